"""The outcome of one call of a reward: a checked value, or the failure that left none."""

from __future__ import annotations

from contextlib import nullcontext
from math import nan
from numbers import Real
from typing import TypeGuard

from mmrl.types import (
    Failure,
    FailureKind,
    Response,
    RewardValue,
    Sample,
    Unscorable,
    UserError,
    use_media_opener,
)
from mmrl.utils.messages import shorten
from mmrl_rewards.contract import BoundReward, LeftToFallback, TurnRewards, describe_error, value_and_reason
from mmrl_rewards.strings import excerpt

_MAX_REASON_CHARS = 2000
_MAX_RESPONSE_CHARS = 200

RewardOutcome = RewardValue | Failure


class RewardError(UserError):
    """A reward failed where the config says `stop`, or before the first step."""


class RewardProcessError(RewardError):
    """A reward's worker did not start; or, in the trial before the first step, hung, died or exceeded a limit."""


def call_reward(bound: BoundReward, response: Response, sample: Sample) -> RewardOutcome:
    """Return the reward's value for a response, or its failure. Never raises, but a reward may hang or crash Python."""
    # A service may be sent pictures, as its options say.
    may_look = bound.reward.looks or bound.reward.uses_service
    counts_low_end = False
    try:
        with nullcontext() if may_look else use_media_opener(None):
            result = bound(response, sample)
        return _check_result(bound, result, len(response.turns))
    except Unscorable as error:
        kind, reason = FailureKind.UNSCORABLE, str(error)
        counts_low_end = isinstance(error, LeftToFallback)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of users may raise anything
        kind, reason = FailureKind.ERROR, describe_error(bound.reward, error)
    # An error may quote a whole response, and reasons are kept with each rollout.
    return Failure(kind, shorten(reason, _MAX_REASON_CHARS), counts_low_end=counts_low_end)


def is_unscorable(outcome: RewardOutcome) -> TypeGuard[Failure]:
    """Return True if the reward abstained: it raised `Unscorable`."""
    return isinstance(outcome, Failure) and outcome.kind is FailureKind.UNSCORABLE


def make_error(name: str, failure: Failure, response: Response, sample: Sample) -> RewardError:
    """Return an error that names the reward, the sample, the cause and the response."""
    where = f"reward {name!r} on sample {sample.id!r} (task {sample.task!r})"
    return RewardError(f"{where}: {failure.reason}; response: {excerpt_response(response)}")


def excerpt_response(response: Response) -> str:
    """Return the start of a response in quotes, for a message."""
    return excerpt(response.text, _MAX_RESPONSE_CHARS)


def _check_result(bound: BoundReward, result: object, num_turns: int) -> RewardOutcome:
    value, reason = value_and_reason(result)
    low, high = bound.reward.low, bound.reward.high
    # NaN fails the comparison below, so a NaN and a value that is not a number get the same message.
    # `float` comes first because a check against the abstract class `Real` is slow.
    number = float(value) if isinstance(value, (float, Real)) else nan
    if not low <= number <= high:
        return Failure(FailureKind.ERROR, f"returned {value!r:.80}, not a number from {low:g} to {high:g}")
    if not isinstance(reason, str):
        return Failure(FailureKind.ERROR, f"gave the reason {reason!r:.80}, which is not a string")
    reason = shorten(reason, _MAX_REASON_CHARS)
    if not isinstance(result, TurnRewards):
        return RewardValue(number, reason)
    if len(result.by_turn) != num_turns:
        problem = f"returned rewards of {len(result.by_turn)} turns for a response of {num_turns}"
        return Failure(FailureKind.ERROR, problem)
    return TurnRewards(result.by_turn, reason)
