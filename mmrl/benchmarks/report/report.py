"""What the verdicts of a run come to: scores with intervals, by subset; what became of responses. Same in, same out."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from mmrl.benchmarks.extraction.numbers import parse_single_number
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.report.stats import cluster_bootstrap, maj_at_k, pass_at_k, wilson_interval
from mmrl.benchmarks.verdict import MISSING_RULE, SCORER_VERSION, ResponseOutcome, Verdict
from mmrl.utils.files import replace_nonfinite

_BOOTSTRAP_SEED: Final = 0
_DECIMALS: Final = 4  # decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSummary:
    """A judge's part: how many responses it was asked about, and why it said nothing of some."""

    model: str
    num_asked: int
    failures: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun:
    """Everything a report tells of: items by id, responses, a verdict for each and for each item without one.

    `provenance` is told as it is; `made_with` says how the responses were made: the model, the prompt, the law.
    """

    benchmark: str
    items: Mapping[str, Item]
    responses: Sequence[ItemResponse]
    verdicts: Sequence[Verdict]
    missing_ids: Sequence[str] = ()
    overall_scores: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    generation_settings: Mapping[str, Any] = field(default_factory=dict)
    judge_summary: JudgeSummary | None = None


def build_report(run: ScoredRun) -> dict[str, Any]:
    """The report, as JSON has it."""
    tokens = [response.num_tokens for response in run.responses if response.num_tokens is not None]
    outcomes = Counter(verdict.outcome for verdict in run.verdicts)
    return {
        "bench": run.benchmark,
        "scorer": SCORER_VERSION,
        **run.provenance,
        **({"made_with": dict(run.generation_settings)} if run.generation_settings else {}),
        "items": len(run.items),
        "responses": len(run.responses),
        "missing": len(run.missing_ids),
        "strict": _clustered_mean([verdict.strict for verdict in run.verdicts], run.verdicts),
        "compat": _clustered_mean([verdict.official for verdict in run.verdicts], run.verdicts),
        **({"judge": _judge_section(run.judge_summary, run.verdicts)} if run.judge_summary else {}),
        "score": _round(fmean(_mean_by_item([verdict.score for verdict in run.verdicts], run.verdicts).values())),
        "overall": {name: _round(value) for name, value in run.overall_scores.items()},
        "outcomes": {str(outcome): outcomes[outcome] for outcome in ResponseOutcome},
        "truncated_rate": _round(sum(not response.finished for response in run.responses) / max(1, len(run.responses))),
        "no_answer_rate": _round(
            (outcomes[ResponseOutcome.NO_ANSWER] + outcomes[ResponseOutcome.REFUSAL]) / len(run.verdicts)
        ),
        "mean_tokens": _round(fmean(tokens)) if tokens else None,
        "samples": _pass_and_majority(run.verdicts),
        "subsets": {name: dict(rows) for name, rows in _subset_rows(run)},
        "rules": _rule_counts(run.verdicts),
    }


def report_json(report: Mapping[str, Any]) -> str:
    """report.json."""
    return json.dumps(replace_nonfinite(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _judge_section(summary: JudgeSummary, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "model": summary.model,
        "asked": summary.num_asked,
        "right": sum(verdict.judge_correct is True for verdict in verdicts),
        "failed": len(summary.failures),
        "accuracy": _clustered_mean([verdict.correct_with_judge for verdict in verdicts], verdicts),
    }


def _mean_by_item(values: Sequence[float], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean over an item's responses, by id: one with few of them, or none, counts as much as any other."""
    found: dict[str, list[float]] = defaultdict(list)
    for value, verdict in zip(values, verdicts, strict=True):
        found[verdict.id].append(value)
    return {id: fmean(each) for id, each in found.items()}


def _clustered_mean(values: Sequence[float], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """A mean over items, pictures resampled. Where all are alike that leaves no interval: then Wilson's, of those."""
    of = {verdict.id: verdict.cluster or verdict.id for verdict in verdicts}
    means = _mean_by_item(values, verdicts)
    clusters = [of[id] for id in means]
    interval = cluster_bootstrap([*means.values()], clusters, seed=_BOOTSTRAP_SEED)
    if interval.low == interval.high:
        count = len({*clusters})
        interval = wilson_interval(count * interval.value, count)
    return {"value": _round(interval.value), "low": _round(interval.low), "high": _round(interval.high)}


def _subset_rows(run: ScoredRun) -> Iterator[tuple[str, Iterator[tuple[str, dict[str, Any]]]]]:
    """Every group and its values, each in alphabetical order."""
    members: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for verdict in run.verdicts:
        for name, values in run.items[verdict.id].subsets.items():
            for value in values:
                members[name][value].append(verdict)
    for name in sorted(members):
        yield name, ((value, _subset_row(verdicts)) for value, verdicts in sorted(members[name].items()))


def _subset_row(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    def mean(values: Sequence[float]) -> float:
        return fmean(_mean_by_item(values, verdicts).values())

    count = len({verdict.id for verdict in verdicts})  # several responses to a question do not make it several
    strict = wilson_interval(count * mean([verdict.strict for verdict in verdicts]), count)
    return {
        "n": count,
        "strict": _round(strict.value),
        "low": _round(strict.low),
        "high": _round(strict.high),
        "compat": _round(mean([verdict.official for verdict in verdicts])),
        "score": _round(mean([verdict.score for verdict in verdicts])),
    }


def _pass_and_majority(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """pass@k and maj@k for k = 1, 2, 4, .. up to the samples that every item with a response has; items without one
    count as wrong. Empty for one sample.
    """
    by_item: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in sorted(verdicts, key=lambda verdict: verdict.response_index):
        by_item[verdict.id].append(verdict)
    answered = [each for each in by_item.values() if each[0].rule != MISSING_RULE]
    most = min(map(len, answered), default=1)
    sizes = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    if most == 1:
        return {}
    return {str(k): {name: _round(value / len(by_item)) for name, value in _sum_at_k(k, answered)} for k in sizes}


def _sum_at_k(k: int, items: Sequence[Sequence[Verdict]]) -> Iterator[tuple[str, float]]:
    """pass@k and maj@k, summed over items."""
    yield "pass", sum(pass_at_k(sum(one.strict for one in each), len(each), k) for each in items)
    yield (
        "maj",
        sum(maj_at_k([_normalize_vote(one.value) for one in each], [one.strict for one in each], k) for each in items),
    )


def _normalize_vote(value: str | None) -> str | float | None:
    """An answer as votes for it are counted: 5, 5.0 and "5 cm" are one, and so are texts of the same words."""
    if value is None:
        return None
    number = parse_single_number(value)
    return " ".join(value.casefold().split()) if number is None else number


def _rule_counts(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """How often each rule decided, and how often what it found was right."""
    counts = Counter(verdict.rule for verdict in verdicts)
    right = Counter(verdict.rule for verdict in verdicts if verdict.strict)
    return {rule: {"n": counts[rule], "strict": _round(right[rule] / counts[rule])} for rule in sorted(counts)}


def _round(value: float) -> float:
    return round(float(value), _DECIMALS)
