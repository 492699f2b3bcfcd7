"""What the verdicts of a run come to: scores with intervals, by subset; what became of responses. Same in, same out."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from mmrl.benchmarks.extraction.numbers import as_number
from mmrl.benchmarks.items import Item, Response
from mmrl.benchmarks.report.stats import bootstrap, maj_at_k, pass_at_k, wilson
from mmrl.benchmarks.verdict import MISSING, SCORER, Outcome, Verdict
from mmrl.utils.files import finite

_SEED: Final = 0
_SHOWN: Final = 4  # decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """A judge's part: how many responses it was asked about, and why it said nothing of some."""

    model: str
    asked: int
    failures: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a report tells of: items by id, responses, a verdict for each and for each item without one.

    `provenance` is told as it is; `made_with` says how the responses were made: the model, the prompt, the law.
    """

    bench: str
    items: Mapping[str, Item]
    responses: Sequence[Response]
    verdicts: Sequence[Verdict]
    missing: Sequence[str] = ()
    overall: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    judging: Judging | None = None


def summarise(run: Run) -> dict[str, Any]:
    """The report, as JSON has it."""
    tokens = [response.tokens for response in run.responses if response.tokens is not None]
    outcomes = Counter(verdict.outcome for verdict in run.verdicts)
    return {
        "bench": run.bench,
        "scorer": SCORER,
        **run.provenance,
        **({"made_with": dict(run.made_with)} if run.made_with else {}),
        "items": len(run.items),
        "responses": len(run.responses),
        "missing": len(run.missing),
        "strict": _clustered([verdict.strict for verdict in run.verdicts], run.verdicts),
        "compat": _clustered([verdict.compat for verdict in run.verdicts], run.verdicts),
        **({"judge": _judge(run.judging, run.verdicts)} if run.judging else {}),
        "score": _rounded(fmean(_by_item([verdict.score for verdict in run.verdicts], run.verdicts).values())),
        "overall": {name: _rounded(value) for name, value in run.overall.items()},
        "outcomes": {str(outcome): outcomes[outcome] for outcome in Outcome},
        "truncated_rate": _rounded(
            sum(not response.finished for response in run.responses) / max(1, len(run.responses))
        ),
        "no_answer_rate": _rounded((outcomes[Outcome.NO_ANSWER] + outcomes[Outcome.REFUSAL]) / len(run.verdicts)),
        "mean_tokens": _rounded(fmean(tokens)) if tokens else None,
        "samples": _samples(run.verdicts),
        "subsets": {name: dict(rows) for name, rows in _subsets(run)},
        "rules": _rules(run.verdicts),
    }


def as_json(report: Mapping[str, Any]) -> str:
    """report.json."""
    return json.dumps(finite(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _judge(judging: Judging, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "model": judging.model,
        "asked": judging.asked,
        "right": sum(verdict.judged is True for verdict in verdicts),
        "failed": len(judging.failures),
        "accuracy": _clustered([verdict.with_judge for verdict in verdicts], verdicts),
    }


def _by_item(values: Sequence[float], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean over an item's responses, by id: one with few of them, or none, counts as much as any other."""
    found: dict[str, list[float]] = defaultdict(list)
    for value, verdict in zip(values, verdicts, strict=True):
        found[verdict.id].append(value)
    return {id: fmean(each) for id, each in found.items()}


def _clustered(values: Sequence[float], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """A mean over items, pictures resampled. Where all are alike that leaves no interval: then Wilson's, of those."""
    of = {verdict.id: verdict.cluster or verdict.id for verdict in verdicts}
    means = _by_item(values, verdicts)
    clusters = [of[id] for id in means]
    interval = bootstrap([*means.values()], clusters, seed=_SEED)
    if interval.low == interval.high:
        count = len({*clusters})
        interval = wilson(count * interval.value, count)
    return {"value": _rounded(interval.value), "low": _rounded(interval.low), "high": _rounded(interval.high)}


def _subsets(run: Run) -> Iterator[tuple[str, Iterator[tuple[str, dict[str, Any]]]]]:
    """Every group and its values, each in alphabetical order."""
    members: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for verdict in run.verdicts:
        for name, values in run.items[verdict.id].groups.items():
            for value in values:
                members[name][value].append(verdict)
    for name in sorted(members):
        yield name, ((value, _row(verdicts)) for value, verdicts in sorted(members[name].items()))


def _row(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    def mean(values: Sequence[float]) -> float:
        return fmean(_by_item(values, verdicts).values())

    count = len({verdict.id for verdict in verdicts})  # several responses to a question do not make it several
    strict = wilson(count * mean([verdict.strict for verdict in verdicts]), count)
    return {
        "n": count,
        "strict": _rounded(strict.value),
        "low": _rounded(strict.low),
        "high": _rounded(strict.high),
        "compat": _rounded(mean([verdict.compat for verdict in verdicts])),
        "score": _rounded(mean([verdict.score for verdict in verdicts])),
    }


def _samples(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """pass@k and maj@k for k = 1, 2, 4, .. up to the samples that every item with a response has; items without one
    count as wrong. Empty for one sample.
    """
    by_item: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in sorted(verdicts, key=lambda verdict: verdict.sample):
        by_item[verdict.id].append(verdict)
    answered = [each for each in by_item.values() if each[0].rule != MISSING]
    most = min(map(len, answered), default=1)
    sizes = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    if most == 1:
        return {}
    return {str(k): {name: _rounded(value / len(by_item)) for name, value in _at(k, answered)} for k in sizes}


def _at(k: int, items: Sequence[Sequence[Verdict]]) -> Iterator[tuple[str, float]]:
    """pass@k and maj@k, summed over items."""
    yield "pass", sum(pass_at_k(sum(one.strict for one in each), len(each), k) for each in items)
    yield "maj", sum(maj_at_k([_vote(one.value) for one in each], [one.strict for one in each], k) for each in items)


def _vote(value: str | None) -> str | float | None:
    """An answer as votes for it are counted: 5, 5.0 and "5 cm" are one, and so are texts of the same words."""
    if value is None:
        return None
    number = as_number(value)
    return " ".join(value.casefold().split()) if number is None else number


def _rules(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """How often each rule decided, and how often what it found was right."""
    counts = Counter(verdict.rule for verdict in verdicts)
    right = Counter(verdict.rule for verdict in verdicts if verdict.strict)
    return {rule: {"n": counts[rule], "strict": _rounded(right[rule] / counts[rule])} for rule in sorted(counts)}


def _rounded(value: float) -> float:
    return round(float(value), _SHOWN)
