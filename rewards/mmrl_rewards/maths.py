"""Rewards for mathematics, judged by math-verify."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.answer import checked, read
from mmrl.types import Kind, Response, Sample, Term, Unscorable
from mmrl_rewards.contract import reward
from mmrl_rewards.strings import shown

_KINDS: Final = (Kind.LATEX, Kind.TEXT, Kind.NUMBER)
_LONGEST: Final = 300  # characters; parsing takes milliseconds for each ten
_PROSE: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}")  # parsed as a product of letters
_EXCERPT: Final = 60


@reward(name="maths", kinds=_KINDS, deadline_s=5.0)
def equal(response: Response, sample: Sample, *, decimals: Annotated[int, Field(ge=0, le=12)] = 6) -> Term:
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
    target = _target(sample)
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    try:
        answer = _formula(response.answer.value)
    except ValueError as error:
        return Term(0.0, f"the answer is {error}")
    return Term(
        float(_equal(target, answer, decimals)), f"{shown(answer, _EXCERPT)}, expected {shown(target, _EXCERPT)}"
    )


def _target(sample: Sample) -> str:
    target = sample.target
    if target.kind not in _KINDS:
        raise Unscorable(f"the target is a {target.kind}, this reward compares {', '.join(_KINDS)}")
    try:
        return _formula(checked(target.kind, target.value))
    except ValueError as error:
        raise Unscorable(f"the target {target.value!r:.80} is {error}") from error


def _formula(value: str | float) -> str:
    """One formula on one line and without its delimiters, whatever kind of answer it stands in."""
    written = value if isinstance(value, str) else f"{Decimal(repr(value)):f}"  # e in 6e23 would be Euler's number
    formula: str = checked(Kind.LATEX, " ".join(written.split()))
    return formula


def _equal(target: str, answer: str, decimals: int) -> bool:
    if answer == target:
        return True
    if len(answer) > _LONGEST or _PROSE.search(answer):
        return False
    try:
        return bool(round(read(Kind.NUMBER, target), decimals) == round(read(Kind.NUMBER, answer), decimals))
    except ValueError:  # not both are plain numbers
        return _math_verify().equal(target, answer, decimals)


class _MathVerify:
    """The library, loaded when it is first needed: that takes a second."""

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadline is switched off
        self._verify, self._parse = math_verify.verify, math_verify.parse
        self._config = (math_verify.LatexExtractionConfig(),)
        # Siblings share their target, and often their answers.
        self._gold = lru_cache(maxsize=256)(self._read)
        self.equal = lru_cache(maxsize=4096)(self._equal)

    def _equal(self, target: str, answer: str, decimals: int) -> bool:
        """Whether they are, the target first; never where math-verify cannot read the target."""
        gold = self._gold(target)
        return bool(gold) and self._verify(gold, self._read(answer), float_rounding=decimals, timeout_seconds=None)

    def _read(self, formula: str) -> list[Any]:
        found: list[Any] = self._parse(
            f"${formula}$", extraction_config=self._config, fallback_mode="no_fallback", parsing_timeout=None
        )
        return found


_math_verify = lru_cache(maxsize=1)(_MathVerify)
