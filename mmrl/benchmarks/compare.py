"""Comparison of two runs on the same questions: which answers differ, and is the difference more than chance?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mmrl.benchmarks.verdict import Verdict, cluster_by_item, group_by_subset, mean_by_item
from mmrl.types import UserError
from mmrl.utils.messages import first_names
from mmrl.utils.stats import Interval, McNemarResult, mcnemar_test, paired_cluster_bootstrap

VerdictColumn = Literal["strict", "official", "correct_with_judge"]
"""Field of `Verdict` that is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Accuracies of two runs A and B, and their difference."""

    num_questions: int  # questions that both answered
    accuracy_a: float  # mean over questions of A, in [0, 1]
    accuracy_b: float  # mean over questions of B, in [0, 1]
    difference: Interval  # A minus B with its 95 % interval
    # Exact test on the answers that differ; None unless both have one response to each question.
    mcnemar: McNemarResult | None
    a_only_ids: tuple[str, ...]  # questions on which A is better
    b_only_ids: tuple[str, ...]  # questions on which B is better


def compare_runs(verdicts_a: Sequence[Verdict], verdicts_b: Sequence[Verdict], column: VerdictColumn) -> RunComparison:
    """Compare two runs by one column; several responses to a question count by their mean.

    Raises:
        UserError: the runs are not on the same questions, or were not scored by the same version of the rules.
    """
    versions_a, versions_b = ({verdict.scorer for verdict in verdicts} for verdicts in (verdicts_a, verdicts_b))
    if versions_a != versions_b:
        raise UserError(
            f"A was scored by version {', '.join(sorted(versions_a))} of the rules and B by version "
            f"{', '.join(sorted(versions_b))}, so verdicts may differ on equal answers; score both again with --rescore"
        )
    by_item_a, by_item_b = mean_by_item(verdicts_a, column), mean_by_item(verdicts_b, column)
    unshared = by_item_a.keys() ^ by_item_b.keys()
    if unshared:
        raise UserError(
            f"{len(unshared)} questions are in only one run ({first_names(sorted(unshared))}); "
            "runs to compare must have the same items"
        )
    means_a, means_b = [*by_item_a.values()], [by_item_b[id] for id in by_item_a]
    clusters = [*cluster_by_item(verdicts_a).values()]
    mcnemar = None
    # McNemar's pairs must be independent, and responses to one question are not.
    if len(verdicts_a) == len(verdicts_b) == len(by_item_a):
        correct_b = {id: mean == 1.0 for id, mean in by_item_b.items()}
        mcnemar = mcnemar_test({id: mean == 1.0 for id, mean in by_item_a.items()}, correct_b)
    return RunComparison(
        num_questions=len(by_item_a),
        accuracy_a=fmean(means_a),
        accuracy_b=fmean(means_b),
        difference=paired_cluster_bootstrap(means_a, means_b, clusters),
        mcnemar=mcnemar,
        a_only_ids=tuple(id for id in by_item_a if by_item_a[id] > by_item_b[id]),
        b_only_ids=tuple(id for id in by_item_a if by_item_a[id] < by_item_b[id]),
    )


def compare_subsets(
    verdicts_a: Sequence[Verdict], verdicts_b: Sequence[Verdict]
) -> dict[str, dict[str, RunComparison]]:
    """Compare the strict verdicts of two runs within every subset, by its column and value in alphabetical order.

    Raises:
        UserError: the runs are not on the same questions.
    """
    comparisons: dict[str, dict[str, RunComparison]] = {}
    for column, subsets in group_by_subset(verdicts_a).items():
        comparisons[column] = {}
        for value, subset_a in subsets.items():
            ids = {verdict.id for verdict in subset_a}
            subset_b = [verdict for verdict in verdicts_b if verdict.id in ids]
            comparisons[column][value] = compare_runs(subset_a, subset_b, "strict")
    return comparisons


def changed_verdicts(before: Sequence[Verdict], after: Sequence[Verdict]) -> list[tuple[Verdict, Verdict]]:
    """Return the old and new verdicts that differ, in the strict verdict or the score, in the order of the new ones."""
    old_verdicts = {(verdict.id, verdict.response_index): verdict for verdict in before}
    changed = []
    for new in after:
        old = old_verdicts.get((new.id, new.response_index))
        if old is not None and (old.strict, old.score) != (new.strict, new.score):
            changed.append((old, new))
    return changed
