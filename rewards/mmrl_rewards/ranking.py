"""Rewards for rankings: the best first.

A target of kind `list` names what is relevant, in any order; the answer ranks what it likes, and a name that stands
twice is worth nothing the second time. A target of kind `permutation` is the right order of everything: there every
answer finds all, so what a random order earns on average is taken off, (value - chance) / (1 - chance), at least 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Annotated, NamedTuple

from pydantic import Field

from mmrl.types import Kind, Response, Sample, Term, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import gold, reward

Depth = Annotated[int, Field(ge=1)]
_KINDS = (Kind.LIST, Kind.PERMUTATION)


class Ranking(NamedTuple):
    """What is relevant, and, for a permutation, how many items there are to rank."""

    targets: tuple[str, ...]
    items: int | None

    def term(self, name: str, value: float, chance: float) -> Term:
        """`value`, less what chance earns where the answer is an order of everything."""
        if self.items is None:
            return Term(value, f"{name} {value:.2f} for {len(self.targets)} relevant")
        above = max(0.0, (value - chance) / (1.0 - chance))
        return Term(above, f"{name} {value:.2f} for {self.items} items, where chance earns {chance:.2f}")


@reward(name="ndcg", kinds=_KINDS)
def ndcg(response: Response, sample: Sample, *, k: Depth = 10) -> Term:
    """DCG@k / the best DCG@k, DCG@k = the sum over ranks i <= k of gain / log2(i + 1).

    The gain is 1 for what is relevant; in a permutation of n, n - i for what belongs at rank i. Source: Järvelin and
    Kekäläinen 2002, 2.2, with the discount of Burges et al. 2005; as reward in VRAG-RL (arXiv:2505.22019). Departures:
    the treatment of repeats and of permutations stated above.

    Raises:
        Unscorable: the target has nothing relevant, names something twice, or is a permutation of one.
    """
    wanted = _ranking(sample)
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    worth = [1.0] * len(wanted.targets) if wanted.items is None else [wanted.items - i for i in range(1, wanted.items)]
    gains = dict(zip(wanted.targets, worth, strict=False))
    best = _dcg(worth, k)
    found = _dcg([gains.get(name, 0.0) for name in _once(response.answer.value)], k)
    chance = _dcg([sum(worth) / wanted.items] * wanted.items, k) / best if wanted.items else 0.0
    return wanted.term(f"NDCG@{k}", found / best, chance)


@reward(name="mrr", kinds=_KINDS)
def mrr(response: Response, sample: Sample, *, k: Depth = 10) -> Term:
    """1 / the rank of the first that is relevant, 0 beyond rank k; in a permutation, the rank of what belongs first.

    Source: the reciprocal rank of TREC-8 question answering (Voorhees 1999), MRR@10 of MS MARCO (arXiv:1611.09268).
    Departures: the treatment of permutations stated above.

    Raises:
        Unscorable: the target has nothing relevant, names something twice, or is a permutation of one.
    """
    wanted = _ranking(sample)
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    relevant = wanted.targets if wanted.items is None else wanted.targets[:1]
    ranks = [rank for rank, name in enumerate(_once(response.answer.value)[:k], 1) if name in relevant]
    chance = sum(1.0 / rank for rank in range(1, min(k, wanted.items) + 1)) / wanted.items if wanted.items else 0.0
    return wanted.term(f"MRR@{k}", 1.0 / ranks[0] if ranks else 0.0, chance)


@reward(name="recall", kinds=_KINDS)
def recall(response: Response, sample: Sample, *, k: Depth | None = None) -> Term:
    """The share of the relevant that stands in the first k of the answer; in a permutation, of the k that belong there.

    Without `k`: as many as are relevant, so that listing everything does not pay; half of a permutation. Source:
    recall@k of information retrieval; without k, R-precision (Manning et al. 2008, 8.4). Departures: the treatment of
    permutations stated above.

    Raises:
        Unscorable: the target has nothing relevant, names something twice, or is a permutation of k or fewer.
    """
    wanted = _ranking(sample)
    depth = k or (len(wanted.targets) if wanted.items is None else wanted.items // 2)
    if wanted.items is not None and depth >= wanted.items:
        raise Unscorable(f"the first {depth} of {wanted.items} are all in any order")
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    relevant = set(wanted.targets if wanted.items is None else wanted.targets[:depth])
    found = len(relevant.intersection(_once(response.answer.value)[:depth]))
    return wanted.term(f"recall@{depth}", found / len(relevant), depth / wanted.items if wanted.items else 0.0)


def _ranking(sample: Sample) -> Ranking:
    if sample.target.kind is Kind.PERMUTATION:
        order = gold(sample, Kind.PERMUTATION)
        if len(order) < 2:
            raise Unscorable("the target is a permutation of one: there is nothing to rank")
        return Ranking(tuple(map(str, order)), len(order))
    targets = tuple(map(_name, gold(sample, Kind.LIST)))
    if not targets:
        raise Unscorable("the target lists nothing that is relevant")
    if len(set(targets)) < len(targets):
        raise Unscorable(f"the target {sample.target.value!r:.80} names something twice")
    return Ranking(targets, None)


def _once(answer: Sequence[object]) -> list[str]:
    """The names in their order; one that comes again keeps its place, as an empty name."""
    seen: dict[str, int] = {}
    names = [_name(entry) for entry in answer]
    return [name if seen.setdefault(name, rank) == rank else "" for rank, name in enumerate(names)]


def _name(entry: object) -> str:
    return strings.normal(str(entry)).casefold()


def _dcg(gains: Sequence[float], k: int) -> float:
    return sum(gain / log2(rank + 1) for rank, gain in enumerate(gains[:k], 1))
