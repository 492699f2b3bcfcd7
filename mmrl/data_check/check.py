"""Check all data of a run without stopping at the first fault.

A run makes the same checks before its first step, and stops. Here each fault becomes a finding, and further checks
compare training with held-out data and with benchmarks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final

from mmrl.config import LoadedConfig, locate_errors
from mmrl.config.schema import DataSourceConfig
from mmrl.data.context import make_dataset_context
from mmrl.data.demonstrations import check_demonstrations
from mmrl.data.load import (
    DatasetLoader,
    check_stages_have_samples,
    check_tables_can_hold_samples,
    check_validation_tasks,
    measure_prompts,
)
from mmrl.data.open_media import find_media_errors, open_media, unique_images, unique_videos
from mmrl.data.rows import DatasetFunction, SplitRows, find_row_limit, load_dataset_function
from mmrl.data_check.duplicates import (
    DuplicateFinding,
    find_repeated_questions,
    find_similar_images,
    find_training_overlap,
    first_uses_by_digest,
)
from mmrl.data_check.fingerprints import inspect_image, inspect_video
from mmrl.data_check.report import (
    BenchmarkReport,
    DataCheckReport,
    DataFinding,
    FindingCode,
    Severity,
    SourceCount,
    SplitReport,
    TaskCount,
    severity_of,
)
from mmrl.data_check.sample_view import find_outside_image
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.pixel_reader import PixelReader
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.policy.build import build_encoder, build_processor, build_response_format
from mmrl.policy.encoder import PromptEncoder
from mmrl.rollout.steps.rewording import check_rewordings
from mmrl.scoring import RewardProcessError
from mmrl.scoring.build import build_scorer
from mmrl.scoring.coverage import find_coverage_gaps
from mmrl.scoring.trial import RewardTrial
from mmrl.training.benchmarks import read_benchmark_questions
from mmrl.training.functions import load_configured_benchmark
from mmrl.types import (
    AnswerType,
    DatasetContext,
    MediaError,
    MediaRef,
    PromptTooLongError,
    RejectedRow,
    Sample,
    UserError,
    VideoRef,
)

_MAX_COMMON_ANSWERS: Final = 10
_MAX_ANSWER_CHARS: Final = 24
_COORDINATE_TYPES: Final = (AnswerType.BOX, AnswerType.BOXES, AnswerType.POINT, AnswerType.POINTS)


class DataCheck:
    """Checks all data of a config. A sample with a fault is left out of the checks that follow."""

    def __init__(self, loaded: LoadedConfig, work_dir: Path, console: Console) -> None:
        """Load the rewards. Datasets make their files in `work_dir`.

        Raises:
            UserError: a reward cannot be loaded, so no sample can be scored.
        """
        config, base_dir = loaded.config, loaded.files[0].parent
        self._loaded, self._config, self._base_dir, self._console = loaded, config, base_dir, console
        self._sources = config.data.sources_by_split()
        self._dataset_context = make_dataset_context(config, base_dir, work_dir)
        self._response_format = build_response_format(config)
        media_policy, limits = self._dataset_context.media_policy, config.data.media_limits
        self._scorer = build_scorer(config, base_dir, PixelReader(media_policy, limits))
        self._media_cache = MediaCache(media_policy, limits)
        functions: dict[str, list[DatasetFunction]] = {}
        for split, sources in self._sources.items():
            # Loaded only when called: one that cannot be loaded becomes a finding, like one that cannot read its data.
            functions[split] = [partial(_load_and_read, source, base_dir) for source in sources]
        self._loader = DatasetLoader(config, self._dataset_context, functions, self._media_cache, console)
        # A cache without images, because worker processes receive a copy of it.
        self._worker_cache = MediaCache(media_policy, limits, max_bytes=0)
        # Thumbnails of images and videos, by sha256.
        self._fingerprints: dict[str, bytes] = {}
        self._findings: list[DataFinding] = []
        # By split: rows as they were read, samples without a fault so far, and total and visual tokens of each prompt.
        self._rows: dict[str, SplitRows] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._token_counts: dict[str, list[tuple[int, int]]] = {}
        self._benchmarks: dict[str, BenchmarkReport] = {}
        # How frames are sampled, which the model's processor decides; None if it cannot be loaded.
        self._frame_sampling: FrameSampling | None = None

    def run(self) -> DataCheckReport:
        """Run all checks and return their findings."""
        for split in self._sources:
            self._read_split(split)
        self._check_ids()
        all_samples = list(chain.from_iterable(self._samples.values()))
        # Without a sample no condition can be met, and an error says so already.
        gaps = find_coverage_gaps(self._config, self._scorer, all_samples) if all_samples else []
        for warning in gaps:
            self._add_finding(FindingCode.CONDITION, "train", "", warning)
        self._drop_samples_with_bad_media(self._open_images(all_samples))
        with closing(self._scorer):
            self._check_rewards()
        self._check_prompts()
        self._check_duplicates()
        self._check_benchmarks()
        for split in self._sources:
            if getattr(self._config.data, split) and not self._samples[split]:
                self._add_finding(FindingCode.EMPTY, split, "", "there are no usable samples")
        train, source_indices = self._samples["train"], self._rows["train"].source_indices
        for code, split, check in (
            (FindingCode.TASK, "validation", partial(check_validation_tasks, self._samples["validation"])),
            (FindingCode.TOO_FEW, "train", partial(check_stages_have_samples, self._config, train, source_indices)),
            (FindingCode.TABLE, "train", partial(check_tables_can_hold_samples, self._config, train)),
        ):
            try:
                check()
            except UserError as error:
                self._add_finding(code, split, "", str(error))
        return DataCheckReport(
            run=self._config.run.name,
            max_prompt_tokens=self._config.model.max_prompt_tokens,
            splits={split: self._split_report(split) for split, sources in self._sources.items() if sources},
            benchmarks=self._benchmarks,
            findings=tuple(self._findings),
        )

    def _add_finding(
        self,
        code: FindingCode,
        split: str,
        sample_id: str,
        message: str,
        *,
        other_id: str = "",
        severity: Severity | None = None,
    ) -> None:
        severity = severity or severity_of(code, self._config.data)
        finding = DataFinding(
            code=code, severity=severity, split=split, sample_id=sample_id, message=message, other_id=other_id
        )
        self._findings.append(finding)

    def _drop_samples(self, code: FindingCode, split: str, problems: Mapping[str, str]) -> None:
        """Add a finding for each problem, by sample id, and leave these samples out from here on."""
        for sample_id, message in problems.items():
            self._add_finding(code, split, sample_id, message)
        self._samples[split] = [sample for sample in self._samples[split] if sample.id not in problems]

    def _add_duplicates(self, split: str, duplicates: Iterable[DuplicateFinding]) -> None:
        for code, sample_id, message, other_id in duplicates:
            self._add_finding(code, split, sample_id, message, other_id=other_id)

    def _read_split(self, split: str) -> None:
        """Read all sources of a split. A source that breaks off keeps the rows before the error."""
        limit = find_row_limit(self._config.data, split)
        if limit is not None:
            self._console.info(f"data.{split} is streamed: only the first {limit:,} rows of each source are checked.")
        rows = self._loader.read_split(split, limit=limit, on_error=partial(self._add_source_error, split))
        for rejected in rows.rejected:
            self._add_finding(FindingCode.ROW, split, rejected.id, rejected.reason)
        self._rows[split], self._samples[split], self._token_counts[split] = rows, list(rows.samples), []

    def _add_source_error(self, split: str, source: DataSourceConfig, error: UserError) -> None:
        try:
            with locate_errors(self._loaded):
                raise error
        except UserError as located:
            self._add_finding(FindingCode.SOURCE, split, "", f"{source.fn}: {located}")

    def _check_ids(self) -> None:
        """Drop samples whose id occurred before in their split, or in training if they are held out."""
        training_ids = {sample.id for sample in self._samples["train"]}
        for split, samples in self._samples.items():
            # The split that has each id already.
            owners = {} if split == "train" else dict.fromkeys(training_ids, "training")
            kept: list[Sample] = []
            for sample in samples:
                if sample.id in owners:
                    message = f"another {owners[sample.id]} sample has this id"
                    self._add_finding(FindingCode.ID, split, sample.id, message, other_id=sample.id)
                else:
                    kept.append(sample)
                owners[sample.id] = split
            self._samples[split] = kept

    def _open_images(self, samples: Iterable[Sample]) -> dict[MediaRef, MediaError]:
        """Open the images that have no fingerprint yet, and return the errors of unusable ones."""
        inspect = partial(inspect_image, self._worker_cache)
        # With their sizes, prompts can be measured without opening them again.
        return self._open_media(unique_images(samples), inspect, self._media_cache.set_image_size)

    def _open_videos(self, samples: Iterable[Sample]) -> dict[MediaRef, MediaError]:
        """Open the videos as `_open_images` does; none without the model's processor, which decides on the frames."""
        sampling = self._frame_sampling
        if sampling is None:
            return {}
        inspect = partial(inspect_video, self._worker_cache, sampling)

        def keep(ref: VideoRef, plan: FramePlan) -> None:
            self._media_cache.set_frame_plan(ref, sampling, plan)

        return self._open_media(unique_videos(samples), inspect, keep)

    def _open_media(
        self, refs: Iterable[Any], inspect: Callable[[Any], tuple[Any, bytes]], keep: Callable[[Any, Any], None]
    ) -> dict[MediaRef, MediaError]:
        new_refs = [ref for ref in refs if ref.sha256 not in self._fingerprints]
        errors: dict[MediaRef, MediaError] = {}
        for ref, result in open_media(new_refs, inspect, options=self._config.data, console=self._console):
            if isinstance(result, MediaError):
                errors[ref] = result
            else:
                found, self._fingerprints[ref.sha256] = result
                keep(ref, found)
        return errors

    def _drop_samples_with_bad_media(self, errors: Mapping[MediaRef, MediaError]) -> None:
        for split, samples in self._samples.items():
            self._drop_samples(FindingCode.MEDIA, split, find_media_errors(samples, errors))

    def _check_rewards(self) -> None:
        """Drop samples that the rewards cannot score."""
        # A reward may hang on every sample until its deadline, so none is tried after the first lost worker.
        worker_failed, trial = False, RewardTrial(self._scorer, self._response_format)
        for split, samples in self._samples.items():
            failed: dict[str, str] = {}
            unscorable: dict[str, str] = {}
            for sample in self._console.track(f"trying rewards on {split}", samples, len(samples)):
                try:
                    if not worker_failed:
                        unscorable |= next(trial.check_in_batches([sample], evaluation=split != "train"))
                except UserError as error:
                    failed[sample.id] = str(error)
                    worker_failed = isinstance(error, RewardProcessError)
                    if worker_failed:
                        failed[sample.id] += ". Rewards were not tried on the samples after this one."
            self._drop_samples(FindingCode.REWARD, split, failed)
            self._drop_samples(FindingCode.UNSCORABLE, split, unscorable)

    def _check_stage_samples(self, response_opening: str) -> None:
        """Drop samples that a supervised stage cannot imitate, or that lack the rewording that a rollout step needs."""
        config, source_indices = self._config, self._rows["train"].source_indices
        checks: dict[FindingCode, Callable[[list[Sample]], None]] = {
            FindingCode.DEMONSTRATION: lambda samples: check_demonstrations(
                config, samples, self._response_format, response_opening
            ),
            FindingCode.REWORDING: lambda samples: check_rewordings(config, samples, source_indices),
        }
        for code, check in checks.items():
            problems: dict[str, str] = {}
            for sample in self._samples["train"]:
                try:
                    check([sample])
                except UserError as error:
                    problems[sample.id] = str(error)
            self._drop_samples(code, "train", problems)

    def _check_prompts(self) -> None:
        """Measure every prompt without its pixels, and drop samples whose prompt is misread or too long."""
        config = self._config
        # The encoder refuses prompts beyond the limit without reporting their lengths, so it gets no limit.
        unlimited = config.model.model_copy(update={"max_prompt_tokens": sys.maxsize})
        try:
            processor = build_processor(config, self._samples["train"], self._base_dir)
            encoder = build_encoder(config.model_copy(update={"model": unlimited}), processor, self._media_cache)
        except UserError as error:
            self._add_finding(FindingCode.MODEL, "train", "", str(error))
            self._check_stage_samples(response_opening="")
            return
        self._frame_sampling = encoder.frame_sampling
        self._check_stage_samples(encoder.response_opening)
        self._drop_samples_with_bad_media(self._open_videos(chain.from_iterable(self._samples.values())))
        for split in self._samples:
            self._check_prompts_of_split(split, encoder)

    def _check_prompts_of_split(self, split: str, encoder: PromptEncoder) -> None:
        samples, limit = self._samples[split], self._config.model.max_prompt_tokens
        patches_per_token = encoder.placeholders.merge_size**2

        def measure(sample: Sample) -> None:
            layout = encoder.measure(sample)
            num_tokens = len(layout.ids)
            # merge_size x merge_size patches become one token.
            num_visual = sum(prod(media.grid) // patches_per_token for media in layout.media_layouts)
            self._token_counts[split].append((num_tokens, num_visual))
            for message in find_outside_image(sample, [media.resize_map for media in layout.media_layouts]):
                self._add_finding(FindingCode.OUTSIDE_IMAGE, split, sample.id, message)
            if num_tokens > limit:
                raise PromptTooLongError(f"{num_tokens} tokens, {num_visual} of them visual")

        tracked = self._console.track(f"measuring {split}", samples, len(samples))
        # Samples with a video that cannot be used were dropped before.
        _, bad, too_long = measure_prompts(tracked, measure, media_errors={})
        self._drop_samples(FindingCode.TEXT, split, dict(bad))
        self._drop_samples(FindingCode.TOO_LONG, split, dict(too_long))

    def _check_duplicates(self) -> None:
        train = self._samples["train"]
        for split, samples in self._samples.items():
            self._add_duplicates(split, find_repeated_questions(samples))
            if split != "train":
                self._add_duplicates(split, find_training_overlap(samples, train, self._fingerprints))
        self._add_duplicates("train", find_similar_images(train, self._fingerprints))

    def _check_benchmarks(self) -> None:
        """Compare the questions of the config's benchmarks with training."""
        work_dir = self._dataset_context.work_dir
        for benchmark in self._config.evaluation.benchmarks:
            split = f"benchmark {benchmark.name}"
            try:
                with locate_errors(self._loaded):
                    rules = load_configured_benchmark(benchmark, self._base_dir)
                    questions = read_benchmark_questions(benchmark, rules, self._config, self._base_dir, work_dir)
            except UserError as error:
                self._add_finding(FindingCode.SOURCE, split, "", str(error))
                continue
            errors = self._open_images(questions.samples) | self._open_videos(questions.samples)
            media_problems = find_media_errors(questions.samples, errors)
            severity = Severity.WARNING if benchmark.allow_missing else Severity.ERROR
            for sample_id, problem in {**questions.problems, **media_problems}.items():
                self._add_finding(FindingCode.MEDIA, split, sample_id, problem, severity=severity)
            overlaps = list(find_training_overlap(questions.samples, self._samples["train"], self._fingerprints))
            self._add_duplicates(split, overlaps)
            counts = Counter(overlap.code for overlap in overlaps)
            self._benchmarks[benchmark.name] = BenchmarkReport(
                questions=len(questions.entries),
                media=len(first_uses_by_digest(questions.samples)),
                leaked=counts[FindingCode.LEAK],
                shared=counts[FindingCode.SHARED_MEDIA],
            )

    def _split_report(self, split: str) -> SplitReport:
        samples = self._samples[split]
        usable = Counter(self._rows[split].source_indices[sample.id] for sample in samples)
        pairs = enumerate(zip(self._sources[split], self._rows[split].row_counts, strict=True))
        sources = [SourceCount(fn=source.fn, rows=count, usable=usable[index]) for index, (source, count) in pairs]
        samples_by_task: dict[str, list[Sample]] = {}
        for sample in samples:
            samples_by_task.setdefault(sample.task, []).append(sample)
        return SplitReport(
            sources=tuple(sources),
            media=len(first_uses_by_digest(samples)),
            tasks={task: _count_task(samples_by_task[task]) for task in sorted(samples_by_task)},
            prompt_tokens=tuple(total for total, _ in self._token_counts[split]),
            visual_tokens=tuple(visual for _, visual in self._token_counts[split]),
        )


def _load_and_read(source: DataSourceConfig, base_dir: Path, context: DatasetContext) -> Iterator[Sample | RejectedRow]:
    yield from load_dataset_function(source, base_dir)(context)


def _count_task(samples: Sequence[Sample]) -> TaskCount:
    answers: Counter[str] = Counter()
    for sample in samples:
        # Coordinates hardly repeat, so their most common values say nothing.
        if sample.target.answer_type not in _COORDINATE_TYPES:
            answers[str(sample.target.value)] += 1
    most_common = []
    for text, times in answers.most_common(_MAX_COMMON_ANSWERS):
        shown = text if len(text) <= _MAX_ANSWER_CHARS else f"{text[: _MAX_ANSWER_CHARS - 3]}..."
        most_common.append((shown, times))
    return TaskCount(
        samples=len(samples),
        answer_types=tuple(sorted({str(sample.target.answer_type) for sample in samples})),
        distinct_answers=len(answers),
        most_common=tuple(most_common),
    )
