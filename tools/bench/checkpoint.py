"""Seconds that saving costs the training loop, and seconds until a resumed run trains.

    python tools/bench/checkpoint.py                   # saving: about 3 minutes
    python tools/bench/checkpoint.py --resume          # continuing: about 2 minutes
    python tools/bench/checkpoint.py --busy            # saving, where others need the machine too

Saving: the quickstart's model in steps that learn (steps.yaml): without checkpoints, with a checkpoint after every
step, and with checkpoints in the background, by turns. The stall is the time that the loop spends on saving; in the
background, on the copy in memory. Medians over the steps of a run, then over the runs, [least, most]. Exits 1 when the
stall in the background exceeds 5 % of an rl step.

Continuing: configs/quickstart.yaml, killed after a step and begun again by the same command, timed from the command to
the end of its first step, all 12,000 pictures included; by turns with a process that only loads the libraries of a
model. Exits 1 when the first takes more than 15 s longer than the second.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from results import format_spread, make_parser, write_results

from mmrl.cli import main as mmrl_command
from mmrl.training.callbacks import PeriodicCheckpointer, TrainStepResult
from mmrl.types import TrainingState

STEPS_CONFIG = Path(__file__).with_name("steps.yaml")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CHECKPOINT_MODES: Mapping[str, tuple[str, ...]] = {
    "none": ("checkpoints.every=1000000",),
    "in the loop": ("checkpoints.every=1",),
    "in the background": ("checkpoints.every=1", "checkpoints.async_save=true"),
}
MAX_STALL_FRACTION, MAX_RESUME_OVERHEAD_S = 0.05, 15.0
STAGES = ("cold", "rl")


class StepCosts(NamedTuple):
    """Median seconds over the steps of a stage: the step itself, and the loop's wait for its checkpoint."""

    step: float
    stall: float


CostsByMode = Mapping[str, list[dict[str, StepCosts]]]
"""By mode, run after run: costs by stage."""


def measure_mode(folder: Path, mode: str, steps: int, prompts: int, clock: Callable[[], float]) -> dict[str, StepCosts]:
    """Train with checkpoints as `mode` says; return the costs by stage."""
    spans: list[tuple[int, float, float]] = []  # stage, when the step ended, when its checkpoint was done with
    save_if_due = PeriodicCheckpointer.on_step_end

    def timed(callback: PeriodicCheckpointer, state: TrainingState, result: TrainStepResult) -> None:
        start = clock()
        save_if_due(callback, state, result)
        spans.append((state.stage_index, start, clock()))

    lengths = [*(f"stages.{stage}.steps={steps}" for stage in STAGES), f"stages.rl.prompts_per_step={prompts}"]
    PeriodicCheckpointer.on_step_end = timed  # type: ignore[method-assign]
    try:
        code = mmrl_command(["train", str(STEPS_CONFIG), *lengths, *CHECKPOINT_MODES[mode], "--run-dir", str(folder)])
    finally:
        PeriodicCheckpointer.on_step_end = save_if_due  # type: ignore[method-assign]
    if code:
        sys.exit(code)
    found = {}
    for number, stage in enumerate(STAGES):
        own = [span[1:] for span in spans if span[0] == number]
        own_steps = [start - before for (_, before), (start, _) in pairwise(own)]
        found[stage] = StepCosts(median(own_steps), median(end - start for start, end in own[1:]))
    return found


def benchmark_saving(rounds: int, steps: int, prompts: int, clock: Callable[[], float]) -> tuple[str, dict[str, float]]:
    """Print the table. Return a complaint, empty if saving is fast enough, and the numbers."""
    found: CostsByMode = {mode: [] for mode in CHECKPOINT_MODES}
    for _ in range(rounds):
        for mode, runs in found.items():
            with TemporaryDirectory() as folder:
                runs.append(measure_mode(Path(folder, "run"), mode, steps, prompts, clock))
    print("\n| stage | checkpoint after every step | step | stall | stall / step | both, against none |")
    print("|---|---|---|---|---|---|")
    numbers = {}
    for stage in STAGES:
        for mode, runs in found.items():
            own, plain = [run[stage] for run in runs], [run[stage] for run in found["none"]]
            step, stall = (median(seconds) * 1e3 for seconds in zip(*own, strict=True))
            share = format_spread([100 * run.stall / run.step for run in own])
            against = format_spread([sum(run) / sum(none) for run, none in zip(own, plain, strict=True)])
            numbers[f"{stage}, {mode}: stall_ms"] = stall
            numbers[f"{stage}, {mode}: step_ms"] = step
            print(f"| {stage} | {mode} | {step:.0f} ms | {stall:.1f} ms | {share} % | {against} |")
    share = median(run["rl"].stall / run["rl"].step for run in found["in the background"])
    complaint = "" if share <= MAX_STALL_FRACTION else "the loop waits too long for its checkpoints"
    return complaint, {**numbers, "stall_fraction_of_an_rl_step": share}


def benchmark_resume(rounds: int) -> tuple[str, dict[str, float]]:
    """Print how long resuming takes. Return a complaint, empty if it is fast enough, and the numbers."""
    with TemporaryDirectory() as folder:
        time_to_next_step(Path(folder, "run"))
        both = [(time_to_next_step(Path(folder, "run")), time_imports()) for _ in range(rounds)]
    taken, loaded = [step for step, _ in both], [load for _, load in both]
    beyond = [step - load for step, load in both]
    print(f"from the command to the end of the first step: {format_spread(taken)} s")
    print(f"libraries alone: {format_spread(loaded)} s; beyond them: {format_spread(beyond)} s")
    complaint = "" if median(beyond) <= MAX_RESUME_OVERHEAD_S else "the run takes too long to continue"
    return complaint, {"to_first_step_s": median(taken), "libraries_s": median(loaded), "beyond_s": median(beyond)}


def time_imports() -> float:
    """Return the seconds of a process that only imports what a run imports."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mmrl.training.run"], check=True)
    return time.perf_counter() - start


def time_to_next_step(folder: Path) -> float:
    """Begin or continue the quickstart, and kill it after a step; return the seconds until then."""
    timings = folder / "timings.jsonl"
    before, start = count_lines(timings), time.perf_counter()
    enough = before + 1 if before else 2  # the first step's checkpoint comes before the second step's line
    command = [sys.executable, "-m", "mmrl", "train", str(QUICKSTART), "--run-dir", str(folder)]
    with subprocess.Popen([*command, "checkpoints.every=1"], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and count_lines(timings) < enough:
            time.sleep(0.01)
        taken = time.perf_counter() - start
        process.kill()
    return taken


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    """Measure, print, judge."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=12, help="of each stage")
    parser.add_argument("--prompts", type=int, default=32, help="of a step of reinforcement learning")
    parser.add_argument("--resume", action="store_true", help="measure how soon a run continues, instead of saving")
    parser.add_argument("--busy", action="store_true", help="count processor time of the loop's thread")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.busy else time.perf_counter
    complaint, numbers = (
        benchmark_resume(arguments.rounds)
        if arguments.resume
        else benchmark_saving(arguments.rounds, arguments.steps, arguments.prompts, clock)
    )
    write_results(arguments.json, "checkpoint", numbers)
    sys.exit(complaint or 0)


if __name__ == "__main__":
    main()
