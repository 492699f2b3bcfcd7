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

from mmrl.answer import ResponseFormat
from mmrl.config import Config
from mmrl.config.schema import DataConfig, DataSourceConfig, MediaLimitsConfig, RlStage, SftStage
from mmrl.data.demonstrations import demonstration_text
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.checks import MediaError
from mmrl.media.media_workers import Workers
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.types import (
    DatasetContext,
    ImageRef,
    MediaPolicy,
    PromptTooLongError,
    RejectedRow,
    Sample,
    Size,
    Target,
    UserError,
    VideoRef,
)
from mmrl.utils.plugins import load_plugin

_MAX_LISTED = 5
_BAD_SAMPLE_REMEDY = "repair them, or leave them out with data.bad_sample=skip"
_DUPLICATE_ID_REMEDY = "where they are different samples, give one of their sources a `name`"
_TOO_LONG_REMEDY = (
    "shorten them, shrink their media (model.max_pixels, model.video), raise model.max_prompt_tokens, or leave them "
    "out with data.over_long=drop"
)

MediaRefT = TypeVar("MediaRefT", ImageRef, VideoRef)
_SourceRows = list[tuple[Sample | RejectedRow, int]]
OpenedT = TypeVar("OpenedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplits:
    """The samples of a run."""

    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    test: tuple[Sample, ...]
    source_indices: Mapping[str, int]
    """Which source, counted from 0, a training sample is from, by id."""

    def by_split(self) -> dict[str, tuple[Sample, ...]]:
        """The samples by part of the data."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def digests(self) -> dict[str, str]:
        """A hash over the samples and media of each part, wherever the media lie."""
        return {name: _digest_samples(samples) for name, samples in self.by_split().items()}


class DatasetLoader:
    """Reads and opens the samples of a run; what is of no use ends it or is left out, as `data` says."""

    def __init__(
        self,
        config: Config,
        context: DatasetContext,
        media_cache: MediaCache,
        console: Console,
        opened_index: OpenedMediaIndex | None = None,
    ) -> None:
        """`ledger` tells which pictures need not be opened again."""
        self._config, self._context, self._media_cache, self._console = config, context, media_cache, console
        self._opened_index = opened_index

    def load(self) -> DataSplits:
        """The samples whose media open.

        Raises:
            UserError: an id that is not unique, a part without a usable sample, fewer samples than a step asks, or bad
                samples where `data.bad_sample` is `stop`.
        """
        parts: dict[str, tuple[Sample, ...]] = {}
        origin: dict[str, int] = {}
        for name, origins in sources_by_split(self._config.data).items():
            rows = [(row, k) for k, source in enumerate(origins) for row in self._read_source(name, source)]
            rows = self._filter_rows(name, rows, origins)
            origin |= {row.id: k for row, k in rows if name == "train"}
            samples, rejects = separate_rejected(row for row, _ in rows)
            _check_unique_ids(samples)
            problems = self._find_media_problems(samples)
            rejects += [RejectedRow(sample.id, problems[sample.id]) for sample in samples if sample.id in problems]
            parts[name] = tuple(sample for sample in samples if sample.id not in problems)
            self._handle_rejected(
                name, parts[name], rejects, drop=self._config.data.on_bad_sample == "skip", remedy=_BAD_SAMPLE_REMEDY
            )
            if origins and not parts[name]:
                raise UserError(f"data.{name}: there is not one usable sample")
        if repeated := {s.id for s in parts["train"]} & {s.id for s in (*parts["validation"], *parts["test"])}:
            raise UserError(
                f"data: sample {min(repeated)!r} is in the training and the held-out data; {_DUPLICATE_ID_REMEDY}"
            )
        check_stages_have_samples(self._config, parts["train"])
        return DataSplits(**parts, source_indices=origin)

    def plan_videos(self, samples: DataSplits, sampling: FrameSampling) -> None:
        """Open videos in worker processes, so that `askable` finds done what it would do one by one."""
        if not (workers := self._config.data.media_workers):
            return
        refs = unique_videos(sample for part in samples.by_split().values() for sample in part)
        look = FramePlanner(self._context.media_policy, self._config.data.media_limits, sampling)
        for ref, plan in open_all_media(refs, look, workers=workers, console=self._console).items():
            if not isinstance(plan, MediaError):
                self._media_cache.set_frame_plan(ref, sampling, plan)

    def filter_by_prompt(self, samples: DataSplits, measure_prompt: Callable[[Sample], object]) -> DataSplits:
        """The samples whose prompt `measure` does not refuse.

        Raises:
            UserError: as `load`; too long a prompt is judged by `data.over_long`, everything else by `data.bad_sample`.
        """
        data = self._config.data
        parts: dict[str, tuple[Sample, ...]] = {}
        for name, given in samples.by_split().items():
            kept, bad, long = _measure_prompts(given, measure_prompt)
            parts[name] = tuple(kept)
            self._handle_rejected(name, kept, bad, drop=data.on_bad_sample == "skip", remedy=_BAD_SAMPLE_REMEDY)
            self._handle_rejected(name, kept, long, drop=data.on_too_long == "skip", remedy=_TOO_LONG_REMEDY)
            if given and not kept:
                raise UserError(f"data.{name}: there is not one usable sample")
        check_stages_have_samples(self._config, parts["train"])
        return DataSplits(**parts, source_indices=samples.source_indices)

    def _read_source(self, part: str, origin: DataSourceConfig) -> Iterator[Sample | RejectedRow]:
        """All rows of a source, or of a streamed one as many as are held at once."""
        stream = self._config.data.streaming if part == "train" else None
        return islice(read_source(origin, self._context), stream.shuffle_buffer_size if stream else None)

    def _filter_rows(self, name: str, rows: _SourceRows, origins: Sequence[DataSourceConfig]) -> _SourceRows:
        """The rows that their source's `keep` takes."""
        taken = [(row, k) for row, k in rows if passes_row_filter(row, origins[k])]
        if len(taken) < len(rows):
            self._console.info(f"data.{name}: {len(rows) - len(taken):,} of {len(rows):,} rows are left out by `keep`")
        return taken

    def _find_media_problems(self, samples: Sequence[Sample]) -> dict[str, str]:
        """What is wrong with the media of samples, by id."""
        refs, workers = unique_images(samples), self._config.data.media_workers
        sizes = self._opened_index.known_sizes(refs) if self._opened_index else {}
        fresh = [ref for ref in refs if ref not in sizes]
        look = (
            ImageMeasurer(self._context.media_policy, self._config.data.media_limits)
            if workers
            else self._media_cache.image_size
        )
        seen = open_all_media(fresh, look, workers=workers, console=self._console)
        opened = {ref: size for ref, size in seen.items() if isinstance(size, Size)}
        for ref, size in {**sizes, **opened}.items():
            self._media_cache.set_image_size(ref, size)
        if self._opened_index:
            self._opened_index.add(opened)
        return {sample.id: problem for sample in samples if (problem := find_media_problem(sample, seen))}

    def _handle_rejected(
        self, name: str, kept: Sequence[Sample], rejects: Sequence[RejectedRow], *, drop: bool, remedy: str
    ) -> None:
        if not rejects:
            return
        listed = "\n".join(f"  {reject.id}: {reject.reason}" for reject in rejects[:_MAX_LISTED])
        more = f"\n  and {len(rejects) - _MAX_LISTED} more" if len(rejects) > _MAX_LISTED else ""
        count = f"data.{name}: {len(rejects)} of {len(rejects) + len(kept)} samples cannot be used"
        if not drop:
            raise UserError(f"{count}:\n{listed}{more}\n{remedy}")
        self._console.warn(f"{count} and are left out:\n{listed}{more}")


@dataclass(frozen=True, slots=True)
class ImageMeasurer:
    """Opens a picture and says its size, in whatever process it is called."""

    media_policy: MediaPolicy
    limits: MediaLimitsConfig

    def __call__(self, ref: ImageRef) -> Size:
        """Raises MediaError as the store does."""
        return MediaCache(self.media_policy, self.limits, max_bytes=0).image_size(ref)


@dataclass(frozen=True, slots=True)
class FramePlanner:
    """Opens a video and says what will be seen of it, in whatever process it is called."""

    media_policy: MediaPolicy
    limits: MediaLimitsConfig
    sampling: FrameSampling

    def __call__(self, ref: VideoRef) -> FramePlan:
        """Raises MediaError as the store does."""
        return MediaCache(self.media_policy, self.limits, max_bytes=0).get_frame_plan(ref, self.sampling)


def sources_by_split(data: DataConfig) -> dict[str, tuple[DataSourceConfig, ...]]:
    """The origins by part of the data."""
    return {"train": data.train, "validation": data.validation, "test": data.test}


def make_dataset_context(config: Config, base: Path, work: Path) -> DatasetContext:
    """Where dataset functions work: what they make goes under `work`, relative paths start from `base`."""
    benches = (
        folder
        for bench in config.evaluation.benchmarks
        for folder in benchmark_folders(bench.data, bench.media_root, base)
    )
    roots = (work, *(base / root for root in config.data.media_roots), *benches)
    access = make_media_policy(config.data.media_limits, roots, schemes=config.data.allowed_url_schemes)
    return DatasetContext(work_dir=work, base_dir=base, seed=config.run.seed, media_policy=access)


def make_media_policy(limits: MediaLimitsConfig, roots: Iterable[Path], *, schemes: Sequence[str]) -> MediaPolicy:
    """What may be read: media in these folders, and from these kinds of URLs, as large as `limits` say."""
    return MediaPolicy(
        roots=tuple(root.resolve() for root in roots),
        schemes=tuple(schemes),
        max_bytes=limits.max_image_bytes,
        max_video_bytes=limits.max_video_bytes,
        max_data_url_bytes=limits.max_data_url_bytes,
    )


def benchmark_folders(paths: Iterable[str], media: str | None, base: Path) -> list[Path]:
    """Where the files of a benchmark and their media lie; relative paths start from `base`."""
    local = [base / path for path in paths if "://" not in path]
    folders = [path if path.is_dir() else path.parent for path in local]
    return [*folders, base / media] if media else folders


def read_source(origin: DataSourceConfig, context: DatasetContext) -> Iterator[Sample | RejectedRow]:
    """What a source yields, its name before the ids.

    Raises:
        UserError: it is not a function, not with these options, or cannot be read.
    """
    read_rows = load_plugin(origin.fn, context.base_dir, origin.args, role="data source", parameters=("context",))
    rows = read_rows(context)
    if origin.name:
        rows = (_with_id(f"{origin.name}/{row.id}", row) for row in rows)
    yield from rows


def _with_id(name: str, row: Sample | RejectedRow) -> Sample | RejectedRow:
    return row._replace(id=name) if isinstance(row, RejectedRow) else replace(row, id=name)


def passes_row_filter(row: Sample | RejectedRow, origin: DataSourceConfig) -> bool:
    """Whether a row is taken, by the number that it carries; one that is no sample is told of elsewhere.

    Raises:
        UserError: a sample has no number there.
    """
    keep = origin.row_filter
    if keep is None or isinstance(row, RejectedRow):
        return True
    value = row.meta.get(keep.column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UserError(
            f"data source {origin.fn!r}: keep: sample {row.id} has no number in column {keep.column!r} of its meta "
            f"({value!r}); there is {', '.join(map(str, row.meta)) or 'nothing'}"
        )
    return (keep.low is None or value >= keep.low) and (keep.high is None or value <= keep.high)


def separate_rejected(rows: Iterable[Sample | RejectedRow]) -> tuple[list[Sample], list[RejectedRow]]:
    """Samples and rejects apart, each in order."""
    samples: list[Sample] = []
    rejects: list[RejectedRow] = []
    for row in rows:
        if isinstance(row, RejectedRow):
            rejects.append(row)
        else:
            samples.append(row)
    return samples, rejects


def unique_images(samples: Iterable[Sample]) -> tuple[ImageRef, ...]:
    """Every picture of the samples once, in order."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.images))


def unique_videos(samples: Iterable[Sample]) -> tuple[VideoRef, ...]:
    """Every video of the samples once, in order."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.media if isinstance(ref, VideoRef)))


def open_all_media(
    refs: Sequence[MediaRefT], open_one: Callable[[MediaRefT], OpenedT], *, workers: int, console: Console
) -> dict[MediaRefT, OpenedT | MediaError]:
    """`look` at every medium, in `workers` processes or in this one (0); what cannot be used maps to its error, and so
    does what kills the process that opens it.
    """
    attempt = partial(_open_or_error, open_one)
    if not refs:
        return {}
    if not workers:
        return dict(zip(refs, console.track("opening media", map(attempt, refs), len(refs)), strict=True))
    with closing(Workers(attempt, workers, name=attrgetter("path"))) as pool:
        coming = [pool.submit(ref) for ref in refs]
        return dict(zip(refs, console.track("opening media", map(_wait_for_media, coming), len(refs)), strict=True))


def _wait_for_media(future: Future[OpenedT | MediaError]) -> OpenedT | MediaError:
    try:
        return future.result()
    except UserError as error:  # it was the end of its process
        return MediaError(str(error))


def _open_or_error(open_one: Callable[[MediaRefT], OpenedT], ref: MediaRefT) -> OpenedT | MediaError:
    try:
        return open_one(ref)
    except MediaError as error:
        return error


def find_media_problem(sample: Sample, opened: Mapping[Any, object]) -> str | None:
    """Why a sample's media cannot be used, as far as they were looked at and if they cannot."""
    looks = (opened.get(ref) for ref in sample.media)
    return next((str(look) for look in looks if isinstance(look, MediaError)), None)


def check_stage_has_samples(stage: SftStage | RlStage, count: int) -> None:
    """A step must not draw a sample twice.

    Raises:
        UserError: the stage has not one sample, or asks more prompts a step than the `count` it has.
    """
    whose = f"stage {stage.from_stage!r} kept {count} of its" if stage.from_stage else f"there are {count}"
    whose += " (see its `when`)" if stage.when else ""
    if not count:
        raise UserError(f"stage {stage.name!r} has nothing to train on: {whose} samples")
    if not isinstance(stage, RlStage):
        return
    asked = max_prompts_per_step(stage)
    if asked > max(count, stage.repeat_samples_to or 0):
        raise UserError(
            f"stage {stage.name!r} asks {asked} prompts a step and {whose} samples: one would get the same rollouts "
            "twice; set repeat_to, or lower prompts_per_step"
            + (" or filter.rounds" if stage.dynamic_sampling else "")
            + (" or over_sample" if stage.max_prompts_in_flight > stage.prompts_per_step else "")
        )


def max_prompts_per_step(stage: RlStage) -> int:
    """Samples that a step may draw, with all rounds of its filter."""
    return stage.max_prompts_in_flight * (stage.dynamic_sampling.max_rounds if stage.dynamic_sampling else 1)


def check_stages_have_samples(config: Config, samples: Sequence[Sample]) -> None:
    """`refuse_too_few` for the stages that train on the training samples themselves."""
    for stage in config.training_stages:
        if stage.from_stage is None:
            check_stage_has_samples(stage, sum(map(stage.accepts, samples)))


def check_demonstrations(config: Config, samples: Iterable[Sample], grammar: ResponseFormat) -> None:
    """What an sft stage imitates must exist and be writable for every sample it takes, before the first step.

    Raises:
        UserError: it does not, or is not.
    """
    stages = [stage for stage in config.stages if isinstance(stage, SftStage) and stage.from_stage is None]
    for sample in samples:
        for imitate in sorted({stage.target_field for stage in stages if stage.accepts(sample)}):
            taught = demonstration_text(sample, imitate)
            try:
                if isinstance(taught, Target):
                    grammar.render(taught, sample.thinking)
            except UserError as error:
                raise UserError(f"sample {sample.id}: {error}") from error


def _check_unique_ids(samples: Iterable[Sample]) -> None:
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise UserError(f"data: two samples have the id {sample.id!r}; {_DUPLICATE_ID_REMEDY}")
        seen.add(sample.id)


def _measure_prompts(
    samples: Iterable[Sample], measure_prompt: Callable[[Sample], object]
) -> tuple[list[Sample], list[RejectedRow], list[RejectedRow]]:
    """Samples that can be asked, those that cannot, and those whose prompt is too long."""
    kept: list[Sample] = []
    bad: list[RejectedRow] = []
    long: list[RejectedRow] = []
    for sample in samples:
        try:
            measure_prompt(sample)
        except PromptTooLongError as error:
            long.append(RejectedRow(sample.id, str(error)))
        except UserError as error:
            bad.append(RejectedRow(sample.id, str(error)))
        else:
            kept.append(sample)
    return kept, bad, long


def _digest_samples(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        parts = [part if isinstance(part, str) else part.sha256 for part in sample.parts]
        digest.update(repr((sample.id, parts, sample.target, sample.label, sample.thinking)).encode())
    return digest.hexdigest()
