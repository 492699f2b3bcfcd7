"""Verdicts on single responses, and the JSONL files that hold them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from mmrl.types import UserError

SCORER_VERSION: Final = "5"
"""Version of the extraction and scoring rules; increase it whenever any verdict may change."""
MISSING_RULE: Final = "missing"
"""Rule named by the verdict on an item without a response."""
_EXCERPT_CHARS: Final = 120  # characters of answers and texts that a row of verdicts.jsonl repeats


class ResponseOutcome(StrEnum):
    """How a response ended. All but `correct` count as incorrect."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"  # no rule found an answer
    REFUSAL = "refusal"  # the response declines to answer
    TRUNCATED = "truncated"  # the response was cut off before it gave an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one response."""

    id: str  # id of the item
    outcome: ResponseOutcome  # by the strict verdict
    rule: str  # extraction rule that found the answer
    start: int = 0  # first character of the answer in the response
    end: int = 0  # character after the answer
    value: str | None = None  # the answer found; None when there is none
    strict: bool = False  # True when a careful reader would call the answer correct
    official: bool = False  # True when the benchmark's own rule gives full marks
    score: float = 0.0  # score by the benchmark's own rule, in [0, 1]
    response_index: int = 0  # number of the response among those to the same item, from 0
    cluster: str = ""  # items of one cluster share their image, so that intervals resample them together
    # Subsets that the item belongs to, by the column that makes them.
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Verdict of a language model where no rule found an answer; None when it was not asked or did not say.
    judge_correct: bool | None = None
    scorer: str = SCORER_VERSION  # version of the rules that gave the verdict

    @property
    def correct_with_judge(self) -> bool:
        """True when the rules, or the judge where they found nothing, call the answer correct."""
        return self.strict or self.judge_correct is True

    def to_row(self, response: str) -> dict[str, Any]:
        """Return the row of verdicts.jsonl, which quotes the text that the rule read."""
        return {
            "pid": self.id,
            "sample": self.response_index,
            "strict": self.strict,
            "official": self.official,
            "score": self.score,
            "outcome": str(self.outcome),
            "rule": self.rule,
            "value": None if self.value is None else self.value[:_EXCERPT_CHARS],
            "start": self.start,
            "end": self.end,
            "text": response[self.start : min(self.end, self.start + _EXCERPT_CHARS)],
            "cluster": self.cluster,
            "subsets": {name: list(values) for name, values in self.subsets.items()},
            "judge_correct": self.judge_correct,
            "scorer": self.scorer,
        }


def parse_verdict(row: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a row of verdicts.jsonl.

    Raises:
        ValueError: a column is missing or of the wrong type.
    """
    try:
        verdict = Verdict(
            id=row["pid"],
            response_index=row["sample"],
            outcome=ResponseOutcome(row["outcome"]),
            rule=row["rule"],
            start=row["start"],
            end=row["end"],
            value=row["value"],
            strict=row["strict"],
            official=row["official"],
            score=float(row["score"]),
            cluster=row["cluster"],
            subsets={name: tuple(values) for name, values in row["subsets"].items()},
            judge_correct=row["judge_correct"],
            scorer=str(row["scorer"]),
        )
    except KeyError as error:
        raise ValueError(f"has no column {error}; verdicts are written by `mmrl eval score`") from None
    except AttributeError:
        raise ValueError(f"subsets are {row['subsets']!r:.40}, not an object") from None
    if not (isinstance(verdict.strict, bool) and isinstance(verdict.official, bool) and isinstance(verdict.id, str)):
        raise ValueError("pid must be text, strict and official true or false")
    return verdict


def read_verdicts(path: Path) -> list[Verdict]:
    """Read a verdicts.jsonl, or the one in the folder `path`.

    Raises:
        UserError: there is no such file, or a row is not a verdict.
    """
    file = path / "verdicts.jsonl" if path.is_dir() else path
    verdicts = []
    for number, row in read_rows(file):
        try:
            verdicts.append(parse_verdict(row))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file}:{number}: {error}") from error
    return verdicts


def mean_by_item(verdicts: Sequence[Verdict], field_name: str) -> dict[str, float]:
    """Return a field's mean over each item's responses: every item counts once, however many responses it has."""
    by_item: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        by_item[verdict.id].append(getattr(verdict, field_name))
    return {id: fmean(item_values) for id, item_values in by_item.items()}


def cluster_by_item(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Return the cluster of each item; an item without one is its own."""
    return {verdict.id: verdict.cluster or verdict.id for verdict in verdicts}


def group_by_subset(verdicts: Sequence[Verdict]) -> dict[str, dict[str, list[Verdict]]]:
    """Return the verdicts in each subset, by its column and value, both in alphabetical order."""
    members: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for verdict in verdicts:
        for column, values in verdict.subsets.items():
            for value in {*values}:
                members[column][value].append(verdict)
    return {column: dict(sorted(members[column].items())) for column in sorted(members)}


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of every line of a .jsonl or .jsonl.gz file; blank lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    open_binary = gzip.open if path.suffix == ".gz" else open
    try:
        with open_binary(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    # `utf-8-sig` skips the mark that some editors put before the first line.
                    row = json.loads(line.decode("utf-8-sig"))
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}:{number}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise UserError(f"{path}:{number}: one JSON object per line is expected, got {json.dumps(row):.60}")
                yield number, row
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {reason}; give a JSONL file, gzipped if it ends in .gz") from error
