"""Rewards for mathematics, judged by math-verify."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.answer import parse_answer_value, validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward
from mmrl_rewards.strings import excerpt

_ANSWER_TYPES: Final = (AnswerType.LATEX, AnswerType.TEXT, AnswerType.NUMBER)
_MAX_CHARS: Final = 300  # characters; parsing takes milliseconds for each ten
_PROSE: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}")  # parsed as a product of letters
_EXCERPT_CHARS: Final = 60


@reward(name="maths", answer_types=_ANSWER_TYPES, timeout_s=5.0)
def equal(response: Response, sample: Sample, *, decimals: Annotated[int, Field(ge=0, le=12)] = 6) -> RewardValue:
    r"""1 if the answer is mathematically equal to the target, else 0: \frac{1}{2}, 1/2 and 0.5 are.

    Decimal fractions are compared to `decimals` places, so 0.333 is 1/3 with 3. Order counts in (1, 2), not in 1, 2 and
    \{1, 2\}; x = 3 is 3; 50% is both 50 and 0.5; units are not compared. Source: math-verify
    (github.com/huggingface/Math-Verify), `verify(gold, answer)`, which is not symmetric: where the target is 1 < x < 2,
    (1, 2) is right, not the other way round. Departures: the whole answer is one formula, from which no number is
    picked: what is longer than 300 characters is none, and three words in a row are prose. An answer written as the
    target is, is right even where neither is mathematics. Plain numbers are compared as such.

    It may take for ever, as for 9^{9^{9^{9}}}, hence the deadline. math-verify's own, a SIGALRM, is switched off, for
    it fails outside the main thread.

    Raises:
        Unscorable: the target is of another kind, or is empty, or not one formula.
    """
    target = _target_formula(sample)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    try:
        answer = _normalize_formula(response.answer.value)
    except ValueError as error:
        return RewardValue(0.0, f"the answer is {error}")
    return RewardValue(
        float(_formulas_equal(target, answer, decimals)),
        f"{excerpt(answer, _EXCERPT_CHARS)}, expected {excerpt(target, _EXCERPT_CHARS)}",
    )


def _target_formula(sample: Sample) -> str:
    target = sample.target
    if target.answer_type not in _ANSWER_TYPES:
        raise Unscorable(f"the target is a {target.answer_type}, this reward compares {', '.join(_ANSWER_TYPES)}")
    try:
        return _normalize_formula(validate_value(target.answer_type, target.value))
    except ValueError as error:
        raise Unscorable(f"the target {target.value!r:.80} is {error}") from error


def _normalize_formula(value: str | float) -> str:
    """One formula on one line and without its delimiters, whatever kind of answer it stands in."""
    written = value if isinstance(value, str) else f"{Decimal(repr(value)):f}"  # e in 6e23 would be Euler's number
    formula: str = validate_value(AnswerType.LATEX, " ".join(written.split()))
    return formula


def _formulas_equal(target: str, answer: str, decimals: int) -> bool:
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
        return _load_math_verify().equal(target, answer, decimals)


class _MathVerify:
    """The library, loaded when it is first needed: that takes a second."""

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadline is switched off
        self._verify, self._parse = math_verify.verify, math_verify.parse
        self._extraction_config = (math_verify.LatexExtractionConfig(),)
        # Siblings share their target, and often their answers.
        self._parse_target = lru_cache(maxsize=256)(self._parse_formula)
        self.equal = lru_cache(maxsize=4096)(self._verify_equal)

    def _verify_equal(self, target: str, answer: str, decimals: int) -> bool:
        """Whether they are, the target first; never where math-verify cannot read the target."""
        gold = self._parse_target(target)
        return bool(gold) and self._verify(
            gold, self._parse_formula(answer), float_rounding=decimals, timeout_seconds=None
        )

    def _parse_formula(self, formula: str) -> list[Any]:
        found: list[Any] = self._parse(
            f"${formula}$", extraction_config=self._extraction_config, fallback_mode="no_fallback", parsing_timeout=None
        )
        return found


_load_math_verify = lru_cache(maxsize=1)(_MathVerify)
