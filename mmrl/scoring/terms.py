"""Reward terms: a term's reward is called, its value checked and transformed, and all terms combined into a total.

A term is one entry of `rewards.terms`: a reward function with its options, its weight and schedule, and the samples it
applies to. A term that `requires` another counts only where the other's value exceeds `requires_above`: accuracy, say,
only where the format is right. A term whose reward gives no value takes the value of the term that `fallback` names.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan, prod
from numbers import Real
from typing import Final, Literal, TypeGuard

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardTermConfig, ScoringConfig
from mmrl.types import (
    Contribution,
    Response,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Sample,
    Unscorable,
    UserError,
    use_media_opener,
)
from mmrl.utils.messages import shorten
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerLimitError, WorkerTimeoutError
from mmrl_rewards.contract import BoundReward, LeftToFallback, Of, TurnRewards, describe_error, value_and_reason

FIRST_CALL_TIMEOUT_S: Final = 60.0
"""Least deadline, in seconds, of a reward's first call in a process: it may import libraries or load a model."""
_MAX_REASON_CHARS = 2000
_VERBS = {"requires": "requires", "fallback": "falls back on"}
_NOUNS = {"requires": "requirements", "fallback": "fallbacks"}

CombineMethod = Literal["sum", "product", "min"]
RewardOutcome = RewardValue | RewardFailure


class RewardError(UserError):
    """A reward failed where the config says `stop`, or before the first step."""


class RewardProcessError(RewardError):
    """A reward's worker did not start; or, in the trial before the first step, hung, died or exceeded a limit."""


def call_reward(reward: BoundReward, response: Response, sample: Sample) -> RewardOutcome:
    """Return the reward's value for a response, or its failure. Never raises, but a reward may hang or crash Python."""
    # A service may be sent pictures, as its options say.
    may_look, is_low = reward.reward.looks or reward.reward.uses_service, False
    try:
        with nullcontext() if may_look else use_media_opener(None):
            result = reward(response, sample)
        return _check_result(reward, result, len(response.turns))
    except Unscorable as error:
        kind, reason, is_low = RewardErrorKind.UNSCORABLE, str(error), isinstance(error, LeftToFallback)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of users may raise anything
        kind, reason = RewardErrorKind.ERROR, describe_error(reward.reward, error)
    # An error may quote a whole response, and reasons are kept with each rollout.
    return RewardFailure(kind, shorten(reason, _MAX_REASON_CHARS), is_low=is_low)


def first_call_timeout_s(timeout_s: float | None) -> float:
    """Return the deadline of a reward's first call, where later ones have `timeout_s`."""
    return max(FIRST_CALL_TIMEOUT_S, timeout_s or 0.0)


def is_unscorable(outcome: RewardOutcome) -> TypeGuard[RewardFailure]:
    """Return True if the reward abstained: it raised `Unscorable`."""
    return isinstance(outcome, RewardFailure) and outcome.error_kind is RewardErrorKind.UNSCORABLE


def make_worker_limits(options: ScoringConfig) -> WorkerLimits:
    """Return the limits of a worker that calls rewards."""
    limits = options.worker_limits
    return WorkerLimits(STARTUP_TIMEOUT_S, options.timeout_s, limits.memory_mib, limits.processes, reads_output=True)


def worker_failure(error: WorkerError) -> RewardFailure:
    """Return the failure of a reward whose worker was killed, or ended, in the middle of a call."""
    match error:
        case WorkerTimeoutError():
            return RewardFailure(RewardErrorKind.TIMEOUT, str(error))
        case WorkerLimitError():
            return RewardFailure(RewardErrorKind.LIMIT, f"was stopped: its process {error}")
        case _:
            return RewardFailure(RewardErrorKind.CRASH, "its process died")


def _check_result(reward: BoundReward, result: object, num_turns: int) -> RewardOutcome:
    value, reason = value_and_reason(result)
    low, high = reward.reward.low, reward.reward.high
    # NaN fails the comparison below, so a NaN and a value that is not a number get the same message.
    # `float` comes first because a check against the abstract class `Real` is slow.
    number = float(value) if isinstance(value, (float, Real)) else nan
    if not low <= number <= high:
        return RewardFailure(RewardErrorKind.ERROR, f"returned {value!r:.80}, not a number from {low:g} to {high:g}")
    if not isinstance(reason, str):
        return RewardFailure(RewardErrorKind.ERROR, f"gave the reason {reason!r:.80}, which is not a string")
    reason = shorten(reason, _MAX_REASON_CHARS)
    if not isinstance(result, TurnRewards):
        return RewardValue(number, reason)
    if len(result.by_turn) != num_turns:
        problem = f"returned rewards of {len(result.by_turn)} turns for a response of {num_turns}"
        return RewardFailure(RewardErrorKind.ERROR, problem)
    return TurnRewards(result.by_turn, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """A reward term from YAML, ready to be called."""

    name: str  # unique among the terms of the config
    reward: BoundReward
    load_reward: Callable[[], BoundReward]  # picklable; loads the same reward in another process
    options: RewardTermConfig

    def __post_init__(self) -> None:
        """Raise UserError if transform or fallback does not suit the reward's range; `key` of the error names it."""
        low, high = self.reward.reward.low, self.reward.reward.high
        scale, fallback = self.options.transform.rescale_to, self.options.fallback
        if self._clip(high) <= self._clip(low) or (scale is not None and scale[0] == scale[1]):
            message = f"term {self.name!r}: its transform makes all values from {low:g} to {high:g} equal"
            raise UserError(message, key="transform")
        if isinstance(fallback, float) and not low <= fallback <= high:
            message = f"term {self.name!r}: fallback {fallback:g} is outside the range {low:g} to {high:g}"
            raise UserError(message, key="fallback")

    @property
    def fallback(self) -> float:
        """The value used when nothing else decides: the low end of the reward's range, unless the config sets it."""
        return self.options.fallback if isinstance(self.options.fallback, float) else self.reward.reward.low

    @property
    def fallback_term(self) -> str | None:
        """Name of the term that decides when the reward abstains or fails; None if there is none."""
        return self.options.fallback if isinstance(self.options.fallback, str) else None

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest value after the transform."""
        ends = self.transform(self.reward.reward.low), self.transform(self.reward.reward.high)
        return min(ends), max(ends)

    @property
    def comes_with_mmrl(self) -> bool:
        """True for a reward of mmrl, False for one in a user's file or package."""
        return self.reward.reward.fn.__module__.startswith(("mmrl.", "mmrl_rewards."))

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a call may take; None if neither the term nor the reward sets a limit."""
        return self.reward.reward.timeout_s if self.options.timeout_s is None else self.options.timeout_s

    def transform(self, value: float) -> float:
        """Return the value that counts in the total for a raw value of the reward."""
        curved, scale = self._clip(value), self.options.transform.rescale_to
        if scale is None:
            return curved
        low, high = self._clip(self.reward.reward.low), self._clip(self.reward.reward.high)
        return scale[0] + (scale[1] - scale[0]) * (curved - low) / (high - low)

    def _clip(self, value: float) -> float:
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


def check_terms(terms: Sequence[BoundTerm], method: CombineMethod) -> None:
    """Raise UserError unless terms fit together.

    Names are unique; `requires` and `fallback` name other terms without cycles; ranges suit the method; and the range
    and options of a fallback suit its term.
    """
    terms_by_name = {term.name: term for term in terms}
    counted = {term.name: term for term in find_counted_terms(terms)}
    for index, term in enumerate(terms):
        name, required, place = term.name, term.options.requires, f"rewards.terms.{index}"
        if any(earlier.name == name for earlier in terms[:index]):
            raise UserError(f"two reward terms are named {name!r}; give one another `name`", key=f"{place}.fn")
        known = ", ".join(terms_by_name)
        for key, other_name in (("requires", required), ("fallback", term.fallback_term)):
            if other_name is not None and (other_name not in terms_by_name or other_name == name):
                problem = f"it {_VERBS[key]} {other_name!r}, which is not another term; there are {known}"
                raise UserError(f"term {name!r}: {problem}", key=f"{place}.{key}")
            cycle = _find_cycle(term, terms_by_name, key)
            if cycle:
                problem = f"term {name!r}: its {_NOUNS[key]} form a cycle: {' -> '.join(cycle)}"
                raise UserError(problem, key=f"{place}.{key}")
        if required is not None and required not in counted:
            problem = f"term {name!r}: it requires {required!r}, which is a fallback and has no value of its own"
            raise UserError(problem, key=f"{place}.requires")
        if required is not None and terms_by_name[required].options.training_only and not term.options.training_only:
            problem = f"term {name!r} counts in evaluation, but requires {required!r}, which is training_only"
            raise UserError(problem, key=f"{place}.requires")
        if term.fallback_term is not None:
            _check_fallback(term, terms_by_name[term.fallback_term], f"{place}.fallback")
        if method != "sum" and name in counted and term.range[0] < 0.0:
            problem = f"values of term {name!r} start at {term.range[0]:g}; give it transform.rescale_to"
            raise UserError(f"combine {method}: {problem}", key=f"{place}.transform")


def _find_cycle(term: BoundTerm, terms_by_name: Mapping[str, BoundTerm], key: str) -> list[str]:
    """Return the names along a cycle of `requires` or `fallback` through a term; empty if there is none."""
    names = [term.name]
    # `check_terms` reports an unknown name for the term that has it.
    while names[-1] in terms_by_name and len(names) <= len(terms_by_name):
        last = terms_by_name[names[-1]]
        names.append((last.options.requires if key == "requires" else last.fallback_term) or "")
        if names[-1] == term.name:
            return names
    return []


def _check_fallback(term: BoundTerm, stand_in: BoundTerm, key: str) -> None:
    """Raise UserError if values of `stand_in` can leave the term's range, or it sets an option that has no effect."""
    low, high = term.reward.reward.low, term.reward.reward.high
    if stand_in.range[0] < low or stand_in.range[1] > high:
        problem = f"its values from {stand_in.range[0]:g} to {stand_in.range[1]:g} do not fit into {low:g} to {high:g}"
        raise UserError(f"term {term.name!r}: fallback {stand_in.name!r}: {problem}; give it a `transform`", key=key)
    options = stand_in.options
    if options.weight != 1.0 or options.schedule or options.requires or options.training_only:
        problem = f"{stand_in.name!r} is the fallback of {term.name!r} and counts in its place: leave out its `weight`"
        raise UserError(f"term {problem}, `schedule`, `requires` and `training_only`", key=key)


def check_parts(terms: Sequence[BoundTerm], response_format: ResponseFormat) -> None:
    """Raise UserError if a term reads a part, by an option of the type `Of`, that the response format does not have."""
    known = response_format.part_names
    for term in terms:
        for name, option in term.reward.reward.options.items():
            part = term.reward.args.get(name, option.default)
            if option.type_hint == Of and part not in known:
                there_are = f"the response format has no {part!r}; its parts are {', '.join(known)}"
                raise UserError(f"term {term.name!r}, option {name!r}: {there_are}")


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
