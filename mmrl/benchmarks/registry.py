"""The benchmarks there are: how each reads an item, what is due, and its own rule; and the verdict on one response."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mmrl.benchmarks.extraction.extract import Asked, Found, Wants, extract
from mmrl.benchmarks.extraction.match import LATEX, is_figure, right
from mmrl.benchmarks.items import Item, Response, canonical
from mmrl.benchmarks.official import choice, formulas, grounding, mathvista, megabench, reading
from mmrl.benchmarks.verdict import MISSING, Outcome, Verdict
from mmrl.types import UserError

Credit = Callable[[Item, Response, Found], float]

_WANTS: Final[Mapping[str, Wants]] = MappingProxyType(
    {
        **dict.fromkeys(("integer", "float", "count"), "number"),
        **{name: name for name in ("choice", "list", "text", "box", "boxes", "point")},
    }
)


class Bench(NamedTuple):
    """A benchmark: its name, its own rule, and how a row becomes an item.

    `overall` is a number over all items, such as COCO's AP, for benchmarks that have one.
    """

    name: str
    credit: Credit
    item: Callable[[Mapping[str, Any]], Item] = canonical
    overall: tuple[str, Callable[[Sequence[tuple[Item, Response, Found]]], float]] | None = None


def _benches() -> Mapping[str, Bench]:
    rules: Mapping[str, Credit] = {
        "mathverse": choice.mathverse,
        "mathvision": formulas.mathvision,
        "mmmu": choice.mmmu,
        "mmmu_pro": choice.mmmu_pro,
        "emma": formulas.emma,
        "megabench": megabench.megabench,
        "refcoco": grounding.refcoco,
        "screenspot": grounding.screenspot,
        "ocrbench": reading.ocrbench,
        "textvqa": reading.textvqa,
        "docvqa": reading.anls,
        "counting": reading.counting,
        "mvbench": choice.mvbench,
        "video_mme": choice.video_mme,
        "seed_bench_r1": choice.seed_bench_r1,
        "geometry3k": choice.by_rule,
        "canonical": lambda item, response, found: float(right(item, response, found)),
    }
    benches = {name: Bench(name, credit) for name, credit in rules.items()}
    benches["mathvista"] = Bench("mathvista", mathvista.credit, mathvista.item)
    benches["coco"] = Bench("coco", _detected, canonical, ("AP", grounding.average_precision))
    benches["megabench"] = benches["megabench"]._replace(overall=("macro mean over tasks", megabench.macro))
    return MappingProxyType(benches)


def _detected(item: Item, response: Response, found: Found) -> float:
    """Boxes of one picture: whether all are found at IoU 0.5 and none besides; AP is over all pictures."""
    return float(right(item, response, found))


BENCHES: Final[Mapping[str, Bench]] = _benches()
"""Every benchmark, by the name that --bench takes."""


def bench_of(name: str) -> Bench:
    """The benchmark of this name.

    Raises:
        UserError: there is none.
    """
    if name not in BENCHES:
        raise UserError(f"there is no benchmark {name!r}; there are {', '.join(sorted(BENCHES))}")
    return BENCHES[name]


def read(item: Item, response: Response) -> Found:
    """What a response answers to an item; where a text is due that is a number, a number, unless a formula is given."""
    asked = Asked(wants=_WANTS[item.kind], question=item.question, options=item.options)
    found = extract(response.text, asked)
    if item.kind == "text" and is_figure(item.answer) and not LATEX.search(found.value or ""):
        return extract(response.text, replace(asked, wants="number"))
    return found


def judge(bench: Bench, item: Item, response: Response) -> Verdict:
    """The verdict on one response."""
    return decide(bench, item, response, read(item, response))


def decide(bench: Bench, item: Item, response: Response, found: Found) -> Verdict:
    """The verdict on what was found."""
    strict = right(item, response, found)
    score = bench.credit(item, response, found)
    return Verdict(
        id=item.id,
        sample=response.sample,
        cluster=item.cluster,
        outcome=_outcome(strict, response, found),
        rule=found.rule,
        start=found.start,
        end=found.end,
        value=found.value,
        strict=strict,
        compat=score == 1.0,
        score=score,
        groups=item.groups,
    )


def unanswered(item: Item) -> Verdict:
    """The verdict where there is no response: wrong, for both rules."""
    return Verdict(
        id=item.id,
        cluster=item.cluster,
        outcome=Outcome.NO_ANSWER,
        rule=MISSING,
        start=0,
        end=0,
        value=None,
        strict=False,
        compat=False,
        score=0.0,
        groups=item.groups,
    )


def _outcome(strict: bool, response: Response, found: Found) -> Outcome:
    if found.value is not None:
        return Outcome.RIGHT if strict else Outcome.WRONG
    if not response.finished:
        return Outcome.TRUNCATED
    return Outcome(found.why)
