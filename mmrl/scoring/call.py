"""One call of a reward, held to its contract: a value in its range, or a failure with a reason."""

from __future__ import annotations

import inspect
import traceback
from math import nan
from numbers import Real
from pathlib import Path

from mmrl.types import Failure, Fault, Response, Sample, Term, Unscorable, UserError
from mmrl_rewards.cases import Caught
from mmrl_rewards.contract import BoundReward

_LONGEST_REASON = 2000

Outcome = Term | Failure


class RewardError(UserError):
    """A reward failed where it must not."""


def attempt(reward: BoundReward, response: Response, sample: Sample) -> Outcome:
    """What a reward says of a response. Never raises, but may hang or end the process, as rewards can."""
    with Caught() as caught:
        return _held(reward, reward(response, sample))
    match caught.error:
        case Unscorable() as error:
            return Failure(Fault.UNSCORABLE, _cut(str(error)))
        case error:
            return Failure(Fault.ERROR, _cut(f"raised {type(error).__name__}: {error}{_place(reward, error)}"))


def _held(reward: BoundReward, result: object) -> Outcome:
    value, reason = (result.value, result.reason) if isinstance(result, Term) else (result, "")
    low, high = reward.reward.low, reward.reward.high
    number = float(value) if isinstance(value, Real) else nan
    if not low <= number <= high:
        return Failure(Fault.ERROR, f"returned {value!r:.80}, not a number from {low:g} to {high:g}")
    if not isinstance(reason, str):
        return Failure(Fault.ERROR, f"gave the reason {reason!r:.80}, which is no text")
    return Term(number, _cut(reason))


def _cut(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "..."


def _place(reward: BoundReward, error: BaseException | None) -> str:
    """Where an error arose: in the reward's own file, if it passed there."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    own = [frame for frame in frames if frame.filename == inspect.getfile(reward.reward.fn)]
    return f" ({Path(frame.filename).name}:{frame.lineno})" if (frame := next(reversed(own or frames), None)) else ""
