"""Whether a run that is killed and resumed ends like one that nobody disturbed: both are tried, and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mmrl.types import UserError

_COMPARED_FOLDERS = ("rollouts", "checkpoints/*", "bench/*/*", "model", "adapter")
_COMPARED_PATTERNS = ("metrics.jsonl", "summary.json", *(f"{name}/*" for name in _COMPARED_FOLDERS))
_POLL_S = 0.002
_ERROR_TAIL_CHARS = 2000


def verify_resume(
    config: Path, overrides: Sequence[str], *, steps: int, processes: int | None, say: Callable[[str], None]
) -> bool:
    """Train `steps` steps a stage as a config says, and again with a kill -9 in every stage; whether they are the same.

    Both write to the same place in a temporary folder, so that not even a path may differ; every checkpoint is kept.
    Where several `processes` share the work, all are killed at once, with their launcher.

    Raises:
        UserError: a run fails, or ends before it can be killed.
    """
    kept = [f"checkpoints.every={max(1, steps // 4)}", "checkpoints.keep=1000000", "run.keep_rollouts_every=1"]
    with TemporaryDirectory(prefix="mmrl-verify-") as folder:
        run, straight = Path(folder, "run"), Path(folder, "straight")
        command = [sys.executable, "-m", "mmrl", "train", str(config), *overrides, *kept]
        command += ["--steps", str(steps), "--run-dir", str(run)]
        command += ["--nproc", str(processes)] if processes else []
        say(f"{steps} steps a stage, undisturbed ...")
        _run_to_end(command)
        run.rename(straight)
        for stage, lines in _stage_middles(straight / "metrics.jsonl"):
            _run_and_kill(command, run / "metrics.jsonl", lines)
            say(f"killed in stage {stage}, after line {lines} of metrics.jsonl; going on ...")
        _run_to_end(command)
        differs, count = find_differing_files(straight, run), len(list(_compared_files(straight)))
    if differs:
        say(f"{len(differs)} of {count} files differ: {', '.join(differs[:5])}")
        say("VERDICT: the resumed run is NOT the undisturbed one.")
    else:
        say(f"VERDICT: the resumed run is the undisturbed one, byte for byte in all {count} files compared.")
    return not differs


def find_differing_files(one: Path, other: Path) -> list[str]:
    """Names of what two runs do not have in common, of all that a seed decides and of their checkpoints."""
    return [
        name
        for name in sorted({*_compared_files(one), *_compared_files(other)})
        if not all((run / name).is_file() for run in (one, other))
        or (one / name).read_bytes() != (other / name).read_bytes()
    ]


def _run_to_end(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`{' '.join(command)}` ended with code {done.returncode}:\n{done.stderr[-_ERROR_TAIL_CHARS:]}")


def _run_and_kill(command: Sequence[str], metrics: Path, lines: int) -> None:
    """Run until there are that many lines of metrics, and no further."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and _count_lines(metrics) < lines:
            time.sleep(_POLL_S)
        ranks = child_processes(process.pid) if "--nproc" in command and process.poll() is None else []
        process.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    if process.returncode != -signal.SIGKILL:
        raise UserError(f"the run ended with code {process.returncode} before it could be killed; try more --steps")


def child_processes(launcher: int) -> list[int]:
    """The processes that one has started, as Linux lists them."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stage_middles(metrics: Path) -> Iterator[tuple[str, int]]:
    """For each stage the line of the step just after its middle."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for stage in dict.fromkeys(record["stage"] for record in records if "learner/lr" in record):
        steps = [number for number, record in enumerate(records, 1) if record["stage"] == stage]
        yield stage, steps[len(steps) // 2]


def _compared_files(run: Path) -> Iterator[str]:
    for pattern in _COMPARED_PATTERNS:
        yield from (str(path.relative_to(run)) for path in run.glob(pattern) if path.is_file())
