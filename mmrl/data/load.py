"""From YAML to usable samples: sources are read, every medium is opened, and what is of no use is listed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from mmrl.answer import Grammar
from mmrl.config import Config
from mmrl.config.schema import Data, Limits, Origin, Rl, Sft
from mmrl.data.demonstrations import lesson
from mmrl.log.console import Console
from mmrl.media.cache import MediaStore
from mmrl.media.checks import MediaError
from mmrl.media.media_workers import Workers
from mmrl.media.opened_index import Ledger
from mmrl.media.video import ClipPlan, ClipRule
from mmrl.types import Access, ImageRef, Place, Reject, Sample, Size, Target, TooLongError, UserError, VideoRef
from mmrl.utils.plugin_args import options_of, settle
from mmrl.utils.plugins import resolve

_LISTED = 5
_BAD = "repair them, or leave them out with data.bad_sample=skip"
_NAME = "where they are different samples, give one of their sources a `name`"
_LONG = (
    "shorten them, shrink their media (model.max_pixels, model.video), raise model.max_prompt_tokens, or leave them "
    "out with data.over_long=drop"
)

Ref = TypeVar("Ref", ImageRef, VideoRef)
_Rows = list[tuple[Sample | Reject, int]]
Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a run."""

    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    test: tuple[Sample, ...]
    origin: Mapping[str, int]
    """Which source, counted from 0, a training sample is from, by id."""

    def parts(self) -> dict[str, tuple[Sample, ...]]:
        """The samples by part of the data."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def digests(self) -> dict[str, str]:
        """A hash over the samples and media of each part, wherever the media lie."""
        return {name: _digest(samples) for name, samples in self.parts().items()}


class Intake:
    """Reads and opens the samples of a run; what is of no use ends it or is left out, as `data` says."""

    def __init__(
        self, config: Config, place: Place, store: MediaStore, console: Console, ledger: Ledger | None = None
    ) -> None:
        """`ledger` tells which pictures need not be opened again."""
        self._config, self._place, self._store, self._console = config, place, store, console
        self._ledger = ledger

    def load(self) -> Samples:
        """The samples whose media open.

        Raises:
            UserError: an id that is not unique, a part without a usable sample, fewer samples than a step asks, or bad
                samples where `data.bad_sample` is `stop`.
        """
        parts: dict[str, tuple[Sample, ...]] = {}
        origin: dict[str, int] = {}
        for name, origins in sources(self._config.data).items():
            rows = [(row, k) for k, source in enumerate(origins) for row in self._first(name, source)]
            rows = self._worth(name, rows, origins)
            origin |= {row.id: k for row, k in rows if name == "train"}
            samples, rejects = divided(row for row, _ in rows)
            _check_unique(samples)
            problems = self._problems(samples)
            rejects += [Reject(sample.id, problems[sample.id]) for sample in samples if sample.id in problems]
            parts[name] = tuple(sample for sample in samples if sample.id not in problems)
            self._settle(name, parts[name], rejects, drop=self._config.data.bad_sample == "skip", remedy=_BAD)
            if origins and not parts[name]:
                raise UserError(f"data.{name}: there is not one usable sample")
        if repeated := {s.id for s in parts["train"]} & {s.id for s in (*parts["validation"], *parts["test"])}:
            raise UserError(f"data: sample {min(repeated)!r} is in the training and the held-out data; {_NAME}")
        check_enough(self._config, parts["train"])
        return Samples(**parts, origin=origin)

    def plan_videos(self, samples: Samples, rule: ClipRule) -> None:
        """Open videos in worker processes, so that `askable` finds done what it would do one by one."""
        if not (workers := self._config.data.workers):
            return
        refs = videos_of(sample for part in samples.parts().values() for sample in part)
        look = Plan(self._place.access, self._config.data.limits, rule)
        for ref, plan in look_at_all(refs, look, workers=workers, console=self._console).items():
            if not isinstance(plan, MediaError):
                self._store.remember_plan(ref, rule, plan)

    def askable(self, samples: Samples, measure: Callable[[Sample], object]) -> Samples:
        """The samples whose prompt `measure` does not refuse.

        Raises:
            UserError: as `load`; too long a prompt is judged by `data.over_long`, everything else by `data.bad_sample`.
        """
        data = self._config.data
        parts: dict[str, tuple[Sample, ...]] = {}
        for name, given in samples.parts().items():
            kept, bad, long = _measured(given, measure)
            parts[name] = tuple(kept)
            self._settle(name, kept, bad, drop=data.bad_sample == "skip", remedy=_BAD)
            self._settle(name, kept, long, drop=data.over_long == "drop", remedy=_LONG)
            if given and not kept:
                raise UserError(f"data.{name}: there is not one usable sample")
        check_enough(self._config, parts["train"])
        return Samples(**parts, origin=samples.origin)

    def _first(self, part: str, origin: Origin) -> Iterator[Sample | Reject]:
        """All rows of a source, or of a streamed one as many as are held at once."""
        stream = self._config.data.stream if part == "train" else None
        return islice(read(origin, self._place), stream.buffer if stream else None)

    def _worth(self, name: str, rows: _Rows, origins: Sequence[Origin]) -> _Rows:
        """The rows that their source's `keep` takes."""
        taken = [(row, k) for row, k in rows if worth(row, origins[k])]
        if len(taken) < len(rows):
            self._console.say(f"data.{name}: {len(rows) - len(taken):,} of {len(rows):,} rows are left out by `keep`")
        return taken

    def _problems(self, samples: Sequence[Sample]) -> dict[str, str]:
        """What is wrong with the media of samples, by id."""
        refs, workers = pictures_of(samples), self._config.data.workers
        sizes = self._ledger.known(refs) if self._ledger else {}
        fresh = [ref for ref in refs if ref not in sizes]
        look = Measure(self._place.access, self._config.data.limits) if workers else self._store.size
        seen = look_at_all(fresh, look, workers=workers, console=self._console)
        opened = {ref: size for ref, size in seen.items() if isinstance(size, Size)}
        for ref, size in {**sizes, **opened}.items():
            self._store.remember(ref, size)
        if self._ledger:
            self._ledger.note(opened)
        return {sample.id: problem for sample in samples if (problem := problem_of(sample, seen))}

    def _settle(self, name: str, kept: Sequence[Sample], rejects: Sequence[Reject], *, drop: bool, remedy: str) -> None:
        if not rejects:
            return
        listed = "\n".join(f"  {reject.id}: {reject.reason}" for reject in rejects[:_LISTED])
        more = f"\n  and {len(rejects) - _LISTED} more" if len(rejects) > _LISTED else ""
        count = f"data.{name}: {len(rejects)} of {len(rejects) + len(kept)} samples cannot be used"
        if not drop:
            raise UserError(f"{count}:\n{listed}{more}\n{remedy}")
        self._console.warn(f"{count} and are left out:\n{listed}{more}")


@dataclass(frozen=True, slots=True)
class Measure:
    """Opens a picture and says its size, in whatever process it is called."""

    access: Access
    limits: Limits

    def __call__(self, ref: ImageRef) -> Size:
        """Raises MediaError as the store does."""
        return MediaStore(self.access, self.limits, max_bytes=0).size(ref)


@dataclass(frozen=True, slots=True)
class Plan:
    """Opens a video and says what will be seen of it, in whatever process it is called."""

    access: Access
    limits: Limits
    rule: ClipRule

    def __call__(self, ref: VideoRef) -> ClipPlan:
        """Raises MediaError as the store does."""
        return MediaStore(self.access, self.limits, max_bytes=0).plan(ref, self.rule)


def sources(data: Data) -> dict[str, tuple[Origin, ...]]:
    """The origins by part of the data."""
    return {"train": data.train, "validation": data.validation, "test": data.test}


def place_of(config: Config, base: Path, work: Path) -> Place:
    """Where dataset functions work: what they make goes under `work`, relative paths start from `base`."""
    benches = (folder for bench in config.evaluation.benchmarks for folder in folders_of(bench.data, bench.media, base))
    roots = (work, *(base / root for root in config.data.roots), *benches)
    access = access_of(config.data.limits, roots, schemes=config.data.urls)
    return Place(work=work, base=base, seed=config.run.seed, access=access)


def access_of(limits: Limits, roots: Iterable[Path], *, schemes: Sequence[str]) -> Access:
    """What may be read: media in these folders, and from these kinds of URLs, as large as `limits` say."""
    return Access(
        roots=tuple(root.resolve() for root in roots),
        schemes=tuple(schemes),
        max_bytes=limits.max_bytes,
        max_video_bytes=limits.max_video_bytes,
        max_data_url_bytes=limits.max_data_url_bytes,
    )


def folders_of(paths: Iterable[str], media: str | None, base: Path) -> list[Path]:
    """Where the files of a benchmark and their media lie; relative paths start from `base`."""
    local = [base / path for path in paths if "://" not in path]
    folders = [path if path.is_dir() else path.parent for path in local]
    return [*folders, base / media] if media else folders


def read(origin: Origin, place: Place) -> Iterator[Sample | Reject]:
    """What a source yields, its name before the ids.

    Raises:
        UserError: it is not a function, not with these options, or cannot be read.
    """
    fn = resolve(origin.fn, place.base)
    if not callable(fn):
        raise UserError(f"data: {origin.fn!r} is not a function")
    rows = fn(place, **settle(f"data source {origin.fn!r}", options_of(fn, after=1), origin.args))
    if origin.name:
        rows = (_called(f"{origin.name}/{row.id}", row) for row in rows)
    yield from rows


def _called(name: str, row: Sample | Reject) -> Sample | Reject:
    return row._replace(id=name) if isinstance(row, Reject) else replace(row, id=name)


def worth(row: Sample | Reject, origin: Origin) -> bool:
    """Whether a row is taken, by the number that it carries; one that is no sample is told of elsewhere.

    Raises:
        UserError: a sample has no number there.
    """
    keep = origin.keep
    if keep is None or isinstance(row, Reject):
        return True
    value = row.meta.get(keep.column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UserError(
            f"data source {origin.fn!r}: keep: sample {row.id} has no number in column {keep.column!r} of its meta "
            f"({value!r}); there is {', '.join(map(str, row.meta)) or 'nothing'}"
        )
    return (keep.low is None or value >= keep.low) and (keep.high is None or value <= keep.high)


def divided(rows: Iterable[Sample | Reject]) -> tuple[list[Sample], list[Reject]]:
    """Samples and rejects apart, each in order."""
    samples: list[Sample] = []
    rejects: list[Reject] = []
    for row in rows:
        if isinstance(row, Reject):
            rejects.append(row)
        else:
            samples.append(row)
    return samples, rejects


def pictures_of(samples: Iterable[Sample]) -> tuple[ImageRef, ...]:
    """Every picture of the samples once, in order."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.images))


def videos_of(samples: Iterable[Sample]) -> tuple[VideoRef, ...]:
    """Every video of the samples once, in order."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.media if isinstance(ref, VideoRef)))


def look_at_all(
    refs: Sequence[Ref], look: Callable[[Ref], Seen], *, workers: int, console: Console
) -> dict[Ref, Seen | MediaError]:
    """`look` at every medium, in `workers` processes or in this one (0); what cannot be used maps to its error, and so
    does what kills the process that opens it.
    """
    attempt = partial(_attempt, look)
    if not refs:
        return {}
    if not workers:
        return dict(zip(refs, console.track("opening media", map(attempt, refs), len(refs)), strict=True))
    with closing(Workers(attempt, workers, name=attrgetter("path"))) as pool:
        coming = [pool.submit(ref) for ref in refs]
        return dict(zip(refs, console.track("opening media", map(_come, coming), len(refs)), strict=True))


def _come(future: Future[Seen | MediaError]) -> Seen | MediaError:
    try:
        return future.result()
    except UserError as error:  # it was the end of its process
        return MediaError(str(error))


def _attempt(look: Callable[[Ref], Seen], ref: Ref) -> Seen | MediaError:
    try:
        return look(ref)
    except MediaError as error:
        return error


def problem_of(sample: Sample, seen: Mapping[Any, object]) -> str | None:
    """Why a sample's media cannot be used, as far as they were looked at and if they cannot."""
    looks = (seen.get(ref) for ref in sample.media)
    return next((str(look) for look in looks if isinstance(look, MediaError)), None)


def refuse_too_few(stage: Sft | Rl, count: int) -> None:
    """A step must not draw a sample twice.

    Raises:
        UserError: the stage has not one sample, or asks more prompts a step than the `count` it has.
    """
    whose = f"stage {stage.source!r} kept {count} of its" if stage.source else f"there are {count}"
    whose += " (see its `when`)" if stage.when else ""
    if not count:
        raise UserError(f"stage {stage.name!r} has nothing to train on: {whose} samples")
    if not isinstance(stage, Rl):
        return
    asked = most_asked(stage)
    if asked > max(count, stage.repeat_to or 0):
        raise UserError(
            f"stage {stage.name!r} asks {asked} prompts a step and {whose} samples: one would get the same rollouts "
            "twice; set repeat_to, or lower prompts_per_step"
            + (" or filter.rounds" if stage.filter else "")
            + (" or over_sample" if stage.places > stage.prompts_per_step else "")
        )


def most_asked(stage: Rl) -> int:
    """Samples that a step may draw, with all rounds of its filter."""
    return stage.places * (stage.filter.rounds if stage.filter else 1)


def check_enough(config: Config, samples: Sequence[Sample]) -> None:
    """`refuse_too_few` for the stages that train on the training samples themselves."""
    for stage in config.trainings:
        if stage.source is None:
            refuse_too_few(stage, sum(map(stage.takes, samples)))


def check_lessons(config: Config, samples: Iterable[Sample], grammar: Grammar) -> None:
    """What an sft stage imitates must exist and be writable for every sample it takes, before the first step.

    Raises:
        UserError: it does not, or is not.
    """
    stages = [stage for stage in config.stages if isinstance(stage, Sft) and stage.source is None]
    for sample in samples:
        for imitate in sorted({stage.imitate for stage in stages if stage.takes(sample)}):
            taught = lesson(sample, imitate)
            try:
                if isinstance(taught, Target):
                    grammar.render(taught, sample.thought)
            except UserError as error:
                raise UserError(f"sample {sample.id}: {error}") from error


def _check_unique(samples: Iterable[Sample]) -> None:
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise UserError(f"data: two samples have the id {sample.id!r}; {_NAME}")
        seen.add(sample.id)


def _measured(
    samples: Iterable[Sample], measure: Callable[[Sample], object]
) -> tuple[list[Sample], list[Reject], list[Reject]]:
    """Samples that can be asked, those that cannot, and those whose prompt is too long."""
    kept: list[Sample] = []
    bad: list[Reject] = []
    long: list[Reject] = []
    for sample in samples:
        try:
            measure(sample)
        except TooLongError as error:
            long.append(Reject(sample.id, str(error)))
        except UserError as error:
            bad.append(Reject(sample.id, str(error)))
        else:
            kept.append(sample)
    return kept, bad, long


def _digest(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        parts = [part if isinstance(part, str) else part.sha256 for part in sample.parts]
        digest.update(repr((sample.id, parts, sample.target, sample.label, sample.thought)).encode())
    return digest.hexdigest()
