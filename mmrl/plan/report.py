"""Describe plans as a table for people or as JSON, and find settings with which a run fits into memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mmrl.plan.memory import fits, memory_parts, peak_phase, phase_gigabytes
from mmrl.plan.stage_plan import Plan
from mmrl.plan.step_time import assumptions, learning_flops, stage_hours, step_seconds, step_tokens

_PLACES = {"gpu": "", "host": " in host memory", "server": " of a server's GPU"}


def stage_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the memory and time of each stage, and the time of all."""
    yield "Stages that train"
    for plan in plans:
        size, phase = peak_phase(plan)
        name = f"{plan.stage.name} ({plan.stage.kind})"
        yield f"  {name:<24} {size:8.0f} GB while {phase:<10} {stage_hours(plan):9,.1f} hours"
    hours = sum(map(stage_hours, plans))
    yield f"  {'in all':<52} {hours:9,.1f} hours, {plans[0].num_gpus * hours:,.0f} GPU-hours"


def table_lines(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield the table of a stage. `other` is the same plan with the other setting of recomputation."""
    yield "Parameters"
    for component in plan.components:
        yield f"  {component.component:<12} {component.num_parameters:>18,}   trained {component.num_trained:,}"
    yield from _memory_lines(plan)
    recomputed = ", ".join(other.options.gradient_checkpointing) or "nothing"
    yield f"  with {recomputed} recomputed: {phase_gigabytes(other)['learning']:.0f} GB while learning"
    seconds, hours, tokens = step_seconds(plan), stage_hours(plan), step_tokens(plan)
    total = sum(seconds.values())
    yield f"\nTime of a step ({learning_flops(plan) / 1e15:,.1f} PFLOP of learning, {tokens:,.0f} tokens)"
    for name, size in seconds.items():
        if size:
            yield f"  {name:<24} {size:8.1f} s"
    yield f"  {'in all':<24} {total:8.1f} s   {tokens / total / plan.num_gpus:,.0f} tokens a second and GPU"
    yield f"  {plan.stage.steps} steps: {hours:,.1f} hours, {plan.num_gpus * hours:,.0f} GPU-hours"
    yield "\nKnown and assumed"
    yield from (f"  {note}" for note in plan.workload.notes)
    yield f"  {assumptions(plan)}"


def as_json(plan: Plan, plans: Sequence[Plan], remedy: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the plan of a stage as JSON, together with the needs of all stages.

    `remedy` holds settings with which all fit; None if they fit already, or if none help.
    """
    stages = {}
    for each in plans:
        stages[each.stage.name] = {"phase_gb": phase_gigabytes(each), "hours": stage_hours(each), "fits": fits(each)}
    return {
        "stage": plan.stage.name,
        "stages": stages,
        "parameters": {part.component: part.num_parameters for part in plan.components},
        "trained": {part.component: part.num_trained for part in plan.components},
        "memory_gb": [part._asdict() for part in memory_parts(plan)],
        "phase_gb": phase_gigabytes(plan),
        "fits": all(map(fits, plans)),
        "remedy": remedy,
        "micro_batch": plan.micro_batch._asdict(),
        "micro_batch_flops": {" ".join(key): count for key, count in plan.measurement.flops.items()},
        "micro_batch_peak_bytes": dict(plan.measurement.peak),
        "step_flops": learning_flops(plan),
        "step_seconds": step_seconds(plan),
        "notes": plan.workload.notes,
    }


def _memory_lines(plan: Plan) -> Iterator[str]:
    """Yield each part of the memory, and the sums."""
    yield f"\nMemory of a GPU of {plan.gpu.memory_gb:.0f} GB ({plan.learners} of {plan.num_gpus} learn)"
    parts, sizes = memory_parts(plan), phase_gigabytes(plan)
    serving = sizes.pop("serving")
    for part in parts:
        if part.gigabytes < 0.05:
            continue
        phases = [phase for phase in sizes if phase in part.phases]
        is_always = part.place != "gpu" or len(phases) == len(sizes)
        suffix = _PLACES[part.place] + ("" if is_always else f" while {' and '.join(phases)}")
        yield f"  {part.name:<48} {part.gigabytes:7.1f} GB{suffix}"
    served = f"; one of a server: {serving:.0f} GB" if serving else ""
    yield f"  a GPU that learns: {', '.join(f'{size:.0f} GB while {phase}' for phase, size in sizes.items())}{served}"
    host = sum(part.gigabytes for part in parts if part.place == "host")
    if host:
        yield f"  in host memory, of all processes: {host * plan.learners:.0f} GB"


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
