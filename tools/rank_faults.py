"""What becomes of a run of two processes when one of them dies, or their launcher, or all at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from lab import BACKGROUND, GRACE_S, Lab, Row, ended, is_saving

from mmrl.checkpoint.verify_resume import ranks_of

TWO = ("--nproc", "2")
ENGINES = {"plain torch": TWO, "DeepSpeed, ZeRO-2": ("deepspeed.zero=2", *TWO)}
STEP_S = 0.1


def rank_dies(lab: Lab) -> Iterator[Row]:
    """Kill -9 to one of two ranks in the middle of a step, the first and the second by turns."""
    for engine, overrides in ENGINES.items():
        lost = []
        for number in range(tries_of(lab)):
            victim = number % 2
            launcher, ranks = under_way(lab, *overrides)
            os.kill(ranks[victim], signal.SIGKILL)
            code = ended(launcher)
            told = [f"rank {victim} was ended by SIGKILL", f"mmrl: error: rank {1 - victim}", "lost another"]
            lost += [f"nothing was said of {words!r}: {lab.log[-300:]}" for words in told if words not in lab.log]
            lost += [] if code == 128 + signal.SIGKILL else [f"ended with {code}"]
            lost += still_there(ranks, within_s=0.0) + lab.finish(*overrides)
        outcome = "the other ended with an error that names both, no process was left; resumed; all bytes equal"
        yield Row(f"a rank of two dies ({engine})", f"{tries_of(lab)} times in a step", outcome, lost)


def rank_dies_saving(lab: Lab) -> Iterator[Row]:
    """Kill -9 to one of two ranks while both write their parts of a checkpoint."""
    for where, overrides in {"the loop's thread": TWO, "the background": (BACKGROUND, *TWO)}.items():
        lost, saving = [], 0
        for number in range(tries_of(lab)):
            launcher, ranks = under_way(lab, *overrides)
            while launcher.is_alive() and not is_saving(lab.run):
                pass
            with suppress(ProcessLookupError):
                os.kill(ranks[number % 2], signal.SIGKILL)
            ended(launcher)
            saving += is_saving(lab.run)
            lost += still_there(ranks, within_s=0.0) + lab.finish(*overrides)
        tried = f"{tries_of(lab)} times, {saving} of them inside a save in {where}"
        yield Row("a rank of two dies while both save", tried, "resumed; all bytes equal", lost)


def launcher_dies(lab: Lab) -> Iterator[Row]:
    """Kill -9 to the launcher, anywhere in a run's life."""
    lost = []
    for _ in range(tries_of(lab)):
        moment = lab.moment(*TWO)
        launcher = lab.start(*TWO)
        time.sleep(moment)
        ranks = ranks_of(launcher.pid) if launcher.is_alive() else []
        launcher.kill()
        ended(launcher)
        lost += still_there(ranks, within_s=3 * lab.whole(*TWO)[1] + GRACE_S) + lab.finish(*TWO)
    outcome = "the ranks ended by themselves, no process was left; resumed; all bytes equal"
    yield Row("the launcher of two ranks dies", f"{tries_of(lab)} random moments", outcome, lost)


def all_die(lab: Lab) -> Iterator[Row]:
    """Kill -9 to launcher and ranks at once, as when a machine is lost."""
    lost = []
    for _ in range(tries_of(lab)):
        launcher, ranks = under_way(lab, *TWO)
        launcher.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        ended(launcher)
        lost += still_there(ranks, within_s=GRACE_S) + lab.finish(*TWO)
    yield Row("two ranks and their launcher die", f"{tries_of(lab)} times in a step", "resumed; all bytes equal", lost)


def tries_of(lab: Lab) -> int:
    """How often; two processes take long to start."""
    return max(1, lab.kills // 12)


def under_way(lab: Lab, *overrides: str) -> tuple[ForkProcess, list[int]]:
    """Begin a run and let it come into some step of training; the launcher, and the ranks in their order."""
    whole, _ = lab.whole(*overrides)
    lines = lab.dice.randrange(1, count_lines(whole) - 2)
    launcher = lab.start(*overrides)
    while launcher.is_alive() and count_lines(lab.run) < lines:
        time.sleep(0.001)
    time.sleep(lab.dice.uniform(0.0, STEP_S))
    return launcher, ranks_of(launcher.pid)


def count_lines(run: Path) -> int:
    """Lines of a run's metrics."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def still_there(processes: list[int], *, within_s: float) -> list[str]:
    """Complaints about processes that have not ended within so many seconds."""
    until = time.monotonic() + within_s
    while (left := [pid for pid in processes if runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return [f"process {pid} was left behind" for pid in left]


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
