"""Checks that a run that was killed and resumed writes the same files as an undisturbed one, byte for byte."""

from __future__ import annotations

import filecmp
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent

from mmrl.log.logger import read_records
from mmrl.types import UserError
from mmrl.utils.processes import kill_processes, list_tree

_COMPARED_FOLDERS = ("rollouts", "checkpoints/*", "benchmarks/*/*", "model", "adapter")
_COMPARED_PATTERNS = ("metrics.jsonl", "events.jsonl", "summary.json", *(f"{name}/*" for name in _COMPARED_FOLDERS))
_POLL_S = 0.002  # short beside a step even of a tiny model: the kill is to come right after its line
_ERROR_TAIL_CHARS = 2000


def verify_resume(
    config: Path, overrides: Sequence[str], *, steps: int, processes: int | None, say: Callable[[str], None]
) -> bool:
    """Return True if a run with a kill -9 in every stage writes the same files as an undisturbed one.

    Each trains a few steps of every stage. With `processes`, that many ranks train, and all are killed at once, with
    their launcher. `say` prints the progress and the verdict.

    Raises:
        UserError: a run fails, or ends before it can be killed.
    """
    # Every checkpoint and every step's rollouts are kept, so that all of them can be compared. Trackers are off.
    keep_all = [
        "logging.trackers=[]",
        f"checkpoints.every={max(1, steps // 4)}",
        "checkpoints.keep_last=1000000",
        "logging.rollouts.every=1",
    ]
    with TemporaryDirectory(prefix="mmrl-verify-") as folder:
        # Both runs write to the same path, so that not even a path differs.
        run, undisturbed = Path(folder, "run"), Path(folder, "straight")
        command = [sys.executable, "-m", "mmrl", "train", str(config), *overrides, *keep_all]
        command += ["--steps", str(steps), "--run-dir", str(run)]
        if processes:
            command += ["--nproc", str(processes)]
        say(f"{steps} steps a stage, undisturbed ...")
        _run_to_end(command)
        run.rename(undisturbed)
        for stage, num_lines in _stage_middles(undisturbed / "metrics.jsonl"):
            _run_and_kill(command, run / "metrics.jsonl", num_lines)
            say(f"killed in stage {stage}, after line {num_lines} of metrics.jsonl; continuing ...")
        _run_to_end(command)
        differing = find_differing_files(undisturbed, run)
        count = len(list(_compared_files(undisturbed)))
    if differing:
        say(f"{len(differing)} of {count} files differ: {', '.join(differing[:5])}")
        say("VERDICT: the resumed run is NOT the undisturbed one.")
        return False
    say(f"VERDICT: the resumed run is the undisturbed one, byte for byte in all {count} files compared.")
    return True


def find_differing_files(one: Path, other: Path) -> list[str]:
    """Return the compared files (`_COMPARED_PATTERNS`) that differ between two runs, or that only one of them has."""
    names = {*_compared_files(one), *_compared_files(other)}
    # A file that only one of them has counts as unreadable.
    _, differing, unreadable = filecmp.cmpfiles(one, other, names, shallow=False)
    return sorted(differing + unreadable)


def _run_to_end(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        end = indent(done.stderr[-_ERROR_TAIL_CHARS:].strip(), "  ")
        raise UserError(f"`{shlex.join(command)}` ended with code {done.returncode}:\n{end}")


def _run_and_kill(command: Sequence[str], metrics: Path, num_lines: int) -> None:
    """Start a run, and kill it as soon as there are that many lines of metrics."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_lines:
                break
            time.sleep(_POLL_S)
        if process.poll() is None:
            # A launcher dies with its ranks.
            kill_processes(list_tree(process.pid))
    if process.returncode != -signal.SIGKILL:
        raise UserError(f"the run ended with code {process.returncode} before it could be killed; try more --steps")


def _stage_middles(metrics: Path) -> Iterator[tuple[str, int]]:
    """Yield each training stage with the number of a line just after its middle."""
    records = [record for record, _ in read_records(metrics)]
    training_stages = dict.fromkeys(record["stage"] for record in records if "learner/lr" in record)
    for stage in training_stages:
        lines = [number for number, record in enumerate(records, 1) if record["stage"] == stage]
        yield stage, lines[len(lines) // 2]


def _compared_files(run: Path) -> Iterator[str]:
    for pattern in _COMPARED_PATTERNS:
        yield from (str(path.relative_to(run)) for path in run.glob(pattern) if path.is_file())
