"""Describe a plan as a table for people or as JSON, and find settings to change if the run does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from mmrl.plan.estimate import (
    DECODE_BANDWIDTH_FRAC,
    HF_LAYER_S,
    HOST_LINK_GBS,
    MemoryPart,
    Plan,
    learning_flops,
    stage_hours,
    step_seconds,
)

Settings = dict[str, Any]


def stage_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the memory and time of each stage, and the time of all."""
    yield "Stages that train"
    for plan in plans:
        size, phase = plan.peak
        name = f"{plan.stage.name} ({plan.stage.kind})"
        yield f"  {name:<24} {size:8.0f} GB while {phase:<10} {stage_hours(plan):9,.1f} hours"
    hours = sum(map(stage_hours, plans))
    yield f"  {'in all':<52} {hours:9,.1f} hours, {plans[0].num_gpus * hours:,.0f} GPU-hours"


def table_lines(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield the table of a stage. `other` is the same plan with the other setting of recomputation."""
    yield "Parameters"
    for part in plan.components:
        yield f"  {part.component:<12} {part.num_parameters:>18,}   trained {part.num_trained:,}"
    yield f"\nMemory of a GPU of {plan.gpu.memory_gb:.0f} GB ({plan.learners} of {plan.num_gpus} learn)"
    parts, sizes = plan.memory_parts(), plan.phase_gigabytes()
    yield from (_memory_line(plan, part) for part in parts if part.gigabytes >= 0.05)
    served = f"; one of a server: {sizes['serving']:.0f} GB" if sizes["serving"] else ""
    yield f"  a GPU that learns: {', '.join(f'{sizes[phase]:.0f} GB while {phase}' for phase in plan.phases)}{served}"
    host = sum(part.gigabytes for part in parts if part.place == "host")
    if host:
        yield f"  in host memory, of all processes: {host * plan.learners:.0f} GB"
    recomputed = ", ".join(other.config.model.gradient_checkpointing) or "nothing"
    yield f"  with {recomputed} recomputed: {other.phase_gigabytes()['learning']:.0f} GB while learning"
    seconds, hours = step_seconds(plan), stage_hours(plan)
    total = sum(seconds.values())
    yield f"\nTime of a step ({learning_flops(plan) / 1e15:,.1f} PFLOP of learning, {plan.step_tokens:,.0f} tokens)"
    for name, size in seconds.items():
        if size:
            yield f"  {name:<24} {size:8.1f} s"
    yield f"  {'in all':<24} {total:8.1f} s   {plan.step_tokens / total / plan.num_gpus:,.0f} tokens a second and GPU"
    yield f"  {plan.stage.steps} steps: {hours:,.1f} hours, {plan.num_gpus * hours:,.0f} GPU-hours"
    yield "\nKnown and assumed"
    for note in plan.workload.notes:
        yield f"  {note}"
    decoding = f"{DECODE_BANDWIDTH_FRAC:.0%} of its bandwidth"
    if plan.config.rollout.engine == "hf":
        decoding += f", or {HF_LAYER_S * 1e3} ms a layer and token"
    yield (
        f"  assumed: learning reaches {plan.efficiency:.0%} of the GPU's peak (--efficiency), decoding {decoding}, "
        f"links {HOST_LINK_GBS:.0f} GB/s; rewards, tools, validation and stages that do not train take no time"
    )


def as_json(plan: Plan, plans: Sequence[Plan], remedy: Settings | None) -> Mapping[str, Any]:
    """Return the plan of a stage as JSON, and of all stages what they need.

    `remedy` holds settings with which all fit; None if they fit already, or if none help.
    """
    stages = {}
    for each in plans:
        stages[each.stage.name] = {"phase_gb": each.phase_gigabytes(), "hours": stage_hours(each), "fits": each.fits}
    return {
        "stage": plan.stage.name,
        "stages": stages,
        "parameters": {part.component: part.num_parameters for part in plan.components},
        "trained": {part.component: part.num_trained for part in plan.components},
        "memory_gb": [part._asdict() for part in plan.memory_parts()],
        "phase_gb": plan.phase_gigabytes(),
        "fits": all(each.fits for each in plans),
        "remedy": remedy,
        "micro_batch": asdict(plan.micro_batch),
        "micro_batch_flops": {" ".join(key): count for key, count in plan.measurement.flops.items()},
        "micro_batch_peak_bytes": dict(plan.measurement.peak),
        "step_flops": learning_flops(plan),
        "step_seconds": step_seconds(plan),
        "notes": plan.workload.notes,
    }


def find_remedy(plans: Sequence[Plan], plan_with: Callable[[Settings], Iterable[Plan]]) -> Settings | None:
    """Return the changes of `_ladder`, added one by one until all stages fit; None if all changes are not enough.

    `plan_with` plans the stages with settings, by dotted path, on top of the config.
    """
    settings: Settings = {}
    for change in _ladder(plans):
        settings |= change
        if all(plan.fits for plan in plan_with(settings)):
            return settings
    return None


def yaml_lines(settings: Settings) -> Iterator[str]:
    """Yield settings as YAML to paste into a config."""
    for section, changes in groupby(sorted(settings.items()), key=lambda item: item[0].partition(".")[0]):
        yield f"{section}:"
        for path, value in changes:
            *stage, key = path.split(".")[1:]
            # JSON is YAML, too.
            yield f"  - {{name: {stage[0]}, {key}: {value}}}" if stage else f"  {key}: {json.dumps(value)}"


def _ladder(plans: Sequence[Plan]) -> Iterator[Settings]:
    """Yield changes by dotted path, those that cost least first."""
    plan = plans[0]
    model, trainable = plan.config.model, {part for each in plans for part in each.options.trainable_components}
    trained = [part for part in ("vision", "language") if part in trainable]
    if set(trained) - set(model.gradient_checkpointing):
        yield {"model.gradient_checkpointing": trained}
    for divisor in (2, 4):
        change = {}
        for each in plans:
            limit = each.stage.micro_batch_tokens
            while limit // 2 >= each.micro_batch.num_tokens:
                limit //= 2  # another limit, such as the number of groups, is reached first
            tokens = limit // divisor
            if not each.fits and tokens >= each.workload.prompt_tokens + each.workload.longest_response:
                change[f"stages.{each.stage.name}.micro_batch_tokens"] = tokens
        if change:
            yield change
    if plan.learners > 1 and plan.zero_stage < 3:
        yield {"deepspeed.zero_stage": 3}
    if model.lora is None:
        yield {"model.lora": {"rank": 32, "alpha": 64}}
    if not plan.offloads_optimizer:
        zero_stage = 3 if plan.learners > 1 else plan.zero_stage or 2
        yield {"deepspeed.zero_stage": zero_stage, "deepspeed.offload_optimizer": True}


def _memory_line(plan: Plan, part: MemoryPart) -> str:
    where = {"gpu": "", "host": " in host memory", "server": " of a server's GPU"}[part.place]
    phases = [phase for phase in plan.phases if phase in part.phases]
    when = "" if len(phases) == len(plan.phases) or part.place != "gpu" else f" while {' and '.join(phases)}"
    return f"  {part.name:<48} {part.gigabytes:7.1f} GB{where}{when}"
