"""Describe a plan as a table for people or as JSON, and find settings to change if the run does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from mmrl.plan.estimate import (
    DECODE_BANDWIDTH_FRAC,
    HF_LAYER_S,
    HOST_LINK_GBS,
    PHASES,
    MemoryPart,
    Plan,
    step_flops,
    step_seconds,
)

Settings = dict[str, Any]


def memory_lines(plan: Plan) -> list[str]:
    """Return the table of memory, without heading, as it is in the comments of recipes."""
    parts, sizes = plan.memory_parts(), plan.phase_gigabytes()
    lines = [_memory_line(part) for part in parts if part.gigabytes >= 0.05]
    lines.append("a GPU that learns: " + ", ".join(f"{sizes[phase]:.0f} GB while {phase}" for phase in PHASES))
    if plan.server_gpus:
        lines[-1] += f"; one of a server: {sizes['serving']:.0f} GB"
    host = sum(part.gigabytes for part in parts if part.place == "host")
    if host:
        lines.append(f"in host memory, of all processes: {host * plan.learners:.0f} GB")
    return lines


def table_lines(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield the whole table. `other` is the same plan with the other setting of recomputation."""
    yield "Parameters"
    for part in plan.components:
        yield f"  {part.component:<12} {part.num_parameters:>18,}   trained {part.num_trained:,}"
    yield f"\nMemory of a GPU of {plan.gpu.memory_gb:.0f} GB ({plan.learners} of {plan.num_gpus} learn)"
    for line in memory_lines(plan):
        yield f"  {line}"
    recomputed = ", ".join(other.config.model.gradient_checkpointing) or "nothing"
    yield f"  with {recomputed} recomputed: {other.phase_gigabytes()['learning']:.0f} GB while learning"
    seconds, flops = step_seconds(plan), step_flops(plan, "forward", "backward") * plan.stage.ppo_epochs
    total, steps = sum(seconds.values()), plan.stage.steps
    yield f"\nTime of a step ({flops / 1e15:,.1f} PFLOP of learning, {plan.step_tokens:,.0f} tokens)"
    for name, size in seconds.items():
        if size:
            yield f"  {name:<24} {size:8.1f} s"
    yield f"  {'in all':<24} {total:8.1f} s   {plan.step_tokens / total / plan.num_gpus:,.0f} tokens a second and GPU"
    hours = total * steps / 3600
    yield f"  {steps} steps: {hours:,.1f} hours, {plan.num_gpus * hours:,.0f} GPU-hours"
    yield "\nKnown and assumed"
    for note in plan.workload.notes:
        yield f"  {note}"
    decoding = f"{DECODE_BANDWIDTH_FRAC:.0%} of its bandwidth"
    if plan.config.rollout.engine == "hf":
        decoding += f", or {HF_LAYER_S * 1e3} ms a layer and token"
    yield (
        f"  assumed: learning reaches {plan.efficiency:.0%} of the GPU's peak (--efficiency), decoding {decoding}, "
        f"links {HOST_LINK_GBS:.0f} GB/s; rewards and tools take no time"
    )


def as_json(plan: Plan, remedy: Settings | None) -> Mapping[str, Any]:
    """Return the plan as JSON. `remedy` holds settings with which it fits; None if it fits already, or if none help."""
    return {
        "parameters": {part.component: part.num_parameters for part in plan.components},
        "trained": {part.component: part.num_trained for part in plan.components},
        "memory_gb": [part._asdict() for part in plan.memory_parts()],
        "phase_gb": plan.phase_gigabytes(),
        "fits": plan.fits,
        "remedy": remedy,
        "micro_batch": asdict(plan.micro_batch),
        "micro_batch_flops": {" ".join(key): count for key, count in plan.measurement.flops.items()},
        "micro_batch_peak_bytes": dict(plan.measurement.peak),
        "step_flops": step_flops(plan, "forward", "backward") * plan.stage.ppo_epochs,
        "step_seconds": step_seconds(plan),
        "notes": plan.workload.notes,
    }


def find_remedy(plan: Plan, plan_with: Callable[[Settings], Plan]) -> Settings | None:
    """Return the changes of `_ladder`, added one by one until the run fits; None if all together are not enough.

    `plan_with` makes a plan with settings, by dotted path, on top of the config.
    """
    settings: Settings = {}
    for change in _ladder(plan):
        settings |= change
        if plan_with(settings).fits:
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


def _ladder(plan: Plan) -> Iterator[Settings]:
    """Yield changes by dotted path, those that cost least first."""
    model, stage = plan.config.model, plan.stage
    trained = [part for part in ("vision", "language") if part in model.trainable_components]
    if set(trained) - set(model.gradient_checkpointing):
        yield {"model.gradient_checkpointing": trained}
    for tokens in (stage.micro_batch_tokens // 2, stage.micro_batch_tokens // 4):
        if tokens >= plan.workload.prompt_tokens + plan.workload.longest_response:
            yield {f"stages.{stage.name}.micro_batch_tokens": tokens}
    if plan.learners > 1 and plan.zero_stage < 3:
        yield {"deepspeed.zero_stage": 3}
    if model.lora is None:
        yield {"model.lora": {"rank": 32, "alpha": 64}}
    if not plan.offloads_optimizer:
        zero_stage = 3 if plan.learners > 1 else plan.zero_stage or 2
        yield {"deepspeed.zero_stage": zero_stage, "deepspeed.offload_optimizer": True}


def _memory_line(part: MemoryPart) -> str:
    where = {"gpu": "", "host": " in host memory", "server": " of a server's GPU"}[part.place]
    when = "" if part.phases == PHASES or part.place != "gpu" else f" while {' and '.join(part.phases)}"
    return f"{part.name:<48} {part.gigabytes:7.1f} GB{where}{when}"
