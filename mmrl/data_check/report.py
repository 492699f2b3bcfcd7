"""The result of an examination, for machines and for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mmrl.data_check.findings import FINDING_TITLES, DataFinding, Severity
from mmrl.data_check.lengths import summarize_lengths, text_histogram
from mmrl.log.console import Console

SCHEMA_VERSION: Final = 1
_MAX_LISTED = 5
_MAX_ANSWERS = 4


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
class SplitReport:
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
class DataCheckReport:
    """Everything an examination says."""

    run: str
    max_prompt_tokens: int
    splits: Mapping[str, SplitReport]
    benchmarks: Mapping[str, BenchmarkReport]
    findings: tuple[DataFinding, ...]

    def counts(self) -> dict[Severity, int]:
        """How many findings there are of each severity."""
        return {level: sum(finding.severity is level for finding in self.findings) for level in Severity}

    def as_json(self) -> dict[str, Any]:
        """What docs/data.md documents."""
        return {
            "schema": SCHEMA_VERSION,
            "run": self.run,
            "max_prompt_tokens": self.max_prompt_tokens,
            "counts": {str(level): count for level, count in self.counts().items()},
            "parts": {name: _split_as_json(part) for name, part in self.splits.items()},
            "benchmarks": {name: asdict(benchmark) for name, benchmark in self.benchmarks.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }


def _split_as_json(part: SplitReport) -> dict[str, Any]:
    told = {"prompt_tokens": part.prompt_tokens, "visual_tokens": part.visual_tokens}
    lengths = {quantity: summarize_lengths(values) if values else None for quantity, values in told.items()}
    return {**asdict(part), **lengths, "usable": sum(source.usable for source in part.sources)}


def print_report(report: DataCheckReport, console: Console) -> None:
    """Print a report: what there is, how long it is, what is wrong with it."""
    for name, part in report.splits.items():
        _print_split(name, part, report.max_prompt_tokens, console)
    for name, benchmark in report.benchmarks.items():
        console.info(
            f"benchmark {name}: {benchmark.questions:,} questions, {benchmark.media:,} media; training asks "
            f"{benchmark.leaked:,} of them too, and shows media of {benchmark.shared:,} others"
        )
    for level in Severity:
        for line in _format_findings([finding for finding in report.findings if finding.severity is level]):
            console.info(line)
    said = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in report.counts().items())
    console.info(f"{report.run}: {said}.")


def _print_split(name: str, part: SplitReport, limit: int, console: Console) -> None:
    rows, usable = (sum(getattr(source, field) for source in part.sources) for field in ("rows", "usable"))
    console.info(f"{name}: {rows:,} rows, {usable:,} usable samples, {part.media:,} media")
    sources = [(source.fn, f"{source.rows:,}", f"{source.usable:,}") for source in part.sources]
    console.print_table("", ("source", "rows", "usable"), sources)
    tasks = [
        (task, f"{of.samples:,}", ", ".join(of.kinds), _format_common_answers(of)) for task, of in part.tasks.items()
    ]
    if tasks:
        console.print_table("", ("task", "samples", "kind", "most common answers"), tasks)
    if part.prompt_tokens:
        _print_lengths(f"{name}, prompt tokens (the limit is {limit})", part.prompt_tokens, console)
        _print_lengths(f"{name}, visual tokens", part.visual_tokens, console)


def _print_lengths(title: str, values: Sequence[int], console: Console) -> None:
    told = summarize_lengths(values)
    console.info(f"{title}: {told['min']} to {told['max']}, median {told['median']}, 95 % up to {told['p95']}")
    console.info("".join(f"  {line}\n" for line in text_histogram(values)))


def _format_common_answers(task: TaskCount) -> str:
    shown = "  ".join(f"{answer} x{times}" for answer, times in task.most_common[:_MAX_ANSWERS])
    return shown + (f"  of {task.distinct_answers:,}" if task.distinct_answers > _MAX_ANSWERS else "")


def _format_findings(findings: list[DataFinding]) -> Iterator[str]:
    """Lines for findings of one severity, the first few of each kind and part."""
    groups: dict[tuple[str, str], list[DataFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.part), []).append(finding)
    for (_, part), group in groups.items():
        first = group[0]
        yield f"{first.severity}: {part}: {FINDING_TITLES[first.code]} ({len(group):,})"
        for finding in group[:_MAX_LISTED]:
            yield f"  {finding.sample}: {finding.message}" if finding.sample else f"  {finding.message}"
        if len(group) > _MAX_LISTED:
            yield f"  and {len(group) - _MAX_LISTED:,} more"
        yield ""
