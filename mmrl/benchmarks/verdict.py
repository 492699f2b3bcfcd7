"""A verdict on one response: what it answers, where, by which rule, and whether that is right."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from mmrl.types import UserError
from mmrl.utils.files import json_line

SCORER_VERSION: Final = "2"
MISSING_RULE: Final = "missing"
"""The rule of a verdict on an item without a response."""
"""Version of the rules; it changes whenever a verdict may."""
_EXCERPT_CHARS: Final = 120


class ResponseOutcome(StrEnum):
    """What became of a response. All but `right` count as wrong."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    REFUSAL = "refusal"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`start` and `end` delimit in the response what the rule read; `value` is what it read there.

    `strict`: a careful reader calls it right. `compat`: the official rule gives full credit; `score` is its credit, in
    [0, 1], which some benchmarks grade. Questions of one `cluster` share their picture; `groups` are the subsets they
    are of. `judged` is what a judge says where no rule found an answer, None where none was asked or could tell.
    """

    id: str
    outcome: ResponseOutcome
    rule: str
    start: int
    end: int
    value: str | None
    strict: bool
    official: bool
    score: float
    response_index: int = 0
    cluster: str = ""
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    judge_correct: bool | None = None

    @property
    def correct_with_judge(self) -> bool:
        """Right by rule, or by the judge where the rules abstain."""
        return self.strict or self.judge_correct is True

    def to_row(self, response: str) -> dict[str, Any]:
        """The row of verdicts.jsonl, with the text that the rule read."""
        return {
            "pid": self.id,
            "sample": self.response_index,
            "strict": self.strict,
            "compat": self.official,
            "score": self.score,
            "class": str(self.outcome),
            "rule": self.rule,
            "value": None if self.value is None else self.value[:_EXCERPT_CHARS],
            "start": self.start,
            "end": self.end,
            "text": response[self.start : min(self.end, self.start + _EXCERPT_CHARS)],
            "cluster": self.cluster,
            "groups": {name: list(values) for name, values in self.subsets.items()},
            "judged": self.judge_correct,
            "scorer": SCORER_VERSION,
        }


def parse_verdict(row: Mapping[str, Any]) -> Verdict:
    """A verdict read back.

    Raises:
        ValueError: a column is missing or of the wrong type.
    """
    try:
        verdict = Verdict(
            id=row["pid"],
            response_index=row["sample"],
            outcome=ResponseOutcome(row["class"]),
            rule=row["rule"],
            start=row["start"],
            end=row["end"],
            value=row["value"],
            strict=row["strict"],
            official=row["compat"],
            score=float(row["score"]),
            cluster=row["cluster"],
            subsets={name: tuple(values) for name, values in row["groups"].items()},
            judge_correct=row["judged"],
        )
    except KeyError as error:
        raise ValueError(f"has no column {error}; verdicts are written by `mmrl eval score`") from None
    except AttributeError:
        raise ValueError(f"groups are {row['groups']!r:.40}, not an object") from None
    if not (isinstance(verdict.strict, bool) and isinstance(verdict.official, bool) and isinstance(verdict.id, str)):
        raise ValueError("pid must be text, strict and compat true or false")
    return verdict


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line of a .jsonl or .jsonl.gz file; blank lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is no JSON object; the message names both.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parse_row(path, number, line)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}; give a JSONL file, gzipped if it ends in .gz") from error


def _parse_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: one JSON object per line is expected, got {line.strip()[:60]!r}")
    return row


def read_verdicts(path: Path) -> list[Verdict]:
    """The verdicts of a file written by `mmrl eval`, or of the folder it wrote.

    Raises:
        UserError: no such file, or a row is no verdict.
    """
    file = path / "verdicts.jsonl" if path.is_dir() else path
    verdicts = []
    for number, row in read_rows(file):
        try:
            verdicts.append(parse_verdict(row))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file}:{number}: {error}") from error
    return verdicts


def verdict_lines(verdicts: Iterable[Verdict], responses: Mapping[tuple[str, int], str]) -> str:
    """verdicts.jsonl, one line each; `responses` by id and sample."""
    return "".join(
        json_line(verdict.to_row(responses.get((verdict.id, verdict.response_index), ""))) for verdict in verdicts
    )
