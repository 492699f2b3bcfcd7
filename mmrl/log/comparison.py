"""The table that compares held-out reward before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mmrl.utils.stats import MeanWithInterval, mean_with_interval, paired_improvement

TaskRewards = Mapping[str, Mapping[str, float]]
"""Total reward by task and sample id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One row of the table: the mean reward of a task's held-out samples, before and after."""

    task: str
    before: MeanWithInterval
    after: MeanWithInterval
    improvement: MeanWithInterval
    """Mean of after minus before, paired by sample."""


def compare_rewards(before: TaskRewards, after: TaskRewards) -> list[TaskComparison]:
    """Return one row for each task, sorted by name. Both must hold the same samples."""
    rows = []
    for task in sorted(before):
        row = TaskComparison(
            task=task,
            before=mean_with_interval(list(before[task].values())),
            after=mean_with_interval(list(after[task].values())),
            improvement=paired_improvement(before[task], after[task]),
        )
        rows.append(row)
    return rows


def comparison_summary(rows: Sequence[TaskComparison]) -> dict[str, Any]:
    """Return the table as plain data for summary.json; `ci` is the interval of the paired improvement."""
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
    return {"tasks": tasks, "mean_rise": fmean(row.improvement.value for row in rows) if rows else None}
