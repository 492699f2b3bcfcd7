"""Rewards for rankings, the best first.

A target of type `list` names the relevant items in any order. The answer ranks items, and a repeated item earns nothing
the second time. A target of type `permutation` is the correct order of all items. Every such answer contains all items,
so the mean value of a random order, the chance level, is subtracted: (value - chance) / (1 - chance), at least 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Annotated, NamedTuple

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import answer_value, rescale_above, reward, target_value

Depth = Annotated[int, Field(ge=1)]
Power = Annotated[float, Field(gt=0.0)]
_ANSWER_TYPES = (AnswerType.LIST, AnswerType.PERMUTATION)


class RankingTarget(NamedTuple):
    """Holds the items that a ranking is compared with."""

    relevant: tuple[str, ...]  # for a permutation, all items in the correct order
    num_items: int | None  # number of items to rank, for a permutation; None for a list

    def make_term(self, name: str, value: float, chance: float) -> RewardValue:
        """Return `value`, for a permutation rescaled so that `chance` earns 0, with a reason."""
        if self.num_items is None:
            return RewardValue(value, f"{name} {value:.2f} for {len(self.relevant)} relevant")
        above = rescale_above(value, chance)
        return RewardValue(above, f"{name} {value:.2f} for {self.num_items} items, where chance earns {chance:.2f}")


@reward(name="ndcg", answer_types=_ANSWER_TYPES)
def ndcg(response: Response, sample: Sample, *, k: Depth = 10, power: Power | None = None) -> RewardValue:
    """Return DCG@k / the best DCG@k, in [0, 1], where DCG@k is the sum over ranks i <= k of gain / log2(i + 1).

    The gain is 1 for a relevant item. In a permutation of n items it is n - i for the item that belongs at rank i. With
    `power` the discount is 1 / i^power; a power of 3 rewards little but the first ranks.

    Source: Järvelin and Kekäläinen 2002, 2.2, with the discount of Burges et al. 2005; as reward in VRAG-RL
    (arXiv:2505.22019), and with the power 3 in MM-R5 (arXiv:2506.12364, 3.3.2).
    Departures: repeats and permutations are treated as the module states.
    Unscorable: the target has nothing relevant, names an item twice, or is a permutation of one.
    """
    target = _ranking_target(sample)
    best_gains: list[float] = [1.0] * len(target.relevant)
    if target.num_items is not None:
        best_gains = list(range(target.num_items - 1, 0, -1))
    gains = dict(zip(target.relevant, best_gains, strict=False))
    best = _dcg(best_gains, k, power)
    found = _dcg([gains.get(name, 0.0) for name in _blank_repeats(answer_value(response))], k, power)
    chance = 0.0
    if target.num_items:
        # In a random order, every rank has the mean gain.
        chance = _dcg([sum(best_gains) / target.num_items] * target.num_items, k, power) / best
    return target.make_term(f"NDCG@{k}", found / best, chance)


@reward(name="mrr", answer_types=_ANSWER_TYPES)
def mrr(response: Response, sample: Sample, *, k: Depth = 10) -> RewardValue:
    """Return 1 / rank of the first relevant item, 0 beyond rank k. In a permutation, only the first item is relevant.

    Source: the reciprocal rank of TREC-8 question answering (Voorhees 1999), MRR@10 of MS MARCO (arXiv:1611.09268).
    Departures: permutations are treated as the module states.
    Unscorable: the target has nothing relevant, names an item twice, or is a permutation of one.
    """
    target = _ranking_target(sample)
    relevant = target.relevant if target.num_items is None else target.relevant[:1]
    names = _blank_repeats(answer_value(response))[:k]
    reciprocal_rank = next((1.0 / rank for rank, name in enumerate(names, 1) if name in relevant), 0.0)
    chance = 0.0
    if target.num_items:
        chance = sum(1.0 / rank for rank in range(1, min(k, target.num_items) + 1)) / target.num_items
    return target.make_term(f"MRR@{k}", reciprocal_rank, chance)


@reward(name="recall", answer_types=_ANSWER_TYPES)
def recall(response: Response, sample: Sample, *, k: Depth | None = None) -> RewardValue:
    """Return the fraction of the relevant items that are in the first k of the answer.

    In a permutation, the first k items of the target are relevant. Without `k`, k is the number of relevant items, so
    that listing everything does not pay; for a permutation, it is half of the number of items.

    Source: recall@k of information retrieval; without k, R-precision (Manning et al. 2008, 8.4).
    Departures: permutations are treated as the module states.
    Unscorable: the target has nothing relevant, names an item twice, or is a permutation of k or fewer.
    """
    target = _ranking_target(sample)
    depth = k or (len(target.relevant) if target.num_items is None else target.num_items // 2)
    if target.num_items is not None and depth >= target.num_items:
        raise Unscorable(f"the first {depth} of {target.num_items} are all in any order")
    relevant = set(target.relevant if target.num_items is None else target.relevant[:depth])
    found = len(relevant.intersection(_blank_repeats(answer_value(response))[:depth]))
    chance = depth / target.num_items if target.num_items else 0.0
    return target.make_term(f"recall@{depth}", found / len(relevant), chance)


def _ranking_target(sample: Sample) -> RankingTarget:
    """Return the target's items, each once: at least one of a list, at least two of a permutation."""
    if sample.target.answer_type is AnswerType.PERMUTATION:
        order = target_value(sample, AnswerType.PERMUTATION)
        if len(order) < 2:
            raise Unscorable("the target is a permutation of one: there is nothing to rank")
        return RankingTarget(tuple(map(str, order)), len(order))
    targets = tuple(strings.normalize(name).casefold() for name in target_value(sample, AnswerType.LIST))
    if not targets:
        raise Unscorable("the target lists nothing that is relevant")
    if len(set(targets)) < len(targets):
        raise Unscorable(f"the target {sample.target.value!r:.80} names something twice")
    return RankingTarget(targets, None)


def _blank_repeats(answer: Sequence[object]) -> list[str]:
    """Return the names in their order, with an empty name in place of each repetition."""
    seen: dict[str, int] = {}
    names = [strings.normalize(str(entry)).casefold() for entry in answer]
    return [name if seen.setdefault(name, rank) == rank else "" for rank, name in enumerate(names)]


def _dcg(gains: Sequence[float], k: int, power: float | None) -> float:
    """Return the discounted cumulative gain of the first k ranks."""
    total = 0.0
    for rank, gain in enumerate(gains[:k], 1):
        total += gain / (log2(rank + 1) if power is None else rank**power)
    return total
