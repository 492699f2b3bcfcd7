"""Load the samples of a run: call the dataset functions, open images and videos, and report unusable rows.

Media that an earlier run opened, or that a generator has just drawn, are not opened again. Of a streamed dataset only
the first rows are checked.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import ceil
from operator import attrgetter
from time import monotonic

from mmrl.config import Config
from mmrl.config.schema import (
    DataSourceConfig,
    MixtureOrderConfig,
    RlStage,
    SampleStage,
    SelectStage,
    SftStage,
    ShuffledOrderConfig,
    matches_conditions,
)
from mmrl.data.data_record import DataRecord
from mmrl.data.open_media import MediaRefT, OpenedT, find_media_errors, open_media, unique_images, unique_videos
from mmrl.data.order import weights_at
from mmrl.data.rows import (
    DatasetFunction,
    SplitRows,
    find_row_limit,
    passes_row_filter,
    read_source,
    separate_rejected,
)
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.checks import check_image_size
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.types import (
    DatasetContext,
    ImageRef,
    MediaError,
    MediaRef,
    PromptTooLongError,
    RejectedRow,
    Sample,
    Size,
    UserError,
    VideoRef,
)
from mmrl.utils.messages import first_lines
from mmrl_datasets.export import sample_columns

_CHECK_CACHE_BYTES = 32 * 2**20  # several crops of one image open it once
EXCHANGE_EVERY_S = 60.0  # a rank that works for hours without an exchange would be reported as lost
_BAD_SAMPLE_REMEDY = "repair or fetch them (see `mmrl recipe show`), or leave them out with data.on_bad_sample=skip"
_DUPLICATE_ID_REMEDY = "if they are different samples, give one of their sources a `name`"
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
        functions: Mapping[str, Sequence[DatasetFunction]],
        media_cache: MediaCache,
        console: Console,
        *,
        opened_index: OpenedMediaIndex | None = None,
        record: DataRecord | None = None,
    ) -> None:
        """Create a loader that calls the dataset `functions` of each split with `context`.

        It puts the size of every image and the frame plan of every video into `media_cache`. `opened_index` lists media
        that earlier runs opened: its images are not opened again, and its videos not decoded again. `record` has the
        data that the run began with.
        """
        self._drawn_images: dict[ImageRef, Size] = {}
        self._config, self._functions = config, functions
        self._context = context._replace(drawn_images=self._drawn_images)
        self._media_cache, self._console = media_cache, console
        self._opened_index, self._record = opened_index, record
        self._video_errors: dict[MediaRef, MediaError] = {}

    def load(self) -> Iterator[DataSplits | None]:
        """Open all images. Yield None every minute, and at the end the samples whose images can be opened.

        Raises:
            UserError: two samples share an id, a task of the validation is named `mean`, a split has no usable sample,
                a stage has too few or cannot write one to its table, there are unusable samples and
                `data.on_bad_sample` is `stop`, or a resumed run finds other data than it began with.
        """
        loaded: dict[str, SplitRows] = {}
        for split in self._config.data.sources_by_split():
            rows = self.read_split(split, limit=find_row_limit(self._config.data, split))
            check_unique_ids(rows.samples)
            usable, damaged = yield from self._open_images(rows.samples)
            rejected = [*rows.rejected, *damaged]
            self._report_rejected(split, usable, rejected)
            # A small validation share may hold out no row, which is only warned of.
            if getattr(self._config.data, split) and not usable:
                raise UserError(f"data.{split}: there are no usable samples")
            loaded[split] = replace(rows, samples=usable, rejected=rejected)
        splits = {split: tuple(rows.samples) for split, rows in loaded.items()}
        check_held_out(splits["train"], [*splits["validation"], *splits["test"]])
        check_validation_tasks(splits["validation"])
        check_stages_have_samples(self._config, splits["train"], loaded["train"].source_indices)
        check_tables_can_hold_samples(self._config, splits["train"])
        if not splits["validation"] and any(stage.validation for stage in self._config.training_stages):
            self._console.warn(
                "there are no samples for the stages' `validation`; set `data.validation`, or a larger "
                "`validation_share` of a source"
            )
        if self._record:
            self._record.check(loaded)
        yield DataSplits(**splits, source_indices=loaded["train"].source_indices)

    def read_split(
        self,
        split: str,
        *,
        limit: int | None = None,
        on_error: Callable[[DataSourceConfig, UserError], None] | None = None,
    ) -> SplitRows:
        """Return the rows of a split that pass their source's row filter, among the first `limit` rows of each source.

        If a source or its filter raises midway, its rows before the error are kept and `on_error` is called with the
        source and the error. Without `on_error`, the error is raised.
        """
        sources = self._config.data.sources_by_split()[split]
        kept: list[Sample | RejectedRow] = []
        source_indices: dict[str, int] = {}
        counts = [0] * len(sources)
        num_filtered = 0
        for source_index, source in enumerate(sources):
            rows = read_source(source, self._functions[split][source_index], self._context, split)
            try:
                for row in self._console.track(f"reading {split} samples", islice(rows, limit)):
                    if passes_row_filter(row, source):
                        kept.append(row)
                        source_indices[row.id] = source_index
                        counts[source_index] += 1
                    else:
                        num_filtered += 1
            except UserError as error:
                if on_error is None:
                    raise
                on_error(source, error)
        if num_filtered:
            count = len(kept) + num_filtered
            self._console.info(f"data.{split}: {num_filtered:,} of {count:,} rows are left out by `row_filter`")
        samples, rejected = separate_rejected(kept)
        return SplitRows(samples=samples, rejected=rejected, source_indices=source_indices, row_counts=counts)

    def open_videos(self, samples: DataSplits, sampling: FrameSampling) -> Iterator[bool | None]:
        """Decode every frame of all videos that the model will see. Yield None every minute, and True at the end.

        `filter_by_prompt` leaves out the samples of videos that cannot be used. A video that a run has decoded before
        in the same way is opened, but not decoded again.
        """
        refs = unique_videos(chain.from_iterable(samples.by_split().values()))
        index, reading = self._opened_index, f"{sampling} by {self._config.media.video_reader}"
        known = index.known_videos(refs, reading) if index else set()

        def keep(plans: Mapping[VideoRef, FramePlan]) -> None:
            for ref, plan in plans.items():
                self._media_cache.set_frame_plan(ref, sampling, plan)
            if index:
                index.add_videos([ref for ref in plans if ref not in known], reading)

        open_video = partial(_open_video, self._worker_cache(), sampling, known)
        for _ in self._open_media(refs, open_video, keep, self._video_errors):
            yield None
        yield True

    def filter_by_prompt(self, samples: DataSplits, measure_prompt: Callable[[Sample], object]) -> DataSplits:
        """Return the samples of `load` whose videos could be opened and whose prompts can be built.

        `measure_prompt` raises PromptTooLongError for a prompt that is too long, and UserError for one that cannot be
        built at all. `open_videos` comes first.

        Raises:
            UserError: a prompt is too long and `data.on_too_long` is `stop`, one cannot be built and
                `data.on_bad_sample` is `stop`, or too few samples are left.
        """
        splits: dict[str, tuple[Sample, ...]] = {}
        for split, given in samples.by_split().items():
            tracked = self._console.track(f"measuring {split} prompts", given, len(given))
            kept, bad, too_long = measure_prompts(tracked, measure_prompt, self._video_errors)
            self._report_rejected(split, kept, bad)
            self._report_rejected(split, kept, too_long, are_too_long=True)
            splits[split] = tuple(kept)
        # Again, because a stage that had enough samples before may have too few now.
        check_stages_have_samples(self._config, splits["train"], samples.source_indices)
        return DataSplits(**splits, source_indices=samples.source_indices)

    def leave_out(self, split: str, samples: Sequence[Sample], problems: Mapping[str, str]) -> tuple[Sample, ...]:
        """Return the samples of a split without those that have a problem, by id; raises as `filter_by_prompt`."""
        kept = tuple(sample for sample in samples if sample.id not in problems)
        self._report_rejected(split, kept, list(map(RejectedRow, problems, problems.values())))
        return kept

    def _open_images(self, samples: Sequence[Sample]) -> Generator[None, None, tuple[list[Sample], list[RejectedRow]]]:
        """Open the images of all samples, and yield every minute.

        Returns the samples that can be used, and the others with the reason.
        """
        index, refs = self._opened_index, unique_images(samples)
        known_sizes = self._take_drawn_images()
        if index:
            known_sizes |= index.known_sizes(ref for ref in refs if ref not in known_sizes)
        for ref, size in known_sizes.items():
            self._media_cache.set_image_size(ref, size)

        def keep(sizes: Mapping[ImageRef, Size]) -> None:
            for ref, size in sizes.items():
                self._media_cache.set_image_size(ref, size)
            if index:
                index.add(sizes)

        # The run's cache gets no pixels: of many images it would keep only the last ones opened.
        open_size, errors = self._worker_cache(_CHECK_CACHE_BYTES).check_image, dict[MediaRef, MediaError]()
        yield from self._open_media([ref for ref in refs if ref not in known_sizes], open_size, keep, errors)
        problems = find_media_errors(samples, errors)
        usable = [sample for sample in samples if sample.id not in problems]
        return usable, list(map(RejectedRow, problems, problems.values()))

    def _open_media(
        self,
        refs: Sequence[MediaRefT],
        open_one: Callable[[MediaRefT], OpenedT],
        keep: Callable[[Mapping[MediaRefT, OpenedT]], None],
        errors: dict[MediaRef, MediaError],
    ) -> Iterator[None]:
        """Open media, and yield every minute, after `keep` got what was opened since; collect the errors."""
        opened: dict[MediaRefT, OpenedT] = {}
        last_exchange = monotonic()
        for ref, found in open_media(refs, open_one, options=self._config.data, console=self._console):
            if isinstance(found, MediaError):
                errors[ref] = found
            else:
                opened[ref] = found
            if monotonic() - last_exchange > EXCHANGE_EVERY_S:
                keep(opened)
                yield
                opened, last_exchange = {}, monotonic()
        keep(opened)
        if self._opened_index:
            files = self._opened_index.files
            problems, files.problems = files.problems, []
            for problem in problems:
                self._console.warn(problem)

    def _take_drawn_images(self) -> dict[ImageRef, Size]:
        """Return the images that generators have just encoded and that are within the limits, and forget them."""
        sizes, limits = {}, self._config.data.media_limits
        for ref, size in self._drawn_images.items():
            with suppress(MediaError, OSError):  # opening the image will say what is wrong
                num_bytes = os.path.getsize(ref.path)
                check_image_size(ref.path, size, num_bytes, limits)
                if num_bytes <= limits.max_image_bytes:
                    sizes[ref] = size
        self._drawn_images.clear()
        return sizes

    def _worker_cache(self, max_bytes: int = 0) -> MediaCache:
        """Return an empty cache, which worker processes may receive."""
        return MediaCache(self._context.media_policy, self._config.data.media_limits, max_bytes=max_bytes)

    def _report_rejected(
        self, split: str, kept: Sequence[Sample], rejected: Sequence[RejectedRow], *, are_too_long: bool = False
    ) -> None:
        """Warn about rejected rows that the config skips. Raise a UserError for others, or if no sample is left."""
        if not rejected:
            return
        data = self._config.data
        listed = "\n".join(first_lines([f"{row.id}: {row.reason}" for row in rejected]))
        count = f"data.{split}: {len(rejected)} of {len(rejected) + len(kept)} samples cannot be used"
        if (data.on_too_long if are_too_long else data.on_bad_sample) != "skip":
            raise UserError(f"{count}:\n{listed}\n{_TOO_LONG_REMEDY if are_too_long else _BAD_SAMPLE_REMEDY}")
        self._console.warn(f"{count} and are left out:\n{listed}")
        if not kept:
            raise UserError(f"data.{split}: there are no usable samples")


def measure_prompts(
    samples: Iterable[Sample], measure_prompt: Callable[[Sample], object], media_errors: Mapping[MediaRef, MediaError]
) -> tuple[list[Sample], list[RejectedRow], list[RejectedRow]]:
    """Return the samples whose prompt can be measured, those that cannot be used, and those whose prompt is too long.

    Errors of `measure_prompt` are as in `filter_by_prompt`; `media_errors` has the media that cannot be opened.
    """
    kept: list[Sample] = []
    bad: list[RejectedRow] = []
    too_long: list[RejectedRow] = []
    for sample in samples:
        problems = find_media_errors([sample], media_errors)
        if problems:
            bad.append(RejectedRow(sample.id, problems[sample.id]))
            continue
        try:
            measure_prompt(sample)
        except PromptTooLongError as error:
            too_long.append(RejectedRow(sample.id, str(error)))
        except UserError as error:
            bad.append(RejectedRow(sample.id, str(error)))
        else:
            kept.append(sample)
    return kept, bad, too_long


def _open_video(cache: MediaCache, sampling: FrameSampling, known: Set[VideoRef], ref: VideoRef) -> FramePlan:
    """Return a video's frame plan after decoding its frames, unless it is one of those `known` to be good."""
    return cache.get_frame_plan(ref, sampling) if ref in known else cache.check_video(ref, sampling).plan


def check_unique_ids(samples: Iterable[Sample]) -> None:
    """Raise a UserError if two samples have the same id."""
    for sample_id, times in Counter(sample.id for sample in samples).items():
        if times > 1:
            raise UserError(f"data: two samples have the id {sample_id!r}; {_DUPLICATE_ID_REMEDY}")


def check_held_out(train: Iterable[Sample], held_out: Iterable[Sample]) -> None:
    """Raise a UserError if a sample is trained on and held out, which would make its evaluation look too good."""
    shared = {sample.id for sample in train} & {sample.id for sample in held_out}
    if shared:
        raise UserError(
            f"data: sample {min(shared)!r} is in the training and the held-out data; {_DUPLICATE_ID_REMEDY}"
        )


def check_validation_tasks(samples: Iterable[Sample]) -> None:
    """Raise a UserError for a task whose metric would be `validation/mean`, the mean over all tasks."""
    for sample in samples:
        if sample.task == "mean":
            raise UserError(
                f"data.validation: sample {sample.id!r} is of the task 'mean', and `validation/mean` is the mean over "
                "all tasks; give it another `task`"
            )


def check_stages_have_samples(config: Config, samples: Sequence[Sample], source_indices: Mapping[str, int]) -> None:
    """Check the stages that use the training samples themselves, or the `top_k` that a `select` stage keeps.

    `source_indices` has the index of each sample's source in `data.train`, by id.

    Raises:
        UserError: as `check_stage_has_samples`, or a source has fewer samples than its share of an RL step.
    """
    counts = Counter(source_indices[sample.id] for sample in samples)
    top_k = {stage.name: stage.top_k for stage in config.stages if isinstance(stage, SelectStage)}
    for stage in config.stages:
        if isinstance(stage, SelectStage):
            continue
        if stage.samples_of is None:
            check_stage_has_samples(stage, sum(matches_conditions(stage.when, sample) for sample in samples))
            if isinstance(stage, RlStage) and not config.data.streaming:
                _check_source_shares(stage, config.data.train, counts)
        elif most := top_k[stage.samples_of]:
            check_stage_has_samples(stage, most)


def check_tables_can_hold_samples(config: Config, samples: Sequence[Sample]) -> None:
    """Check that every sample of a stage that writes its samples to a table can be written.

    Samples of an earlier stage come from a table, so they can be written again.

    Raises:
        UserError: a table cannot hold a sample.
    """
    for stage in config.stages:
        writes_table = isinstance(stage, SampleStage) or config.is_selected_from(stage.name)
        if isinstance(stage, SelectStage) or stage.samples_of is not None or not writes_table:
            continue
        for sample in samples:
            if not matches_conditions(stage.when, sample):
                continue
            try:
                sample_columns(sample, attrgetter("path"))
            except UserError as error:
                raise UserError(
                    f"stage {stage.name!r} writes its samples to a table, and {error}; or leave such samples out by "
                    "the stage's `when`"
                ) from error


def check_stage_has_samples(stage: SftStage | RlStage | SampleStage, count: int) -> None:
    """Check that a stage has samples, and an RL stage enough of them for a step to take each at most once.

    Raises:
        UserError: `count`, the number of samples that the stage may use, is too small.
    """
    owner = f"stage {stage.samples_of!r} keeps" if stage.samples_of else "there are"
    available = f"{owner} {count} samples" + (" (see its `when`)" if stage.when else "")
    if not count:
        purpose = "to sample from" if isinstance(stage, SampleStage) else "to train on"
        raise UserError(f"stage {stage.name!r} has nothing {purpose}: {available}")
    if not isinstance(stage, RlStage):
        return
    needed = max_prompts_per_step(stage)
    # Draws derive from step and sample id, so a sample taken twice would get the same rollouts twice.
    if needed > max(count, stage.repeat_samples_to or 0):
        remedy = f"{'raise' if stage.repeat_samples_to else 'set'} repeat_samples_to, or lower prompts_per_step"
        if stage.dynamic_sampling:
            remedy += " or dynamic_sampling.max_rounds"
        if stage.prompts_per_round > stage.prompts_per_step:
            remedy += " or oversampling"
        raise UserError(
            f"stage {stage.name!r} needs {needed} prompts per step and {available}, so a sample would get the same "
            f"rollouts twice; {remedy}"
        )


def _check_source_shares(stage: RlStage, sources: Sequence[DataSourceConfig], counts: Counter[int]) -> None:
    """Raise a UserError if a source has fewer samples than its largest share of a step, by index in `counts`."""
    order, step_size = stage.data_order, max_prompts_per_step(stage)
    for index, source in enumerate(sources):
        share = 0.0
        if isinstance(order, MixtureOrderConfig):
            share = max(weights_at(order, step)[index] for step in range(stage.steps))
        elif isinstance(order, ShuffledOrderConfig) and source.weight:
            share = source.weight / sum(other.weight or 0.0 for other in sources)
        # Rounded first, because 0.1 * 30 is more than 3.
        needed = ceil(round(share * step_size, 6))
        if counts[index] < needed:
            raise UserError(
                f"stage {stage.name!r} takes up to {needed} of a step's {step_size} samples from source {source.fn!r}, "
                f"which has {counts[index]}; lower its weight or the stage's prompts_per_step"
            )


def max_prompts_per_step(stage: RlStage) -> int:
    """Return how many samples a step may take, in all its sampling rounds together."""
    rounds = stage.dynamic_sampling.max_rounds if stage.dynamic_sampling else 1
    return stage.prompts_per_round * rounds
