"""Training rewards asked about a benchmark's answer: what evaluates is what trains."""

from __future__ import annotations

import re
from typing import Final

from mmrl.answer import Value
from mmrl.types import Answer, Finish, Frame, Kind, ResizeMap, Response, Sample, Size, Target, Term, Unscorable
from mmrl_rewards import maths
from mmrl_rewards.contract import Reward

_NOWHERE: Final = ResizeMap(Size(1, 1), Size(1, 1))
_LONGEST: Final = 120  # characters of a formula
_COSTLY: Final = re.compile(r"\^[^\\]{0,20}\^|\^\{?\d{3}|\d{16}|!|\\(?:sum|prod|int|lim)|\^\{[^}]*\^")
"""What may keep a computer algebra system busy for ever."""


def earned(
    reward: Reward[...],
    kind: Kind,
    value: Value,
    target: Value,
    *,
    frames: tuple[Frame, Frame] = (Frame.PX_ORIGINAL, Frame.PX_ORIGINAL),
    resize: ResizeMap = _NOWHERE,
    **options: object,
) -> float:
    """What a reward gives a value, in [0, 1]; `frames` are the answer's and the target's; 0 for a target it refuses."""
    framed = kind in (Kind.BOX, Kind.BOXES, Kind.POINT)
    sample = Sample(
        id="", task="", parts=(), target=Target(kind=kind, value=target, frame=frames[1] if framed else None)
    )
    answer = Answer(text=str(value), thought=None, value=value)
    response = Response(text="", answer=answer, finish=Finish.EOS, num_tokens=0, resizes=(resize,), frame=frames[0])
    try:
        term = reward(response, sample, **options)
    except Unscorable:
        return 0.0
    return term.value if isinstance(term, Term) else term


def same_formula(value: str, target: str, decimals: int = 6) -> bool:
    """Whether two formulas are equal to math-verify; those too long, or too costly to expand, only if written alike."""
    if value.strip() == target.strip():
        return True
    if max(len(value), len(target)) > _LONGEST or _COSTLY.search(value) or _COSTLY.search(target):
        return False
    return earned(maths.equal, Kind.LATEX, value, target, decimals=decimals) == 1.0
