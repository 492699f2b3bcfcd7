"""Calls a reward once and checks the result: a value in its range, or a failure with a reason."""

from __future__ import annotations

import inspect
import traceback
from math import nan
from numbers import Real
from pathlib import Path

from mmrl.types import Response, RewardErrorKind, RewardFailure, RewardValue, Sample, Unscorable, UserError
from mmrl.utils.error_catcher import ErrorCatcher
from mmrl_rewards.contract import BoundReward

_MAX_REASON_CHARS = 2000

RewardOutcome = RewardValue | RewardFailure


class RewardError(UserError):
    """A reward failed where the config says `stop`, or before the first step."""


def call_reward(reward: BoundReward, response: Response, sample: Sample) -> RewardOutcome:
    """Return the reward's value for a response, or its failure. Never raises, but a reward may hang or crash Python."""
    with ErrorCatcher() as caught:
        return _check_result(reward, reward(response, sample))
    match caught.error:
        case Unscorable() as error:
            return RewardFailure(RewardErrorKind.UNSCORABLE, _truncate(str(error)))
        case error:
            return RewardFailure(
                RewardErrorKind.ERROR,
                _truncate(f"raised {type(error).__name__}: {error}{_error_location(reward, error)}"),
            )


def _check_result(reward: BoundReward, result: object) -> RewardOutcome:
    value, reason = (result.value, result.reason) if isinstance(result, RewardValue) else (result, "")
    low, high = reward.reward.low, reward.reward.high
    number = float(value) if isinstance(value, Real) else nan
    if not low <= number <= high:
        return RewardFailure(RewardErrorKind.ERROR, f"returned {value!r:.80}, not a number from {low:g} to {high:g}")
    if not isinstance(reason, str):
        return RewardFailure(RewardErrorKind.ERROR, f"gave the reason {reason!r:.80}, which is not a string")
    return RewardValue(number, _truncate(reason))


def _truncate(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + "..."


def _error_location(reward: BoundReward, error: BaseException | None) -> str:
    """Return file and line of an error, those in the reward's own file if the traceback passes there."""
    frames = list(traceback.extract_tb(error.__traceback__)) if error else []
    own_frames = []
    for frame in frames:
        if frame.filename == inspect.getfile(reward.reward.fn):
            own_frames.append(frame)
    if not frames:
        return ""
    last = (own_frames or frames)[-1]
    return f" ({Path(last.filename).name}:{last.lineno})"
