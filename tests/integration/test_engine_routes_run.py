"""Runs that replay the engine's routes of experts: a stopped one ends with the same bytes."""

import signal
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, experiment, reproducible_files, rl_stage, succeed, write
from interrupts import train_until_signal
from zoom_runs import check_all_occurred, learned_steps

from mmrl.checkpoint.snapshot import load_state
from mmrl.learner.learner import PolicyLearner

LOSS = {"routing_replay": "engine", "entropy": {"coef": 0.05}}
PARITY = """
from mmrl_rewards.contract import reward

@reward(name="parity")
def parity(response, sample) -> float:
    return float(sum(map(ord, response.text)) % 2)
"""
RETHINK = {"kind": "rethink", "correct": ["parity"], "max_new_tokens": 4, "triggers": [{"text": " Wait."}]}
CHUNKS = {"kind": "generate", "partial_rollout_tokens": 2, "oversampling": 1.5, "max_tokens_per_step": 40}
KINDS: dict[str, dict[str, Any]] = {
    "async": {"async_rollouts": True, "rollout_steps": [{"kind": "generate"}, RETHINK]},
    "partial": {"rollout_steps": [CHUNKS]},
}


def replay_config(run_dir: Path, kind: str) -> Path:
    """Four steps with rollouts of older weights, a replay buffer and two mini-batches."""
    rl = rl_stage(steps=4, loss=LOSS, replay={"capacity": 32}, num_mini_batches=2, **KINDS[kind])
    config = experiment(run_dir, stages=[rl], checkpoints={"every": 2, "keep_last": 9})
    language = {**TINY["language"], "num_layers": 2}
    config["model"]["from_scratch"] = {**TINY, "family": "qwen3_vl_moe", "language": language}
    # It gives the responses of a new model different rewards, so no cold start is needed.
    (run_dir.parent / "mine.py").write_text(PARITY)
    config["rewards"] = {"custom_rewards": "main_process", "terms": [{"fn": "./mine.py:parity"}]}
    return write(config, run_dir.with_suffix(".yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_run_stopped_with_routes_in_its_state_ends_like_the_whole_one(tmp_path, in_process, kind):
    succeed(in_process("train", replay_config(tmp_path / "whole", kind)))
    check_all_occurred(learned_steps(tmp_path / "whole"), "rollout/route_diff_tokens_frac")
    state = load_state(tmp_path / "whole" / "checkpoints" / "00-000002")
    saved = [experience.rollout for experience in state.replay_buffer]
    for group in (*state.unfinished, *(state.next_batch.groups if state.next_batch else ())):
        saved += group
    assert saved and all(rollout.prompt_routes is not None for rollout in saved)

    config = replay_config(tmp_path / "run", kind)
    train_until_signal(in_process, config, PolicyLearner, "step", 2, signal.SIGTERM)
    succeed(in_process("train", config))
    assert reproducible_files(tmp_path / "run") == reproducible_files(tmp_path / "whole")
