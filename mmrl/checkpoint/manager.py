"""Saves the checkpoints of a run, at once or in the background, finds them again, and removes old ones.

`mmrl/checkpoint/snapshot.py` says what a checkpoint consists of, and which line completes it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Final, NamedTuple

from mmrl.checkpoint.atomic_folder import (
    commit_partial,
    create_partial,
    discard_partial,
    find_damage,
    merge_part_hashes,
    partial_path,
    report_save_errors,
    restore_retired,
)
from mmrl.checkpoint.snapshot import (
    COMMON_FILES,
    Snapshot,
    copy_to_cpu,
    part_file_names,
    read_ranking_metric,
    write_part,
)
from mmrl.config.schema import BestCheckpointConfig, CheckpointsConfig
from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.types import UserError
from mmrl.utils.files import check_not_deleted, remove_leftovers, report_write_errors

_NAME: Final = re.compile(r"(\d+)-(\d+)")
_POLL_S: Final = 0.05  # short beside the seconds of a write, long beside a look at the file system


class StepId(NamedTuple):
    """A step of a run. Ids sort in the order in which training passes them."""

    stage: int  # index of the stage
    step: int  # finished steps of the stage

    def __str__(self) -> str:
        """Return the name of the step's checkpoint folder: `00-000100` for stage 0, step 100."""
        return f"{self.stage:02d}-{self.step:06d}"


class CheckpointManager:
    """Saves checkpoints, at most one at a time, and removes old ones once the new one is complete.

    Every rank writes its own part. When all parts are there, rank 0 turns them into a checkpoint. Its methods are
    collective, unless the run ends with an error: every rank must call them, and an error of one is raised on all.
    """

    def __init__(
        self, folder: Path, options: CheckpointsConfig, warn: Callable[[str], None], ranks: Ranks | None = None
    ) -> None:
        """Manage the checkpoints in a folder; `warn` is called for a failed write when another error ends the run."""
        self._folder = folder
        self._options = options
        self._warn = warn
        self._ranks = ranks or SingleProcess()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[Path, Future[UserError | None]] | None = None
        # Tells the background thread not to wait for the parts of other ranks: the main thread commits them itself.
        self._main_thread_commits = Event()

    def __enter__(self) -> CheckpointManager:
        """Return the manager itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a write in the background. If the block itself raised, only warn of a failed write."""
        try:
            # With several ranks and an error here, the others may never reach a collective call, so none is made.
            if kind is None or self._ranks.size == 1:
                self.wait()
        except UserError as failure:
            if kind is None:
                raise
            self._warn(str(failure))
        finally:
            self._main_thread_commits.set()
            self._pool.shutdown()

    def save(self, snapshot: Snapshot, *, before_write: Callable[[], None]) -> None:
        """Save a checkpoint, then remove the ones that need not stay.

        With `async_save`, waits for the previous checkpoint, copies the snapshot, and returns while it is written.
        `before_write` is called on the writing thread before anything is written.

        Raises:
            UserError: this checkpoint cannot be saved, or the one before could not.
        """
        # At most one copy of the run is in memory at a time.
        self.wait()
        folder = self._folder / str(StepId(snapshot.state.stage_index, snapshot.state.step))
        self._ranks.on_rank0(partial(check_not_deleted, self._folder.parent))
        self._ranks.on_rank0(partial(create_partial, folder))
        if self._options.async_save:
            self._main_thread_commits.clear()
            future = self._pool.submit(self._write_in_background, folder, copy_to_cpu(snapshot), before_write)
            self._writing = (folder, future)
        else:
            self._commit_on_rank0(folder, self._write_part(folder, snapshot, before_write))

    def commit_if_written(self) -> None:
        """Complete the checkpoint in the background if all ranks have written their parts; else return at once.

        Raises:
            UserError: it failed.
        """
        if self._writing is None:
            return
        _, future = self._writing
        outcomes = self._ranks.all_gather((future.done(), future.result() if future.done() else None))
        done, errors = zip(*outcomes, strict=True)
        # A failure anywhere ends the write on all ranks, even if others are still writing.
        if all(done) or any(errors):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            UserError: what was being written could not be saved.
        """
        if self._writing is None:
            return
        folder, future = self._writing
        self._writing = None
        self._main_thread_commits.set()
        self._commit_on_rank0(folder, future.result())

    def _write_part(self, folder: Path, snapshot: Snapshot, before_write: Callable[[], None]) -> UserError | None:
        """Write this rank's part, and return the error if it fails."""
        # Returned rather than raised: the other ranks must know of it before this one ends.
        try:
            with report_save_errors(folder):
                before_write()
                write_part(partial_path(folder), snapshot, self._ranks)
        except UserError as error:
            return error
        return None

    def _write_in_background(
        self, folder: Path, snapshot: Snapshot, before_write: Callable[[], None]
    ) -> UserError | None:
        """Write this rank's part; on rank 0 also turn all parts into a checkpoint once they are there."""
        error = self._write_part(folder, snapshot, before_write)
        if error or self._ranks.rank:
            return error
        # This thread watches the file system for the parts of other ranks, because a collective call here could meet
        # one of the training loop's.
        parts = list(map(partial_path(folder).joinpath, part_file_names(self._ranks.size)))
        while not all(map(Path.exists, parts)):
            if self._main_thread_commits.wait(_POLL_S):
                return None
        try:
            self._commit(folder)
        except UserError as failure:
            return failure
        return None

    def _commit_on_rank0(self, folder: Path, error: UserError | None) -> None:
        """Let rank 0 turn all parts into a checkpoint, or discard them and raise if a rank could not write its own."""
        errors = list(filter(None, self._ranks.all_gather(error)))
        self._ranks.on_rank0(partial(self._commit_or_discard, folder, errors))

    def _commit_or_discard(self, folder: Path, errors: Sequence[UserError]) -> None:
        if errors:
            discard_partial(folder)
            raise errors[0]
        # The background thread may have committed it already.
        if partial_path(folder).exists():
            self._commit(folder)

    def _commit(self, folder: Path) -> None:
        try:
            with report_save_errors(folder):
                merge_part_hashes(partial_path(folder), part_file_names(self._ranks.size))
                commit_partial(folder)
        except BaseException:
            discard_partial(folder)
            raise
        # Only now: until the new checkpoint is there, an old one may be needed.
        with report_write_errors(self._folder):
            prune_checkpoints(self._folder, self._options)


def find_latest(
    checkpoints: Path, warn: Callable[[str], None], ranks: Ranks | None = None, *, until: int | None = None
) -> Path | None:
    """Return the newest intact checkpoint, None if there are none at all; damaged ones are skipped with a warning.

    With `until`, the index of a stage, checkpoints of later stages are ignored. Collective: with several ranks all must
    call it. It repairs a replacement that was killed halfway, so no other process may be writing.

    Raises:
        UserError: there are checkpoints, and every one is damaged.
    """
    ranks = ranks or SingleProcess()
    ranks.on_rank0(partial(restore_retired, checkpoints))
    return _find_newest_intact(checkpoints, warn, ranks, until)


def remove_later_stages(checkpoints: Path, last_stage: int) -> None:
    """Remove the checkpoints of all stages after `last_stage`, whose index counts from 0."""
    for step_id, folder in _list_checkpoints(checkpoints).items():
        if step_id.stage > last_stage:
            with report_write_errors(folder):
                shutil.rmtree(folder)


def set_aside_later(checkpoints: Path, resumed: Path) -> Path | None:
    """Move the checkpoints after `resumed`, which are damaged, into a subfolder; return it, None if there are none.

    Pruning would count them as the newest, and delete the ones that the run saves from now on.
    """
    aside = checkpoints / "damaged"
    saved = [folder for _, folder in sorted(_list_checkpoints(checkpoints).items())]
    later = saved[saved.index(resumed) + 1 :]
    with report_write_errors(aside):
        for folder in later:
            aside.mkdir(exist_ok=True)
            # An earlier resume may have moved a checkpoint of the same step.
            shutil.rmtree(aside / folder.name, ignore_errors=True)
            folder.rename(aside / folder.name)
    return aside if later else None


def find_checkpoint(
    checkpoints: Path, name: str | None, best: BestCheckpointConfig | None, warn: Callable[[str], None]
) -> Path:
    """Return the checkpoint called `name`: for "best" the one with the best metric, for None the newest intact one.

    It only reads, so the run may be in progress. The argument `best` says which metric decides. `warn` is called for
    each damaged checkpoint that is skipped.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    saved = _list_checkpoints(checkpoints)
    if name is None:
        newest = _find_newest_intact(checkpoints, warn, SingleProcess())
        if newest is not None:
            return newest
    if name == "best":
        chosen = _find_best(saved, best)
    else:
        chosen = next((step_id for step_id, folder in saved.items() if folder.name == name), None)
    if chosen is None:
        listed = ", ".join(folder.name for _, folder in sorted(saved.items())) or "none"
        hint = "; `best` needs checkpoints.best" if name == "best" and best is None else ""
        raise UserError(f"{checkpoints}: no checkpoint {name or ''!r}; available: {listed}{hint}")
    problem = find_damage(saved[chosen], COMMON_FILES)
    if problem:
        raise UserError(f"checkpoint {saved[chosen]} is damaged ({problem}); choose another")
    return saved[chosen]


def prune_checkpoints(checkpoints: Path, options: CheckpointsConfig) -> None:
    """Remove the checkpoints that `options` does not keep, and the leftovers of an interrupted save."""
    saved = _list_checkpoints(checkpoints)
    kept = set(sorted(saved)[-options.keep_last :])
    if options.keep_every:
        # Step 0, saved between two stages, is a multiple of every number, but `keep_every` does not mean it.
        kept |= {step_id for step_id in saved if step_id.step and step_id.step % options.keep_every == 0}
    best = _find_best(saved, options.best)
    if best is not None:
        kept.add(best)
    for step_id in saved.keys() - kept:
        shutil.rmtree(saved[step_id])
    remove_leftovers(checkpoints)


def _find_newest_intact(
    checkpoints: Path, warn: Callable[[str], None], ranks: Ranks, until: int | None = None
) -> Path | None:
    damaged = []
    saved = ranks.on_rank0(partial(_list_checkpoints, checkpoints))
    for step_id, folder in sorted(saved.items(), reverse=True):
        if until is not None and step_id.stage > until:
            continue
        problem = find_damage(folder, COMMON_FILES, ranks)
        if problem is None:
            return folder
        damaged.append(f"checkpoint {folder} is damaged ({problem})")
        warn(damaged[-1])
    if damaged:
        raise UserError(
            f"{damaged[0]}, and no other is intact; restore one, or delete {checkpoints} to start the run over"
        )
    return None


def _find_best(saved: Mapping[StepId, Path], best: BestCheckpointConfig | None) -> StepId | None:
    """Return the earliest checkpoint with the best metric; None where it was never recorded."""
    if best is None:
        return None
    sign = 1.0 if best.mode == "max" else -1.0
    signed_metrics: dict[StepId, float] = {}
    for step_id, folder in sorted(saved.items()):
        metric = read_ranking_metric(folder)
        if metric is not None:
            signed_metrics[step_id] = sign * metric
    # max returns the first of equal values, which is the earliest.
    return max(signed_metrics, key=signed_metrics.__getitem__, default=None)


def _list_checkpoints(checkpoints: Path) -> dict[StepId, Path]:
    saved = {}
    # Whatever is not named like a checkpoint belongs to somebody else, and must not be pruned.
    for path in checkpoints.glob("*"):
        name = _NAME.fullmatch(path.name)
        if name and path.is_dir():
            saved[StepId(int(name[1]), int(name[2]))] = path
    return saved
