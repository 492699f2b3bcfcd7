"""The table that compares held-out reward before and after a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mmrl.utils.stats import MeanWithInterval, mean_with_interval, paired_improvement

TaskRewards = Mapping[str, Mapping[str, float]]
"""Task → sample id → total reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One line of the before/after table. `rise` is paired over the same held-out samples."""

    task: str
    before: MeanWithInterval
    after: MeanWithInterval
    improvement: MeanWithInterval


def compare_rewards(before: TaskRewards, after: TaskRewards) -> list[TaskComparison]:
    """The table, a row per task."""
    return [
        TaskComparison(
            task=task,
            before=mean_with_interval(list(before[task].values())),
            after=mean_with_interval(list(after[task].values())),
            improvement=paired_improvement(before[task], after[task]),
        )
        for task in sorted(before)
    ]


def comparison_summary(rows: Sequence[TaskComparison]) -> dict[str, Any]:
    """The table as plain data; `ci` is the 95 % interval of the rise, paired over the held-out samples."""
    tasks = [
        {
            "task": row.task,
            "before": row.before.value,
            "after": row.after.value,
            "n": row.after.n,
            "ci": [row.improvement.low, row.improvement.high],
            "before_ci": [row.before.low, row.before.high],
            "after_ci": [row.after.low, row.after.high],
        }
        for row in rows
    ]
    return {"tasks": tasks, "mean_rise": fmean(row.improvement.value for row in rows) if rows else None}
