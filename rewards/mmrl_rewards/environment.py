"""Rewards for episodes in an environment: what it gave, whether the task was done, and whether actions were valid.

Each lists what every turn earned, for `advantage.credit`. Responses without turns (checks before a run) earn 0.
"""

from __future__ import annotations

from math import log2
from typing import Annotated, Final

from pydantic import Field, PositiveFloat

from mmrl.types import Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import TurnRewards, column_value, reward

_ROUNDING: Final = 1e-9  # by which a sum of rewards may be off


@reward(name="total", low=-1.0, attack_tolerance=0.5)
def total(response: Response, sample: Sample, *, scale: PositiveFloat = 1.0) -> RewardValue:
    """Return Σ_t r_t / scale, with r_t the environment's reward of turn t, in [-1, 1].

    `scale` is the largest absolute sum of rewards that an episode can earn. A larger sum is an error: clipping it would
    hide which turn earned it.

    Source: the return of an episode (Sutton and Barto 2018, 3.3).
    Departures: the sum is not discounted here; `advantage.discount` does that when credit is assigned.
    Unscorable: never.
    """
    rewards = [turn.reward / scale for turn in response.turns]
    if abs(sum(rewards)) > 1.0 + _ROUNDING:
        raise ValueError(f"the turns earned {sum(rewards) * scale:g}, which is beyond scale={scale:g}; raise it")
    return TurnRewards(_within_one(rewards), f"{len(rewards)} turns earned {sum(rewards) * scale:g}")


@reward(name="success")
def success(response: Response, sample: Sample, *, key: str = "success", above: float = 0.0) -> RewardValue:
    """Return 1 if the environment ended the episode with success, else 0; the last turn earns it.

    An episode that a limit cut short has not ended. At the last turn, success is an `info[key]` of at least 1 or, if
    `info` lacks the key, a reward greater than `above`.

    Source: the success rate of agents, as in ALFWorld and WebShop (GiGPO, arXiv:2505.10978, 5.1).
    Departures: what counts as success is the environment's own word, or a reward.
    Unscorable: never.
    """
    if not response.turns:
        return RewardValue(0.0, "no turn")
    last = response.turns[-1]
    done = last.terminated and (last.info[key] >= 1.0 if key in last.info else last.reward > above)
    end = "the episode ended" if last.terminated else "the episode was cut short"
    return TurnRewards([*[0.0] * (len(response.turns) - 1), float(done)], f"{end}, {'done' if done else 'not done'}")


@reward(name="retrieval")
def retrieval(response: Response, sample: Sample, *, column: str = "pages") -> RewardValue:
    """Return NDCG of the pages in the order in which searches showed them, in [0, 1].

    DCG is the sum over shown pages i, from 1, of (2^r_i - 1) / log2(i + 1), with r_i the number `relevant` (0 or 1)
    that the environment reported. It is divided by the DCG of an order with all relevant pages first. `column` of the
    sample's row lists these pages (`a.b` is the key `b` within column `a`). A page earns its addend when it is shown.

    Source: VRAG-RL (arXiv:2505.22019), 3.3, and its code's gain.
    Departures: the value is divided among the turns.
    Unscorable: the row has no such column, or it names no page.
    """
    gold = column_value(sample, column)
    if not isinstance(gold, list | tuple) or not gold:
        raise Unscorable(f"the column {column!r} lists no relevant page: {gold!r:.80}")
    gold = set(map(str, gold))
    best = sum(1.0 / log2(rank + 1) for rank in range(1, len(gold) + 1))
    rewards: list[float] = []
    num_shown = num_relevant = 0
    for turn in response.turns:
        gain = 0.0
        if "relevant" in turn.info:
            num_shown += 1
            num_relevant += turn.info["relevant"] > 0.0
            gain = (2.0 ** turn.info["relevant"] - 1.0) / log2(num_shown + 1) / best
        rewards.append(gain)
    return TurnRewards(_within_one(rewards), f"{num_relevant} of {len(gold)} relevant pages among {num_shown}")


@reward(name="invalid", low=-1.0, high=0.0, attack_tolerance=1.0, judges_answer=False)
def invalid(
    response: Response, sample: Sample, *, penalty: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
) -> RewardValue:
    """Return -penalty for each turn whose action the environment could not use, together at least -1.

    Source: GiGPO (arXiv:2505.10978), whose code subtracts 0.1 for each.
    Departures: the sum is bounded, and a penalty is discounted with the other rewards of its turn.
    Unscorable: never.
    """
    rewards: list[float] = []
    for turn in response.turns:
        left = 1.0 + sum(rewards)
        rewards.append(0.0 if turn.valid else -min(penalty, left))
    count = sum(not turn.valid for turn in response.turns)
    return TurnRewards(rewards, f"{count} of {len(rewards)} actions could not be used")


def _within_one(rewards: list[float]) -> list[float]:
    """Return the rewards, scaled if mere rounding has carried their sum out of [-1, 1]."""
    if abs(sum(rewards)) <= 1.0:
        return rewards
    scale = (1.0 - _ROUNDING) / abs(sum(rewards))
    return [reward * scale for reward in rewards]
