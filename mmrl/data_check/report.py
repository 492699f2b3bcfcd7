"""The findings of a data check and their severity, and the report of them, as JSON and as text on the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

from mmrl.config.schema import DataConfig
from mmrl.data_check.lengths import summarize_lengths, text_histogram
from mmrl.log.console import Console
from mmrl.utils.messages import first_lines

SCHEMA_VERSION: Final = 2
"""Version of the JSON; it changes when a key is renamed or removed."""
# Common answers of a task that the console lists.
_MAX_ANSWERS: Final = 4


class Severity(StrEnum):
    """Consequence of a finding for the run."""

    ERROR = "error"  # the run would stop, or its held-out numbers would mean nothing
    WARNING = "warning"  # the run would continue, but perhaps not as its author expects
    NOTE = "note"  # worth knowing


class FindingCode(StrEnum):
    """Kind of a finding, with its title on the console; docs/data.md describes each."""

    console_title: str

    def __new__(cls, code: str, console_title: str) -> Self:
        """Create a member whose value, in the JSON report, is `code`."""
        member = str.__new__(cls, code)
        member._value_, member.console_title = code, console_title
        return member

    SOURCE = "source", "sources that cannot be read"
    MODEL = "model", "prompts cannot be built without the model's processor"
    EMPTY = "empty", "splits without one usable sample"
    TOO_FEW = "too_few", "stages that need more samples a step than there are"
    TASK = "task", "tasks whose validation metric would take the name of another"
    TABLE = "table", "stages that cannot write their samples to a table"
    ROW = "row", "rows that make no sample"
    ID = "id", "ids that are not unique"
    MEDIA = "media", "images and videos that cannot be used"
    REWARD = "reward", "samples on which a reward fails, or that the response format cannot write"
    UNSCORABLE = "unscorable", "samples that a reward cannot score"
    CONDITION = "condition", "conditions that no sample meets, and answers that no reward judges"
    DEMONSTRATION = "demonstration", "samples that a stage cannot imitate"
    REWORDING = "rewording", "samples without the other wording that a rollout step needs"
    TEXT = "text", "text that the model would misread"
    TOO_LONG = "too_long", "prompts that are too long"
    OUTSIDE_IMAGE = "outside_image", "answers outside their image"
    LEAK = "leak", "held-out questions that are trained on"
    SHARED_MEDIA = "shared_media", "held-out media that training shows too, with other questions or slightly changed"
    CONTRADICTION = "contradiction", "questions asked twice with different answers"
    DUPLICATE = "duplicate", "questions asked twice"
    NEAR_DUPLICATE = "near_duplicate", "training images that look like another"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    """One finding of a data check."""

    code: FindingCode
    severity: Severity
    split: str  # train, validation, test or `benchmark NAME`
    sample_id: str  # empty if the finding is about a whole split
    message: str
    other_id: str = ""  # the other sample, if the finding is about two


def severity_of(code: FindingCode, data: DataConfig) -> Severity:
    """Return the severity of a kind of finding in a run with these settings."""
    match code:
        case FindingCode.ROW | FindingCode.MEDIA | FindingCode.UNSCORABLE | FindingCode.TEXT:
            return Severity.ERROR if data.on_bad_sample == "stop" else Severity.WARNING
        case FindingCode.TOO_LONG:
            return Severity.ERROR if data.on_too_long == "stop" else Severity.WARNING
        case FindingCode.OUTSIDE_IMAGE | FindingCode.SHARED_MEDIA | FindingCode.CONTRADICTION:
            return Severity.WARNING
        case FindingCode.CONDITION | FindingCode.DUPLICATE:
            return Severity.WARNING
        case FindingCode.NEAR_DUPLICATE:
            return Severity.NOTE
    return Severity.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCount:
    """Numbers of rows of one source."""

    fn: str  # the dataset function
    rows: int
    usable: int  # rows that made samples without a fault


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCount:
    """The usable samples of one task."""

    samples: int
    answer_types: tuple[str, ...]
    distinct_answers: int  # different answers; 0 if all are boxes or points
    most_common: tuple[tuple[str, int], ...]  # the ten most common, shortened, with their counts; no boxes or points


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """One split of the data."""

    sources: tuple[SourceCount, ...]
    media: int  # different images and videos of usable samples
    tasks: Mapping[str, TaskCount]
    prompt_tokens: tuple[int, ...]  # tokens of each prompt that could be built, including too long ones
    visual_tokens: tuple[int, ...]  # tokens of the images and videos in each of these prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkReport:
    """A benchmark of the config, compared with training."""

    questions: int
    media: int  # different images and videos
    leaked: int  # questions that training asks, too
    shared: int  # other questions with an image or video that training shows, too


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheckReport:
    """The result of a data check."""

    run: str  # name of the run in the config
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
        splits = {}
        for name, split in self.splits.items():
            splits[name] = {
                **asdict(split),
                # The report holds summaries of the lengths; a length for each sample would make it too long.
                "prompt_tokens": summarize_lengths(split.prompt_tokens) if split.prompt_tokens else None,
                "visual_tokens": summarize_lengths(split.visual_tokens) if split.visual_tokens else None,
                "usable": sum(source.usable for source in split.sources),
            }
        return {
            "schema": SCHEMA_VERSION,
            "run": self.run,
            "max_prompt_tokens": self.max_prompt_tokens,
            "counts": {str(severity): count for severity, count in self.counts().items()},
            "splits": splits,
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
        # Findings of one kind and split are under one title, of which only the first few are listed.
        groups: dict[tuple[str, str], list[DataFinding]] = {}
        for finding in report.findings:
            if finding.severity is severity:
                groups.setdefault((finding.code, finding.split), []).append(finding)
        for (_, split_name), group in groups.items():
            console.info(f"{severity}: {split_name}: {group[0].code.console_title} ({len(group):,})")
            found = [f"{item.sample_id}: {item.message}" if item.sample_id else item.message for item in group]
            for line in first_lines(found):
                console.info(line)
            console.info("")
    counts = [f"{count} {severity}{'s' * (count != 1)}" for severity, count in report.counts().items()]
    console.info(f"{report.run}: {', '.join(counts)}.")


def _print_split(name: str, split: SplitReport, limit: int, console: Console) -> None:
    num_rows = sum(source.rows for source in split.sources)
    num_usable = sum(source.usable for source in split.sources)
    console.info(f"{name}: {num_rows:,} rows, {num_usable:,} usable samples, {split.media:,} media")
    sources = [(source.fn, f"{source.rows:,}", f"{source.usable:,}") for source in split.sources]
    console.print_table("", ("source", "rows", "usable"), sources)
    tasks = []
    for task, count in split.tasks.items():
        answers = "  ".join(f"{answer} x{times}" for answer, times in count.most_common[:_MAX_ANSWERS])
        if count.distinct_answers > _MAX_ANSWERS:
            answers += f"  of {count.distinct_answers:,}"
        tasks.append((task, f"{count.samples:,}", ", ".join(count.answer_types), answers))
    if tasks:
        console.print_table("", ("task", "samples", "answer type", "most common answers"), tasks)
    if split.prompt_tokens:
        prompt_title, visual_title = f"{name}, prompt tokens (the limit is {limit})", f"{name}, visual tokens"
        for title, values in ((prompt_title, split.prompt_tokens), (visual_title, split.visual_tokens)):
            summary = summarize_lengths(values)
            shortest, longest, middle = summary["min"], summary["max"], summary["median"]
            console.info(f"{title}: {shortest} to {longest}, median {middle}, 95 % up to {summary['p95']}")
            console.info("".join(f"  {line}\n" for line in text_histogram(values)))
