"""From responses to verdicts: find the answer, compare it strictly, and apply the benchmark's own rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from mmrl.benchmarks.benchmark import Benchmark, GradedResponse
from mmrl.benchmarks.extraction.extract import ExpectedType, extract
from mmrl.benchmarks.extraction.match import LATEX_MARKUP, is_single_number
from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.items import Item, ItemResponse, missing_ids, read_items, read_responses
from mmrl.benchmarks.report import ScoredRun
from mmrl.benchmarks.verdict import MISSING_RULE, ResponseOutcome, Verdict
from mmrl.types import UserError
from mmrl.utils.digests import file_digest
from mmrl.utils.messages import first_lines


def extract_answer(item: Item, response: ItemResponse) -> Extraction:
    """Find the answer to an item in a response."""
    expected_type: ExpectedType
    match item.answer_type:
        case "integer" | "float" | "count":
            expected_type = "number"
        case other_type:
            expected_type = other_type
    extraction = extract(response.text, expected_type, item.question, item.options)
    # Where the correct text is one number, a number is looked for, unless the response gives a formula.
    if item.answer_type != "text" or not is_single_number(item.answer):
        return extraction
    if LATEX_MARKUP.search(extraction.value or ""):
        return extraction
    return extract(response.text, "number", item.question, item.options)


def grade_response(
    benchmark: Benchmark, item: Item, response: ItemResponse, extraction: Extraction | None = None
) -> Verdict:
    """Return the verdict on a response; `extraction` is the answer in it, if it was found already."""
    if extraction is None:
        extraction = extract_answer(item, response)
    strict = benchmark.is_correct(item, response, extraction)
    if strict not in (True, False):
        raise _wrong_result(benchmark, item, "is_correct", strict, "True or False")
    strict = bool(strict)  # also numpy's own type
    score = benchmark.official_score(item, response, extraction) if benchmark.official_score else strict
    # A mean of several scores may be off by rounding. NaN is in no range.
    if not isinstance(score, Real) or not 0.0 <= round(float(score), 9) <= 1.0:
        raise _wrong_result(benchmark, item, "official_score", score, "a number from 0 to 1")
    score = float(score)
    if extraction.value is not None:
        outcome = ResponseOutcome.CORRECT if strict else ResponseOutcome.INCORRECT
    elif not response.finished:
        # A response that was cut off counts as truncated, whatever reason the rules give for the missing answer.
        outcome = ResponseOutcome.TRUNCATED
    else:
        outcome = ResponseOutcome(extraction.no_answer_reason)
    return Verdict(
        id=item.id,
        response_index=response.response_index,
        cluster=item.cluster,
        outcome=outcome,
        rule=extraction.rule,
        start=extraction.start,
        end=extraction.end,
        value=extraction.value,
        strict=strict,
        official=score == 1.0,
        score=score,
        subsets=item.subsets,
    )


def _wrong_result(benchmark: Benchmark, item: Item, rule: str, value: object, expected: str) -> UserError:
    return UserError(
        f"benchmark {benchmark.name!r}, item {item.id!r}: {rule} returned {value!r:.80}; it must return {expected}"
    )


def missing_verdict(item: Item) -> Verdict:
    """Return the verdict on an item without a response: incorrect, strictly and officially."""
    outcome = ResponseOutcome.NO_ANSWER
    return Verdict(id=item.id, cluster=item.cluster, outcome=outcome, rule=MISSING_RULE, subsets=item.subsets)


def score_files(
    benchmark: Benchmark, items_file: Path, responses_file: Path, *, allow_missing: bool = False
) -> ScoredRun:
    """Score the responses of a file. Items without a response count as incorrect, as do malformed rows if allowed.

    Raises:
        UserError: a file cannot be read, or holds unusable rows.
    """
    items, problems = read_items(items_file, lambda row: benchmark.check_item(benchmark.parse_item(row)))
    # If no row is an item, the file is not of this benchmark, and there is nothing to score.
    if problems and not (allow_missing and len(problems) < len(items)):
        lines = first_lines([*problems.values()])
        remedy = f"{len(problems)} of {len(items)} items are malformed: repair them"
        if len(problems) < len(items):
            remedy += ", or count them as incorrect with --allow-missing"
        raise UserError("\n".join([*lines, remedy]))
    # A malformed row has no answer to compare with: it counts as missing, whatever the response.
    responses = [response for response in read_responses(responses_file, items) if response.id not in problems]
    provenance = {"items_sha256": file_digest(items_file), "responses_sha256": file_digest(responses_file)}
    return replace(score_responses(benchmark, items, responses, provenance), problems=problems)


def score_responses(
    benchmark: Benchmark, items: Mapping[str, Item], responses: Sequence[ItemResponse], provenance: Mapping[str, Any]
) -> ScoredRun:
    """Score responses; an item without one gets a verdict, too. The report repeats `provenance`.

    Verdicts are in the order of the items, and of the responses to each.
    """
    positions = {id: index for index, id in enumerate(items)}

    def position(entry: ItemResponse | Verdict) -> tuple[int, int]:
        return positions[entry.id], entry.response_index

    ordered = sorted(responses, key=position)
    absent = missing_ids(items, responses)
    graded: list[GradedResponse] = []
    verdicts = []
    for response in ordered:
        item = items[response.id]
        extraction = extract_answer(item, response)
        graded.append((item, response, extraction))
        verdicts.append(grade_response(benchmark, item, response, extraction))
    if benchmark.draw_letters is not None:
        drawn = benchmark.draw_letters(graded)
        for index, verdict in enumerate(verdicts):
            if (verdict.id, verdict.response_index) in drawn:
                verdicts[index] = replace(verdict, official=True, score=1.0)
    for id in absent:
        # An overall metric needs missing items, too: COCO's recall counts their boxes.
        silence = ItemResponse(id=id, text="")
        graded.append((items[id], silence, extract_answer(items[id], silence)))
        verdicts.append(missing_verdict(items[id]))
    verdicts.sort(key=position)
    overall_scores = {}
    if benchmark.overall_metric is not None:
        overall_scores[benchmark.overall_metric.name] = benchmark.overall_metric.compute(graded)
    return ScoredRun(
        benchmark=benchmark.name,
        items=items,
        responses=ordered,
        verdicts=verdicts,
        missing_ids=absent,
        overall_scores=overall_scores,
        provenance=provenance,
    )
