"""Counts the steps that GRPO takes to reach a held-out reward with and without replay, at equal rollouts.

    python tools/ssr_curves.py --seeds 0 1 2 3 4 --out runs/ssr

For each seed a cold start (configs/ssr_cold.yaml), and from it configs/ssr.yaml with `replay: null` and as it is, and
both at twice the rate. Every run is an ordinary `mmrl train`; runs that are finished are read, not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from finished_runs import read_metrics, train_unless_finished

ARMS: Mapping[str, tuple[str, ...]] = {
    "plain": ("stages.rl.replay=null",),
    "replay": (),
    "faster": ("stages.rl.replay=null", "stages.rl.optimizer.lr=2e-4"),  # is replay more than a larger rate?
    "faster_replay": ("stages.rl.optimizer.lr=2e-4",),
}
VALIDATION_KEY = "validation/mean"

MetricsByArm = dict[str, dict[int, list[dict[str, Any]]]]
"""Metrics by arm and seed."""
RewardCurves = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Held-out reward by arm, seed and step."""


def reward_curve(metrics: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the held-out reward by step."""
    return {record["step"]: record[VALIDATION_KEY] for record in metrics if VALIDATION_KEY in record}


def first_step_reaching(looks: Mapping[int, float], goal: float) -> int | None:
    """Return the first validation that reaches a goal."""
    return next((step for step, reward in looks.items() if reward >= goal), None)


def mean_metric(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a metric over the steps that have it."""
    return fmean(record[name] for record in metrics if name in record)


def goal_rows(curves: RewardCurves, goal: float) -> list[str]:
    """Return table rows of the steps to a goal: one for each seed, and the ratio replay / plain at either rate."""
    rows: list[str] = []
    ratios: dict[str, list[float]] = {"replay": [], "faster_replay": []}
    for seed in curves["replay"]:
        steps = {arm: first_step_reaching(curves[arm][seed], goal) for arm in ARMS}
        rows.append(f"| {goal:g} | {seed} | {' | '.join(str(step or 'never') for step in steps.values())} |")
        for replay, plain in (("replay", "plain"), ("faster_replay", "faster")):
            ours, theirs = steps[replay], steps[plain]
            ratios[replay] += [ours / theirs] if ours and theirs else []
    spreads = {arm: f"{fmean(of_arm):.2f}, sd {stdev(of_arm):.2f}" for arm, of_arm in ratios.items() if len(of_arm) > 1}
    cells = " | ".join(f"**{spreads[arm]}**" if arm in spreads else "" for arm in ARMS)
    return [*rows, f"| {goal:g} | **replay / plain** | {cells} |"]


def format_run_rows(runs: MetricsByArm) -> list[str]:
    """Return table rows: the last reward of each run, and its share of groups with a gradient."""
    rows = []
    for arm, of_arm in runs.items():
        for seed, metrics in of_arm.items():
            looks = list(reward_curve(metrics).values())
            cells = [f"{mean_metric(metrics, 'groups/nonzero_advantage_frac'):.0%}", "", ""]
            if "replay" in arm:
                cells[1] = f"{mean_metric(metrics, 'replay/frac'):.0%}"
                cells[2] = f"{mean_metric(metrics, 'replay/staleness_mean'):.1f}"
            rows.append(f"| {arm} | {seed} | {looks[-1]:.3f} | {max(looks):.3f} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Run all arms on all seeds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--goals", type=float, nargs="+", default=[0.55, 0.6, 0.65])
    parser.add_argument("--out", type=Path, default=Path("runs/ssr"))
    options = parser.parse_args()
    runs: MetricsByArm = {arm: {} for arm in ARMS}
    for seed in options.seeds:
        cold = options.out / f"cold-{seed}"
        train_unless_finished("ssr_cold.yaml", cold, f"run.seed={seed}")
        for arm, overrides in ARMS.items():
            own = (f"run.seed={seed}", f"model.path={cold / 'model'}", *overrides)
            train_unless_finished("ssr.yaml", options.out / f"{arm}-{seed}", *own)
            runs[arm][seed] = read_metrics(options.out / f"{arm}-{seed}")
    curves = {}
    for arm, metrics_by_seed in runs.items():
        curves[arm] = {seed: reward_curve(metrics) for seed, metrics in metrics_by_seed.items()}
    print("| held-out reward | seed | GRPO, steps | replay | GRPO, twice the rate | replay, twice the rate |")
    print("|---|---|---|---|---|---|")
    for goal in options.goals:
        print("\n".join(goal_rows(curves, goal)))
    print("\n| arm | seed | last reward | best | with a signal | replayed | age |\n|---|---|---|---|---|---|---|")
    print("\n".join(format_run_rows(runs)))


if __name__ == "__main__":
    main()
