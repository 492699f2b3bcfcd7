"""What to change where a run does not fit: a ladder, whose changes add up until it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mmrl.config import Config
from mmrl.plan.estimate import Plan

USABLE_FRAC = 0.95  # share of a GPU's memory that a plan may fill


def fits(plan: Plan, memory_gb: float) -> bool:
    """Return True if every phase leaves some of the GPU's memory free."""
    return plan.peak_gigabytes() <= USABLE_FRAC * memory_gb


def find_remedy(
    config: Config, overrides: Sequence[str], stage_name: str, num_learners: int, plan_for: Callable[[list[str]], bool]
) -> list[str] | None:
    """Return the first changes of the ladder with which a run fits, as `key=value`; None if none helps.

    `plan_for` says if the run fits with these overrides.
    """
    changes: list[str] = []
    for change in _ladder(config, stage_name, num_learners):
        # A later change of a key replaces an earlier one.
        key = change.partition("=")[0]
        changes = [kept for kept in changes if kept.partition("=")[0] != key] + [change]
        if plan_for([*overrides, *changes]):
            return changes
    return None


def _ladder(config: Config, stage_name: str, num_learners: int) -> Iterator[str]:
    """Yield changes as `key=value`, those that cost least first."""
    model = config.model
    stage = next(stage for stage in config.training_stages if stage.name == stage_name)
    trained = [part for part in ("vision", "language") if part in model.trainable_components]
    if set(trained) - set(model.gradient_checkpointing):
        yield f"model.gradient_checkpointing=[{', '.join(trained)}]"
    if stage.micro_batch_tokens > 4096:
        yield f"stages.{stage_name}.micro_batch_tokens={max(4096, stage.micro_batch_tokens // 4)}"
    zero = config.deepspeed.zero_stage if config.deepspeed else 0
    if num_learners > 1 and zero < 3:
        yield "deepspeed={zero_stage: 3}"
    if config.deepspeed is None or not config.deepspeed.offload_optimizer:
        yield f"deepspeed={{zero_stage: {3 if num_learners > 1 else 2}, offload_optimizer: true}}"
    if model.lora is None:
        yield "model.freeze=[vision, projector]"
        yield "model.lora={rank: 32, alpha: 64}"
