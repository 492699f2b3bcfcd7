"""Rewards for length, in tokens of the whole response.

The first three pay right answers alone, from `floor` up: no length lifts a wrong answer, so none comes to lie above a
right one. An answer is right if the reward of its kind, which `ACCURACY` names, reaches `threshold`; that of formulas
may hang, hence the deadline. The last two know nothing of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import cos, pi
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable, UserError
from mmrl_rewards import box, choice, classify, detect, gui, jigsaw, maths, number, point, span, text
from mmrl_rewards.contract import reward
from mmrl_rewards.geometry import Threshold

Tokens = Annotated[int, Field(ge=1)]
Floor = Annotated[float, Field(ge=0.0, lt=1.0)]
Peak = Annotated[float, Field(gt=0.0, lt=1.0)]

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
"""What says whether an answer is right."""
_ANSWER_TYPES = tuple(ACCURACY_REWARDS)
_TIMEOUT_S = 5.0


@reward(name="cosine_length", answer_types=_ANSWER_TYPES, timeout_s=_TIMEOUT_S)
def cosine(
    response: Response, sample: Sample, *, max_tokens: Tokens = 1024, floor: Floor = 0.5, threshold: Threshold = 0.7
) -> RewardValue:
    """A right answer: floor + (1 - floor) (1 + cos(pi t)) / 2, t = min(1, tokens / max_tokens). A wrong one: 0.

    Source: the cosine reward of Yeo et al. (arXiv:2502.03373), with VLM-R1's 1 to 0.5 over 1024 tokens. Departures: t
    ends at 1, where the cosine would rise again; a wrong answer earns the same at any length, since to pay it for
    length is to pay rambling.

    Raises:
        Unscorable: the target is none that `ACCURACY` can judge.
    """
    share = (1.0 + cos(pi * min(1.0, response.num_tokens / max_tokens))) / 2.0
    return _score_if_correct(response, sample, threshold, floor, share)


@reward(name="brevity", answer_types=_ANSWER_TYPES, timeout_s=_TIMEOUT_S)
def brevity(
    response: Response, sample: Sample, *, max_tokens: Tokens = 1024, floor: Floor = 0.5, threshold: Threshold = 0.7
) -> RewardValue:
    """A right answer: 1 - (1 - floor) min(1, tokens / max_tokens). A wrong one: 0.

    Source: the length penalty of Kimi k1.5 (arXiv:2501.12599, 2.3.3), linear in the length. Departures: measured
    against a fixed length instead of the group's; a wrong answer earns the same at any length.

    Raises:
        Unscorable: the target is none that `ACCURACY` can judge.
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
    """A right answer: 1 if least <= tokens <= most, else `floor`. A wrong one: 0.

    Source: the length reward of Video-R1 (arXiv:2503.21776), 320 to 512. Departures: none.

    Raises:
        Unscorable: the target is none that `ACCURACY` can judge.
        UserError: the window is empty.
    """
    if least > most:
        raise UserError(f"length window: no length lies between least = {least} and most = {most}")
    return _score_if_correct(response, sample, threshold, floor, float(least <= response.num_tokens <= most))


@reward(name="overlong", low=-1.0, high=0.0, attack_tolerance=1.0)  # a penalty: silence is not fined
def overlong(response: Response, sample: Sample, *, max_tokens: Tokens = 20_480, buffer: Tokens = 4096) -> RewardValue:
    """0 up to max_tokens - buffer, from there falling linearly to -1 at max_tokens.

    Source: soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13). Departures: none.
    """
    value = max(-1.0, min(0.0, (max_tokens - buffer - response.num_tokens) / buffer))
    return RewardValue(value, f"{response.num_tokens} tokens, free up to {max_tokens - buffer}")


@reward(name="surrogate_length", low=-1.0, attack_tolerance=1.0)  # label-free: any answer of its kind will do
def surrogate(response: Response, sample: Sample, *, max_tokens: Tokens = 3072, peak: Peak = 0.5) -> RewardValue:
    """1 - (1 - x/p)^2 for x <= p, above it 1 - 2 ((x - p) / (1 - p))^2; x = min(1, tokens / max_tokens), p = peak.

    Only a loss is counted, min(0, value), where nothing of the target's kind was answered. Source: format and length
    as surrogate signals (arXiv:2505.19439). Departures: the format's share is a term of its own, `mmrl_rewards.format`.
    """
    x = min(1.0, response.num_tokens / max_tokens)
    value = 1.0 - (1.0 - x / peak) ** 2 if x <= peak else 1.0 - 2.0 * ((x - peak) / (1.0 - peak)) ** 2
    if response.answer.value is None:
        return RewardValue(min(0.0, value), f"{response.num_tokens} tokens, {response.answer.problems[0]}")
    return RewardValue(value, f"{response.num_tokens} tokens of {max_tokens}")


def _score_if_correct(
    response: Response, sample: Sample, threshold: float, floor: float, length_score: float
) -> RewardValue:
    """Return 0 for an incorrect answer, else `floor` plus `length_score` times the rest of the range."""
    accuracy = ACCURACY_REWARDS.get(sample.target.answer_type)
    if accuracy is None:
        raise Unscorable(
            f"no reward here says whether a {sample.target.answer_type} is right, but for {', '.join(_ANSWER_TYPES)}"
        )
    judged = accuracy(response, sample)
    value, reason = judged if isinstance(judged, RewardValue) else (judged, "")
    if value < threshold:
        return RewardValue(0.0, f"wrong: {reason}")
    return RewardValue(floor + (1.0 - floor) * length_score, f"right, {response.num_tokens} tokens: {reason}")
