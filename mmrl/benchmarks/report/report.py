"""Report on a scored run: accuracies with intervals, outcomes, subsets, pass@k. Equal verdicts give equal bytes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean
from typing import Any, Final

from mmrl.benchmarks.extraction.numbers import parse_single_number
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.verdict import MISSING_RULE, SCORER_VERSION, ResponseOutcome, Verdict
from mmrl.utils.files import replace_nonfinite
from mmrl.utils.stats import cluster_bootstrap, maj_at_k, pass_at_k, wilson_interval

_BOOTSTRAP_SEED: Final = 0
_DECIMALS: Final = 4
"""Decimals of every share in a report."""

_Column = Callable[[Verdict], float]
_STRICT: Final[_Column] = attrgetter("strict")
_OFFICIAL: Final[_Column] = attrgetter("official")
_SCORE: Final[_Column] = attrgetter("score")
_CORRECT_WITH_JUDGE: Final[_Column] = attrgetter("correct_with_judge")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSummary:
    """Work of a language model that judged responses."""

    model: str
    """Name of the model."""
    num_asked: int
    """Responses it was asked about."""
    failures: Sequence[str] = ()
    """Reasons why it gave no verdict, one for each response without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun:
    """Everything that a report is made of."""

    benchmark: str
    """Name of the benchmark."""
    items: Mapping[str, Item]
    """Items by id."""
    responses: Sequence[ItemResponse]
    """All responses."""
    verdicts: Sequence[Verdict]
    """One for each response, and for each item without any."""
    missing_ids: Sequence[str] = ()
    """Ids of items without a response."""
    overall_scores: Mapping[str, float] = field(default_factory=dict)
    """Values of the benchmark's overall metric, by its name."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the input, such as digests of files; the report repeats them."""
    generation_settings: Mapping[str, Any] = field(default_factory=dict)
    """Model, prompt and sampling parameters that made the responses; empty when they were made elsewhere."""
    judge_summary: JudgeSummary | None = None
    """None when no judge was asked."""


def build_report(run: ScoredRun) -> dict[str, Any]:
    """Return the report as a JSON object; see docs/evaluation.md for its keys."""
    verdicts = run.verdicts
    token_counts = [response.num_tokens for response in run.responses if response.num_tokens is not None]
    num_truncated = sum(not response.finished for response in run.responses)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    num_without_answer = outcomes[ResponseOutcome.NO_ANSWER] + outcomes[ResponseOutcome.REFUSAL]
    report: dict[str, Any] = {"benchmark": run.benchmark, "scorer": SCORER_VERSION, **run.provenance}
    if run.generation_settings:
        report["generation"] = dict(run.generation_settings)
    report["items"] = len(run.items)
    report["responses"] = len(run.responses)
    report["missing"] = len(run.missing_ids)
    report["strict"] = _clustered_mean(verdicts, _STRICT)
    report["official"] = _clustered_mean(verdicts, _OFFICIAL)
    if run.judge_summary:
        report["judge"] = _judge_section(run.judge_summary, verdicts)
    report["score"] = _round(_mean_over_items(verdicts, _SCORE))
    report["overall"] = {name: _round(value) for name, value in run.overall_scores.items()}
    report["outcomes"] = {str(outcome): outcomes[outcome] for outcome in ResponseOutcome}
    report["truncated_rate"] = _round(num_truncated / max(1, len(run.responses)))
    report["no_answer_rate"] = _round(num_without_answer / len(verdicts))
    report["mean_tokens"] = _round(fmean(token_counts)) if token_counts else None
    report["samples"] = _pass_and_majority(verdicts)
    report["subsets"] = _subset_section(run)
    report["rules"] = _rule_section(verdicts)
    return report


def report_json(report: Mapping[str, Any]) -> str:
    """Return the text of report.json."""
    return json.dumps(replace_nonfinite(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _judge_section(summary: JudgeSummary, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "model": summary.model,
        "asked": summary.num_asked,
        "correct": sum(verdict.judge_correct is True for verdict in verdicts),
        "failed": len(summary.failures),
        "accuracy": _clustered_mean(verdicts, _CORRECT_WITH_JUDGE),
    }


def _mean_by_item(verdicts: Sequence[Verdict], column: _Column) -> dict[str, float]:
    """Return the mean over each item's responses, so that items count alike however many responses they have."""
    by_item: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        by_item[verdict.id].append(column(verdict))
    return {id: fmean(item_values) for id, item_values in by_item.items()}


def _mean_over_items(verdicts: Sequence[Verdict], column: _Column) -> float:
    return fmean(_mean_by_item(verdicts, column).values())


def _clustered_mean(verdicts: Sequence[Verdict], column: _Column) -> dict[str, float]:
    """Return the mean over items with an interval that resamples clusters."""
    cluster_of = {}
    for verdict in verdicts:
        cluster_of[verdict.id] = verdict.cluster or verdict.id
    means = _mean_by_item(verdicts, column)
    clusters = [cluster_of[id] for id in means]
    interval = cluster_bootstrap([*means.values()], clusters, seed=_BOOTSTRAP_SEED)
    if interval.low == interval.high:
        # Where all clusters are alike, resampling gives no width, and Wilson's interval does.
        num_clusters = len({*clusters})
        interval = wilson_interval(num_clusters * interval.value, num_clusters)
    return {"value": _round(interval.value), "low": _round(interval.low), "high": _round(interval.high)}


def _subset_section(run: ScoredRun) -> dict[str, dict[str, Any]]:
    """Return a row for each value of each subset column, both in alphabetical order."""
    members: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for verdict in run.verdicts:
        for column, values in run.items[verdict.id].subsets.items():
            for value in values:
                members[column][value].append(verdict)
    section = {}
    for column in sorted(members):
        section[column] = {value: _subset_row(verdicts) for value, verdicts in sorted(members[column].items())}
    return section


def _subset_row(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    num_items = len({verdict.id for verdict in verdicts})
    # Wilson's interval counts items: several responses to one question are not several questions.
    strict = wilson_interval(num_items * _mean_over_items(verdicts, _STRICT), num_items)
    return {
        "n": num_items,
        "strict": _round(strict.value),
        "low": _round(strict.low),
        "high": _round(strict.high),
        "official": _round(_mean_over_items(verdicts, _OFFICIAL)),
        "score": _round(_mean_over_items(verdicts, _SCORE)),
    }


def _pass_and_majority(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Return pass@k and maj@k for k = 1, 2, 4, ... up to the responses that every answered item has.

    Items without a response count as incorrect. Empty when some item has one response only.
    """
    by_item: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in sorted(verdicts, key=lambda verdict: verdict.response_index):
        by_item[verdict.id].append(verdict)
    answered = [item_verdicts for item_verdicts in by_item.values() if item_verdicts[0].rule != MISSING_RULE]
    max_k = min(map(len, answered), default=1)
    if max_k == 1:
        return {}
    powers = [2**exponent for exponent in range(max_k.bit_length())]
    rows = {}
    for k in sorted({*powers, max_k}):
        passed = sum(_pass_at_k(item_verdicts, k) for item_verdicts in answered)
        majority = sum(_maj_at_k(item_verdicts, k) for item_verdicts in answered)
        rows[str(k)] = {"pass": _round(passed / len(by_item)), "maj": _round(majority / len(by_item))}
    return rows


def _pass_at_k(verdicts: Sequence[Verdict], k: int) -> float:
    return pass_at_k(sum(verdict.strict for verdict in verdicts), len(verdicts), k)


def _maj_at_k(verdicts: Sequence[Verdict], k: int) -> float:
    votes = [_normalize_vote(verdict.value) for verdict in verdicts]
    return maj_at_k(votes, [verdict.strict for verdict in verdicts], k)


def _normalize_vote(value: str | None) -> str | float | None:
    """Return an answer as votes for it are counted: 5, 5.0 and "5 cm" are one vote, and so are texts of equal words."""
    if value is None:
        return None
    number = parse_single_number(value)
    return " ".join(value.casefold().split()) if number is None else number


def _rule_section(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Return for each extraction rule the responses it decided, and the share of them that are correct."""
    counts = Counter(verdict.rule for verdict in verdicts)
    correct = Counter(verdict.rule for verdict in verdicts if verdict.strict)
    return {rule: {"n": counts[rule], "strict": _round(correct[rule] / counts[rule])} for rule in sorted(counts)}


def _round(value: float) -> float:
    return round(float(value), _DECIMALS)
