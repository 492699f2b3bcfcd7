"""Kills one of two ranks, their launcher, or all at once, and resumes the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from lab import ASYNC_CHECKPOINTS, MAX_EXIT_S, FaultHarness, FaultRow, is_saving, wait_for_exit

TWO_PROCESSES = ("--nproc", "2")
ENGINE_OVERRIDES = {"plain torch": TWO_PROCESSES, "DeepSpeed, ZeRO-2": ("deepspeed.zero_stage=2", *TWO_PROCESSES)}
MAX_STEP_S = 0.1


def kill_rank(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 to one of two ranks in the middle of a step, the first and the second by turns."""
    for engine, overrides in ENGINE_OVERRIDES.items():
        lost = []
        for number in range(num_tries(harness)):
            victim = number % 2
            launcher, ranks = start_into_training(harness, *overrides)
            os.kill(ranks[victim], signal.SIGKILL)
            code = wait_for_exit(launcher)
            expected = [f"rank {victim} was ended by SIGKILL", f"mmrl: error: rank {1 - victim}", "lost another"]
            lost += [
                f"nothing was said of {words!r}: {harness.log_text[-300:]}"
                for words in expected
                if words not in harness.log_text
            ]
            lost += [] if code == 128 + signal.SIGKILL else [f"ended with {code}"]
            lost += kill_leftovers(ranks, within_s=0.0) + harness.finish_and_compare(*overrides)
        outcome = "the other ended with an error that names both, no process was left; resumed; all bytes equal"
        yield FaultRow(f"a rank of two dies ({engine})", f"{num_tries(harness)} times in a step", outcome, lost)


def kill_rank_while_saving(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 to one of two ranks while both write their parts of a checkpoint."""
    for where, overrides in {
        "the loop's thread": TWO_PROCESSES,
        "the background": (ASYNC_CHECKPOINTS, *TWO_PROCESSES),
    }.items():
        lost, saving = [], 0
        for number in range(num_tries(harness)):
            launcher, ranks = start_into_training(harness, *overrides)
            while launcher.is_alive() and not is_saving(harness.run_dir):
                pass
            with suppress(ProcessLookupError):
                os.kill(ranks[number % 2], signal.SIGKILL)
            wait_for_exit(launcher)
            saving += is_saving(harness.run_dir)
            lost += kill_leftovers(ranks, within_s=0.0) + harness.finish_and_compare(*overrides)
        tried = f"{num_tries(harness)} times, {saving} of them inside a save in {where}"
        yield FaultRow("a rank of two dies while both save", tried, "resumed; all bytes equal", lost)


def kill_launcher(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 to the launcher, at any moment of a run."""
    lost = []
    for _ in range(num_tries(harness)):
        moment = harness.random_moment(*TWO_PROCESSES)
        launcher = harness.start(*TWO_PROCESSES)
        time.sleep(moment)
        ranks = child_processes(launcher.pid) if launcher.is_alive() else []
        launcher.kill()
        wait_for_exit(launcher)
        lost += kill_leftovers(
            ranks, within_s=3 * harness.undisturbed_run(*TWO_PROCESSES)[1] + MAX_EXIT_S
        ) + harness.finish_and_compare(*TWO_PROCESSES)
    outcome = "the ranks ended by themselves, no process was left; resumed; all bytes equal"
    yield FaultRow("the launcher of two ranks dies", f"{num_tries(harness)} random moments", outcome, lost)


def kill_all_processes(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 to launcher and ranks at once, as when a machine is lost."""
    lost = []
    for _ in range(num_tries(harness)):
        launcher, ranks = start_into_training(harness, *TWO_PROCESSES)
        launcher.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        wait_for_exit(launcher)
        lost += kill_leftovers(ranks, within_s=MAX_EXIT_S) + harness.finish_and_compare(*TWO_PROCESSES)
    yield FaultRow(
        "two ranks and their launcher die", f"{num_tries(harness)} times in a step", "resumed; all bytes equal", lost
    )


def child_processes(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started, on Linux."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def num_tries(harness: FaultHarness) -> int:
    """Return the number of tries, which is small because two processes take long to start."""
    return max(1, harness.num_kills // 25)


def start_into_training(harness: FaultHarness, *overrides: str) -> tuple[ForkProcess, list[int]]:
    """Begin a run and let it reach some training step; return the launcher, and the ranks in order."""
    whole, _ = harness.undisturbed_run(*overrides)
    lines = harness.rng.randrange(1, count_metric_lines(whole) - 2)
    launcher = harness.start(*overrides)
    while launcher.is_alive() and count_metric_lines(harness.run_dir) < lines:
        time.sleep(0.001)
    time.sleep(harness.rng.uniform(0.0, MAX_STEP_S))
    return launcher, child_processes(launcher.pid)


def count_metric_lines(run_dir: Path) -> int:
    """Return the number of lines of a run's metrics."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_leftovers(processes: list[int], *, within_s: float) -> list[str]:
    """Return a complaint for each process that has not ended within so many seconds."""
    until = time.monotonic() + within_s
    while (left := [pid for pid in processes if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return [f"process {pid} was left behind" for pid in left]


def is_running(pid: int) -> bool:
    """Return True if a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
