"""The checkpoints of a run: written here or in the background, found again, and cleared away by policy."""

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
from mmrl.checkpoint.snapshot import COMMON_FILES, Snapshot, copy_to_cpu, part_file_names, read_best_metric, write_part
from mmrl.config.schema import BestCheckpointConfig, CheckpointsConfig
from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.types import UserError
from mmrl.utils.files import remove_leftovers, report_write_errors

_NAME: Final = re.compile(r"(\d+)-(\d+)")
_POLL_S: Final = 0.05


class StepId(NamedTuple):
    """How far a run had come; places sort as it passes them."""

    stage: int
    step: int

    def __str__(self) -> str:
        """The name of its checkpoint."""
        return f"{self.stage:02d}-{self.step:06d}"


class CheckpointManager:
    """Holds checkpoints as `options` say. At most one is being written; the last good one goes only after.

    Every rank writes its part; once all have, the first makes them a checkpoint. Whatever is called here, every rank
    must call, and an error of one is raised on all.
    """

    def __init__(
        self, folder: Path, options: CheckpointsConfig, warn: Callable[[str], None], ranks: Ranks | None = None
    ) -> None:
        self._folder, self._options, self._warn, self._ranks = folder, options, warn, ranks or SingleProcess()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[Path, Future[UserError | None]] | None = None
        self._settle_requested = Event()

    def __enter__(self) -> CheckpointManager:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being written. Where something else went wrong already, a failure is told, not raised.

        Of several ranks the others may not come then: what they were writing together is given up.
        """
        try:
            if kind is None or self._ranks.size == 1:
                self.wait()
        except UserError as failure:
            if kind is None:
                raise
            self._warn(str(failure))
        finally:
            self._settle_requested.set()
            self._pool.shutdown()

    def save(self, snapshot: Snapshot, *, before_write: Callable[[], None]) -> None:
        """Save a checkpoint, calling `first` before, and clear away what need not stay.

        Asynchronously, this returns once the snapshot is copied; it waits for the one before.

        Raises:
            UserError: this one cannot be saved, or the one before could not.
        """
        self.wait()
        folder = self._folder / str(StepId(snapshot.state.stage_index, snapshot.state.step))
        self._ranks.on_rank0(partial(_create_partial, folder))
        if self._options.async_save:
            self._settle_requested.clear()
            self._writing = (
                folder,
                self._pool.submit(self._write_in_background, folder, copy_to_cpu(snapshot), before_write),
            )
        else:
            self._commit_on_all_ranks(folder, self._write_part(folder, snapshot, before_write))

    def raise_if_failed(self) -> None:
        """Look whether a write in the background has failed.

        Raises:
            UserError: it has.
        """
        if self._writing is not None:
            part = self._writing[1]
            seen = self._ranks.all_gather((part.done(), part.result() if part.done() else None))
            if all(done for done, _ in seen) or any(error for _, error in seen):
                self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            UserError: what was being written cannot be saved.
        """
        if self._writing is not None:
            (folder, part), self._writing = self._writing, None
            self._settle_requested.set()
            self._commit_on_all_ranks(folder, part.result())

    def _write_part(self, folder: Path, snapshot: Snapshot, before_write: Callable[[], None]) -> UserError | None:
        """Write this rank's part; returns what went wrong."""
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
        """Also make a checkpoint of it as soon as all have written theirs, unless they are asked for it before."""
        error = self._write_part(folder, snapshot, before_write)
        if error or self._ranks.rank:
            return error
        parts = [partial_path(folder) / name for name in part_file_names(self._ranks.size)]
        while not all(part.exists() for part in parts):
            if self._settle_requested.wait(_POLL_S):
                return None
        try:
            self._commit(folder)
        except UserError as failure:
            return failure
        return None

    def _commit_on_all_ranks(self, folder: Path, error: UserError | None) -> None:
        """Make a checkpoint of what all ranks have written, unless one of them could not."""
        errors = [each for each in self._ranks.all_gather(error) if each]
        self._ranks.on_rank0(partial(self._commit_or_discard, folder, errors))

    def _commit_or_discard(self, folder: Path, errors: Sequence[UserError]) -> None:
        if errors:
            discard_partial(folder)
            raise errors[0]
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
        with report_write_errors(self._folder):
            prune_checkpoints(self._folder, self._options)


def _create_partial(folder: Path) -> None:
    with report_save_errors(folder):
        create_partial(folder)


def find_latest(checkpoints: Path, warn: Callable[[str], None], ranks: Ranks | None = None) -> Path | None:
    """The newest checkpoint that is whole, if there are any; one that is not is passed over with a warning.

    Of several `ranks` all must ask.

    Raises:
        UserError: there are checkpoints, and every one is damaged.
    """
    ranks = ranks or SingleProcess()
    ranks.on_rank0(partial(restore_retired, checkpoints))
    return _find_newest_intact(checkpoints, warn, ranks)


def find_checkpoint(
    checkpoints: Path, name: str | None, best: BestCheckpointConfig | None, warn: Callable[[str], None]
) -> Path:
    """A checkpoint, while its run may go on: by name, the best that `best` keeps, or (None) the newest as `latest`.

    Raises:
        UserError: there is none, or it is damaged.
    """
    saved = _list_checkpoints(checkpoints)
    if name is None and (newest := _find_newest_intact(checkpoints, warn, SingleProcess())):
        return newest
    chosen = _find_best(saved, best) if name == "best" else next((at for at in saved if saved[at].name == name), None)
    if chosen is None:
        listed = ", ".join(folder.name for _, folder in sorted(saved.items())) or "none"
        hint = "; `best` needs checkpoints.best" if name == "best" and best is None else ""
        raise UserError(f"{checkpoints}: there is no checkpoint {name or ''!r}; there is {listed}{hint}")
    if problem := find_damage(saved[chosen], COMMON_FILES):
        raise UserError(f"checkpoint {saved[chosen]} is damaged ({problem}); choose another")
    return saved[chosen]


def prune_checkpoints(checkpoints: Path, options: CheckpointsConfig) -> None:
    """Remove the checkpoints that need not stay, and what an interrupted save left behind."""
    saved = _list_checkpoints(checkpoints)
    kept = set(sorted(saved)[-options.keep_last :])
    kept |= {place for place in saved if options.keep_every and place.step and not place.step % options.keep_every}
    if best := _find_best(saved, options.best):
        kept.add(best)
    for place in saved.keys() - kept:
        shutil.rmtree(saved[place])
    remove_leftovers(checkpoints)


def _find_newest_intact(checkpoints: Path, warn: Callable[[str], None], ranks: Ranks) -> Path | None:
    damaged = []
    for _, folder in sorted(ranks.on_rank0(partial(_list_checkpoints, checkpoints)).items(), reverse=True):
        problem = find_damage(folder, COMMON_FILES, ranks)
        if problem is None:
            return folder
        damaged.append(f"checkpoint {folder} is damaged ({problem})")
        warn(damaged[-1])
    if damaged:
        raise UserError(
            f"{damaged[0]}, and no other is whole; restore one, or delete {checkpoints} to begin the run anew"
        )
    return None


def _find_best(saved: Mapping[StepId, Path], best: BestCheckpointConfig | None) -> StepId | None:
    """Where the metric was best, for the first time; None where it was never recorded."""
    if best is None:
        return None
    sign = 1.0 if best.mode == "max" else -1.0
    scores = {
        place: score for place, folder in sorted(saved.items()) if (score := read_best_metric(folder)) is not None
    }
    return max(scores, key=lambda place: sign * scores[place], default=None)


def _list_checkpoints(checkpoints: Path) -> dict[StepId, Path]:
    """What looks like a checkpoint; anything else in the folder is somebody else's."""
    named = ((path, _NAME.fullmatch(path.name)) for path in checkpoints.glob("*") if path.is_dir())
    return {StepId(int(name[1]), int(name[2])): path for path, name in named if name}
