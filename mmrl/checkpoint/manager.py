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

from mmrl.checkpoint.atomic_folder import aside_of, begin, bring_back, damage, drop, finish, seal, writing
from mmrl.checkpoint.snapshot import COMMON, Snapshot, part_names, score_of, still, write_part
from mmrl.config.schema import Best, Checkpoints
from mmrl.distributed.ranks import Alone, Ranks
from mmrl.types import UserError
from mmrl.utils.files import refusing, sweep

_NAME: Final = re.compile(r"(\d+)-(\d+)")
_LOOK_S: Final = 0.05


class Place(NamedTuple):
    """How far a run had come; places sort as it passes them."""

    stage: int
    step: int

    def __str__(self) -> str:
        """The name of its checkpoint."""
        return f"{self.stage:02d}-{self.step:06d}"


class Shelf:
    """Holds checkpoints as `options` say. At most one is being written; the last good one goes only after.

    Every rank writes its part; once all have, the first makes them a checkpoint. Whatever is called here, every rank
    must call, and an error of one is raised on all.
    """

    def __init__(
        self, folder: Path, options: Checkpoints, warn: Callable[[str], None], ranks: Ranks | None = None
    ) -> None:
        self._folder, self._options, self._warn, self._ranks = folder, options, warn, ranks or Alone()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[Path, Future[UserError | None]] | None = None
        self._asked = Event()

    def __enter__(self) -> Shelf:
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
                self.settle()
        except UserError as failure:
            if kind is None:
                raise
            self._warn(str(failure))
        finally:
            self._asked.set()
            self._pool.shutdown()

    def put(self, snapshot: Snapshot, *, first: Callable[[], None]) -> None:
        """Save a checkpoint, calling `first` before, and clear away what need not stay.

        Asynchronously, this returns once the snapshot is copied; it waits for the one before.

        Raises:
            UserError: this one cannot be saved, or the one before could not.
        """
        self.settle()
        folder = self._folder / str(Place(snapshot.state.stage, snapshot.state.step))
        self._ranks.once(partial(_begin, folder))
        if self._options.asynchronous:
            self._asked.clear()
            self._writing = folder, self._pool.submit(self._write_behind, folder, still(snapshot), first)
        else:
            self._agree(folder, self._write(folder, snapshot, first))

    def check(self) -> None:
        """Look whether a write in the background has failed.

        Raises:
            UserError: it has.
        """
        if self._writing is not None:
            part = self._writing[1]
            seen = self._ranks.gather((part.done(), part.result() if part.done() else None))
            if all(done for done, _ in seen) or any(error for _, error in seen):
                self.settle()

    def settle(self) -> None:
        """Wait until nothing is being written.

        Raises:
            UserError: what was being written cannot be saved.
        """
        if self._writing is not None:
            (folder, part), self._writing = self._writing, None
            self._asked.set()
            self._agree(folder, part.result())

    def _write(self, folder: Path, snapshot: Snapshot, first: Callable[[], None]) -> UserError | None:
        """Write this rank's part; returns what went wrong."""
        try:
            with writing(folder):
                first()
                write_part(aside_of(folder), snapshot, self._ranks)
        except UserError as error:
            return error
        return None

    def _write_behind(self, folder: Path, snapshot: Snapshot, first: Callable[[], None]) -> UserError | None:
        """Also make a checkpoint of it as soon as all have written theirs, unless they are asked for it before."""
        error = self._write(folder, snapshot, first)
        if error or self._ranks.rank:
            return error
        parts = [aside_of(folder) / name for name in part_names(self._ranks.size)]
        while not all(part.exists() for part in parts):
            if self._asked.wait(_LOOK_S):
                return None
        try:
            self._finish(folder)
        except UserError as failure:
            return failure
        return None

    def _agree(self, folder: Path, error: UserError | None) -> None:
        """Make a checkpoint of what all ranks have written, unless one of them could not."""
        errors = [each for each in self._ranks.gather(error) if each]
        self._ranks.once(partial(self._conclude, folder, errors))

    def _conclude(self, folder: Path, errors: Sequence[UserError]) -> None:
        if errors:
            drop(folder)
            raise errors[0]
        if aside_of(folder).exists():
            self._finish(folder)

    def _finish(self, folder: Path) -> None:
        try:
            with writing(folder):
                seal(aside_of(folder), part_names(self._ranks.size))
                finish(folder)
        except BaseException:
            drop(folder)
            raise
        with refusing(self._folder):
            prune(self._folder, self._options)


def _begin(folder: Path) -> None:
    with writing(folder):
        begin(folder)


def latest(checkpoints: Path, warn: Callable[[str], None], ranks: Ranks | None = None) -> Path | None:
    """The newest checkpoint that is whole, if there are any; one that is not is passed over with a warning.

    Of several `ranks` all must ask.

    Raises:
        UserError: there are checkpoints, and every one is damaged.
    """
    ranks = ranks or Alone()
    ranks.once(partial(bring_back, checkpoints))
    return _newest(checkpoints, warn, ranks)


def find(checkpoints: Path, name: str | None, best: Best | None, warn: Callable[[str], None]) -> Path:
    """A checkpoint, while its run may go on: by name, the best that `best` keeps, or (None) the newest as `latest`.

    Raises:
        UserError: there is none, or it is damaged.
    """
    saved = _saved(checkpoints)
    if name is None and (newest := _newest(checkpoints, warn, Alone())):
        return newest
    chosen = _best(saved, best) if name == "best" else next((at for at in saved if saved[at].name == name), None)
    if chosen is None:
        listed = ", ".join(folder.name for _, folder in sorted(saved.items())) or "none"
        hint = "; `best` needs checkpoints.best" if name == "best" and best is None else ""
        raise UserError(f"{checkpoints}: there is no checkpoint {name or ''!r}; there is {listed}{hint}")
    if problem := damage(saved[chosen], COMMON):
        raise UserError(f"checkpoint {saved[chosen]} is damaged ({problem}); choose another")
    return saved[chosen]


def prune(checkpoints: Path, options: Checkpoints) -> None:
    """Remove the checkpoints that need not stay, and what an interrupted save left behind."""
    saved = _saved(checkpoints)
    kept = set(sorted(saved)[-options.keep :])
    kept |= {place for place in saved if options.keep_every and place.step and not place.step % options.keep_every}
    if best := _best(saved, options.best):
        kept.add(best)
    for place in saved.keys() - kept:
        shutil.rmtree(saved[place])
    sweep(checkpoints)


def _newest(checkpoints: Path, warn: Callable[[str], None], ranks: Ranks) -> Path | None:
    damaged = []
    for _, folder in sorted(ranks.once(partial(_saved, checkpoints)).items(), reverse=True):
        problem = damage(folder, COMMON, ranks)
        if problem is None:
            return folder
        damaged.append(f"checkpoint {folder} is damaged ({problem})")
        warn(damaged[-1])
    if damaged:
        raise UserError(
            f"{damaged[0]}, and no other is whole; restore one, or delete {checkpoints} to begin the run anew"
        )
    return None


def _best(saved: Mapping[Place, Path], best: Best | None) -> Place | None:
    """Where the metric was best, for the first time; None where it was never recorded."""
    if best is None:
        return None
    sign = 1.0 if best.mode == "max" else -1.0
    scores = {place: score for place, folder in sorted(saved.items()) if (score := score_of(folder)) is not None}
    return max(scores, key=lambda place: sign * scores[place], default=None)


def _saved(checkpoints: Path) -> dict[Place, Path]:
    """What looks like a checkpoint; anything else in the folder is somebody else's."""
    named = ((path, _NAME.fullmatch(path.name)) for path in checkpoints.glob("*") if path.is_dir())
    return {Place(int(name[1]), int(name[2])): path for path, name in named if name}
