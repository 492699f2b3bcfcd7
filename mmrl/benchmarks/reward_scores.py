"""Training rewards asked about a benchmark's answer: what evaluates is what trains."""

from __future__ import annotations

import re
from typing import Final

from mmrl.answer import AnswerValue
from mmrl.types import (
    Answer,
    AnswerType,
    CoordinateSystem,
    FinishReason,
    ResizeMap,
    Response,
    RewardValue,
    Sample,
    Size,
    Target,
    Unscorable,
)
from mmrl_rewards import maths
from mmrl_rewards.contract import Reward

_IDENTITY_RESIZE: Final = ResizeMap(Size(1, 1), Size(1, 1))
_MAX_FORMULA_CHARS: Final = 120  # characters of a formula
_EXPENSIVE_FORMULA: Final = re.compile(r"\^[^\\]{0,20}\^|\^\{?\d{3}|\d{16}|!|\\(?:sum|prod|int|lim)|\^\{[^}]*\^")
"""What may keep a computer algebra system busy for ever."""


def reward_score(
    reward: Reward[...],
    answer_type: AnswerType,
    value: AnswerValue,
    target: AnswerValue,
    *,
    coordinate_systems: tuple[CoordinateSystem, CoordinateSystem] = (
        CoordinateSystem.PX_ORIGINAL,
        CoordinateSystem.PX_ORIGINAL,
    ),
    resize_map: ResizeMap = _IDENTITY_RESIZE,
    **options: object,
) -> float:
    """What a reward gives a value, in [0, 1]; `frames` are the answer's and the target's; 0 for a target it refuses."""
    framed = answer_type in (AnswerType.BOX, AnswerType.BOXES, AnswerType.POINT)
    sample = Sample(
        id="",
        task="",
        parts=(),
        target=Target(
            answer_type=answer_type, value=target, coordinate_system=coordinate_systems[1] if framed else None
        ),
    )
    answer = Answer(text=str(value), thinking=None, value=value)
    response = Response(
        text="",
        answer=answer,
        finish_reason=FinishReason.EOS,
        num_tokens=0,
        resize_maps=(resize_map,),
        coordinate_system=coordinate_systems[0],
    )
    try:
        term = reward(response, sample, **options)
    except Unscorable:
        return 0.0
    return term.value if isinstance(term, RewardValue) else term


def formulas_equal(value: str, target: str, decimals: int = 6) -> bool:
    """Whether two formulas are equal to math-verify; those too long, or too costly to expand, only if written alike."""
    if value.strip() == target.strip():
        return True
    if (
        max(len(value), len(target)) > _MAX_FORMULA_CHARS
        or _EXPENSIVE_FORMULA.search(value)
        or _EXPENSIVE_FORMULA.search(target)
    ):
        return False
    return reward_score(maths.equal, AnswerType.LATEX, value, target, decimals=decimals) == 1.0
