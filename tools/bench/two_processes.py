"""Speed-up by a second process and cost of DeepSpeed, in whole GRPO steps with one thread for each process.

    python tools/bench/two_processes.py --only two            # about 4 minutes
    python tools/bench/two_processes.py --only zero            # about 4 minutes
    python tools/bench/two_processes.py --busy                  # twice that; where others need the machine too

Runs of tools/bench/steps.yaml with the same 256 rollouts a step (`--prompts`), of a model of 9.8 million parameters.
Arms take turns; each round gives a ratio, printed as median [least, most]. Seconds are wall-clock, of a step's six
verbs, without the first steps. With `--busy` they are CPU seconds of a process, a long run's minus a short one's: the
time that a step would take if every process had a core. Exits 1 when two processes are less than 1.6 times as fast
as one, or when ZeRO-0 on one process takes more than 10 % longer than plain torch.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from results import format_spread, make_parser, write_results

CONFIG = Path(__file__).with_name("steps.yaml")
MODEL = {
    "language": {"hidden_size": 384, "intermediate_size": 1536, "num_layers": 4},
    "vision": {"hidden_size": 128, "intermediate_size": 256},
}
WARM_UP_STEPS = 1
BASELINE = "one process, torch"
ARMS: Mapping[str, tuple[str, ...]] = {
    BASELINE: (),
    "two processes, torch": ("--nproc", "2"),
    "one process, ZeRO-0": ("deepspeed.zero_stage=0",),
}
ARM_BY_OPTION = {"two": "two processes, torch", "zero": "one process, ZeRO-0"}
MIN_SPEEDUP, MAX_SLOWDOWN = 1.6, 1.1


class RunSeconds(NamedTuple):
    """Wall-clock seconds of a step, and CPU seconds of the whole run, over all processes."""

    step: float
    cpu: float


def run_arm(arm: tuple[str, ...], steps: int, prompts: int) -> RunSeconds:
    """Train for so many steps of so many prompts, and some before that are not counted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mmrl", "train", str(CONFIG), f"model.from_scratch={json.dumps(MODEL)}", *arm]
        size = [f"stages.rl.steps={WARM_UP_STEPS + steps}", f"stages.rl.prompts_per_step={prompts}"]
        options = [*size, "--run-dir", f"{folder}/run"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr)
        records = [json.loads(line) for line in Path(folder, "run", "timings.jsonl").read_text().splitlines()]
        learned = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    if any(record.get("learner/grad_norm", 1.0) == 0.0 for record in learned):
        sys.exit("a step learned nothing")
    timed = [record for record in records if record["stage"] == "rl"][WARM_UP_STEPS:]
    wall = []
    for record in timed:
        wall.append(sum(value for name, value in record.items() if name.startswith("time/")))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return RunSeconds(fmean(wall), cpu)


def step_seconds(arm: tuple[str, ...], steps: int, prompts: int, *, busy: bool) -> float:
    """Return the seconds of a step: wall-clock, or CPU seconds of one process."""
    if not busy:
        return run_arm(arm, steps, prompts).step
    long, short = run_arm(arm, steps, prompts), run_arm(arm, 1, prompts)
    return (long.cpu - short.cpu) / (steps - 1) / (2 if "--nproc" in arm else 1)


def main() -> int:
    """Measure, print, judge."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=4, help="steps measured in each")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, each with 8 responses")
    parser.add_argument("--only", choices=ARM_BY_OPTION, help="what is held against one process with plain torch")
    parser.add_argument("--busy", action="store_true", help="count processor time, where others need the machine too")
    arguments = parser.parse_args()
    others = [ARM_BY_OPTION[arguments.only]] if arguments.only else list(ARM_BY_OPTION.values())
    found: dict[str, list[float]] = {name: [] for name in (BASELINE, *others)}
    for _ in range(arguments.rounds):
        for name, taken in found.items():
            taken.append(step_seconds(ARMS[name], arguments.steps, arguments.prompts, busy=arguments.busy))
    for name, taken in found.items():
        print(f"{name:22} {format_spread(taken)} s a step{' of a process, CPU' if arguments.busy else ''}")
    numbers = {f"{name}: step_s": median(taken) for name, taken in found.items()}
    passed = True
    two, zero = ARM_BY_OPTION["two"], ARM_BY_OPTION["zero"]
    if two in found:
        gains = [one / both for one, both in zip(found[BASELINE], found[two], strict=True)]
        print(f"two processes are {format_spread(gains)} times as fast as one (at least {MIN_SPEEDUP})")
        numbers["speedup_of_two"] = median(gains)
        passed &= median(gains) >= MIN_SPEEDUP
    if zero in found:
        costs = [ours / one for one, ours in zip(found[BASELINE], found[zero], strict=True)]
        print(f"ZeRO-0 takes {format_spread(costs)} times as long as plain torch (at most {MAX_SLOWDOWN})")
        numbers["slowdown_of_zero"] = median(costs)
        passed &= median(costs) <= MAX_SLOWDOWN
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    write_results(arguments.json, "two_processes", numbers)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
