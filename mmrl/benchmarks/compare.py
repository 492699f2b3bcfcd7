"""Comparison of two runs on the same questions: which answers differ, and is the difference more than chance?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Literal

from mmrl.benchmarks.verdict import Verdict
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
    mcnemar: McNemarResult | None
    """Exact test on the answers that differ; None unless both have one response to each question."""
    a_only_ids: tuple[str, ...]  # questions on which A is better
    b_only_ids: tuple[str, ...]  # questions on which B is better


def compare_runs(verdicts_a: Sequence[Verdict], verdicts_b: Sequence[Verdict], column: VerdictColumn) -> RunComparison:
    """Compare two runs by one column; several responses to a question count by their mean.

    Raises:
        UserError: the runs are not on the same questions.
    """
    correct_a, correct_b = _correct_by_question(verdicts_a, column), _correct_by_question(verdicts_b, column)
    unshared = correct_a.keys() ^ correct_b.keys()
    if unshared:
        raise UserError(
            f"{len(unshared)} questions are in only one run ({first_names(sorted(unshared))}); "
            "runs to compare must have the same items"
        )
    cluster_of = {verdict.id: verdict.cluster or verdict.id for verdict in verdicts_a}
    means_a = [fmean(values) for values in correct_a.values()]
    means_b = [fmean(correct_b[id]) for id in correct_a]
    clusters = [cluster_of[id] for id in correct_a]
    mcnemar = None
    # McNemar's pairs must be independent, and responses to one question are not.
    if all(len(values) == 1 for values in (*correct_a.values(), *correct_b.values())):
        firsts_b = {id: values[0] for id, values in correct_b.items()}
        mcnemar = mcnemar_test({id: values[0] for id, values in correct_a.items()}, firsts_b)
    a_only_ids = [id for id, a, b in zip(correct_a, means_a, means_b, strict=True) if a > b]
    b_only_ids = [id for id, a, b in zip(correct_a, means_a, means_b, strict=True) if a < b]
    return RunComparison(
        num_questions=len(correct_a),
        accuracy_a=fmean(means_a),
        accuracy_b=fmean(means_b),
        difference=paired_cluster_bootstrap(means_a, means_b, clusters),
        mcnemar=mcnemar,
        a_only_ids=tuple(a_only_ids),
        b_only_ids=tuple(b_only_ids),
    )


def compare_subsets(
    verdicts_a: Sequence[Verdict], verdicts_b: Sequence[Verdict], column: VerdictColumn
) -> dict[str, dict[str, RunComparison]]:
    """Compare two runs within every subset, by subset column and value in alphabetical order.

    Raises:
        UserError: the runs are not on the same questions.
    """
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for verdict in verdicts_a:
        for name, values in verdict.subsets.items():
            for value in values:
                members[name][value].add(verdict.id)
    comparisons: dict[str, dict[str, RunComparison]] = {}
    for name in sorted(members):
        comparisons[name] = {}
        for value, ids in sorted(members[name].items()):
            subset_a = [verdict for verdict in verdicts_a if verdict.id in ids]
            subset_b = [verdict for verdict in verdicts_b if verdict.id in ids]
            comparisons[name][value] = compare_runs(subset_a, subset_b, column)
    return comparisons


def changed_verdicts(before: Sequence[Verdict], after: Sequence[Verdict]) -> list[tuple[Verdict, Verdict]]:
    """Return the old and new verdicts that differ, strictly or officially, in the order of the new ones."""
    old_verdicts = {(verdict.id, verdict.response_index): verdict for verdict in before}
    changed = []
    for new in after:
        old = old_verdicts.get((new.id, new.response_index))
        if old is not None and (old.strict, old.official) != (new.strict, new.official):
            changed.append((old, new))
    return changed


def _correct_by_question(verdicts: Sequence[Verdict], column: VerdictColumn) -> dict[str, list[bool]]:
    is_correct = attrgetter(column)
    by_question: dict[str, list[bool]] = defaultdict(list)
    for verdict in verdicts:
        by_question[verdict.id].append(is_correct(verdict))
    return by_question
