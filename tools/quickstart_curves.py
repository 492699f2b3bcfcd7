"""Prints the tables of docs/learning.md: the quickstart, with vLLM, its control and its ceiling, on several seeds.

    python tools/quickstart_curves.py --seeds 0 1 2 --out runs/learning

Every run is an ordinary `mmrl train`; runs that are finished are read, not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from finished_runs import train_unless_finished

EXACT_LABELS = ("stages.more.target_field=target", "stages.more.steps=800")
ARMS = {
    "GRPO": ("quickstart.yaml",),
    "GRPO, vLLM": ("quickstart.yaml", "rollout.engine=vllm"),
    "more cold start": ("quickstart_control.yaml",),
    "more cold start, exact labels": ("quickstart_control.yaml", *EXACT_LABELS),
}


def markdown_rows(arm: str, seed: int, result: dict[str, Any]) -> list[str]:
    """Return the Markdown rows of one run: one for each task and one for their mean."""
    head = f"| {arm} | {seed} "
    lines = []
    for task in result["tasks"]:
        before, after, (low, high) = task["before"], task["after"], task["ci"]
        rise = f"{after - before:+.3f} [{low:+.2f}, {high:+.2f}]"
        lines.append(f"{head}| {task['task']} | {task['n']} | {before:.3f} | {after:.3f} | {rise} |")
    before = fmean(task["before"] for task in result["tasks"])
    after = fmean(task["after"] for task in result["tasks"])
    return [*lines, f"{head}| **mean** | | {before:.3f} | {after:.3f} | **{after - before:+.3f}** |"]


def main() -> None:
    """Run all arms on all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    options = parser.parse_args()
    table = ["| arm | seed | task | n | before | after | rise [95 %] |", "|---|---|---|---|---|---|---|"]
    for arm in options.arms:
        for seed in options.seeds:
            folder = options.out / f"{arm.replace(' ', '_').replace(',', '')}-{seed}"
            config, *overrides = ARMS[arm]
            table += markdown_rows(arm, seed, train_unless_finished(config, folder, *overrides, f"run.seed={seed}"))
    print("\n".join(table))


if __name__ == "__main__":
    main()
