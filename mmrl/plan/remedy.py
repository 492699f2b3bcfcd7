"""Find settings with which a run that does not fit into memory would fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from mmrl.plan.memory import fits
from mmrl.plan.stage_plan import Plan


def find_remedy(plans: Sequence[Plan], plan_with: Callable[[dict[str, Any]], Iterable[Plan]]) -> dict[str, Any] | None:
    """Return the changes of `_ladder`, added one by one until all stages fit; None if even all changes are not enough.

    `plan_with` plans the stages with settings, by dotted path, on top of the config.
    """
    settings: dict[str, Any] = {}
    for change in _ladder(plans):
        settings |= change
        if all(map(fits, plan_with(settings))):
            return settings
    return None


def yaml_lines(settings: dict[str, Any]) -> Iterator[str]:
    """Yield settings as YAML to paste into a config. Their values are JSON, which is YAML, too."""
    for section, changes in groupby(sorted(settings.items()), key=lambda item: item[0].partition(".")[0]):
        yield f"{section}:"
        for path, value in changes:
            *stage, key = path.split(".")[1:]
            yield f"  - {{name: {stage[0]}, {key}: {value}}}" if stage else f"  {key}: {json.dumps(value)}"


def _ladder(plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """Yield changes by dotted path, the cheapest first."""
    plan = plans[0]
    trainable = {part for each in plans for part in each.options.trainable_components}
    trained = [part for part in ("vision", "language") if part in trainable]
    if set(trained) - set(plan.options.gradient_checkpointing):
        yield {"model.gradient_checkpointing": trained}
    for divisor in (2, 4):
        change = {}
        for each in plans:
            limit = each.stage.micro_batch_tokens
            while limit // 2 >= each.micro_batch.num_tokens:
                limit //= 2  # another limit, such as the number of groups, is reached first
            tokens = limit // divisor
            if not fits(each) and tokens >= each.workload.prompt_tokens + each.workload.longest_response:
                change[f"stages.{each.stage.name}.micro_batch_tokens"] = tokens
        if change:
            yield change
    if plan.learners > 1 and plan.zero.zero_stage < 3:
        yield {"deepspeed.zero_stage": 3}
    # With an adapter, no stage may freeze a component, or give a rate to one that is then not trained.
    rates = [each.stage.optimizer.lr_by_component.model_dump(exclude_none=True) for each in plans]
    names_components = any(rates) or any(each.stage.freeze is not None for each in plans)
    if plan.options.lora is None and not names_components:
        yield {"model.lora": {"rank": 32, "alpha": 64}}
    if not plan.zero.offload_optimizer:
        zero_stage = 3 if plan.learners > 1 else plan.zero.zero_stage or 2
        yield {"deepspeed.zero_stage": zero_stage, "deepspeed.offload_optimizer": True}
