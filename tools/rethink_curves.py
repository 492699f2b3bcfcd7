"""Held-out accuracy of first responses and of their continuations, of GRPO with and without forced rethinking.

    python tools/rethink_curves.py --seeds 0 1 2 --out runs/rethink

For each seed a cold start (configs/rethink_cold.yaml), and from it configs/rethink.yaml as it is and without its
rethinking step. Every run is an ordinary `mmrl train`; runs that are finished are read, not repeated.

Evaluation continues every response, so one run shows two accuracies: of first responses, and after rethinking. Runs are
compared on the second, paired over the same held-out samples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from finished_runs import read_metrics, train_unless_finished

from mmrl import checkpoint
from mmrl.log.run_dir import RunDir
from mmrl.utils.stats import paired_improvement

ARMS: Mapping[str, tuple[str, ...]] = {"plain": ("stages.rl.rollout_steps=[{kind: generate}]",), "rethink": ()}
METRIC_PREFIX = "test/rethink/"


class RethinkAccuracy(NamedTuple):
    """Shares of held-out samples: correct before rethinking, correct after it, turned correct or incorrect by it."""

    first_response: float
    after_rethink: float
    incorrect_to_correct: float
    correct_to_incorrect: float


def rethink_accuracy(record: Mapping[str, Any], samples: int) -> RethinkAccuracy:
    """Return what a run measured on its test samples. Truncated first responses count as wrong."""
    names = ("incorrect_to_correct", "correct_to_incorrect", "correct_to_correct")
    corrected, spoiled, stayed = (record[METRIC_PREFIX + name] / samples for name in names)
    return RethinkAccuracy(
        first_response=stayed + spoiled,
        after_rethink=stayed + corrected,
        incorrect_to_correct=corrected,
        correct_to_incorrect=spoiled,
    )


def train_or_read(config: str, folder: Path, *overrides: str) -> RethinkAccuracy:
    """Train a config, or resume it, unless its run is finished; return the last measurement."""
    (task,) = train_unless_finished(config, folder, *overrides)["tasks"]
    records = [record for record in read_metrics(folder) if METRIC_PREFIX + "attempted" in record]
    return rethink_accuracy(records[-1], task["n"])


def final_rewards(folder: Path) -> Mapping[str, float]:
    """Return the reward of each test sample after rethinking, at the end of a run."""
    saved = checkpoint.find_latest(RunDir(folder).checkpoints, print)
    if saved is None:
        sys.exit(f"{folder}: no checkpoint; delete the folder, and it is trained anew")
    ((_, rewards),) = checkpoint.load_state(saved).eval_rewards["after"].items()
    return dict(rewards)


def format_mean_row(arm: str, results: Sequence[RethinkAccuracy]) -> str:
    """Return a table row: the mean over seeds, with the deviation from seed to seed."""
    spreads = [f"{fmean(values):.3f} ± {stdev(values):.3f}" for values in zip(*results, strict=True)]
    return f"| {arm} | mean | {' | '.join(f'**{spread}**' for spread in spreads)} |"


def main() -> None:
    """Run both arms on all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/rethink"))
    options = parser.parse_args()
    results: dict[str, list[RethinkAccuracy]] = {"cold": [], **{arm: [] for arm in ARMS}}
    for seed in options.seeds:
        cold = options.out / f"cold-{seed}"
        results["cold"].append(train_or_read("rethink_cold.yaml", cold, f"run.seed={seed}"))
        for arm, overrides in ARMS.items():
            own = (f"run.seed={seed}", f"model.path={cold / 'model'}", *overrides)
            results[arm].append(train_or_read("rethink.yaml", options.out / f"{arm}-{seed}", *own))
    print("| arm | seed | correct at first | correct after rethinking | incorrect → correct | correct → incorrect |")
    print("|---|---|---|---|---|---|")
    for arm, of_arm in results.items():
        for seed, one in zip(options.seeds, of_arm, strict=True):
            print(f"| {arm} | {seed} | {' | '.join(f'{value:.3f}' for value in one)} |")
        if len(of_arm) > 1:
            print(format_mean_row(arm, of_arm))
    print("\n| after rethinking | seed | difference [95 %, paired] |\n|---|---|---|")
    for other in ("plain", "cold"):
        for seed in options.seeds:
            gap = paired_improvement(*(final_rewards(options.out / f"{arm}-{seed}") for arm in (other, "rethink")))
            print(f"| rethink - {other} | {seed} | {gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] |")


if __name__ == "__main__":
    main()
