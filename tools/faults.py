"""Causes every fault of docs/reliability.md in real runs, and writes the table there.

    python tools/faults.py                                  # 50 kills and all the rest, minutes
    python tools/faults.py --kills 3 --only kill corrupt    # a few
    python tools/faults.py --write docs/reliability.md

A run under test is `mmrl train` on a tiny model, in a process forked from this one, where torch is loaded already, or
in two that it launches (rank_faults.py, which needs DeepSpeed). It imitates and reinforces with a tool, rethinking,
replay, KL and a decaying rate (`CONFIG` in lab.py), or in an environment (episode_faults.py). Its results are compared
byte for byte with an undisturbed run's: weights, optimizer, State, metrics, summary, rollouts, export. Exits 1 if
anything is lost in any row.
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

from episode_faults import kill_in_episodes, kill_ranks_in_episodes
from lab import ASYNC_CHECKPOINTS, MAX_EXIT_S, FaultHarness, FaultRow, is_saving, wait_for_exit
from rank_faults import kill_all_processes, kill_launcher, kill_rank, kill_rank_while_saving
from safetensors.torch import load_file

from mmrl.checkpoint import find_latest
from mmrl.checkpoint.atomic_folder import HASHES_FILE
from mmrl.checkpoint.snapshot import COMMON_FILES, OPTIMIZER_FILE, WEIGHTS_FILE
from mmrl.checkpoint.verify_resume import find_differing_files

TABLE_HEAD = ("| fault | tried | what happened | lost |", "|---|---|---|---|")
NAN_LOSS = """
def nan_loss(logprobs, old_logprobs, advantages, mask):
    return logprobs * float("nan")
"""
BEGIN_MARK, END_MARK = "<!-- tools/faults.py writes from here -->", "<!-- to here -->"


def kill_run(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 at any moment of a run: loading, training, measuring, exporting; every other time in a save."""
    for overrides, where in (((), "the loop's thread"), ((ASYNC_CHECKPOINTS,), "the background")):
        lost, saving, tries = [], 0, harness.num_kills // 2
        for number in range(tries):
            moment = harness.random_moment(*overrides)
            process = harness.start(*overrides)
            time.sleep(moment)
            while number % 2 and process.is_alive() and not is_saving(harness.run_dir):
                pass
            process.kill()
            wait_for_exit(process)
            saving += is_saving(harness.run_dir)
            lost += harness.finish_and_compare(*overrides)
        tried = f"{tries} random moments, {saving} of them inside a save in {where}"
        yield FaultRow("kill -9", tried, "resumed; all bytes equal", lost)


def send_sigterm(harness: FaultHarness) -> Iterator[FaultRow]:
    """Send SIGTERM at random moments, as a scheduler does."""
    tries, lost, longest = max(2, harness.num_kills // 5), [], 0.0
    codes: list[int] = []
    for _ in range(tries):
        moment = harness.random_moment(ASYNC_CHECKPOINTS)
        process = harness.start(ASYNC_CHECKPOINTS)
        time.sleep(moment)
        start = time.perf_counter()
        process.terminate()
        codes.append(wait_for_exit(process))
        longest = max(longest, time.perf_counter() - start)
        lost += harness.finish_and_compare(ASYNC_CHECKPOINTS)
    lost += [f"exit code {code}" for code in codes if code not in (143, -signal.SIGTERM, 0)]
    lost += [f"{longest:.1f} s"] if longest > MAX_EXIT_S else []
    outcome = f"saved, exit code 143 within {longest:.1f} s; resumed; all bytes equal"
    yield FaultRow("SIGTERM", f"{tries} random moments", outcome, lost)


def fill_disk(harness: FaultHarness) -> Iterator[FaultRow]:
    """Let no file grow from a random moment on; a limit of the process stands for a full disk."""
    tries, lost, refused = max(2, harness.num_kills // 5), [], 0
    for _ in range(tries):
        moment = harness.random_moment()
        process = harness.start()
        time.sleep(moment)
        limit = harness.rng.randrange(8_000, 100_000)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        code = wait_for_exit(process)
        refused += code == 2 and ("cannot save" in harness.log_text or "cannot be written" in harness.log_text)
        lost += [] if code in (0, 2) else [f"ended with {code}: {harness.log_text[-300:]}"]
        lost += harness.finish_and_compare()
    outcome = f"{refused} ended with a message and exit code 2, none left a half-written file; resumed; all bytes equal"
    yield FaultRow("disk full", f"{tries} random moments", outcome, lost)


def make_read_only(harness: FaultHarness) -> Iterator[FaultRow]:
    """Make the directory of a run read-only, then resume it."""
    half = harness.restore_half_run()
    places = [half, *(path for path in half.rglob("*") if path.is_dir())]
    for path in places:
        path.chmod(0o555)
    lost = harness.run_and_check(words="cannot be written", prepare=drop_capabilities)
    for path in places:
        path.chmod(0o755)
    outcome = "refused with the path, exit code 2; then resumed; all bytes equal"
    yield FaultRow("read-only run directory", "1", outcome, lost + harness.finish_and_compare())


def drop_capabilities() -> None:
    """Obey file permissions, even as root."""
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; each in two halves
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0


def corrupt_checkpoint(harness: FaultHarness) -> Iterator[FaultRow]:
    """Damage each file of the newest checkpoint in each way, and resume."""
    lost, tries = [], 0
    damages = [
        (name, how)
        for name in (HASHES_FILE, WEIGHTS_FILE, OPTIMIZER_FILE, *COMMON_FILES)
        for how in ("lost", "cut", "flipped")
    ]
    for name, how in damages if harness.num_kills >= 50 else harness.rng.sample(damages, 2):
        file = harness.restore_half_run() / "checkpoints" / "01-000003" / name
        content = bytearray(file.read_bytes())
        file.unlink()
        if how != "lost":
            content[harness.rng.randrange(len(content))] ^= 0x10
            file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
        lost += harness.finish_and_compare()
        lost += [] if "is damaged" in harness.log_text else [f"nothing was said of {name} {how}"]
        tries += 1
    tried = f"{tries}: files lost, cut in half, one bit flipped"
    yield FaultRow("corrupt checkpoint", tried, "a warning, the checkpoint before it used; all bytes equal", lost)


def change_config(harness: FaultHarness) -> Iterator[FaultRow]:
    """Resume a run with another config."""
    half = harness.restore_half_run()
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    lost = harness.run_and_check("stages.rl.group_size=8", "run.seed=1", words="run.seed: 0 -> 1")
    lost += ["the directory changed"] if before != {path: path.read_bytes() for path in before} else []
    outcome = "refused with the diff, nothing touched; then resumed; all bytes equal"
    yield FaultRow("another config", "1", outcome, lost + harness.finish_and_compare())


def make_gradients_nan(harness: FaultHarness) -> Iterator[FaultRow]:
    """Train with a loss that is not finite."""
    (harness.folder / "nan_loss.py").write_text(NAN_LOSS)
    policy_loss = "stages.rl.loss.policy_loss={fn: ./nan_loss.py:nan_loss}"
    lost = harness.run_and_check(policy_loss, "stages.rl.max_nonfinite_steps=2", words="not finite")
    newest = find_latest(harness.run_dir / "checkpoints", lost.append)
    if newest is None or not all(tensor.isfinite().all() for tensor in load_file(newest / WEIGHTS_FILE).values()):
        lost.append("weights that are not finite were saved")
    shutil.rmtree(harness.run_dir)
    outcome = "no weight changed, exit code 2, the samples' file named; saved weights finite"
    yield FaultRow("NaN loss", "1", outcome, lost)


def jump_clocks(harness: FaultHarness) -> Iterator[FaultRow]:
    """Let wall clocks and the dates of files jump back and forth by days at every reading."""
    harness.restore_half_run()
    for path in harness.run_dir.rglob("*"):
        os.utime(path, (harness.rng.randrange(2**31),) * 2)

    def mad(read: Callable[[], Any]) -> Callable[[], Any]:
        def read_mad() -> Any:
            return read() + harness.rng.randrange(-(10**6), 10**6)

        return read_mad

    def jump() -> None:
        # Not the monotonic one, which never jumps: Python's own waits for processes rely on that.
        for name in ("time", "time_ns", "perf_counter"):
            setattr(time, name, mad(getattr(time, name)))

    whole, _ = harness.undisturbed_run()
    code = harness.run_to_end(prepare=jump)
    lost = [f"ended with {code}: {harness.log_text[-300:]}"] if code else find_differing_files(whole, harness.run_dir)
    shutil.rmtree(harness.run_dir)
    yield FaultRow("clock jumps", "1", "resumed under wall clocks that jump at every reading; all bytes equal", lost)


FAULTS: dict[str, Callable[[FaultHarness], Iterator[FaultRow]]] = {
    "kill": kill_run,
    "episodes": kill_in_episodes,
    "episodes_of_ranks": kill_ranks_in_episodes,
    "terminate": send_sigterm,
    "full_disk": fill_disk,
    "read_only": make_read_only,
    "corrupt": corrupt_checkpoint,
    "other_config": change_config,
    "not_a_number": make_gradients_nan,
    "clock": jump_clocks,
    "rank_dies": kill_rank,
    "rank_dies_saving": kill_rank_while_saving,
    "launcher_dies": kill_launcher,
    "all_die": kill_all_processes,
}


def markdown_rows(rows: Sequence[FaultRow]) -> list[str]:
    """Return the rows in Markdown."""
    return [f"| {row.fault} | {row.tried} | {row.outcome} | {'; '.join(row.problems) or 'nothing'} |" for row in rows]


def update_table(path: Path, rows: Sequence[FaultRow]) -> None:
    """Put rows between the marks, each in place of the old row of its fault."""
    before, _, rest = path.read_text().partition(BEGIN_MARK)
    old, _, after = rest.partition(END_MARK)
    known, fresh = (group_by_fault(lines) for lines in (old.strip().splitlines()[2:], markdown_rows(rows)))
    lines = [*TABLE_HEAD, *chain.from_iterable({**known, **fresh}.values())]
    path.write_text("\n".join([before + BEGIN_MARK, "", *lines, "", END_MARK + after]))


def group_by_fault(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return the lines of the table by their first cell."""
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
        lab = FaultHarness(Path(folder), random.Random(arguments.seed), arguments.kills)
        lab.train_base_model()
        rows = []
        for name in arguments.only:
            rows += list(FAULTS[name](lab))
            print(
                f"{name}: {'LOST ' + '; '.join(rows[-1].problems) if rows[-1].problems else 'nothing lost'}", flush=True
            )
    print("\n".join([*TABLE_HEAD, *markdown_rows(rows)]))
    if arguments.write:
        update_table(arguments.write, rows)
    sys.exit("something was lost" if any(row.problems for row in rows) else 0)


if __name__ == "__main__":
    main()
