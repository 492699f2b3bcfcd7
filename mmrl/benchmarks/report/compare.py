"""Two runs on the same questions: what flipped, and whether the difference is more than chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mmrl.benchmarks.report.stats import Interval, McNemarResult, mcnemar_test, paired_cluster_bootstrap
from mmrl.benchmarks.verdict import Verdict
from mmrl.types import UserError

VerdictColumn = Literal["strict", "compat", "judged"]
"""Whose verdict counts; `judged` is strict, with the judge's where the rules abstain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Accuracies of two runs and their gap, a - b; `flips` where both have one response to each question."""

    num_questions: int
    accuracy_a: float
    accuracy_b: float
    difference: Interval
    mcnemar: McNemarResult | None
    a_only_ids: tuple[str, ...]
    b_only_ids: tuple[str, ...]


def compare_runs(verdicts_a: Sequence[Verdict], verdicts_b: Sequence[Verdict], column: VerdictColumn) -> RunComparison:
    """Compare two runs by one column; several responses to a question count by their mean.

    Raises:
        UserError: the two are not on the same questions.
    """
    ours, theirs = _correct_by_question(verdicts_a, column), _correct_by_question(verdicts_b, column)
    if apart := ours.keys() ^ theirs.keys():
        raise UserError(
            f"{len(apart)} questions are in one run alone ({', '.join(sorted(apart)[:5])}); runs to compare must have "
            "the same items"
        )
    clusters = {verdict.id: verdict.cluster or verdict.id for verdict in verdicts_a}
    means = [[fmean(run[id]) for id in ours] for run in (ours, theirs)]
    single = all(len(values) == 1 for run in (ours, theirs) for values in run.values())
    flips = mcnemar_test(*({id: values[0] for id, values in run.items()} for run in (ours, theirs))) if single else None
    return RunComparison(
        num_questions=len(ours),
        accuracy_a=fmean(means[0]),
        accuracy_b=fmean(means[1]),
        difference=paired_cluster_bootstrap(means[0], means[1], [clusters[id] for id in ours]),
        mcnemar=flips,
        a_only_ids=tuple(id for id, one, other in zip(ours, *means, strict=True) if one > other),
        b_only_ids=tuple(id for id, one, other in zip(ours, *means, strict=True) if one < other),
    )


def compare_subsets(
    verdicts_a: Sequence[Verdict], verdicts_b: Sequence[Verdict], column: VerdictColumn
) -> dict[str, dict[str, RunComparison]]:
    """The comparison within every subset: column of metadata → value → difference, both in alphabetical order.

    Raises:
        UserError: as `compare`.
    """
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for verdict in verdicts_a:
        for name, values in verdict.subsets.items():
            for value in values:
                members[name][value].add(verdict.id)
    return {
        name: {
            value: compare_runs(_verdicts_of(ids, verdicts_a), _verdicts_of(ids, verdicts_b), column)
            for value, ids in sorted(members[name].items())
        }
        for name in sorted(members)
    }


def _verdicts_of(ids: Collection[str], verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.id in ids]


def _correct_by_question(verdicts: Sequence[Verdict], column: VerdictColumn) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = defaultdict(list)
    for verdict in verdicts:
        right = {"strict": verdict.strict, "compat": verdict.official, "judged": verdict.correct_with_judge}
        found[verdict.id].append(right[column])
    return found
