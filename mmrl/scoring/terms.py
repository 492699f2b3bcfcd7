"""Reward terms: the value of a term's reward is transformed, and all terms are combined into a total.

A term is one entry of `rewards.terms`: a reward function with its options, its weight and schedule, and the samples it
applies to. A term that `requires` another counts only where the other's value exceeds `requires_above`: accuracy, say,
only where the format is right. A term whose reward gives no value takes the value of the term that `fallback` names.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mmrl.config.schema import RewardTermConfig
from mmrl.types import Contribution, UserError
from mmrl_rewards.contract import BoundReward, Reward

CombineMethod = Literal["sum", "product", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """A reward term from YAML, ready to be called."""

    name: str  # unique among the terms of the config
    reward: BoundReward
    load_reward: Callable[[], BoundReward]  # picklable; loads the same reward in another process
    options: RewardTermConfig

    def __post_init__(self) -> None:
        """Raise UserError if transform or fallback does not suit the reward's range; `key` of the error names it."""
        low, high = self.declaration.low, self.declaration.high
        scale, fallback = self.options.transform.rescale_to, self.options.fallback
        is_constant = self._clip_and_threshold(high) <= self._clip_and_threshold(low)
        if is_constant or (scale is not None and scale[0] == scale[1]):
            message = f"term {self.name!r}: its transform makes all values from {low:g} to {high:g} equal"
            raise UserError(message, key="transform")
        if isinstance(fallback, float) and not low <= fallback <= high:
            message = f"term {self.name!r}: fallback {fallback:g} is outside the range {low:g} to {high:g}"
            raise UserError(message, key="fallback")

    @property
    def declaration(self) -> Reward[...]:
        """Name, range and everything else that the `@reward(...)` of its function states."""
        return self.reward.reward

    @property
    def fallback(self) -> float:
        """The value used when nothing else decides: the low end of the reward's range, unless the config sets it."""
        return self.options.fallback if isinstance(self.options.fallback, float) else self.declaration.low

    @property
    def fallback_term(self) -> str | None:
        """Name of the term that decides when the reward abstains or fails; None if there is none."""
        return self.options.fallback if isinstance(self.options.fallback, str) else None

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest value after the transform."""
        ends = self.transform(self.declaration.low), self.transform(self.declaration.high)
        return min(ends), max(ends)

    @property
    def comes_with_mmrl(self) -> bool:
        """True for a reward of mmrl, False for one in a user's file or package."""
        return self.declaration.fn.__module__.startswith(("mmrl.", "mmrl_rewards."))

    @property
    def is_costly(self) -> bool:
        """True if each call costs a request or a model."""
        option = self.declaration.costly_with
        return self.declaration.uses_service and (option is None or self.reward.args.get(option) is not None)

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a call may take; None if neither the term nor the reward sets a limit."""
        return self.declaration.timeout_s if self.options.timeout_s is None else self.options.timeout_s

    def transform(self, value: float) -> float:
        """Return the value that counts in the total for a raw value of the reward."""
        curved, scale = self._clip_and_threshold(value), self.options.transform.rescale_to
        if scale is None:
            return curved
        low, high = self._clip_and_threshold(self.declaration.low), self._clip_and_threshold(self.declaration.high)
        return scale[0] + (scale[1] - scale[0]) * (curved - low) / (high - low)

    def _clip_and_threshold(self, value: float) -> float:
        transform = self.options.transform
        if transform.clip is not None:
            value = min(max(value, transform.clip[0]), transform.clip[1])
        if transform.threshold is not None:
            value = float(value >= transform.threshold)
        return value


def find_counted_terms(terms: Sequence[BoundTerm]) -> tuple[BoundTerm, ...]:
    """Return the terms that count by themselves: no other term names them as its fallback."""
    stand_ins = {term.fallback_term for term in terms}
    return tuple(term for term in terms if term.name not in stand_ins)


def combine_terms(
    terms: Sequence[BoundTerm],
    values_by_term: Mapping[str, float],
    method: CombineMethod,
    *,
    step: int | None,
    left_out: Container[str] = (),
) -> tuple[float, dict[str, Contribution]]:
    """Return the total of a response, and what each term contributes. A term whose requirement is not met counts 0.

    With weights w and transformed values v: sum Σ w v; product Π v^w; min, the lowest v. Terms in `left_out`
    are ignored. If all are left out, the total is 0.

    Args:
        terms: the terms that apply to the sample, in the order of the config.
        values_by_term: the rewards' values, before transforms.
        method: `rewards.combine` of the config.
        step: the step of the stage, for schedules; None for weights without them.
        left_out: names of the terms whose `when` excludes the rollout.

    Raises:
        UserError: a required term has no value, because it does not apply to this sample.
    """
    contributions: dict[str, Contribution] = {}
    counted_values: list[float] = []
    shares: list[float] = []
    for term in terms:
        if term.name in left_out:
            contributions[term.name] = Contribution(0.0, term.options.weight_at(step), False, None)
            continue
        is_counted = term.options.requires is None or _requirements_met(term, terms, values_by_term)
        transformed, weight = term.transform(values_by_term[term.name]), term.options.weight_at(step)
        counted = transformed if is_counted else 0.0
        share: float | None = None
        if method != "min":
            share = weight * counted if method == "sum" else counted**weight
            shares.append(share)
        counted_values.append(counted)
        contributions[term.name] = Contribution(transformed, weight, is_counted, share)
    if not counted_values:
        return 0.0, contributions
    match method:
        case "sum":
            total = sum(shares)
        case "product":
            total = prod(shares)
        case "min":
            total = min(counted_values)
    return float(total), contributions


def divide_by_turn(
    rewards_by_turn: Mapping[str, Sequence[float]],
    contributions: Mapping[str, Contribution],
    total: float,
    num_turns: int,
) -> tuple[float, ...]:
    """Return addends of the total, one for each turn in an environment.

    Terms with per-turn rewards are credited to those turns; the rest of the total goes to the last turn.
    """
    if num_turns == 1:
        return (total,)
    by_turn = [0.0] * num_turns
    for name, rewards in rewards_by_turn.items():
        if contributions[name].is_counted:
            for turn, reward in enumerate(rewards):
                by_turn[turn] += contributions[name].weight * reward
    by_turn[-1] += total - sum(by_turn)
    return tuple(by_turn)


def _requirements_met(term: BoundTerm, terms: Sequence[BoundTerm], values_by_term: Mapping[str, float]) -> bool:
    """Return True if the required term exceeds `requires_above`, and so do all terms that it requires in turn."""
    while term.options.requires is not None:
        required = term.options.requires
        if required not in values_by_term:
            raise UserError(
                f"term {term.name!r}: it requires {required!r}, which does not apply to the same samples: see `when`"
            )
        if values_by_term[required] <= term.options.requires_above:
            return False
        term = next(candidate for candidate in terms if candidate.name == required)
    return True
