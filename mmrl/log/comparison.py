"""The table that compares held-out reward before and after training: computed, stored in summary.json, printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.utils.stats import MeanWithInterval, mean_with_interval, paired_improvement

TaskRewards = Mapping[str, Mapping[str, float]]
"""Total reward by task and sample id."""


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One row of the table: the mean reward of a task's held-out samples, before and after."""

    task: str
    before: MeanWithInterval
    after: MeanWithInterval
    improvement: MeanWithInterval  # mean of after minus before, paired by sample


def compare_rewards(before: TaskRewards, after: TaskRewards) -> list[TaskComparison]:
    """Return one row for each task, sorted by name, over the samples that were measured both times.

    They are all samples, unless the run continued with changed data.
    """
    rows = []
    for task in sorted(before.keys() & after.keys()):
        first = {sample_id: reward for sample_id, reward in before[task].items() if sample_id in after[task]}
        last = {sample_id: after[task][sample_id] for sample_id in first}
        if not first:
            continue
        means = mean_with_interval(list(first.values())), mean_with_interval(list(last.values()))
        rows.append(TaskComparison(task, *means, improvement=paired_improvement(first, last)))
    return rows


def comparison_summary(rows: Sequence[TaskComparison], temperature: float) -> dict[str, Any]:
    """Return the table as plain data for summary.json; `ci` is the interval of the paired improvement.

    `temperature` is the one that the held-out responses were sampled at; 0 is greedy.
    """
    tasks = []
    for row in rows:
        task = {
            "task": row.task,
            "before": row.before.value,
            "after": row.after.value,
            "n": row.after.n,
            "ci": [row.improvement.low, row.improvement.high],
            "before_ci": [row.before.low, row.before.high],
            "after_ci": [row.after.low, row.after.high],
        }
        tasks.append(task)
    mean_rise = fmean(row.improvement.value for row in rows) if rows else None
    return {"tasks": tasks, "mean_rise": mean_rise, "temperature": temperature}


def print_summary(run_dir: RunDir, console: Console) -> None:
    """Print what a finished run achieved and where its files are."""
    summary = json.loads(run_dir.summary.read_text())
    if summary["tasks"]:
        # The summary of an older run has no temperature.
        temperature = summary.get("temperature", 0.0)
        decoding = f"temperature {temperature:g}" if temperature else "greedy"
        title = f"Held-out reward before stage {summary['since']} and at the end ({decoding}, 95 % intervals)"
        rows = []
        for task in summary["tasks"]:
            before, after = task["before"], task["after"]
            before_text = f"{before:.3f} {_format_interval(task['before_ci'])}"
            after_text = f"{after:.3f} {_format_interval(task['after_ci'])}"
            rise = f"{after - before:+.3f} {_format_interval(task['ci'], sign='+')}"
            rows.append((task["task"], str(task["n"]), before_text, after_text, rise))
        console.print_table(title, ("task", "n", "before", "after", "rise"), rows)
    console.info(f"Model: {run_dir.model}\nEverything: {run_dir.path} (to look at it: mmrl view {run_dir.path})")


def _format_interval(ends: Sequence[float | None], sign: str = "") -> str:
    # The interval of a single sample is infinite, which summary.json holds as null.
    texts = ["?" if end is None else f"{end:{sign}.2f}" for end in ends]
    return f"[{', '.join(texts)}]"
