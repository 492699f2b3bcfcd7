"""Training rewards applied to benchmark answers, so that evaluation and training measure the same."""

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
_MAX_FORMULA_CHARS: Final = 120  # characters of the longest formula that is compared algebraically
# Formulas that may keep the computer algebra system busy without end: towers of powers, factorials, integrals.
_EXPENSIVE_FORMULA: Final = re.compile(r"\^[^\\]{0,20}\^|\^\{?\d{3}|\d{16}|!|\\(?:sum|prod|int|lim)|\^\{[^}]*\^")


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
    """Return the reward of an answer, in [0, 1]; 0 where the reward cannot score the target.

    `coordinate_systems` belong to `value`, the answer found, and to `target`; `resize_map` converts between them.
    `options` are the reward's.
    """
    has_coordinates = answer_type in (AnswerType.BOX, AnswerType.BOXES, AnswerType.POINT)
    sample_target = Target(
        answer_type=answer_type, value=target, coordinate_system=coordinate_systems[1] if has_coordinates else None
    )
    # Rewards take a whole sample and response; what is not the answer is a placeholder.
    sample = Sample(id="", task="", parts=(), target=sample_target)
    response = Response(
        text="",
        answer=Answer(text=str(value), thinking=None, value=value),
        finish_reason=FinishReason.EOS,
        num_tokens=0,
        resize_maps=(resize_map,),
        coordinate_system=coordinate_systems[0],
    )
    try:
        result = reward(response, sample, **options)
    except Unscorable:
        return 0.0
    return result.value if isinstance(result, RewardValue) else result


def formulas_equal(value: str, target: str, decimals: int = 6) -> bool:
    """Return True when math-verify finds two formulas equal to so many decimals."""
    if value.strip() == target.strip():
        return True
    # Formulas that are too long or too expensive to expand are equal only if their texts are.
    for formula in (value, target):
        if len(formula) > _MAX_FORMULA_CHARS or _EXPENSIVE_FORMULA.search(formula):
            return False
    return reward_score(maths.equal, AnswerType.LATEX, value, target, decimals=decimals) == 1.0
