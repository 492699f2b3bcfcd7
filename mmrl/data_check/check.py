"""The examination: everything a run does with its data before the first step, without stopping at the first fault."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mmrl.config import Config
from mmrl.data.load import (
    check_enough,
    check_lessons,
    divided,
    look_at_all,
    pictures_of,
    place_of,
    problem_of,
    read,
    sources,
    videos_of,
)
from mmrl.data_check.benchmarks import compared, recognise
from mmrl.data_check.duplicates import Alarm, look_alikes, repeated, shown_in_training
from mmrl.data_check.findings import Code, Finding, Severity, severity
from mmrl.data_check.open_media import Inspect, Watch
from mmrl.data_check.out_of_frame import outside
from mmrl.data_check.report import BenchmarkReport, PartReport, Report, SourceCount, TaskCount
from mmrl.log.console import Console
from mmrl.media.cache import MediaStore
from mmrl.media.checks import MediaError
from mmrl.media.video import ClipRule
from mmrl.policy.build import encoder_of, grammar_of, reader_of
from mmrl.policy.encoder import Outline
from mmrl.scoring.build import judge_of
from mmrl.training.benchmarks import read_benchmark
from mmrl.training.build import PICTURE_BYTES
from mmrl.types import ImageRef, Kind, Reject, Sample, UserError, VideoRef

_COMMON = 10
_ANSWER_WIDTH = 24
Ref = TypeVar("Ref", ImageRef, VideoRef)
Told = TypeVar("Told")
_PLACED = (Kind.BOX, Kind.BOXES, Kind.POINT, Kind.POINTS)


def examine(config: Config, base: Path, work: Path, console: Console) -> Report:
    """Look at all data of a config whose relative paths start from `base`; datasets make their files under `work`.

    Raises:
        UserError: the rewards cannot be had, so nothing can be judged.
    """
    return _Examination(config, base, work, console).report()


class _Examination:
    """Sample by sample; what a check finds fault with is left out of the following ones."""

    def __init__(self, config: Config, base: Path, work: Path, console: Console) -> None:
        self._config, self._base, self._console = config, base, console
        self._place = place_of(config, base, work)
        self._grammar, self._judge = grammar_of(config), judge_of(config, base)
        self._store = MediaStore(self._place.access, config.data.limits, max_bytes=PICTURE_BYTES)
        self._fingerprints: dict[str, bytes] = {}
        self._findings: list[Finding] = []
        self._samples: dict[str, list[Sample]] = {}
        self._rows: dict[str, list[int]] = {}
        self._source_of: dict[str, dict[str, int]] = {}
        self._tokens: dict[str, list[tuple[int, int]]] = {}
        self._benchmarks: dict[str, BenchmarkReport] = {}
        self._clip_rule: ClipRule | None = None

    def report(self) -> Report:
        """Examine, and say everything at once."""
        for name in sources(self._config.data):
            self._read(name)
        self._check_ids()
        self._open()
        self._check_rewards()
        self._check_prompts()
        self._check_repeats()
        self._check_benchmarks()
        self._check_enough()
        parts = {name: self._part(name) for name, origins in sources(self._config.data).items() if origins}
        return Report(
            run=self._config.run.name,
            max_prompt_tokens=self._config.model.max_prompt_tokens,
            parts=parts,
            benchmarks=self._benchmarks,
            findings=tuple(self._findings),
        )

    def _find(
        self, code: Code, part: str, sample: str, message: str, *, other: str = "", level: Severity | None = None
    ) -> None:
        bad = level or severity(code, self._config.data)
        self._findings.append(Finding(code=code, severity=bad, part=part, sample=sample, message=message, other=other))

    def _leave_out(self, code: Code, part: str, faults: Mapping[str, str]) -> None:
        """Note faults by sample id, and go on without these samples."""
        for sample, message in faults.items():
            self._find(code, part, sample, message)
        self._samples[part] = [sample for sample in self._samples[part] if sample.id not in faults]

    def _raise_alarms(self, part: str, alarms: Iterable[Alarm]) -> None:
        for code, sample, message, other in alarms:
            self._find(code, part, sample, message, other=other)

    def _read(self, name: str) -> None:
        self._samples[name], self._rows[name], self._source_of[name], self._tokens[name] = [], [], {}, []
        for number, origin in enumerate(sources(self._config.data)[name]):
            rows: list[Sample | Reject] = []
            try:
                for row in self._console.track(f"reading {name}", read(origin, self._place)):
                    rows.append(row)
            except UserError as error:
                self._find(Code.SOURCE, name, "", f"{origin.fn}: {error}")
            samples, rejects = divided(rows)
            for reject in rejects:
                self._find(Code.ROW, name, reject.id, reject.reason)
            self._rows[name].append(len(rows))
            self._samples[name] += samples
            self._source_of[name] |= {sample.id: number for sample in samples}

    def _check_ids(self) -> None:
        """Ids are unique within a part, and none is both trained on and held out."""
        trained = {sample.id for sample in self._samples["train"]}
        for name, samples in self._samples.items():
            seen: set[str] = set()
            kept: list[Sample] = []
            for sample in samples:
                if sample.id in seen or (name != "train" and sample.id in trained):
                    where = name if sample.id in seen else "training"
                    self._find(Code.ID, name, sample.id, f"another {where} sample has this id", other=sample.id)
                else:
                    kept.append(sample)
                seen.add(sample.id)
            self._samples[name] = kept

    def _open(self) -> None:
        look = Inspect(self._place.access, self._config.data.limits)
        for ref, seen in self._looked_at(pictures_of(self._all()), look).items():
            self._store.remember(ref, seen.size)
            self._fingerprints[ref.sha256] = seen.fingerprint

    def _watch(self, rule: ClipRule) -> None:
        look = Watch(self._place.access, self._config.data.limits, rule)
        for ref, watched in self._looked_at(videos_of(self._all()), look).items():
            self._store.remember_plan(ref, rule, watched.plan)
            self._fingerprints[ref.sha256] = watched.fingerprint

    def _looked_at(self, refs: Sequence[Ref], look: Callable[[Ref], Told]) -> dict[Ref, Told]:
        """What looking at media told, without those that cannot be used, nor henceforth their samples."""
        seen = look_at_all(refs, look, workers=self._config.data.workers, console=self._console)
        for name, samples in self._samples.items():
            problems = {sample.id: problem_of(sample, seen) for sample in samples}
            self._leave_out(Code.MEDIUM, name, {id_: problem for id_, problem in problems.items() if problem})
        return {ref: told for ref, told in seen.items() if not isinstance(told, MediaError)}

    def _all(self) -> list[Sample]:
        return [sample for samples in self._samples.values() for sample in samples]

    def _check_rewards(self) -> None:
        for name, samples in self._samples.items():
            unjudged: dict[str, str] = {}
            unlearnable: dict[str, str] = {}
            for sample in self._console.track(f"trying rewards on {name}", samples, len(samples)):
                try:
                    self._judge.check([sample], self._grammar, evaluation=name != "train")
                except UserError as error:
                    unjudged[sample.id] = str(error)
                    continue
                try:
                    check_lessons(self._config, [sample] if name == "train" else [], self._grammar)
                except UserError as error:
                    unlearnable[sample.id] = str(error)
            self._leave_out(Code.REWARD, name, unjudged)
            self._leave_out(Code.LESSON, name, unlearnable)

    def _check_prompts(self) -> None:
        """Prompts are made without their pixels, too long ones too, as their lengths are to be told."""
        config = self._config
        boundless = config.model.model_copy(update={"max_prompt_tokens": sys.maxsize})
        try:
            reader = reader_of(config, self._samples["train"])
        except UserError as error:
            self._find(Code.MODEL, "train", "", str(error))
            return
        encoder = encoder_of(config.model_copy(update={"model": boundless}), reader, self._store)
        merge, self._clip_rule = encoder.placeholders.merge, encoder.clip_rule
        self._watch(encoder.clip_rule)
        for name, samples in self._samples.items():
            misread: dict[str, str] = {}
            too_long: dict[str, str] = {}
            for sample in self._console.track(f"measuring {name}", samples, len(samples)):
                try:
                    outline = encoder.measure(sample)
                except UserError as error:
                    misread[sample.id] = str(error)
                    continue
                self._tokens[name].append((len(outline.ids), _visual(outline, merge)))
                if len(outline.ids) > config.model.max_prompt_tokens:
                    too_long[sample.id] = f"{len(outline.ids)} tokens, {_visual(outline, merge)} of them visual"
                for fault in outside(sample, [layout.resize for layout in outline.layouts]):
                    self._find(Code.OUTSIDE, name, sample.id, fault)
            self._leave_out(Code.TEXT, name, misread)
            self._leave_out(Code.TOO_LONG, name, too_long)

    def _check_repeats(self) -> None:
        train, fingerprints = self._samples["train"], self._fingerprints
        for name, samples in self._samples.items():
            self._raise_alarms(name, repeated(samples))
            if name != "train":
                self._raise_alarms(name, shown_in_training(samples, train, fingerprints))
        self._raise_alarms("train", look_alikes(train, fingerprints))

    def _check_benchmarks(self) -> None:
        """Compare what the run is asked by benchmarks with what it trains on."""
        for benchmark in self._config.evaluation.benchmarks:
            part = f"benchmark {benchmark.name}"
            try:
                questions = read_benchmark(benchmark, self._config, self._base, self._place.work)
            except UserError as error:
                self._find(Code.SOURCE, part, "", str(error))
                continue
            problems = {**questions.problems, **self._recognise(questions.samples)}
            level = Severity.WARNING if benchmark.allow_missing else Severity.ERROR
            for id_, problem in problems.items():
                self._find(Code.MEDIUM, part, id_, problem, level=level)
            alarms = [*shown_in_training(questions.samples, self._samples["train"], self._fingerprints)]
            self._raise_alarms(part, alarms)
            self._benchmarks[benchmark.name] = compared(questions, alarms)

    def _recognise(self, samples: Sequence[Sample]) -> dict[str, str]:
        access, limits, rule = self._place.access, self._config.data.limits, self._clip_rule
        return recognise(
            samples,
            self._fingerprints,
            inspect=Inspect(access, limits),
            watch=Watch(access, limits, rule) if rule else None,
            workers=self._config.data.workers,
            console=self._console,
        )

    def _check_enough(self) -> None:
        for name, origins in sources(self._config.data).items():
            if origins and not self._samples[name]:
                self._find(Code.EMPTY, name, "", "there is not one usable sample")
        try:
            check_enough(self._config, self._samples["train"])
        except UserError as error:
            self._find(Code.TOO_FEW, "train", "", str(error))

    def _part(self, name: str) -> PartReport:
        samples, origins = self._samples[name], sources(self._config.data)[name]
        usable = Counter(self._source_of[name][sample.id] for sample in samples)
        tasks = sorted({sample.task for sample in samples})
        return PartReport(
            sources=tuple(
                SourceCount(fn=origin.fn, rows=rows, usable=usable[number])
                for number, (origin, rows) in enumerate(zip(origins, self._rows[name], strict=True))
            ),
            media=len({ref.sha256 for sample in samples for ref in sample.media}),
            tasks={task: _task([sample for sample in samples if sample.task == task]) for task in tasks},
            prompt_tokens=tuple(total for total, _ in self._tokens[name]),
            visual_tokens=tuple(visual for _, visual in self._tokens[name]),
        )


def _visual(outline: Outline, merge: int) -> int:
    return sum(time * height * width // merge**2 for time, height, width in (of.grid for of in outline.layouts))


def _task(samples: Sequence[Sample]) -> TaskCount:
    answers = Counter(_shown(sample.target.value) for sample in samples if sample.target.kind not in _PLACED)
    return TaskCount(
        samples=len(samples),
        kinds=tuple(sorted({str(sample.target.kind) for sample in samples})),
        distinct_answers=len(answers),
        most_common=tuple(answers.most_common(_COMMON)),
    )


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _ANSWER_WIDTH else f"{text[: _ANSWER_WIDTH - 3]}..."
