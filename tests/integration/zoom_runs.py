"""Configs of a policy that calls a tool: it imitates demonstrations that zoom, then zooms by itself."""

from pathlib import Path
from typing import Any

from harness import TINY, experiment, metrics, rl_stage, sft_stage

TOOLS = {"kind": "tools", "max_media": 1, "max_turns": 1, "max_total_tokens": 512, "max_result_chars": 400}
TOOLS["tools"] = [{"fn": "mmrl.rollout.tools.builtin:zoom"}]
STEPS = [{"kind": "generate"}, TOOLS]
RETHINK = {"kind": "rethink", "correct": ["digit"], "max_new_tokens": 12, "triggers": [{"text": " Wait."}]}


def corners(split: str, size: int) -> dict[str, Any]:
    """A source of questions about a digit that is too small to be read without zooming."""
    args = {"split": split, "size": size, "image_px": 128, "digit_px": 12, "resized_px": 32}
    return {"fn": "mmrl_datasets.generators.tiny_digits:corner_digits", "args": args}


def zoom_config(run_dir: Path) -> dict[str, Any]:
    """A cold start of 90 steps, after which the policy zooms, and four RL steps."""
    sizes = {"steps": 90, "prompts_per_step": 12, "micro_batch_groups": 12}
    cold = sft_stage(**sizes, target_field="response", rollout_steps=[TOOLS])
    rl = rl_stage(steps=4, ppo_epochs=1, rollout_steps=STEPS, sampling={"max_new_tokens": 40})
    config = experiment(
        run_dir,
        data={"train": [corners("train", 96)], "test": [corners("test", 6)]},
        rewards={"terms": [{"fn": "mmrl_rewards.number:exact", "name": "digit"}]},
        evaluation={"max_new_tokens": 40, "batch_size": 8, "rollout_steps": STEPS},
        checkpoints={"every": 100, "keep_last": 2},
        stages=[cold, rl],
    )
    config["model"]["from_scratch"] = {**TINY, "language": {**TINY["language"], "vocab_size": 400}}
    return config


def later_config(run_dir: Path, base: Path) -> dict[str, Any]:
    """What a policy that zooms already learns from demonstrations, then in asynchronous steps."""
    config = zoom_config(run_dir)
    config["model"] |= {"from_scratch": None, "path": str(base)}
    cold, rl = config["stages"]
    cold |= {"steps": 3, "prompts_per_step": 5, "optimizer": {"lr": 3e-4}}
    rl |= {"async_rollouts": True, "optimizer": {"lr": 1e-3}, "loss": {"entropy": {"coef": 0.02}}}
    return config


def partial_config(run_dir: Path, base: Path) -> dict[str, Any]:
    """Responses that are sampled in chunks, zoom, are made to rethink, and are replayed."""
    config = later_config(run_dir, base)
    cold, rl = config["stages"]
    cold |= {"steps": 1}
    rl |= {
        "async_rollouts": False,
        "steps": 5,
        "rollout_steps": [
            {"kind": "generate", "partial_rollout_tokens": 4, "oversampling": 1.5, "max_tokens_per_step": 120},
            TOOLS,
            {**RETHINK, "fraction": 0.5},
            {"kind": "probe", "corruption": "grey", "every": 2},
        ],
        "replay": {"capacity": 64},
    }
    return config


def learned_steps(run_dir: Path, stage: str = "rl") -> list[dict[str, Any]]:
    """The metrics of each training step of a stage."""
    return [record for record in metrics(run_dir) if record["stage"] == stage and "learner/loss" in record]


def logprob_checks(run_dir: Path) -> list[float]:
    """The mean difference between engine and learner, in nats, of each check."""
    return [record["logprob_check/diff_mean"] for record in metrics(run_dir) if "logprob_check/diff_mean" in record]


def check_all_occurred(records: list[dict[str, Any]], *names: str) -> None:
    """Check that each of these metrics was above zero in some step."""
    for name in names:
        assert sum(record.get(name, 0.0) for record in records) > 0, name
