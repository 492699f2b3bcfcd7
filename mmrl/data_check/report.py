"""The report of a data check, as JSON and as text on the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mmrl.data_check.findings import FINDING_TITLES, DataFinding, Severity
from mmrl.data_check.lengths import summarize_lengths, text_histogram
from mmrl.log.console import Console

SCHEMA_VERSION: Final = 2
"""Version of the JSON; it changes when a key is renamed or removed."""
_MAX_LISTED: Final = 5
"""Findings of one kind and split that the console lists."""
_MAX_ANSWERS: Final = 4
"""Common answers of a task that the console lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCount:
    """Numbers of rows of one source."""

    fn: str
    """The dataset function."""
    rows: int
    usable: int
    """Rows that made samples without a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCount:
    """The usable samples of one task."""

    samples: int
    answer_types: tuple[str, ...]
    distinct_answers: int
    """Different answers; 0 if all are boxes or points."""
    most_common: tuple[tuple[str, int], ...]
    """The ten most common answers, shortened, each with its number of samples; none of boxes and points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """One split of the data."""

    sources: tuple[SourceCount, ...]
    media: int
    """Different images and videos of usable samples."""
    tasks: Mapping[str, TaskCount]
    prompt_tokens: tuple[int, ...]
    """Tokens of each prompt that could be built, including those that are too long."""
    visual_tokens: tuple[int, ...]
    """Tokens of the images and videos in each of these prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkReport:
    """A benchmark of the config, compared with training."""

    questions: int
    media: int
    """Different images and videos."""
    leaked: int
    """Questions that training asks, too."""
    shared: int
    """Other questions with an image or video that training shows, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheckReport:
    """The result of a data check."""

    run: str
    """Name of the run in the config."""
    max_prompt_tokens: int
    splits: Mapping[str, SplitReport]
    benchmarks: Mapping[str, BenchmarkReport]
    findings: tuple[DataFinding, ...]

    def counts(self) -> dict[Severity, int]:
        """Return the number of findings of each severity."""
        counts = dict.fromkeys(Severity, 0)
        for finding in self.findings:
            counts[finding.severity] += 1
        return counts

    def as_json(self) -> dict[str, Any]:
        """Return the report as docs/data.md describes it."""
        return {
            "schema": SCHEMA_VERSION,
            "run": self.run,
            "max_prompt_tokens": self.max_prompt_tokens,
            "counts": {str(severity): count for severity, count in self.counts().items()},
            "splits": {name: _split_as_json(split) for name, split in self.splits.items()},
            "benchmarks": {name: asdict(benchmark) for name, benchmark in self.benchmarks.items()},
            "findings": list(map(asdict, self.findings)),
        }


def print_report(report: DataCheckReport, console: Console) -> None:
    """Print the counts and lengths of each split, then the findings, the most severe first."""
    for name, split in report.splits.items():
        _print_split(name, split, report.max_prompt_tokens, console)
    for name, benchmark in report.benchmarks.items():
        console.info(
            f"benchmark {name}: {benchmark.questions:,} questions, {benchmark.media:,} media; training asks "
            f"{benchmark.leaked:,} of them too, and shows media of {benchmark.shared:,} others"
        )
    for severity in Severity:
        for line in _format_findings([finding for finding in report.findings if finding.severity is severity]):
            console.info(line)
    counts = [f"{count} {severity}{'s' * (count != 1)}" for severity, count in report.counts().items()]
    console.info(f"{report.run}: {', '.join(counts)}.")


def _split_as_json(split: SplitReport) -> dict[str, Any]:
    return {
        **asdict(split),
        "prompt_tokens": summarize_lengths(split.prompt_tokens) if split.prompt_tokens else None,
        "visual_tokens": summarize_lengths(split.visual_tokens) if split.visual_tokens else None,
        "usable": sum(source.usable for source in split.sources),
    }


def _print_split(name: str, split: SplitReport, limit: int, console: Console) -> None:
    num_rows = sum(source.rows for source in split.sources)
    num_usable = sum(source.usable for source in split.sources)
    console.info(f"{name}: {num_rows:,} rows, {num_usable:,} usable samples, {split.media:,} media")
    sources = [(source.fn, f"{source.rows:,}", f"{source.usable:,}") for source in split.sources]
    console.print_table("", ("source", "rows", "usable"), sources)
    tasks = []
    for task, count in split.tasks.items():
        tasks.append((task, f"{count.samples:,}", ", ".join(count.answer_types), _format_common_answers(count)))
    if tasks:
        console.print_table("", ("task", "samples", "answer type", "most common answers"), tasks)
    if split.prompt_tokens:
        _print_lengths(f"{name}, prompt tokens (the limit is {limit})", split.prompt_tokens, console)
        _print_lengths(f"{name}, visual tokens", split.visual_tokens, console)


def _print_lengths(title: str, values: Sequence[int], console: Console) -> None:
    summary = summarize_lengths(values)
    console.info(
        f"{title}: {summary['min']} to {summary['max']}, median {summary['median']}, 95 % up to {summary['p95']}"
    )
    console.info("".join(f"  {line}\n" for line in text_histogram(values)))


def _format_common_answers(task: TaskCount) -> str:
    listed = "  ".join(f"{answer} x{times}" for answer, times in task.most_common[:_MAX_ANSWERS])
    return listed + (f"  of {task.distinct_answers:,}" if task.distinct_answers > _MAX_ANSWERS else "")


def _format_findings(findings: list[DataFinding]) -> Iterator[str]:
    """Yield lines for findings of one severity: a title for each kind and split, and its first few findings."""
    groups: dict[tuple[str, str], list[DataFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.split), []).append(finding)
    for (_, split), group in groups.items():
        first = group[0]
        yield f"{first.severity}: {split}: {FINDING_TITLES[first.code]} ({len(group):,})"
        for finding in group[:_MAX_LISTED]:
            yield f"  {finding.sample_id}: {finding.message}" if finding.sample_id else f"  {finding.message}"
        if len(group) > _MAX_LISTED:
            yield f"  and {len(group) - _MAX_LISTED:,} more"
        yield ""
