"""How our MathVista verdicts compare with published ones: the metric on stored extractions, and the rules without GPT.

The folder holds items.jsonl.gz, scores_official.json.gz and public/responses_RUN.jsonl.gz with truth.jsonl.gz; each row
of a run has the response, GPT-4's extraction of it, and the official verdict, once as stored in 2023 (`true_false`) and
once by the code at 53d52587 (`true_false_head`).
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from mmrl.benchmarks.items import Item, Response
from mmrl.benchmarks.official.mathvista import SUBSETS, item, prediction
from mmrl.benchmarks.registry import BENCHES, judge
from mmrl.benchmarks.verdict import Verdict, read_rows
from mmrl.types import UserError

EXCLUDED: Final = ("_code", "instruct_blip2")
"""Runs in which GPT-4 did not extract: it simulated programs, or answered in place of an empty response."""
_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")
_OLD_GRADE: Final = "daily life"


class Bar(NamedTuple):
    """What a self-test demands: a share, at least `least`, or at most where `most` says so."""

    name: str
    share: float
    bound: float
    most: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is met."""
        return self.share <= self.bound if self.most else self.share >= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One run; pairs are (equal, of). `false_right` counts what the rules call right and the truth does not."""

    run: str
    excluded: bool
    metric: tuple[int, int]
    head: tuple[int, int]
    cells: tuple[int, int]
    clean: tuple[int, int]
    free: tuple[int, int]
    truth: tuple[int, int]
    false_right: int
    compat: float
    official: float


def parity(folder: Path) -> list[Parity]:
    """Every run of a folder, in alphabetical order.

    Raises:
        UserError: the folder lacks a file.
    """
    if not (folder / "items.jsonl.gz").exists():
        raise UserError(
            f"{folder}: there is no items.jsonl.gz; --data is a folder of MathVista's published responses and verdicts"
        )
    rows = {row["pid"]: row for _, row in read_rows(folder / "items.jsonl.gz")}
    items = {pid: item(row) for pid, row in rows.items()}
    with gzip.open(folder / "scores_official.json.gz", "rt", encoding="utf-8") as file:
        tables = json.load(file)
    truth = {(row["run"], row["pid"]): row["truth"] for _, row in read_rows(folder / "public" / "truth.jsonl.gz")}
    found = []
    for path in sorted((folder / "public").glob("responses_*.jsonl.gz")):
        run = path.name.removeprefix("responses_").removesuffix(".jsonl.gz")
        responses = [row for _, row in read_rows(path)]
        known = {pid: told for (name, pid), told in truth.items() if name == run and told is not None}
        found.append(_compared(run, responses, items, known, _cells(tables[run], responses, rows)))
    return found


def bars(runs: Sequence[Parity]) -> list[Bar]:
    """What the runs together must reach."""
    plain = [run for run in runs if not run.excluded]
    rights = sum(run.truth[1] for run in plain)
    return [
        Bar("metric of 2023 on stored extractions", _share(run.metric for run in runs), 1.0),
        Bar("metric at head on stored extractions", _share(run.head for run in runs), 1.0),
        Bar("cells of published score tables", _share(run.cells for run in runs), 1.0),
        Bar("rules, clean rows of all runs", _share(run.clean for run in plain), 0.97),
        Bar("rules, clean rows of the worst run", min(_share([run.clean]) for run in plain), 0.95),
        Bar("rules, free-form rows", _share(run.free for run in plain), 0.985),
        Bar("rules against the adjudicated truth", _share(run.truth for run in plain), 0.99),
        Bar("right by rule, wrong in truth", sum(run.false_right for run in plain) / max(1, rights), 0.005, most=True),
    ]


def _compared(
    run: str,
    rows: Sequence[Mapping[str, Any]],
    items: Mapping[str, Item],
    truth: Mapping[str, bool],
    cells: tuple[int, int],
) -> Parity:
    excluded = any(part in run for part in EXCLUDED)
    judged = [
        (row, items[row["pid"]], _verdict(items[row["pid"]], row)) for row in rows if row.get("true_false") is not None
    ]
    clean = [(row, verdict) for row, item, verdict in judged if _is_clean(row, item)]
    free = [(row, verdict) for row, item, verdict in judged if not item.options]
    told = [(verdict, truth[verdict.id]) for _, _, verdict in judged if verdict.id in truth]
    return Parity(
        run=run,
        excluded=excluded,
        metric=max(
            _count(_metric(row, item, digits) == (row["prediction"], row["true_false"]) for row, item, _ in judged)
            for digits in (True, False)  # the authors' code changed between runs, never within one
        ),
        head=_count(
            _metric(row, item, False) == (row["prediction_head"], row["true_false_head"]) for row, item, _ in judged
        ),
        cells=cells,
        clean=_count(verdict.compat == row["true_false_head"] for row, verdict in clean),
        free=_count(verdict.compat == row["true_false_head"] for row, verdict in free),
        truth=_count(verdict.strict == right for verdict, right in told),
        false_right=sum(verdict.strict and not right for verdict, right in told),
        compat=sum(verdict.compat for _, _, verdict in judged) / max(1, len(judged)),
        official=sum(row["true_false_head"] for row, _, _ in judged) / max(1, len(judged)),
    )


def _verdict(item: Item, row: Mapping[str, Any]) -> Verdict:
    return judge(BENCHES["mathvista"], item, Response(id=item.id, text=row["response"] or ""))


def _metric(row: Mapping[str, Any], item: Item, whole_digits: bool) -> tuple[str | None, bool]:
    """Prediction and verdict on the stored extraction."""
    said = prediction(
        row["extraction"],
        choices=item.options,
        answer_type=item.kind,
        precision=item.precision,
        whole_digits=whole_digits,
    )
    return said, said == item.answer


def _is_clean(row: Mapping[str, Any], item: Item) -> bool:
    """Whether there is a response, and GPT-4's extraction from it is an answer of the kind that is due."""
    extraction = str(row["extraction"]).strip()
    if not row["response"].strip():
        return False
    if item.options:
        letters = [chr(ord("A") + place) for place in range(len(item.options))]
        bracketed = _LETTER.search(extraction)
        return extraction in (*letters, *item.options) or (bracketed is not None and bracketed[1].upper() in letters)
    if item.kind == "list":
        return extraction.startswith("[")
    return prediction(extraction, choices=None, answer_type=item.kind, precision=item.precision) is not None


def _cells(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], items: Mapping[str, Any]) -> tuple[int, int]:
    """How many cells of a published table the stored verdicts give, with the names and skills of its time."""
    right = {row["pid"]: bool(row.get("true_false")) for row in rows}
    best = (0, 0)
    for skills in ("", "set1", "set2", "set3"):  # the annotation changed, as did the name of a grade
        ours = _table(right, items, skills)
        cells = [(published, ours.get(key)) for key, published in _flat(table)]
        best = max(best, _count(published == mine for published, mine in cells))
    return best


def _table(right: Mapping[str, bool], items: Mapping[str, Any], skills: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Right and asked, by subset and value."""
    asked: Counter[tuple[str, str]] = Counter()
    answered: Counter[tuple[str, str]] = Counter()
    for pid, row in items.items():
        for key in _keys(row, skills):
            asked[key] += 1
            answered[key] += right.get(pid, False)
    return {key: (answered[key], asked[key]) for key in asked}


def _keys(row: Mapping[str, Any], skills: str) -> Iterator[tuple[str, str]]:
    yield "average", ""
    yield from ((name, row[name]) for name in ("question_type", "answer_type"))
    metadata = row["metadata"] | ({"skills": row["skills_old"][skills]} if skills else {})
    for name in SUBSETS:
        value = metadata[name]
        yield from ((name, one) for one in (value if isinstance(value, list) else [value]))


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    for name, values in table.items():
        for value, cell in (("", values),) if name == "average" else values.items():
            renamed = "not applicable" if value == _OLD_GRADE else value
            yield (name, renamed), (cell["correct"], cell["total"])


def _count(equal: Iterable[bool]) -> tuple[int, int]:
    seen = [*equal]
    return sum(seen), len(seen)


def _share(pairs: Iterable[tuple[int, int]]) -> float:
    counts = [*pairs]
    return sum(equal for equal, _ in counts) / max(1, sum(of for _, of in counts))
