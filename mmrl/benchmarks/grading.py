"""From a response to its verdict: find the answer, compare it strictly, and apply the benchmark's own rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.extraction.extract import ExpectedType, Extraction, ExtractionQuery, extract
from mmrl.benchmarks.extraction.match import LATEX_MARKUP, is_single_number
from mmrl.benchmarks.items import Item, ItemAnswerType, ItemResponse
from mmrl.benchmarks.verdict import MISSING_RULE, ResponseOutcome, Verdict

_EXPECTED_TYPES: Final[Mapping[ItemAnswerType, ExpectedType]] = MappingProxyType(
    {
        "choice": "choice",
        "integer": "number",
        "float": "number",
        "count": "number",
        "list": "list",
        "text": "text",
        "box": "box",
        "boxes": "boxes",
        "point": "point",
    }
)


def extract_answer(item: Item, response: ItemResponse) -> Extraction:
    """Find the answer to an item in a response.

    Where the item's answer is a text that consists of one number, a number is looked for, unless the response gives a
    formula.
    """
    query = ExtractionQuery(
        expected_type=_EXPECTED_TYPES[item.answer_type], question=item.question, options=item.options
    )
    extraction = extract(response.text, query)
    if item.answer_type != "text" or not is_single_number(item.answer):
        return extraction
    if LATEX_MARKUP.search(extraction.value or ""):
        return extraction
    return extract(response.text, replace(query, expected_type="number"))


def grade_response(benchmark: Benchmark, item: Item, response: ItemResponse) -> Verdict:
    """Find the answer in a response and return the verdict on it."""
    return make_verdict(benchmark, item, response, extract_answer(item, response))


def make_verdict(benchmark: Benchmark, item: Item, response: ItemResponse, extraction: Extraction) -> Verdict:
    """Return the verdict on an answer that was found already."""
    strict = benchmark.is_correct(item, response, extraction)
    score = float(strict)
    if benchmark.official_score is not None:
        score = benchmark.official_score(item, response, extraction)
    return Verdict(
        id=item.id,
        response_index=response.response_index,
        cluster=item.cluster,
        outcome=_classify_outcome(strict, response, extraction),
        rule=extraction.rule,
        start=extraction.start,
        end=extraction.end,
        value=extraction.value,
        strict=strict,
        official=score == 1.0,
        score=score,
        subsets=item.subsets,
    )


def missing_verdict(item: Item) -> Verdict:
    """Return the verdict on an item without a response: incorrect, strictly and officially."""
    return Verdict(
        id=item.id,
        cluster=item.cluster,
        outcome=ResponseOutcome.NO_ANSWER,
        rule=MISSING_RULE,
        start=0,
        end=0,
        value=None,
        strict=False,
        official=False,
        score=0.0,
        subsets=item.subsets,
    )


def _classify_outcome(strict: bool, response: ItemResponse, extraction: Extraction) -> ResponseOutcome:
    if extraction.value is not None:
        return ResponseOutcome.CORRECT if strict else ResponseOutcome.INCORRECT
    if not response.finished:
        # A response that was cut off counts as truncated whatever the rules thought of its beginning.
        return ResponseOutcome.TRUNCATED
    return ResponseOutcome(extraction.no_answer_reason)
