"""The benchmarks there are: how each reads an item, what is due, and its own rule; and the verdict on one response."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mmrl.benchmarks.extraction.extract import ExpectedType, Extraction, ExtractionQuery, extract
from mmrl.benchmarks.extraction.match import LATEX_MARKUP, is_correct, is_single_number
from mmrl.benchmarks.items import Item, ItemResponse, parse_canonical_item
from mmrl.benchmarks.official import choice, formulas, grounding, mathvista, megabench, reading
from mmrl.benchmarks.verdict import MISSING_RULE, ResponseOutcome, Verdict
from mmrl.types import UserError

OfficialMetric = Callable[[Item, ItemResponse, Extraction], float]

_EXPECTED_TYPES: Final[Mapping[str, ExpectedType]] = MappingProxyType(
    {
        **dict.fromkeys(("integer", "float", "count"), "number"),
        **{name: name for name in ("choice", "list", "text", "box", "boxes", "point")},
    }
)


class Benchmark(NamedTuple):
    """A benchmark: its name, its own rule, and how a row becomes an item.

    `overall` is a number over all items, such as COCO's AP, for benchmarks that have one.
    """

    name: str
    official_score: OfficialMetric
    parse_item: Callable[[Mapping[str, Any]], Item] = parse_canonical_item
    overall_metric: tuple[str, Callable[[Sequence[tuple[Item, ItemResponse, Extraction]]], float]] | None = None


def _build_registry() -> Mapping[str, Benchmark]:
    rules: Mapping[str, OfficialMetric] = {
        "mathverse": choice.score_mathverse,
        "mathvision": formulas.score_mathvision,
        "mmmu": choice.score_mmmu,
        "mmmu_pro": choice.score_mmmu_pro,
        "emma": formulas.score_emma,
        "megabench": megabench.score_megabench,
        "refcoco": grounding.score_refcoco,
        "screenspot": grounding.score_screenspot,
        "ocrbench": reading.score_ocrbench,
        "textvqa": reading.score_textvqa,
        "docvqa": reading.score_docvqa,
        "counting": reading.score_counting,
        "mvbench": choice.score_mvbench,
        "video_mme": choice.score_video_mme,
        "seed_bench_r1": choice.score_seed_bench_r1,
        "geometry3k": choice.score_geometry3k,
        "canonical": lambda item, response, found: float(is_correct(item, response, found)),
    }
    benches = {name: Benchmark(name, credit) for name, credit in rules.items()}
    benches["mathvista"] = Benchmark("mathvista", mathvista.score_mathvista, mathvista.parse_mathvista_item)
    benches["coco"] = Benchmark("coco", _score_coco, parse_canonical_item, ("AP", grounding.average_precision))
    benches["megabench"] = benches["megabench"]._replace(overall_metric=("macro mean over tasks", megabench.macro_mean))
    return MappingProxyType(benches)


def _score_coco(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Boxes of one picture: whether all are found at IoU 0.5 and none besides; AP is over all pictures."""
    return float(is_correct(item, response, extraction))


BENCHMARKS: Final[Mapping[str, Benchmark]] = _build_registry()
"""Every benchmark, by the name that --bench takes."""


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of this name.

    Raises:
        UserError: there is none.
    """
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {name!r}; there are {', '.join(sorted(BENCHMARKS))}")
    return BENCHMARKS[name]


def extract_answer(item: Item, response: ItemResponse) -> Extraction:
    """What a response answers to an item; where a text is due that is a number, a number, unless a formula is given."""
    asked = ExtractionQuery(
        expected_type=_EXPECTED_TYPES[item.answer_type], question=item.question, options=item.options
    )
    found = extract(response.text, asked)
    if item.answer_type == "text" and is_single_number(item.answer) and not LATEX_MARKUP.search(found.value or ""):
        return extract(response.text, replace(asked, expected_type="number"))
    return found


def grade_response(benchmark: Benchmark, item: Item, response: ItemResponse) -> Verdict:
    """The verdict on one response."""
    return make_verdict(benchmark, item, response, extract_answer(item, response))


def make_verdict(benchmark: Benchmark, item: Item, response: ItemResponse, extraction: Extraction) -> Verdict:
    """The verdict on what was found."""
    strict = is_correct(item, response, extraction)
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
    """The verdict where there is no response: wrong, for both rules."""
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
        return ResponseOutcome.RIGHT if strict else ResponseOutcome.WRONG
    if not response.finished:
        return ResponseOutcome.TRUNCATED
    return ResponseOutcome(extraction.no_answer_reason)
