"""Prints the tables of docs/maze.md: GRPO in mazes with the credit of whole episodes and of single turns, seed by seed.

    python tools/maze_curves.py --seeds 0 1 2 --out runs/maze

For each seed a cold start (configs/maze_cold.yaml), and from it configs/maze.yaml with each `advantage.credit`, on the
same mazes in the same order. Every run is an ordinary `mmrl train`; runs that are finished are read, not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from finished_runs import read_metrics, train_unless_finished

ARMS = ("broadcast", "gigpo")
VALIDATION_KEY, PROBE_KEY, TRAINING_KEY = "validation/mean", "probe/blind_gap/grey/success", "reward/term/success"
LAST_PROBES = 3


def success_row(arm: str, seed: int, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return a table row: greedy success on the test mazes before and after, and that of the last blind rollouts."""
    (task,) = summary["tasks"]
    before, after, (low, high) = task["before"], task["after"], task["ci"]
    probed = [record for record in metrics if PROBE_KEY in record][-LAST_PROBES:]
    seeing = fmean(record[TRAINING_KEY] for record in probed)
    blind = seeing - fmean(record[PROBE_KEY] for record in probed)
    rise = f"**{after - before:+.3f}** [{low:+.2f}, {high:+.2f}]"
    return f"| {arm} | {seed} | {before:.3f} | {after:.3f} | {rise} | {seeing:.2f} | {blind:.2f} |"


def curve_row(arm: str, seed: int, metrics: Sequence[Mapping[str, Any]]) -> tuple[list[int], str]:
    """Return the steps of validations, and a table row of the success in each."""
    looks = {record["step"]: record[VALIDATION_KEY] for record in metrics if VALIDATION_KEY in record}
    return list(looks), f"| {arm} | {seed} | {' | '.join(f'{success:.3f}' for success in looks.values())} |"


def main() -> None:
    """Run both arms on all seeds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/maze"))
    options = parser.parse_args()
    rows: list[str] = []
    curves: list[str] = []
    steps: list[int] = []
    rises: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in options.seeds:
        cold = options.out / f"cold-{seed}"
        train_unless_finished("maze_cold.yaml", cold, f"run.seed={seed}")
        for arm in ARMS:
            folder = options.out / f"{arm}-{seed}"
            own = (f"run.seed={seed}", f"model.path={cold / 'model'}", f"stages.rl.advantage.credit={arm}")
            summary = train_unless_finished("maze.yaml", folder, *own)
            metrics = read_metrics(folder)
            rows.append(success_row(arm, seed, summary, metrics))
            steps, curve = curve_row(arm, seed, metrics)
            curves.append(curve)
            rises[arm].append(summary["mean_rise"])
    print("| credit | seed | before | after | rise [95 %] | sampled | blind |\n|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    differences = [ours - theirs for ours, theirs in zip(rises["gigpo"], rises["broadcast"], strict=True)]
    print("\ngigpo - broadcast, by seed: " + ", ".join(f"{difference:+.3f}" for difference in differences))
    print(f"\n| credit | seed | {' | '.join(map(str, steps))} |\n|---|---{'|---' * len(steps)}|")
    print("\n".join(curves))


if __name__ == "__main__":
    main()
