"""Rewards for length, in tokens of the whole response.

The first three reward only correct answers, with at least `floor`, and give wrong answers 0 at any length. So no wrong
answer gets more than a correct one. An answer is correct if the reward that `ACCURACY_REWARDS` lists for the target's
type reaches `threshold`. The reward for formulas can hang, so these rewards have a time limit. The last two rewards do
not look at the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import cos, pi
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable, UserError
from mmrl_rewards import box, choice, classify, detect, gui, jigsaw, maths, number, point, span, text
from mmrl_rewards.contract import reward, value_and_reason
from mmrl_rewards.geometry import Threshold

Tokens = Annotated[int, Field(ge=1)]
Floor = Annotated[float, Field(ge=0.0, lt=1.0)]  # lowest value of a correct answer
Peak = Annotated[float, Field(gt=0.0, lt=1.0)]  # fraction of `max_tokens`

ACCURACY_REWARDS: Final[Mapping[AnswerType, Callable[[Response, Sample], float | RewardValue]]] = MappingProxyType(
    {
        AnswerType.TEXT: text.exact,
        AnswerType.CHOICE: choice.exact,
        AnswerType.NUMBER: number.exact,
        AnswerType.BOX: box.iou,
        AnswerType.BOXES: detect.f1,
        AnswerType.POINTS: point.f1,
        AnswerType.SPAN: span.iou,
        AnswerType.SPANS: span.f1,
        AnswerType.PERMUTATION: jigsaw.exact,
        AnswerType.ACTION: gui.step,
        AnswerType.LIST: classify.labels,
        AnswerType.LATEX: maths.equal,
    }
)
"""The reward that decides whether an answer is correct, by the target's type."""
_ANSWER_TYPES = tuple(ACCURACY_REWARDS)
_TIMEOUT_S = 5.0  # seconds for one call


@reward(name="cosine_length", answer_types=_ANSWER_TYPES, timeout_s=_TIMEOUT_S)
def cosine(
    response: Response, sample: Sample, *, max_tokens: Tokens = 1024, floor: Floor = 0.5, threshold: Threshold = 0.7
) -> RewardValue:
    """Return floor + (1 - floor) (1 + cos(pi t)) / 2 for a correct answer, t = min(1, tokens / max_tokens), else 0.

    Source: the cosine reward of Yeo et al. (arXiv:2502.03373), with VLM-R1's 1 to 0.5 over 1024 tokens.
    Departures: t ends at 1, because the cosine would rise again beyond. A wrong answer earns 0 at any length, because a
    value that grows with its length would reward rambling.
    Unscorable: the target has a type without a reward in `ACCURACY_REWARDS`, or that reward raises it.
    """
    share = (1.0 + cos(pi * min(1.0, response.num_tokens / max_tokens))) / 2.0
    return _score_if_correct(response, sample, threshold, floor, share)


@reward(name="brevity", answer_types=_ANSWER_TYPES, timeout_s=_TIMEOUT_S)
def brevity(
    response: Response, sample: Sample, *, max_tokens: Tokens = 1024, floor: Floor = 0.5, threshold: Threshold = 0.7
) -> RewardValue:
    """Return 1 - (1 - floor) min(1, tokens / max_tokens) for a correct answer, else 0.

    Source: the length penalty of Kimi k1.5 (arXiv:2501.12599, 2.3.3), linear in the length.
    Departures: the length is measured against a fixed maximum instead of the group's lengths. A wrong answer earns 0 at
    any length.
    Unscorable: the target has a type without a reward in `ACCURACY_REWARDS`, or that reward raises it.
    """
    return _score_if_correct(response, sample, threshold, floor, 1.0 - min(1.0, response.num_tokens / max_tokens))


@reward(name="length_window", answer_types=_ANSWER_TYPES, timeout_s=_TIMEOUT_S)
def window(
    response: Response,
    sample: Sample,
    *,
    least: Tokens = 320,
    most: Tokens = 512,
    floor: Floor = 0.5,
    threshold: Threshold = 0.7,
) -> RewardValue:
    """Return 1 for a correct answer with least <= tokens <= most, `floor` for another correct answer, else 0.

    Source: the length reward of Video-R1 (arXiv:2503.21776), 320 to 512. Departures: none.
    Unscorable: the target has a type without a reward in `ACCURACY_REWARDS`, or that reward raises it.

    Raises:
        UserError: `least` is greater than `most`.
    """
    if least > most:
        raise UserError(f"length window: no length lies between least = {least} and most = {most}")
    return _score_if_correct(response, sample, threshold, floor, float(least <= response.num_tokens <= most))


# A short response gets the maximum.
@reward(name="overlong", judges_answer=False, low=-1.0, high=0.0, attack_tolerance=1.0)
def overlong(response: Response, sample: Sample, *, max_tokens: Tokens = 20_480, buffer: Tokens = 4096) -> RewardValue:
    """Return 0 up to max_tokens - buffer tokens, then a value that falls linearly to -1 at max_tokens.

    Source: soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13). Departures: none.
    """
    value = max(-1.0, min(0.0, (max_tokens - buffer - response.num_tokens) / buffer))
    return RewardValue(value, f"{response.num_tokens} tokens, free up to {max_tokens - buffer}")


@reward(name="surrogate_length", judges_answer=False, low=-1.0, attack_tolerance=1.0)  # ignores the target's value
def surrogate(response: Response, sample: Sample, *, max_tokens: Tokens = 3072, peak: Peak = 0.5) -> RewardValue:
    """Return 1 - (1 - x/p)^2 for x <= p and 1 - 2 ((x - p) / (1 - p))^2 above, in [-1, 1].

    x is min(1, tokens / max_tokens) and p is `peak`. If the response holds no answer of the target's type, a positive
    value becomes 0.

    Source: format and length as surrogate signals (arXiv:2505.19439).
    Departures: the paper's format reward is a separate term here, `mmrl_rewards.format`.
    """
    x = min(1.0, response.num_tokens / max_tokens)
    value = 1.0 - (1.0 - x / peak) ** 2 if x <= peak else 1.0 - 2.0 * ((x - peak) / (1.0 - peak)) ** 2
    if response.answer.value is None:
        return RewardValue(min(0.0, value), f"{response.num_tokens} tokens, {response.answer.problems[0]}")
    return RewardValue(value, f"{response.num_tokens} tokens of {max_tokens}")


def _score_if_correct(
    response: Response, sample: Sample, threshold: float, floor: float, length_score: float
) -> RewardValue:
    """Return floor + (1 - floor) * length_score for a correct answer, else 0. `length_score` is in [0, 1]."""
    accuracy_reward = ACCURACY_REWARDS.get(sample.target.answer_type)
    if accuracy_reward is None:
        raise Unscorable(
            f"no reward here says whether a {sample.target.answer_type} is right, except for {', '.join(_ANSWER_TYPES)}"
        )
    accuracy = accuracy_reward(response, sample)
    value, reason = value_and_reason(accuracy)
    if value < threshold:
        return RewardValue(0.0, f"wrong: {reason}")
    return RewardValue(floor + (1.0 - floor) * length_score, f"right, {response.num_tokens} tokens: {reason}")
