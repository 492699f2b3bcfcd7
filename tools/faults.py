"""What becomes of a run when things go wrong: every fault is tried on real runs; docs/reliability.md has the table.

    python tools/faults.py                                  # 50 kills and all the rest, minutes
    python tools/faults.py --kills 3 --only kill corrupt    # a few
    python tools/faults.py --write docs/reliability.md

A run under test is `mmrl train` on a tiny model, in a process forked from this one, where torch is loaded already, or
in two that it launches (rank_faults.py, which needs DeepSpeed). What it ends with is compared byte for byte with what
an undisturbed run ends with: weights, optimizer, State, metrics, summary, rollouts, export. Exits 1 if anything is
lost in any row.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab import BACKGROUND, GRACE_S, Lab, Row, ended, is_saving
from rank_faults import all_die, launcher_dies, rank_dies, rank_dies_saving
from safetensors.torch import load_file

from mmrl.checkpoint import latest
from mmrl.checkpoint.atomic_folder import HASHES
from mmrl.checkpoint.snapshot import COMMON, OPTIMIZER, WEIGHTS
from mmrl.checkpoint.verify_resume import differing

HEAD = ("| fault | tried | what happened | lost |", "|---|---|---|---|")
BEGIN, END = "<!-- tools/faults.py writes from here -->", "<!-- to here -->"


def kill(lab: Lab) -> Iterator[Row]:
    """Kill -9, anywhere in a run's life: loading, training, measuring, exporting; every other time in a save."""
    for overrides, where in (((), "the loop's thread"), ((BACKGROUND,), "the background")):
        lost, saving, tries = [], 0, lab.kills // 2
        for number in range(tries):
            moment = lab.moment(*overrides)
            process = lab.start(*overrides)
            time.sleep(moment)
            while number % 2 and process.is_alive() and not is_saving(lab.run):
                pass
            process.kill()
            ended(process)
            saving += is_saving(lab.run)
            lost += lab.finish(*overrides)
        tried = f"{tries} random moments, {saving} of them inside a save in {where}"
        yield Row("kill -9", tried, "resumed; all bytes equal", lost)


def terminate(lab: Lab) -> Iterator[Row]:
    """SIGTERM, as a scheduler sends it."""
    tries, lost, longest = max(2, lab.kills // 5), [], 0.0
    codes: list[int] = []
    for _ in range(tries):
        moment = lab.moment(BACKGROUND)
        process = lab.start(BACKGROUND)
        time.sleep(moment)
        start = time.perf_counter()
        process.terminate()
        codes.append(ended(process))
        longest = max(longest, time.perf_counter() - start)
        lost += lab.finish(BACKGROUND)
    lost += [f"exit code {code}" for code in codes if code not in (143, -signal.SIGTERM, 0)]
    lost += [f"{longest:.1f} s"] if longest > GRACE_S else []
    outcome = f"saved, exit code 143 within {longest:.1f} s; resumed; all bytes equal"
    yield Row("SIGTERM", f"{tries} random moments", outcome, lost)


def full_disk(lab: Lab) -> Iterator[Row]:
    """No file can grow any more, from some moment on; a limit of the process stands for the disk's."""
    tries, lost, refused = max(2, lab.kills // 5), [], 0
    for _ in range(tries):
        moment = lab.moment()
        process = lab.start()
        time.sleep(moment)
        limit = lab.dice.randrange(8_000, 100_000)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        code = ended(process)
        refused += code == 2 and ("cannot save" in lab.log or "cannot be written" in lab.log)
        lost += [] if code in (0, 2) else [f"ended with {code}: {lab.log[-300:]}"]
        lost += lab.finish()
    outcome = f"{refused} ended with a message and exit code 2, none left a half-written file; resumed; all bytes equal"
    yield Row("disk full", f"{tries} random moments", outcome, lost)


def read_only(lab: Lab) -> Iterator[Row]:
    """The run directory of a begun run may not be written any more."""
    half = lab.half()
    places = [half, *(path for path in half.rglob("*") if path.is_dir())]
    for path in places:
        path.chmod(0o555)

    code = lab.go(prepare=drop_capabilities)
    lost = [] if code == 2 and "cannot be written" in lab.log else [f"ended with {code}: {lab.log[-300:]}"]
    for path in places:
        path.chmod(0o755)
    yield Row(
        "read-only run directory",
        "1",
        "refused by name, exit code 2; then resumed; all bytes equal",
        lost + lab.finish(),
    )


def drop_capabilities() -> None:
    """Be bound by permissions, even as root."""
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; each in two halves
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0


def corrupt(lab: Lab) -> Iterator[Row]:
    """The newest checkpoint is damaged, in every file and every way."""
    lost, tries = [], 0
    damages = [(name, how) for name in (HASHES, WEIGHTS, OPTIMIZER, *COMMON) for how in ("lost", "cut", "flipped")]
    for name, how in damages if lab.kills >= 50 else lab.dice.sample(damages, 2):
        file = lab.half() / "checkpoints" / "01-000003" / name
        content = bytearray(file.read_bytes())
        file.unlink()
        if how != "lost":
            content[lab.dice.randrange(len(content))] ^= 0x10
            file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
        lost += lab.finish()
        lost += [] if "is damaged" in lab.log else [f"nothing was said of {name} {how}"]
        tries += 1
    tried = f"{tries}: files lost, cut in half, one bit flipped"
    yield Row("corrupt checkpoint", tried, "a loud line, the one before used; all bytes equal", lost)


def other_config(lab: Lab) -> Iterator[Row]:
    """The same directory with another config."""
    half = lab.half()
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    code = lab.go("stages.rl.group_size=8", "run.seed=1")
    lost = [] if code == 2 and "run.seed: 0 -> 1" in lab.log else [f"ended with {code}: {lab.log[-300:]}"]
    lost += ["the directory changed"] if before != {path: path.read_bytes() for path in before} else []
    yield Row(
        "another config",
        "1",
        "refused with the diff, nothing touched; then resumed; all bytes equal",
        lost + lab.finish(),
    )


def not_a_number(lab: Lab) -> Iterator[Row]:
    """Gradients that are not finite."""
    code = lab.go("stages.cold.optimizer.lr=1e30", "stages.cold.max_bad_steps=2")
    lost = [] if code == 2 and "not finite" in lab.log else [f"ended with {code}: {lab.log[-300:]}"]
    newest = latest(lab.run / "checkpoints", lost.append)
    if newest is None or not all(tensor.isfinite().all() for tensor in load_file(newest / WEIGHTS).values()):
        lost.append("weights that are not finite were saved")
    shutil.rmtree(lab.run)
    yield Row("NaN loss", "1", "no weight changed, exit code 2, the samples' file named; saved weights finite", lost)


def clock(lab: Lab) -> Iterator[Row]:
    """Clocks jump back and forth by days at every look, and so do the dates of files."""
    lab.half()
    for path in lab.run.rglob("*"):
        os.utime(path, (lab.dice.randrange(2**31),) * 2)

    def mad(read: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: read() + lab.dice.randrange(-(10**6), 10**6)

    def jump() -> None:
        for name in ("time", "monotonic", "perf_counter", "time_ns"):
            setattr(time, name, mad(getattr(time, name)))

    whole, _ = lab.whole()
    code = lab.go(prepare=jump)
    lost = [f"ended with {code}: {lab.log[-300:]}"] if code else differing(whole, lab.run)
    shutil.rmtree(lab.run)
    yield Row("clock jumps", "1", "resumed under clocks that jump at every look; all bytes equal", lost)


FAULTS: dict[str, Callable[[Lab], Iterator[Row]]] = {
    "kill": kill,
    "terminate": terminate,
    "full_disk": full_disk,
    "read_only": read_only,
    "corrupt": corrupt,
    "other_config": other_config,
    "not_a_number": not_a_number,
    "clock": clock,
    "rank_dies": rank_dies,
    "rank_dies_saving": rank_dies_saving,
    "launcher_dies": launcher_dies,
    "all_die": all_die,
}


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The rows in Markdown."""
    return [f"| {row.fault} | {row.tried} | {row.outcome} | {'; '.join(row.lost) or 'nothing'} |" for row in rows]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Put rows between the marks, each fault's in the place of what was known of it."""
    before, _, rest = path.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    known, fresh = (by_fault(lines) for lines in (old.strip().splitlines()[2:], lines_of(rows)))
    lines = [*HEAD, *chain.from_iterable({**known, **fresh}.values())]
    path.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))


def by_fault(lines: Sequence[str]) -> dict[str, list[str]]:
    """Lines of the table by their first cell."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line.split("|")[1].strip(), []).append(line)
    return found


def main() -> None:
    """Try the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many; of the other faults, in proportion")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the rows into the table in this file")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="mmrl-faults-") as folder:
        lab = Lab(Path(folder), random.Random(arguments.seed), arguments.kills)
        rows = []
        for name in arguments.only:
            rows += list(FAULTS[name](lab))
            print(f"{name}: {'LOST ' + '; '.join(rows[-1].lost) if rows[-1].lost else 'nothing lost'}", flush=True)
    print("\n".join([*HEAD, *lines_of(rows)]))
    if arguments.write:
        write(arguments.write, rows)
    sys.exit("something was lost" if any(row.lost for row in rows) else 0)


if __name__ == "__main__":
    main()
