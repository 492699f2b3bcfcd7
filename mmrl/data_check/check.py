"""The examination: everything a run does with its data before the first step, without stopping at the first fault."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mmrl.config import Config
from mmrl.data.check_stages import check_demonstrations, check_stages_have_samples
from mmrl.data.context import make_dataset_context
from mmrl.data.load import read_source, separate_rejected, sources_by_split
from mmrl.data.open_media import find_media_problem, open_all_media, unique_images, unique_videos
from mmrl.data_check.benchmarks import compare_with_training, fingerprint_new_media
from mmrl.data_check.duplicates import (
    DuplicateFinding,
    find_repeated_questions,
    find_similar_images,
    find_training_overlap,
)
from mmrl.data_check.findings import DataFinding, FindingCode, Severity, severity_of
from mmrl.data_check.open_media import ImageInspector, VideoInspector
from mmrl.data_check.out_of_frame import find_out_of_frame
from mmrl.data_check.report import BenchmarkReport, DataCheckReport, SourceCount, SplitReport, TaskCount
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.checks import MediaError
from mmrl.media.video import FrameSampling
from mmrl.policy.build import build_encoder, build_processor, build_response_format
from mmrl.policy.encoder import PromptLayout
from mmrl.scoring.build import build_scorer
from mmrl.training.benchmarks import read_benchmark_questions
from mmrl.training.build import IMAGE_CACHE_BYTES
from mmrl.types import AnswerType, ImageRef, RejectedRow, Sample, UserError, VideoRef

_MAX_COMMON_ANSWERS = 10
_ANSWER_WIDTH = 24
MediaRefT = TypeVar("MediaRefT", ImageRef, VideoRef)
InspectedT = TypeVar("InspectedT")
_COORDINATE_TYPES = (AnswerType.BOX, AnswerType.BOXES, AnswerType.POINT, AnswerType.POINTS)


def check_data(config: Config, base: Path, work: Path, console: Console) -> DataCheckReport:
    """Look at all data of a config whose relative paths start from `base`; datasets make their files under `work`.

    Raises:
        UserError: the rewards cannot be had, so nothing can be judged.
    """
    return _DataCheck(config, base, work, console).run()


class _DataCheck:
    """Sample by sample; what a check finds fault with is left out of the following ones."""

    def __init__(self, config: Config, base: Path, work: Path, console: Console) -> None:
        self._config, self._base, self._console = config, base, console
        self._dataset_context = make_dataset_context(config, base, work)
        self._grammar, self._scorer = build_response_format(config), build_scorer(config, base)
        self._media_cache = MediaCache(
            self._dataset_context.media_policy, config.data.media_limits, max_bytes=IMAGE_CACHE_BYTES
        )
        self._fingerprints: dict[str, bytes] = {}
        self._findings: list[DataFinding] = []
        self._samples: dict[str, list[Sample]] = {}
        self._row_counts: dict[str, list[int]] = {}
        self._source_indices: dict[str, dict[str, int]] = {}
        self._token_counts: dict[str, list[tuple[int, int]]] = {}
        self._benchmarks: dict[str, BenchmarkReport] = {}
        self._frame_sampling: FrameSampling | None = None

    def run(self) -> DataCheckReport:
        """Examine, and say everything at once."""
        for name in sources_by_split(self._config.data):
            self._read_split(name)
        self._check_ids()
        self._inspect_images()
        self._check_rewards()
        self._check_prompts()
        self._check_duplicates()
        self._check_benchmarks()
        self._check_enough()
        parts = {
            name: self._split_report(name) for name, origins in sources_by_split(self._config.data).items() if origins
        }
        return DataCheckReport(
            run=self._config.run.name,
            max_prompt_tokens=self._config.model.max_prompt_tokens,
            splits=parts,
            benchmarks=self._benchmarks,
            findings=tuple(self._findings),
        )

    def _add_finding(
        self,
        code: FindingCode,
        split: str,
        sample: str,
        message: str,
        *,
        other: str = "",
        level: Severity | None = None,
    ) -> None:
        bad = level or severity_of(code, self._config.data)
        self._findings.append(
            DataFinding(code=code, severity=bad, part=split, sample=sample, message=message, other=other)
        )

    def _drop_samples(self, code: FindingCode, split: str, problems: Mapping[str, str]) -> None:
        """Note faults by sample id, and go on without these samples."""
        for sample, message in problems.items():
            self._add_finding(code, split, sample, message)
        self._samples[split] = [sample for sample in self._samples[split] if sample.id not in problems]

    def _add_duplicates(self, split: str, duplicates: Iterable[DuplicateFinding]) -> None:
        for code, sample, message, other in duplicates:
            self._add_finding(code, split, sample, message, other=other)

    def _read_split(self, name: str) -> None:
        self._samples[name], self._row_counts[name], self._source_indices[name], self._token_counts[name] = (
            [],
            [],
            {},
            [],
        )
        for number, origin in enumerate(sources_by_split(self._config.data)[name]):
            rows: list[Sample | RejectedRow] = []
            try:
                for row in self._console.track(f"reading {name}", read_source(origin, self._dataset_context)):
                    rows.append(row)
            except UserError as error:
                self._add_finding(FindingCode.SOURCE, name, "", f"{origin.fn}: {error}")
            samples, rejects = separate_rejected(rows)
            for reject in rejects:
                self._add_finding(FindingCode.ROW, name, reject.id, reject.reason)
            self._row_counts[name].append(len(rows))
            self._samples[name] += samples
            self._source_indices[name] |= {sample.id: number for sample in samples}

    def _check_ids(self) -> None:
        """Ids are unique within a part, and none is both trained on and held out."""
        trained = {sample.id for sample in self._samples["train"]}
        for name, samples in self._samples.items():
            seen: set[str] = set()
            kept: list[Sample] = []
            for sample in samples:
                if sample.id in seen or (name != "train" and sample.id in trained):
                    where = name if sample.id in seen else "training"
                    self._add_finding(
                        FindingCode.ID, name, sample.id, f"another {where} sample has this id", other=sample.id
                    )
                else:
                    kept.append(sample)
                seen.add(sample.id)
            self._samples[name] = kept

    def _inspect_images(self) -> None:
        look = ImageInspector(self._dataset_context.media_policy, self._config.data.media_limits)
        for ref, seen in self._inspect_media(unique_images(self._all_samples()), look).items():
            self._media_cache.set_image_size(ref, seen.size)
            self._fingerprints[ref.sha256] = seen.fingerprint

    def _inspect_videos(self, sampling: FrameSampling) -> None:
        look = VideoInspector(self._dataset_context.media_policy, self._config.data.media_limits, sampling)
        for ref, watched in self._inspect_media(unique_videos(self._all_samples()), look).items():
            self._media_cache.set_frame_plan(ref, sampling, watched.frame_plan)
            self._fingerprints[ref.sha256] = watched.fingerprint

    def _inspect_media(
        self, refs: Sequence[MediaRefT], inspect: Callable[[MediaRefT], InspectedT]
    ) -> dict[MediaRefT, InspectedT]:
        """What looking at media told, without those that cannot be used, nor henceforth their samples."""
        seen = open_all_media(refs, inspect, workers=self._config.data.media_workers, console=self._console)
        for name, samples in self._samples.items():
            problems = {sample.id: find_media_problem(sample, seen) for sample in samples}
            self._drop_samples(FindingCode.MEDIUM, name, {id_: problem for id_, problem in problems.items() if problem})
        return {ref: told for ref, told in seen.items() if not isinstance(told, MediaError)}

    def _all_samples(self) -> list[Sample]:
        return [sample for samples in self._samples.values() for sample in samples]

    def _check_rewards(self) -> None:
        for name, samples in self._samples.items():
            unjudged: dict[str, str] = {}
            unlearnable: dict[str, str] = {}
            for sample in self._console.track(f"trying rewards on {name}", samples, len(samples)):
                try:
                    self._scorer.check_samples([sample], self._grammar, evaluation=name != "train")
                except UserError as error:
                    unjudged[sample.id] = str(error)
                    continue
                try:
                    check_demonstrations(self._config, [sample] if name == "train" else [], self._grammar)
                except UserError as error:
                    unlearnable[sample.id] = str(error)
            self._drop_samples(FindingCode.REWARD, name, unjudged)
            self._drop_samples(FindingCode.DEMONSTRATION, name, unlearnable)

    def _check_prompts(self) -> None:
        """Prompts are made without their pixels, too long ones too, as their lengths are to be told."""
        config = self._config
        boundless = config.model.model_copy(update={"max_prompt_tokens": sys.maxsize})
        try:
            reader = build_processor(config, self._samples["train"], self._base)
        except UserError as error:
            self._add_finding(FindingCode.MODEL, "train", "", str(error))
            return
        encoder = build_encoder(config.model_copy(update={"model": boundless}), reader, self._media_cache)
        merge, self._frame_sampling = encoder.placeholders.merge_size, encoder.frame_sampling
        self._inspect_videos(encoder.frame_sampling)
        for name, samples in self._samples.items():
            misread: dict[str, str] = {}
            too_long: dict[str, str] = {}
            for sample in self._console.track(f"measuring {name}", samples, len(samples)):
                try:
                    outline = encoder.measure(sample)
                except UserError as error:
                    misread[sample.id] = str(error)
                    continue
                self._token_counts[name].append((len(outline.ids), _count_visual_tokens(outline, merge)))
                if len(outline.ids) > config.model.max_prompt_tokens:
                    too_long[sample.id] = (
                        f"{len(outline.ids)} tokens, {_count_visual_tokens(outline, merge)} of them visual"
                    )
                for fault in find_out_of_frame(sample, [layout.resize_map for layout in outline.media_layouts]):
                    self._add_finding(FindingCode.OUT_OF_FRAME, name, sample.id, fault)
            self._drop_samples(FindingCode.TEXT, name, misread)
            self._drop_samples(FindingCode.TOO_LONG, name, too_long)

    def _check_duplicates(self) -> None:
        train, fingerprints = self._samples["train"], self._fingerprints
        for name, samples in self._samples.items():
            self._add_duplicates(name, find_repeated_questions(samples))
            if name != "train":
                self._add_duplicates(name, find_training_overlap(samples, train, fingerprints))
        self._add_duplicates("train", find_similar_images(train, fingerprints))

    def _check_benchmarks(self) -> None:
        """Compare what the run is asked by benchmarks with what it trains on."""
        for benchmark in self._config.evaluation.benchmarks:
            part = f"benchmark {benchmark.name}"
            try:
                questions = read_benchmark_questions(
                    benchmark, self._config, self._base, self._dataset_context.work_dir
                )
            except UserError as error:
                self._add_finding(FindingCode.SOURCE, part, "", str(error))
                continue
            problems = {**questions.problems, **self._fingerprint_benchmark(questions.samples)}
            level = Severity.WARNING if benchmark.allow_missing else Severity.ERROR
            for id_, problem in problems.items():
                self._add_finding(FindingCode.MEDIUM, part, id_, problem, level=level)
            alarms = [*find_training_overlap(questions.samples, self._samples["train"], self._fingerprints)]
            self._add_duplicates(part, alarms)
            self._benchmarks[benchmark.name] = compare_with_training(questions, alarms)

    def _fingerprint_benchmark(self, samples: Sequence[Sample]) -> dict[str, str]:
        access, limits, rule = self._dataset_context.media_policy, self._config.data.media_limits, self._frame_sampling
        return fingerprint_new_media(
            samples,
            self._fingerprints,
            inspect_image=ImageInspector(access, limits),
            inspect_video=VideoInspector(access, limits, rule) if rule else None,
            workers=self._config.data.media_workers,
            console=self._console,
        )

    def _check_enough(self) -> None:
        for name, origins in sources_by_split(self._config.data).items():
            if origins and not self._samples[name]:
                self._add_finding(FindingCode.EMPTY, name, "", "there is not one usable sample")
        try:
            check_stages_have_samples(self._config, self._samples["train"])
        except UserError as error:
            self._add_finding(FindingCode.TOO_FEW, "train", "", str(error))

    def _split_report(self, name: str) -> SplitReport:
        samples, origins = self._samples[name], sources_by_split(self._config.data)[name]
        usable = Counter(self._source_indices[name][sample.id] for sample in samples)
        tasks = sorted({sample.task for sample in samples})
        return SplitReport(
            sources=tuple(
                SourceCount(fn=origin.fn, rows=rows, usable=usable[number])
                for number, (origin, rows) in enumerate(zip(origins, self._row_counts[name], strict=True))
            ),
            media=len({ref.sha256 for sample in samples for ref in sample.media}),
            tasks={task: _count_task([sample for sample in samples if sample.task == task]) for task in tasks},
            prompt_tokens=tuple(total for total, _ in self._token_counts[name]),
            visual_tokens=tuple(visual for _, visual in self._token_counts[name]),
        )


def _count_visual_tokens(outline: PromptLayout, merge: int) -> int:
    return sum(time * height * width // merge**2 for time, height, width in (of.grid for of in outline.media_layouts))


def _count_task(samples: Sequence[Sample]) -> TaskCount:
    answers = Counter(
        _shorten(sample.target.value) for sample in samples if sample.target.answer_type not in _COORDINATE_TYPES
    )
    return TaskCount(
        samples=len(samples),
        kinds=tuple(sorted({str(sample.target.answer_type) for sample in samples})),
        distinct_answers=len(answers),
        most_common=tuple(answers.most_common(_MAX_COMMON_ANSWERS)),
    )


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= _ANSWER_WIDTH else f"{text[: _ANSWER_WIDTH - 3]}..."
