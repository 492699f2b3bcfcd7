"""Runs that replay the engine's routes of experts: from YAML through checkpoints to the same bytes after a stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, Command, contents, experiment, metrics, rl_stage, write
from test_async_rollouts_run import strike

from mmrl.checkpoint.snapshot import load_state
from mmrl.learner.learner import PolicyLearner

EXPERTS = {**TINY, "family": "qwen3_vl_moe", "language": {**TINY["language"], "num_layers": 2}}
LOSS = {"routing_replay": "engine", "entropy": {"coef": 0.05}}
CHUNKS = [{"kind": "generate", "partial_rollout_tokens": 2, "oversampling": 1.5, "max_tokens_per_step": 40}]
PARITY = """
from mmrl_rewards.contract import reward

@reward(name="parity")
def parity(response, sample) -> float:
    return float(sum(map(ord, response.text)) % 2)
"""
LOOK = {"kind": "rethink", "correct": ["parity"], "max_new_tokens": 4, "triggers": [{"text": " Wait."}]}
KINDS: dict[str, dict[str, Any]] = {
    "async": {"async_rollouts": True, "rollout_steps": [{"kind": "generate"}, LOOK]},
    "partial": {"rollout_steps": CHUNKS},
}


def replaying(run_dir: Path, kind: str) -> dict[str, Any]:
    """Four steps under rollouts of older weights, with a replay buffer and two mini-batches."""
    options = {"steps": 4, "loss": LOSS, "replay": {"capacity": 32}, "num_mini_batches": 2, **KINDS[kind]}
    config = experiment(run_dir, stages=[rl_stage(**options)], checkpoints={"every": 2, "keep_last": 9})
    # It tells the responses of a new model apart, so no cold start is needed.
    (run_dir.parent / "mine.py").write_text(PARITY)
    rewards = {"custom_rewards": "main_process", "terms": [{"fn": "./mine.py:parity"}]}
    return {**config, "model": {**config["model"], "from_scratch": EXPERTS}, "rewards": rewards}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_with_routes_in_its_state_ends_like_the_whole_one(
    tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = write(replaying(tmp_path / "whole", kind), tmp_path / "whole.yaml")
    done = here("train", whole)
    assert done.code == 0, done.errors
    steps = [record for record in metrics(tmp_path / "whole") if "learner/loss" in record]
    assert max(record["rollout/route_diff_tokens_frac"] for record in steps) > 0
    state = load_state(tmp_path / "whole" / "checkpoints" / "00-000002")
    waiting = [experience.rollout for experience in state.replay_buffer]
    waiting += [rollout for group in state.unfinished for rollout in group]
    waiting += [rollout for group in (state.prefetched.groups if state.prefetched else ()) for rollout in group]
    assert waiting and all(rollout.prompt_routes is not None for rollout in waiting)

    config = write(replaying(tmp_path / "run", kind), tmp_path / "tiny.yaml")
    with monkeypatch.context() as patches:
        strike(patches, PolicyLearner, "step", 2, signal.SIGTERM)
        assert here("train", config).code == 128 + signal.SIGTERM
    done = here("train", config)
    assert done.code == 0, done.errors
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_model_without_experts_is_refused_before_training(tmp_path: Path, here: Command) -> None:
    config = experiment(tmp_path / "run", stages=[rl_stage(steps=1, loss=LOSS)])
    done = here("train", write(config, tmp_path / "tiny.yaml"))
    assert done.code == 2
    assert "loss.routing_replay: this qwen2_5_vl has no experts; leave it out" in " ".join(done.errors.split())
