"""The result of an examination, for machines and for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mmrl.data_check.findings import TITLES, Finding, Severity
from mmrl.data_check.lengths import bars, summary
from mmrl.log.console import Console

SCHEMA: Final = 1
_LISTED = 5
_SHOWN_ANSWERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCount:
    """What one source gave: rows, and how many of them made usable samples."""

    fn: str
    rows: int
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCount:
    """The usable samples of a task: how many, of what kinds, and which answers are most common (answer, times)."""

    samples: int
    kinds: tuple[str, ...]
    distinct_answers: int
    most_common: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """One part of the data. Token counts have an entry per prompt that could be made, too long ones included."""

    sources: tuple[SourceCount, ...]
    media: int
    tasks: Mapping[str, TaskCount]
    prompt_tokens: tuple[int, ...]
    visual_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkReport:
    """A benchmark that the run takes: its questions and media, how many questions training asks too, and of how many
    others it shows a medium.
    """

    questions: int
    media: int
    leaked: int
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything an examination says."""

    run: str
    max_prompt_tokens: int
    parts: Mapping[str, PartReport]
    benchmarks: Mapping[str, BenchmarkReport]
    findings: tuple[Finding, ...]

    def counts(self) -> dict[Severity, int]:
        """How many findings there are of each severity."""
        return {level: sum(finding.severity is level for finding in self.findings) for level in Severity}

    def as_json(self) -> dict[str, Any]:
        """What docs/data.md documents."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "max_prompt_tokens": self.max_prompt_tokens,
            "counts": {str(level): count for level, count in self.counts().items()},
            "parts": {name: _part_as_json(part) for name, part in self.parts.items()},
            "benchmarks": {name: asdict(benchmark) for name, benchmark in self.benchmarks.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }


def _part_as_json(part: PartReport) -> dict[str, Any]:
    told = {"prompt_tokens": part.prompt_tokens, "visual_tokens": part.visual_tokens}
    lengths = {quantity: summary(values) if values else None for quantity, values in told.items()}
    return {**asdict(part), **lengths, "usable": sum(source.usable for source in part.sources)}


def tell(report: Report, console: Console) -> None:
    """Print a report: what there is, how long it is, what is wrong with it."""
    for name, part in report.parts.items():
        _tell_part(name, part, report.max_prompt_tokens, console)
    for name, benchmark in report.benchmarks.items():
        console.say(
            f"benchmark {name}: {benchmark.questions:,} questions, {benchmark.media:,} media; training asks "
            f"{benchmark.leaked:,} of them too, and shows media of {benchmark.shared:,} others"
        )
    for level in Severity:
        for line in _grouped([finding for finding in report.findings if finding.severity is level]):
            console.say(line)
    said = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in report.counts().items())
    console.say(f"{report.run}: {said}.")


def _tell_part(name: str, part: PartReport, limit: int, console: Console) -> None:
    rows, usable = (sum(getattr(source, field) for source in part.sources) for field in ("rows", "usable"))
    console.say(f"{name}: {rows:,} rows, {usable:,} usable samples, {part.media:,} media")
    sources = [(source.fn, f"{source.rows:,}", f"{source.usable:,}") for source in part.sources]
    console.table("", ("source", "rows", "usable"), sources)
    tasks = [(task, f"{of.samples:,}", ", ".join(of.kinds), _answers(of)) for task, of in part.tasks.items()]
    if tasks:
        console.table("", ("task", "samples", "kind", "most common answers"), tasks)
    if part.prompt_tokens:
        _tell_lengths(f"{name}, prompt tokens (the limit is {limit})", part.prompt_tokens, console)
        _tell_lengths(f"{name}, visual tokens", part.visual_tokens, console)


def _tell_lengths(title: str, values: Sequence[int], console: Console) -> None:
    told = summary(values)
    console.say(f"{title}: {told['min']} to {told['max']}, median {told['median']}, 95 % up to {told['p95']}")
    console.say("".join(f"  {line}\n" for line in bars(values)))


def _answers(task: TaskCount) -> str:
    shown = "  ".join(f"{answer} x{times}" for answer, times in task.most_common[:_SHOWN_ANSWERS])
    return shown + (f"  of {task.distinct_answers:,}" if task.distinct_answers > _SHOWN_ANSWERS else "")


def _grouped(findings: list[Finding]) -> Iterator[str]:
    """Lines for findings of one severity, the first few of each kind and part."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.part), []).append(finding)
    for (_, part), group in groups.items():
        first = group[0]
        yield f"{first.severity}: {part}: {TITLES[first.code]} ({len(group):,})"
        for finding in group[:_LISTED]:
            yield f"  {finding.sample}: {finding.message}" if finding.sample else f"  {finding.message}"
        if len(group) > _LISTED:
            yield f"  and {len(group) - _LISTED:,} more"
        yield ""
