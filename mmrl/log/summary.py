"""What a finished run says last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir


def print_summary(run_dir: RunDir, console: Console) -> None:
    """Say what a finished run achieved and where it is."""
    summary = json.loads(run_dir.summary.read_text())
    if summary["tasks"]:
        title = f"Held-out reward before stage {summary['since']} and at the end (greedy, 95 % intervals)"
        console.print_table(
            title, ("task", "n", "before", "after", "rise"), [_format_task(task) for task in summary["tasks"]]
        )
    console.info(f"Model: {run_dir.model}\nEverything: {run_dir.path}")


def _format_task(task: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = task["before"], task["after"]
    return (
        task["task"],
        str(task["n"]),
        f"{before:.3f} {_format_interval(task['before_ci'])}",
        f"{after:.3f} {_format_interval(task['after_ci'])}",
        f"{after - before:+.3f} {_format_interval(task['ci'], sign='+')}",
    )


def _format_interval(ends: Sequence[float | None], sign: str = "") -> str:
    return "[" + ", ".join("?" if end is None else f"{end:{sign}.2f}" for end in ends) + "]"
