"""Makes the tables and curves of docs/maze.md: GRPO in mazes with the credit of whole episodes and of single turns.

    python tools/maze_curves.py --seeds 2                         # one more seed, in runs/maze
    python tools/maze_curves.py --seeds 0 1 2 --curves docs/maze.svg

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
WIDTH, HEIGHT, MARGIN = 560, 320, 40  # of the picture, in pixels
COLOURS = {"broadcast": "#2563eb", "gigpo": "#d97706"}


def success_row(arm: str, seed: int, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return a table row: greedy success on the test mazes before and after, and success of the last blind rollouts."""
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


def draw_curves(successes: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return an SVG picture of the success of sampled episodes by step: each seed thin, the mean of the seeds thick."""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    num_steps = len(next(iter(successes.values()))[0])

    def place(step: float, success: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / num_steps
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * success:.1f}"

    for tenths in range(0, 11, 2):
        x, y = place(0, tenths / 10).split(",")
        parts.append(f'<path d="M{x} {y}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 4}" y="{y}" font-size="11" text-anchor="end">{tenths / 10:.1f}</text>')
    for step in range(0, num_steps + 1, 10):
        x = place(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 14}" font-size="11" text-anchor="middle">{step}</text>')
    for number, (arm, rows) in enumerate(successes.items()):
        means = [fmean(values) for values in zip(*rows, strict=True)]
        for row in [*rows, means]:
            points = " ".join(place(step, success) for step, success in enumerate(smooth(row), start=1))
            style = f'fill="none" stroke="{COLOURS[arm]}" stroke-width="{3 if row is means else 1}"'
            parts.append(f'<polyline points="{points}" {style}/>')
        label = f'x="{MARGIN + 8}" y="{MARGIN + 14 * (number + 1)}" font-size="12" fill="{COLOURS[arm]}"'
        parts.append(f"<text {label}>{arm}</text>")
    return "\n".join([*parts, "</svg>", ""])


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to four before it."""
    return [fmean(values[max(0, place - 4) : place + 1]) for place in range(len(values))]


def main() -> None:
    """Run both arms on all seeds, print the tables and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/maze"))
    parser.add_argument("--curves", type=Path, metavar="FILE.svg", help="draw the curves of these seeds")
    options = parser.parse_args()
    rows: list[str] = []
    curves: list[str] = []
    steps: list[int] = []
    rises: dict[str, list[float]] = {arm: [] for arm in ARMS}
    sampled: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
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
            sampled[arm].append([record[TRAINING_KEY] for record in metrics if TRAINING_KEY in record])
    print("| credit | seed | before | after | rise [95 %] | sampled | blind |\n|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print("\nmean rise: " + ", ".join(f"{arm} {fmean(values):+.3f}" for arm, values in rises.items()))
    differences = [ours - theirs for ours, theirs in zip(rises["gigpo"], rises["broadcast"], strict=True)]
    by_seed = ", ".join(f"{difference:+.3f}" for difference in differences)
    print(f"gigpo - broadcast, by seed: {by_seed}; mean {fmean(differences):+.3f}")
    print(f"\n| credit | seed | {' | '.join(map(str, steps))} |\n|---|---{'|---' * len(steps)}|")
    print("\n".join(curves))
    if options.curves:
        options.curves.write_text(draw_curves(sampled))


if __name__ == "__main__":
    main()
