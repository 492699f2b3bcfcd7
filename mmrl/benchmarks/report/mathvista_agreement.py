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

from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.official.mathvista import SUBSET_COLUMNS, normalize_extraction, parse_mathvista_item
from mmrl.benchmarks.registry import BENCHMARKS, grade_response
from mmrl.benchmarks.verdict import Verdict, read_rows
from mmrl.types import UserError

EXCLUDED_RUNS: Final = ("_code", "instruct_blip2")
"""Runs in which GPT-4 did not extract: it simulated programs, or answered in place of an empty response."""
_BRACKETED_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")
_FORMER_GRADE_NAME: Final = "daily life"


class AgreementThreshold(NamedTuple):
    """What a self-test demands: a share, at least `least`, or at most where `most` says so."""

    name: str
    value: float
    bound: float
    is_upper_bound: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is met."""
        return self.value <= self.bound if self.is_upper_bound else self.value >= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgreement:
    """One run; pairs are (equal, of). `false_right` counts what the rules call right and the truth does not."""

    run: str
    excluded: bool
    metric_2023: tuple[int, int]
    metric_head: tuple[int, int]
    table_cells: tuple[int, int]
    clean_rows: tuple[int, int]
    free_form_rows: tuple[int, int]
    adjudicated_rows: tuple[int, int]
    false_positives: int
    our_accuracy: float
    published_accuracy: float


def measure_agreement(folder: Path) -> list[RunAgreement]:
    """Every run of a folder, in alphabetical order.

    Raises:
        UserError: the folder lacks a file.
    """
    if not (folder / "items.jsonl.gz").exists():
        raise UserError(
            f"{folder}: there is no items.jsonl.gz; --data is a folder of MathVista's published responses and verdicts"
        )
    rows = {row["pid"]: row for _, row in read_rows(folder / "items.jsonl.gz")}
    items = {pid: parse_mathvista_item(row) for pid, row in rows.items()}
    with gzip.open(folder / "scores_official.json.gz", "rt", encoding="utf-8") as file:
        tables = json.load(file)
    truth = {(row["run"], row["pid"]): row["truth"] for _, row in read_rows(folder / "public" / "truth.jsonl.gz")}
    found = []
    for path in sorted((folder / "public").glob("responses_*.jsonl.gz")):
        run = path.name.removeprefix("responses_").removesuffix(".jsonl.gz")
        responses = [row for _, row in read_rows(path)]
        known = {pid: told for (name, pid), told in truth.items() if name == run and told is not None}
        found.append(_compare_run(run, responses, items, known, _count_table_cells(tables[run], responses, rows)))
    return found


def agreement_thresholds(runs: Sequence[RunAgreement]) -> list[AgreementThreshold]:
    """What the runs together must reach."""
    plain = [run for run in runs if not run.excluded]
    rights = sum(run.adjudicated_rows[1] for run in plain)
    return [
        AgreementThreshold("metric of 2023 on stored extractions", _equal_share(run.metric_2023 for run in runs), 1.0),
        AgreementThreshold("metric at head on stored extractions", _equal_share(run.metric_head for run in runs), 1.0),
        AgreementThreshold("cells of published score tables", _equal_share(run.table_cells for run in runs), 1.0),
        AgreementThreshold("rules, clean rows of all runs", _equal_share(run.clean_rows for run in plain), 0.97),
        AgreementThreshold(
            "rules, clean rows of the worst run", min(_equal_share([run.clean_rows]) for run in plain), 0.95
        ),
        AgreementThreshold("rules, free-form rows", _equal_share(run.free_form_rows for run in plain), 0.985),
        AgreementThreshold(
            "rules against the adjudicated truth", _equal_share(run.adjudicated_rows for run in plain), 0.99
        ),
        AgreementThreshold(
            "right by rule, wrong in truth",
            sum(run.false_positives for run in plain) / max(1, rights),
            0.005,
            is_upper_bound=True,
        ),
    ]


def _compare_run(
    run: str,
    rows: Sequence[Mapping[str, Any]],
    items: Mapping[str, Item],
    truth: Mapping[str, bool],
    cells: tuple[int, int],
) -> RunAgreement:
    excluded = any(part in run for part in EXCLUDED_RUNS)
    judged = [
        (row, items[row["pid"]], _grade_row(items[row["pid"]], row))
        for row in rows
        if row.get("true_false") is not None
    ]
    clean = [(row, verdict) for row, item, verdict in judged if _has_clean_extraction(row, item)]
    free = [(row, verdict) for row, item, verdict in judged if not item.options]
    told = [(verdict, truth[verdict.id]) for _, _, verdict in judged if verdict.id in truth]
    return RunAgreement(
        run=run,
        excluded=excluded,
        metric_2023=max(
            _count_equal(
                _normalize_stored_extraction(row, item, digits) == (row["prediction"], row["true_false"])
                for row, item, _ in judged
            )
            for digits in (True, False)  # the authors' code changed between runs, never within one
        ),
        metric_head=_count_equal(
            _normalize_stored_extraction(row, item, False) == (row["prediction_head"], row["true_false_head"])
            for row, item, _ in judged
        ),
        table_cells=cells,
        clean_rows=_count_equal(verdict.official == row["true_false_head"] for row, verdict in clean),
        free_form_rows=_count_equal(verdict.official == row["true_false_head"] for row, verdict in free),
        adjudicated_rows=_count_equal(verdict.strict == right for verdict, right in told),
        false_positives=sum(verdict.strict and not right for verdict, right in told),
        our_accuracy=sum(verdict.official for _, _, verdict in judged) / max(1, len(judged)),
        published_accuracy=sum(row["true_false_head"] for row, _, _ in judged) / max(1, len(judged)),
    )


def _grade_row(item: Item, row: Mapping[str, Any]) -> Verdict:
    return grade_response(BENCHMARKS["mathvista"], item, ItemResponse(id=item.id, text=row["response"] or ""))


def _normalize_stored_extraction(row: Mapping[str, Any], item: Item, digits_only: bool) -> tuple[str | None, bool]:
    """Prediction and verdict on the stored extraction."""
    said = normalize_extraction(
        row["extraction"],
        choices=item.options,
        answer_type=item.answer_type,
        precision=item.precision,
        digits_only=digits_only,
    )
    return said, said == item.answer


def _has_clean_extraction(row: Mapping[str, Any], item: Item) -> bool:
    """Whether there is a response, and GPT-4's extraction from it is an answer of the kind that is due."""
    extraction = str(row["extraction"]).strip()
    if not row["response"].strip():
        return False
    if item.options:
        letters = [chr(ord("A") + place) for place in range(len(item.options))]
        bracketed = _BRACKETED_LETTER.search(extraction)
        return extraction in (*letters, *item.options) or (bracketed is not None and bracketed[1].upper() in letters)
    if item.answer_type == "list":
        return extraction.startswith("[")
    return (
        normalize_extraction(extraction, choices=None, answer_type=item.answer_type, precision=item.precision)
        is not None
    )


def _count_table_cells(
    table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], items: Mapping[str, Any]
) -> tuple[int, int]:
    """How many cells of a published table the stored verdicts give, with the names and skills of its time."""
    right = {row["pid"]: bool(row.get("true_false")) for row in rows}
    best = (0, 0)
    for skills in ("", "set1", "set2", "set3"):  # the annotation changed, as did the name of a grade
        ours = _count_correct(right, items, skills)
        cells = [(published, ours.get(key)) for key, published in _flatten_table(table)]
        best = max(best, _count_equal(published == mine for published, mine in cells))
    return best


def _count_correct(
    correct: Mapping[str, bool], items: Mapping[str, Any], skills: str
) -> dict[tuple[str, str], tuple[int, int]]:
    """Right and asked, by subset and value."""
    asked: Counter[tuple[str, str]] = Counter()
    answered: Counter[tuple[str, str]] = Counter()
    for pid, row in items.items():
        for key in _table_keys(row, skills):
            asked[key] += 1
            answered[key] += correct.get(pid, False)
    return {key: (answered[key], asked[key]) for key in asked}


def _table_keys(row: Mapping[str, Any], skills: str) -> Iterator[tuple[str, str]]:
    yield "average", ""
    yield from ((name, row[name]) for name in ("question_type", "answer_type"))
    metadata = row["metadata"] | ({"skills": row["skills_old"][skills]} if skills else {})
    for name in SUBSET_COLUMNS:
        value = metadata[name]
        yield from ((name, one) for one in (value if isinstance(value, list) else [value]))


def _flatten_table(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    for name, values in table.items():
        for value, cell in (("", values),) if name == "average" else values.items():
            renamed = "not applicable" if value == _FORMER_GRADE_NAME else value
            yield (name, renamed), (cell["correct"], cell["total"])


def _count_equal(equal: Iterable[bool]) -> tuple[int, int]:
    seen = [*equal]
    return sum(seen), len(seen)


def _equal_share(pairs: Iterable[tuple[int, int]]) -> float:
    counts = [*pairs]
    return sum(equal for equal, _ in counts) / max(1, sum(of for _, of in counts))
