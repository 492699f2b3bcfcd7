"""A plan as a table for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mmrl.config.schema import RlStage
from mmrl.plan.estimate import DECODE_BANDWIDTH_FRAC, HOST_LINK_GBS, MemoryPart, Plan
from mmrl.plan.hardware import Gpu
from mmrl.plan.workload import Workload


def memory_lines(plan: Plan) -> list[str]:
    """Return the table of memory, without heading, as comments of recipes hold it."""
    lines = [_memory_line(part) for part in plan.memory if part.gigabytes >= 0.05]
    phases = plan.phase_gigabytes()
    lines.append("a GPU that learns: " + ", ".join(f"{size:.0f} GB while {name}" for name, size in phases.items()))
    server = sum(part.gigabytes for part in plan.memory if part.place == "server")
    if server:
        lines[-1] += f"; one of a server: {server:.0f} GB"
    host = sum(part.gigabytes for part in plan.memory if part.place == "host")
    if host:
        lines[-1] += f"; in host memory, of all processes: {host * plan.num_learners:.0f} GB"
    return lines


def table_lines(
    plan: Plan, stage: RlStage, workload: Workload, gpu_name: str, gpu: Gpu, efficiency: float
) -> list[str]:
    """Return the whole table."""
    return [
        *_parameter_lines(plan),
        "",
        f"Memory of a GPU ({gpu_name}, {gpu.memory_gb:.0f} GB; {plan.num_learners} of {plan.num_gpus} learn)",
        *(f"  {line}" for line in memory_lines(plan)),
        "",
        *_time_lines(plan, stage, efficiency),
        "",
        "Known and assumed",
        *(f"  {note}" for note in workload.notes),
        f"  assumed: learning reaches {efficiency:.0%} of the GPU's peak (--efficiency), decoding "
        f"{DECODE_BANDWIDTH_FRAC:.0%} of its bandwidth, links {HOST_LINK_GBS:.0f} GB/s; rewards and tools take no time",
    ]


def as_json(plan: Plan, workload: Workload, remedy: Sequence[str] | None, *, is_fitting: bool) -> Mapping[str, Any]:
    """Return the plan as JSON."""
    flops = {f"{part} {name}": count for (part, name), count in plan.measurement.flops.items()}
    return {
        "parameters": {part.component: part.num_parameters for part in plan.components},
        "trained": {part.component: part.num_trained for part in plan.components},
        "memory_gb": [asdict(part) for part in plan.memory],
        "phase_gb": plan.phase_gigabytes(),
        "peak_gb": plan.peak_gigabytes(),
        "fits": is_fitting,
        "remedy": remedy,
        "micro_batch": asdict(plan.micro_batch),
        "micro_batch_flops": flops,
        "micro_batch_peak_bytes": dict(plan.measurement.peak),
        "micro_batch_peak_phase": plan.measurement.peak_phase,
        "step_flops": plan.flops,
        "step_seconds": plan.seconds,
        "notes": workload.notes,
    }


def _memory_line(part: MemoryPart) -> str:
    where = {"gpu": "", "host": " in host memory", "server": " of a server's GPU"}[part.place]
    when = "" if len(part.phases) == 3 or part.place != "gpu" else f" while {' and '.join(part.phases)}"
    return f"{part.name:<48} {part.gigabytes:7.1f} GB{where}{when}"


def _parameter_lines(plan: Plan) -> Iterator[str]:
    yield "Parameters"
    for part in plan.components:
        yield f"  {part.component:<12} {part.num_parameters:>18,}   trained {part.num_trained:,}"


def _time_lines(plan: Plan, stage: RlStage, efficiency: float) -> Iterator[str]:
    total = sum(plan.seconds.values())
    yield f"Time of a step ({plan.flops / 1e15:,.1f} PFLOP of learning, {plan.tokens:,.0f} tokens)"
    for part, seconds in plan.seconds.items():
        if seconds:
            yield f"  {part:<24} {seconds:8.1f} s"
    yield f"  {'in all':<24} {total:8.1f} s   {plan.tokens / total / plan.num_gpus:,.0f} tokens a second and GPU"
    hours = plan.num_gpus * total * stage.steps / 3600
    yield f"  {stage.steps} steps: {total * stage.steps / 3600:,.1f} hours, {hours:,.0f} GPU-hours"
