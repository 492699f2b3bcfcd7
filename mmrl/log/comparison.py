"""The table that compares held-out reward before and after a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mmrl.utils.stats import Mean, mean, rise

Rewards = Mapping[str, Mapping[str, float]]
"""Task → sample id → total reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One line of the before/after table. `rise` is paired over the same held-out samples."""

    task: str
    before: Mean
    after: Mean
    rise: Mean


def compare(before: Rewards, after: Rewards) -> list[TaskRow]:
    """The table, a row per task."""
    return [
        TaskRow(
            task=task,
            before=mean(list(before[task].values())),
            after=mean(list(after[task].values())),
            rise=rise(before[task], after[task]),
        )
        for task in sorted(before)
    ]


def summarize(rows: Sequence[TaskRow]) -> dict[str, Any]:
    """The table as plain data; `ci` is the 95 % interval of the rise, paired over the held-out samples."""
    tasks = [
        {
            "task": row.task,
            "before": row.before.value,
            "after": row.after.value,
            "n": row.after.n,
            "ci": [row.rise.low, row.rise.high],
            "before_ci": [row.before.low, row.before.high],
            "after_ci": [row.after.low, row.after.high],
        }
        for row in rows
    ]
    return {"tasks": tasks, "mean_rise": fmean(row.rise.value for row in rows) if rows else None}
