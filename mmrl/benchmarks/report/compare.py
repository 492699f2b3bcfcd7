"""Two runs on the same questions: what flipped, and whether the difference is more than chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mmrl.benchmarks.report.stats import Flips, Interval, mcnemar, paired_bootstrap
from mmrl.benchmarks.verdict import Verdict
from mmrl.types import UserError

Column = Literal["strict", "compat", "judged"]
"""Whose verdict counts; `judged` is strict, with the judge's where the rules abstain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accuracies of two runs and their gap, a - b; `flips` where both have one response to each question."""

    n: int
    a: float
    b: float
    gap: Interval
    flips: Flips | None
    a_only: tuple[str, ...]
    b_only: tuple[str, ...]


def compare(a: Sequence[Verdict], b: Sequence[Verdict], column: Column) -> Difference:
    """Compare two runs by one column; several responses to a question count by their mean.

    Raises:
        UserError: the two are not on the same questions.
    """
    ours, theirs = _by_question(a, column), _by_question(b, column)
    if apart := ours.keys() ^ theirs.keys():
        raise UserError(
            f"{len(apart)} questions are in one run alone ({', '.join(sorted(apart)[:5])}); runs to compare must have "
            "the same items"
        )
    clusters = {verdict.id: verdict.cluster or verdict.id for verdict in a}
    means = [[fmean(run[id]) for id in ours] for run in (ours, theirs)]
    single = all(len(values) == 1 for run in (ours, theirs) for values in run.values())
    flips = mcnemar(*({id: values[0] for id, values in run.items()} for run in (ours, theirs))) if single else None
    return Difference(
        n=len(ours),
        a=fmean(means[0]),
        b=fmean(means[1]),
        gap=paired_bootstrap(means[0], means[1], [clusters[id] for id in ours]),
        flips=flips,
        a_only=tuple(id for id, one, other in zip(ours, *means, strict=True) if one > other),
        b_only=tuple(id for id, one, other in zip(ours, *means, strict=True) if one < other),
    )


def by_subset(a: Sequence[Verdict], b: Sequence[Verdict], column: Column) -> dict[str, dict[str, Difference]]:
    """The comparison within every subset: column of metadata → value → difference, both in alphabetical order.

    Raises:
        UserError: as `compare`.
    """
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for verdict in a:
        for name, values in verdict.groups.items():
            for value in values:
                members[name][value].add(verdict.id)
    return {
        name: {value: compare(_only(ids, a), _only(ids, b), column) for value, ids in sorted(members[name].items())}
        for name in sorted(members)
    }


def _only(ids: Collection[str], verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.id in ids]


def _by_question(verdicts: Sequence[Verdict], column: Column) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = defaultdict(list)
    for verdict in verdicts:
        right = {"strict": verdict.strict, "compat": verdict.compat, "judged": verdict.with_judge}
        found[verdict.id].append(right[column])
    return found
