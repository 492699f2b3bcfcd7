"""Rewards for mathematics, compared by math-verify."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.answer import parse_answer_value, validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import Of, part_value, reward
from mmrl_rewards.strings import excerpt

_ANSWER_TYPES: Final = (AnswerType.LATEX, AnswerType.TEXT, AnswerType.NUMBER)
_MAX_CHARS: Final = 300  # characters; parsing takes milliseconds for each ten
_PROSE: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}")  # parsed as a product of letters
_EXCERPT_CHARS: Final = 60


@reward(name="maths", answer_types=_ANSWER_TYPES, timeout_s=5.0)
def equal(
    response: Response, sample: Sample, *, decimals: Annotated[int, Field(ge=0, le=12)] = 6, of: Of = "answer"
) -> RewardValue:
    r"""Return 1 if the answer is mathematically equal to the target, as \frac{1}{2}, 1/2 and 0.5 are, else 0.

    Decimal fractions are compared to `decimals` places, so with 3 places 0.333 equals 1/3. Order counts in (1, 2), but
    not in 1, 2 and \{1, 2\}. x = 3 equals 3, and 50% equals both 50 and 0.5. Units are not compared.

    A comparison can run forever, as for 9^{9^{9^{9}}}, so a call has a time limit. math-verify's own limit uses
    SIGALRM, which fails outside the main thread, so it is switched off.

    Source: math-verify (github.com/huggingface/Math-Verify), `verify(gold, answer)`. It is not symmetric: (1, 2) is a
    correct answer to 1 < x < 2, but not the reverse.
    Departures: the whole answer must be one formula, and no number is extracted from it. More than 300 characters, or
    three words in a row, are not a formula. An answer identical to the target is correct even if neither is
    mathematics. Plain numbers are compared as numbers.
    Unscorable: the target has another type, is empty, or is not one formula.
    """
    if sample.target.answer_type not in _ANSWER_TYPES:
        written = sample.target.answer_type
        raise Unscorable(f"the target is a {written}, this reward compares {', '.join(_ANSWER_TYPES)}")
    try:
        target = _normalize_formula(validate_value(sample.target.answer_type, sample.target.value))
    except ValueError as error:
        raise Unscorable(f"the target {sample.target.value!r:.80} is {error}") from error
    try:
        answer = _normalize_formula(part_value(response, sample.target.answer_type, of))
    except ValueError as error:
        return RewardValue(0.0, f"the answer is {error}")
    reason = f"{excerpt(answer, _EXCERPT_CHARS)}, expected {excerpt(target, _EXCERPT_CHARS)}"
    return RewardValue(float(_formulas_equal(target, answer, decimals)), reason)


def _normalize_formula(value: str | float) -> str:
    """Return a formula on one line and without delimiters, from an answer of any type.

    Raises:
        ValueError: the value is not one formula.
    """
    # Written out, since the e in 6e23 would be Euler's number.
    written = value if isinstance(value, str) else f"{Decimal(repr(value)):f}"
    formula: str = validate_value(AnswerType.LATEX, " ".join(written.split()))
    return formula


def _formulas_equal(target: str, answer: str, decimals: int) -> bool:
    """Return True if the texts are equal, or equal as numbers rounded to `decimals` places, or equal to math-verify."""
    if answer == target:
        return True
    if len(answer) > _MAX_CHARS or _PROSE.search(answer):
        return False
    try:
        return bool(
            round(parse_answer_value(AnswerType.NUMBER, target), decimals)
            == round(parse_answer_value(AnswerType.NUMBER, answer), decimals)
        )
    except ValueError:  # not both are plain numbers
        return _verify(target, answer, decimals)


@lru_cache(maxsize=4096)  # siblings share their target, and often their answers
def _verify(target: str, answer: str, decimals: int) -> bool:
    """Return math-verify's verdict. It is False if math-verify cannot read the target."""
    from math_verify import verify  # takes a second

    gold = _parse_formula(target)
    return bool(gold) and verify(gold, _parse_formula(answer), float_rounding=decimals, timeout_seconds=None)


@lru_cache(maxsize=256)
def _parse_formula(formula: str) -> list[Any]:
    """Return math-verify's readings of a formula, empty if it cannot read it."""
    from math_verify import LatexExtractionConfig, parse

    # It warns at every call that its own time limit is switched off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(
        f"${formula}$", extraction_config=(LatexExtractionConfig(),), fallback_mode="no_fallback", parsing_timeout=None
    )
    return found
