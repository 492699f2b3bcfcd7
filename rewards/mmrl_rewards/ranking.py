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

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import reward, target_value

Depth = Annotated[int, Field(ge=1)]
_ANSWER_TYPES = (AnswerType.LIST, AnswerType.PERMUTATION)


class RankingTarget(NamedTuple):
    """The relevant items, and for a permutation the number of items to rank."""

    relevant: tuple[str, ...]
    num_items: int | None

    def make_term(self, name: str, value: float, chance: float) -> RewardValue:
        """`value`, less what chance earns where the answer is an order of everything."""
        if self.num_items is None:
            return RewardValue(value, f"{name} {value:.2f} for {len(self.relevant)} relevant")
        above = max(0.0, (value - chance) / (1.0 - chance))
        return RewardValue(above, f"{name} {value:.2f} for {self.num_items} items, where chance earns {chance:.2f}")


@reward(name="ndcg", answer_types=_ANSWER_TYPES)
def ndcg(response: Response, sample: Sample, *, k: Depth = 10) -> RewardValue:
    """DCG@k / the best DCG@k, DCG@k = the sum over ranks i <= k of gain / log2(i + 1).

    The gain is 1 for what is relevant; in a permutation of n, n - i for what belongs at rank i. Source: Järvelin and
    Kekäläinen 2002, 2.2, with the discount of Burges et al. 2005; as reward in VRAG-RL (arXiv:2505.22019). Departures:
    the treatment of repeats and of permutations stated above.

    Raises:
        Unscorable: the target has nothing relevant, names something twice, or is a permutation of one.
    """
    wanted = _ranking_target(sample)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    worth = (
        [1.0] * len(wanted.relevant)
        if wanted.num_items is None
        else [wanted.num_items - i for i in range(1, wanted.num_items)]
    )
    gains = dict(zip(wanted.relevant, worth, strict=False))
    best = _dcg(worth, k)
    found = _dcg([gains.get(name, 0.0) for name in _blank_repeats(response.answer.value)], k)
    chance = _dcg([sum(worth) / wanted.num_items] * wanted.num_items, k) / best if wanted.num_items else 0.0
    return wanted.make_term(f"NDCG@{k}", found / best, chance)


@reward(name="mrr", answer_types=_ANSWER_TYPES)
def mrr(response: Response, sample: Sample, *, k: Depth = 10) -> RewardValue:
    """1 / the rank of the first that is relevant, 0 beyond rank k; in a permutation, the rank of what belongs first.

    Source: the reciprocal rank of TREC-8 question answering (Voorhees 1999), MRR@10 of MS MARCO (arXiv:1611.09268).
    Departures: the treatment of permutations stated above.

    Raises:
        Unscorable: the target has nothing relevant, names something twice, or is a permutation of one.
    """
    wanted = _ranking_target(sample)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    relevant = wanted.relevant if wanted.num_items is None else wanted.relevant[:1]
    ranks = [rank for rank, name in enumerate(_blank_repeats(response.answer.value)[:k], 1) if name in relevant]
    chance = (
        sum(1.0 / rank for rank in range(1, min(k, wanted.num_items) + 1)) / wanted.num_items
        if wanted.num_items
        else 0.0
    )
    return wanted.make_term(f"MRR@{k}", 1.0 / ranks[0] if ranks else 0.0, chance)


@reward(name="recall", answer_types=_ANSWER_TYPES)
def recall(response: Response, sample: Sample, *, k: Depth | None = None) -> RewardValue:
    """The share of the relevant that stands in the first k of the answer; in a permutation, of the k that belong there.

    Without `k`: as many as are relevant, so that listing everything does not pay; half of a permutation. Source:
    recall@k of information retrieval; without k, R-precision (Manning et al. 2008, 8.4). Departures: the treatment of
    permutations stated above.

    Raises:
        Unscorable: the target has nothing relevant, names something twice, or is a permutation of k or fewer.
    """
    wanted = _ranking_target(sample)
    depth = k or (len(wanted.relevant) if wanted.num_items is None else wanted.num_items // 2)
    if wanted.num_items is not None and depth >= wanted.num_items:
        raise Unscorable(f"the first {depth} of {wanted.num_items} are all in any order")
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    relevant = set(wanted.relevant if wanted.num_items is None else wanted.relevant[:depth])
    found = len(relevant.intersection(_blank_repeats(response.answer.value)[:depth]))
    return wanted.make_term(
        f"recall@{depth}", found / len(relevant), depth / wanted.num_items if wanted.num_items else 0.0
    )


def _ranking_target(sample: Sample) -> RankingTarget:
    if sample.target.answer_type is AnswerType.PERMUTATION:
        order = target_value(sample, AnswerType.PERMUTATION)
        if len(order) < 2:
            raise Unscorable("the target is a permutation of one: there is nothing to rank")
        return RankingTarget(tuple(map(str, order)), len(order))
    targets = tuple(map(_normalize_name, target_value(sample, AnswerType.LIST)))
    if not targets:
        raise Unscorable("the target lists nothing that is relevant")
    if len(set(targets)) < len(targets):
        raise Unscorable(f"the target {sample.target.value!r:.80} names something twice")
    return RankingTarget(targets, None)


def _blank_repeats(answer: Sequence[object]) -> list[str]:
    """Return the names in their order, with an empty name in place of each repetition."""
    seen: dict[str, int] = {}
    names = [_normalize_name(entry) for entry in answer]
    return [name if seen.setdefault(name, rank) == rank else "" for rank, name in enumerate(names)]


def _normalize_name(entry: object) -> str:
    return strings.normalize(str(entry)).casefold()


def _dcg(gains: Sequence[float], k: int) -> float:
    return sum(gain / log2(rank + 1) for rank, gain in enumerate(gains[:k], 1))
