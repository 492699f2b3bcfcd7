"""Loading of samples: dataset functions are called, every image and video is opened, and unusable rows are reported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import isfinite
from operator import attrgetter
from time import monotonic
from typing import Any, TypeVar

from mmrl.config import Config
from mmrl.config.schema import DataConfig, DataSourceConfig, RlStage, SftStage, matches_conditions
from mmrl.data.context import load_dataset_function
from mmrl.data.data_record import DataRecord, LoadedSplit
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.checks import MediaError
from mmrl.media.media_workers import start_media_workers
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.types import DatasetContext, ImageRef, PromptTooLongError, RejectedRow, Sample, Size, UserError, VideoRef
from mmrl.utils.messages import first_lines
from mmrl.utils.plugins import errors_about_call

MediaRefT = TypeVar("MediaRefT", ImageRef, VideoRef)
OpenedT = TypeVar("OpenedT")

_MAX_LISTED = 5
_REPORT_VIDEOS_S = 60.0
_BAD_SAMPLE_REMEDY = "repair them, or leave them out with data.on_bad_sample=skip"
_DUPLICATE_ID_REMEDY = "where they are different samples, give one of their sources a `name`"
_TOO_LONG_REMEDY = (
    "shorten them, shrink their media (model.max_pixels, model.video), raise model.max_prompt_tokens, or leave them "
    "out with data.on_too_long=skip"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplits:
    """Samples of a run, by split.

    Example: `DataSplits(train=(a, b), validation=(), test=(c,), source_indices={"a": 0, "b": 1})`
    """

    train: tuple[Sample, ...]  # samples to train on
    validation: tuple[Sample, ...]  # samples that a stage's `validation` measures
    test: tuple[Sample, ...]  # samples that are measured before and after training
    source_indices: Mapping[str, int]  # id of a training sample → index of its source in `data.train`

    def by_split(self) -> dict[str, tuple[Sample, ...]]:
        """Return the samples by the name of their split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def content_hashes(self) -> dict[str, str]:
        """Return a sha256 over samples and media of each split, which does not depend on where the media lie."""
        hashes = {}
        for name, samples in self.by_split().items():
            sha256 = hashlib.sha256()
            for sample in samples:
                parts = [part if isinstance(part, str) else part.sha256 for part in sample.parts]
                sha256.update(repr((sample.id, parts, sample.target, sample.label, sample.thinking)).encode())
            hashes[name] = sha256.hexdigest()
        return hashes


class DatasetLoader:
    """Reads the samples of a run and opens their media. Unusable rows end the run or are left out, as `data` says."""

    def __init__(
        self,
        config: Config,
        context: DatasetContext,
        media_cache: MediaCache,
        console: Console,
        *,
        opened_index: OpenedMediaIndex | None = None,
        record: DataRecord | None = None,
    ) -> None:
        """Create a loader that calls dataset functions with `context`.

        It puts the size of every image and the frame plan of every video into `media_cache`. Images and videos in
        `opened_index`, which an earlier start of the run has opened, are not opened again. `record` has the data that
        the run began with.
        """
        self._config, self._context, self._media_cache, self._console = config, context, media_cache, console
        self._opened_index, self._record = opened_index, record
        # The error of each video that cannot be used, or its frame plan; filled by `open_videos`.
        self._opened_videos: dict[VideoRef, FramePlan | MediaError] = {}

    def load(self) -> DataSplits:
        """Return all samples whose images can be opened.

        Raises:
            UserError: two samples share an id, a split has no usable sample, a stage has too few, there are unusable
                samples and `data.on_bad_sample` is `stop`, or a resumed run finds other data than it began with.
        """
        splits: dict[str, tuple[Sample, ...]] = {}
        loaded: dict[str, LoadedSplit] = {}
        opened_sizes: dict[ImageRef, Size] = {}
        source_indices: dict[str, int] = {}
        # A wrong option of the last source should not wait until all others are read.
        for sources in sources_by_split(self._config.data).values():
            for source in sources:
                load_dataset_function(source, self._context.base_dir)
        for split, sources in sources_by_split(self._config.data).items():
            rows, row_sources = self._read_split(split, sources)
            if split == "train":
                source_indices = row_sources
            samples, rejected = separate_rejected(rows)
            seen: set[str] = set()
            for sample in samples:
                if sample.id in seen:
                    raise UserError(f"data: two samples have the id {sample.id!r}; {_DUPLICATE_ID_REMEDY}")
                seen.add(sample.id)
            usable, damaged = self._open_images(samples, opened_sizes)
            rejected += damaged
            skip = self._config.data.on_bad_sample == "skip"
            self._report_rejected(split, usable, rejected, skip=skip, remedy=_BAD_SAMPLE_REMEDY)
            if sources and not usable:
                raise UserError(f"data.{split}: there is not one usable sample")
            splits[split] = tuple(usable)
            loaded[split] = LoadedSplit(samples=usable, sources=row_sources, rejected=dict(rejected))
        # A sample that is trained on would make its evaluation look better than it is.
        held_out = {sample.id for sample in (*splits["validation"], *splits["test"])}
        repeated = held_out & {sample.id for sample in splits["train"]}
        if repeated:
            raise UserError(
                f"data: sample {min(repeated)!r} is in the training and the held-out data; {_DUPLICATE_ID_REMEDY}"
            )
        check_stages_have_samples(self._config, splits["train"])
        if self._record:
            self._record.check(loaded)
        # Not before: a run that is refused for its data must stay as it was.
        if self._opened_index:
            self._opened_index.add(opened_sizes)
        return DataSplits(**splits, source_indices=source_indices)

    def open_videos(self, samples: DataSplits, sampling: FrameSampling) -> Iterator[int]:
        """Decode every frame of all videos that the model will see; `filter_by_prompt` leaves out those with damage.

        A video that an earlier start of the run has decoded in the same way is opened, but not decoded again. Yields
        the number of videos that are done, about every minute: decoding may take longer than ranks wait for another.
        """
        refs = unique_videos(sample for split in samples.by_split().values() for sample in split)
        reading = f"{sampling} by {self._config.media.video_reader}"
        known = self._opened_index.known_videos(refs, reading) if self._opened_index else set()
        open_video = partial(_open_video, self._worker_cache(), sampling, known)
        new_sizes = {}
        reported_at = monotonic()
        for ref, plan in open_media(refs, open_video, options=self._config.data, console=self._console):
            self._opened_videos[ref] = plan
            if isinstance(plan, FramePlan):
                self._media_cache.set_frame_plan(ref, sampling, plan)
                if ref not in known:
                    new_sizes[ref] = plan.original_size
            if monotonic() - reported_at > _REPORT_VIDEOS_S:
                if self._opened_index:
                    self._opened_index.add_videos(new_sizes, reading)
                    new_sizes.clear()
                yield len(self._opened_videos)
                reported_at = monotonic()
        if self._opened_index:
            self._opened_index.add_videos(new_sizes, reading)

    def filter_by_prompt(self, samples: DataSplits, measure_prompt: Callable[[Sample], object]) -> DataSplits:
        """Return the samples of `load` whose videos could be opened and whose prompts can be built.

        `measure_prompt` raises PromptTooLongError for a prompt that is too long, and UserError for one that cannot be
        built at all.

        Raises:
            UserError: a prompt is too long and `data.on_too_long` is `stop`, one cannot be built and
                `data.on_bad_sample` is `stop`, or too few samples are left.
        """
        data = self._config.data
        splits: dict[str, tuple[Sample, ...]] = {}
        for split, given in samples.by_split().items():
            kept: list[Sample] = []
            bad: list[RejectedRow] = []
            too_long: list[RejectedRow] = []
            for sample in self._console.track(f"measuring {split} prompts", given, len(given)):
                problem = find_media_problem(sample, self._opened_videos)
                if problem is not None:
                    bad.append(RejectedRow(sample.id, problem))
                    continue
                try:
                    measure_prompt(sample)
                except PromptTooLongError as error:
                    too_long.append(RejectedRow(sample.id, str(error)))
                except UserError as error:
                    bad.append(RejectedRow(sample.id, str(error)))
                else:
                    kept.append(sample)
            self._report_rejected(split, kept, bad, skip=data.on_bad_sample == "skip", remedy=_BAD_SAMPLE_REMEDY)
            self._report_rejected(split, kept, too_long, skip=data.on_too_long == "skip", remedy=_TOO_LONG_REMEDY)
            if given and not kept:
                raise UserError(f"data.{split}: there is not one usable sample")
            splits[split] = tuple(kept)
        # Again, because a stage that had enough samples before may have too few now.
        check_stages_have_samples(self._config, splits["train"])
        return DataSplits(**splits, source_indices=samples.source_indices)

    def _read_split(
        self, split: str, sources: Sequence[DataSourceConfig]
    ) -> tuple[list[Sample | RejectedRow], dict[str, int]]:
        """Return the rows of a split's sources that pass their row filters, and each row's source by row id."""
        streaming = self._config.data.streaming if split == "train" else None
        # Of a streamed source only as many rows are checked now as training will hold at once.
        limit = streaming.shuffle_buffer_size if streaming else None
        kept: list[Sample | RejectedRow] = []
        source_indices: dict[str, int] = {}
        count = 0
        rows = (
            (source_index, row)
            for source_index, source in enumerate(sources)
            for row in islice(read_source(source, self._context), limit)
        )
        for source_index, row in self._console.track(f"reading {split} samples", rows):
            count += 1
            if passes_row_filter(row, sources[source_index]):
                kept.append(row)
                source_indices[row.id] = source_index
        if len(kept) < count:
            self._console.info(f"data.{split}: {count - len(kept):,} of {count:,} rows are left out by `row_filter`")
        return kept, source_indices

    def _open_images(
        self, samples: Sequence[Sample], opened_sizes: dict[ImageRef, Size]
    ) -> tuple[list[Sample], list[RejectedRow]]:
        """Open the images of all samples; return the samples that can be used, and the others with the reason.

        The sizes of images that were not known before are added to `opened_sizes`.
        """
        options = self._config.data
        refs = unique_images(samples)
        # A resumed run knows the sizes of images that it has opened before and that have not been touched since.
        known_sizes = self._opened_index.known_sizes(refs) if self._opened_index else {}
        new_refs = [ref for ref in refs if ref not in known_sizes]
        # Workers open media through an empty cache of their own and send back sizes, not pixels.
        cache = self._worker_cache() if options.media_workers else self._media_cache
        opened = dict(open_media(new_refs, cache.image_size, options=options, console=self._console))
        new_sizes = {ref: size for ref, size in opened.items() if isinstance(size, Size)}
        for ref, size in {**known_sizes, **new_sizes}.items():
            self._media_cache.set_image_size(ref, size)
        opened_sizes |= new_sizes

        usable: list[Sample] = []
        damaged: list[RejectedRow] = []
        for sample in samples:
            problem = find_media_problem(sample, opened)
            if problem is None:
                usable.append(sample)
            else:
                damaged.append(RejectedRow(sample.id, problem))
        return usable, damaged

    def _worker_cache(self) -> MediaCache:
        """Return the cache that is sent to worker processes, where it opens media and keeps no image."""
        return MediaCache(self._context.media_policy, self._config.data.media_limits, max_bytes=0)

    def _report_rejected(
        self, split: str, kept: Sequence[Sample], rejected: Sequence[RejectedRow], *, skip: bool, remedy: str
    ) -> None:
        """Warn about rejected rows, or raise a UserError unless they may be skipped."""
        if not rejected:
            return
        listed = "\n".join(first_lines([f"{row.id}: {row.reason}" for row in rejected], _MAX_LISTED))
        count = f"data.{split}: {len(rejected)} of {len(rejected) + len(kept)} samples cannot be used"
        if not skip:
            raise UserError(f"{count}:\n{listed}\n{remedy}")
        self._console.warn(f"{count} and are left out:\n{listed}")


def sources_by_split(data: DataConfig) -> dict[str, tuple[DataSourceConfig, ...]]:
    """Return the sources by the name of their split."""
    return {"train": data.train, "validation": data.validation, "test": data.test}


def read_source(source: DataSourceConfig, context: DatasetContext) -> Iterator[Sample | RejectedRow]:
    """Call a source's dataset function and yield its rows, with the source's name before their ids.

    Raises:
        UserError: `fn` is not a function, does not take these options, or cannot read its data.
    """
    read_rows = load_dataset_function(source, context.base_dir)
    with errors_about_call(source.fn, source.args):
        for row in read_rows(context):
            if not isinstance(row, Sample | RejectedRow):
                raise UserError(f"data source {source.fn!r} yielded {row!r:.80}, neither a Sample nor a RejectedRow")
            if not source.name:
                yield row
            elif isinstance(row, RejectedRow):
                yield row._replace(id=f"{source.name}/{row.id}")
            else:
                yield replace(row, id=f"{source.name}/{row.id}")


def passes_row_filter(row: Sample | RejectedRow, source: DataSourceConfig) -> bool:
    """Return True if the source's `row_filter` takes a row. A rejected row passes, since it is reported elsewhere.

    Raises:
        UserError: a sample has no number in the filter's column.
    """
    row_filter = source.row_filter
    if row_filter is None or isinstance(row, RejectedRow):
        return True
    value = row.meta.get(row_filter.column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UserError(
            f"data source {source.fn!r}: row_filter: sample {row.id} has no number in column {row_filter.column!r} of "
            f"its meta ({value!r}); there is {', '.join(map(str, row.meta)) or 'nothing'}"
        )
    above_low = row_filter.low is None or value >= row_filter.low
    below_high = row_filter.high is None or value <= row_filter.high
    return above_low and below_high


def separate_rejected(rows: Iterable[Sample | RejectedRow]) -> tuple[list[Sample], list[RejectedRow]]:
    """Return samples and rejected rows apart, each in order."""
    samples: list[Sample] = []
    rejected: list[RejectedRow] = []
    for row in rows:
        if isinstance(row, RejectedRow):
            rejected.append(row)
        else:
            samples.append(row)
    return samples, rejected


def unique_images(samples: Iterable[Sample]) -> tuple[ImageRef, ...]:
    """Return every image of the samples once, in the order of first use."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.images))


def unique_videos(samples: Iterable[Sample]) -> tuple[VideoRef, ...]:
    """Return every video of the samples once, in the order of first use."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.media if isinstance(ref, VideoRef)))


def open_media(
    refs: Sequence[MediaRefT], open_one: Callable[[MediaRefT], OpenedT], *, options: DataConfig, console: Console
) -> Iterator[tuple[MediaRefT, OpenedT | MediaError]]:
    """Open images or videos, and yield each with what `open_one` returned or the error that it raised, in order.

    Without `media_workers` in the options, this process opens them. Otherwise `open_one` must be picklable, and a file
    that kills the process that opens it, or takes it too long, comes with an error too.
    """
    if not refs:
        return
    attempt = partial(_open_or_error, open_one)
    if not options.media_workers:
        yield from zip(refs, console.track("opening media", map(attempt, refs), len(refs)), strict=True)
        return
    workers = start_media_workers(
        attempt, options.media_workers, timeout_s=options.media_timeout_s, name=attrgetter("path")
    )
    with closing(workers) as pool:
        futures = list(map(pool.submit, refs))
        opened = console.track("opening media", map(_wait_for_media, futures), len(refs))
        yield from zip(refs, opened, strict=True)


def _open_video(cache: MediaCache, sampling: FrameSampling, known: Set[VideoRef], ref: VideoRef) -> FramePlan:
    """Return a video's frame plan after decoding its frames, unless it is one of those `known` to be good."""
    return cache.get_frame_plan(ref, sampling) if ref in known else cache.check_video(ref, sampling).plan


def find_media_problem(sample: Sample, opened: Mapping[Any, object]) -> str | None:
    """Return the first error among a sample's media, or None; media that were not opened count as good."""
    for ref in sample.media:
        outcome = opened.get(ref)
        if isinstance(outcome, MediaError):
            return str(outcome)
    return None


def check_stages_have_samples(config: Config, samples: Sequence[Sample]) -> None:
    """Check the stages that train on the training samples themselves; raises as `check_stage_has_samples`."""
    for stage in config.training_stages:
        if stage.from_stage is None:
            check_stage_has_samples(stage, sum(matches_conditions(stage.when, sample) for sample in samples))


def check_stage_has_samples(stage: SftStage | RlStage, count: int) -> None:
    """Check that a stage has samples, and an RL stage enough of them for a step to take each at most once.

    Raises:
        UserError: `count`, the number of samples that the stage may use, is too small.
    """
    owner = f"stage {stage.from_stage!r} kept {count} of its" if stage.from_stage else f"there are {count}"
    owner += " (see its `when`)" if stage.when else ""
    if not count:
        raise UserError(f"stage {stage.name!r} has nothing to train on: {owner} samples")
    if not isinstance(stage, RlStage):
        return
    needed = max_prompts_per_step(stage)
    # Draws derive from step and sample id, so a sample taken twice would get the same rollouts twice.
    if needed > max(count, stage.repeat_samples_to or 0):
        remedy = "set repeat_samples_to, or lower prompts_per_step"
        if stage.dynamic_sampling:
            remedy += " or dynamic_sampling.max_rounds"
        if stage.max_prompts_in_flight > stage.prompts_per_step:
            remedy += " or oversampling"
        raise UserError(
            f"stage {stage.name!r} needs {needed} prompts a step and {owner} samples: one would get the same rollouts "
            f"twice; {remedy}"
        )


def max_prompts_per_step(stage: RlStage) -> int:
    """Return how many samples a step may take, in all its sampling rounds together."""
    rounds = stage.dynamic_sampling.max_rounds if stage.dynamic_sampling else 1
    return stage.max_prompts_in_flight * rounds


def _wait_for_media(future: Future[OpenedT | MediaError]) -> OpenedT | MediaError:
    try:
        return future.result()
    except UserError as error:
        # `_open_or_error` returns what the decoder raises, so this is the end of the worker's process.
        return MediaError(str(error))


def _open_or_error(open_one: Callable[[MediaRefT], OpenedT], ref: MediaRefT) -> OpenedT | MediaError:
    try:
        return open_one(ref)
    except MediaError as error:
        return error
