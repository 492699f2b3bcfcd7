"""Seconds that recording rollouts costs a training step.

    python tools/bench/records.py                      # a minute

The quickstart's model in steps that learn (steps.yaml), whose rollouts are all recorded after every step, tokens
included. A run records one step in ten (`logging.rollouts.every`), so a tenth of the seconds counts against a step.
The model is the smallest there is: with a larger one, steps take longer but recording does not. Medians over the
steps. Exits 1 when recording costs more than 2 % of a step.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from results import make_parser, write_results

from mmrl.cli import main as mmrl_command
from mmrl.config.schema import RolloutRecordsConfig
from mmrl.training.callbacks import RolloutRecorder
from mmrl.types import SelectedExperiences, TrainingState

STEPS_CONFIG = Path(__file__).with_name("steps.yaml")
MAX_FRACTION = 0.02


def time_recording(folder: Path, steps: int, prompts: int) -> list[tuple[float, float]]:
    """Train, and return when the recording of each step began and when it ended."""
    spans: list[tuple[float, float]] = []
    record_step = RolloutRecorder.record_step

    def timed(
        recorder: RolloutRecorder, state: TrainingState, selected: SelectedExperiences, *, force: bool
    ) -> str | None:
        start = time.perf_counter()
        path = record_step(recorder, state, selected, force=force)
        spans.append((start, time.perf_counter()))
        return path

    options = [f"stages.rl.steps={steps}", f"stages.rl.prompts_per_step={prompts}", "logging.rollouts.every=1"]
    RolloutRecorder.record_step = timed  # type: ignore[method-assign]
    try:
        code = mmrl_command(["train", str(STEPS_CONFIG), *options, "--run-dir", str(folder)])
    finally:
        RolloutRecorder.record_step = record_step  # type: ignore[method-assign]
    if code:
        sys.exit(code)
    return spans


def main() -> None:
    """Measure, print, judge."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with eight rollouts each")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        spans = time_recording(Path(folder, "run"), arguments.steps, arguments.prompts)
        files = list(Path(folder, "run", "rollouts").glob("rl-*"))
        kilobytes = sum(file.stat().st_size for file in files) / 1e3 / arguments.steps
    step_s = median(start - end for (_, end), (start, _) in pairwise(spans))
    recording_s = median(end - start for start, end in spans[1:])
    fraction = recording_s / RolloutRecordsConfig().every / step_s
    print(f"\n{arguments.prompts * 8} rollouts: {kilobytes:.0f} KB, {recording_s * 1e3:.0f} ms where they are recorded")
    print(f"step without it {step_s * 1e3:.0f} ms; a tenth of the recording is {fraction:.2%} of that")
    numbers = {"step_ms": step_s * 1e3, "recording_ms": recording_s * 1e3, "kilobytes": kilobytes}
    write_results(arguments.json, "records", {**numbers, "fraction_of_step": fraction})
    sys.exit("recording costs too much" if fraction > MAX_FRACTION else 0)


if __name__ == "__main__":
    main()
