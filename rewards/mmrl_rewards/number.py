"""Rewards for one number, with or without a unit."""

from __future__ import annotations

import re
from functools import lru_cache
from math import inf, isclose
from typing import Annotated, Final
from unicodedata import normalize

from pydantic import Field

from mmrl.answer import ANSWER_LEAD, parse_answer_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.chinese import to_english
from mmrl_rewards.choice_grammar import strip_markup
from mmrl_rewards.contract import Of, part_value, reward, target_value
from mmrl_rewards.number_words import GROUPED_DIGITS, MINUS, join_digits, split_number, write_exponents
from mmrl_rewards.units import Unit, find_unit

Tolerance = Annotated[float, Field(ge=0.0)]
Decimals = Annotated[int, Field(ge=0, le=12)]
_CONVERSION_TOLERANCE: Final = 1e-9  # relative; converting units rounds
_MONEY: Final = r"((?:US)?\$|[€£¥]|USD|EUR|GBP|)"
_QUANTITY: Final = re.compile(rf"{_MONEY}\s*([+-]?[0-9.][0-9.,]*(?:[eE][+-]?[0-9]+)?)\s*(\D.*)?", re.ASCII)
_POWER_OF_TEN: Final = re.compile(r"(?<=[0-9])\s*(?:\\times|\\cdot|[*x\u00d7\u00b7])\s*10\^([+-]?[0-9]+)", re.ASCII)
_FRACTION: Final = re.compile(r"^(?:([0-9]+) )?([0-9]+)/([1-9][0-9]*)(?= ?[A-Za-z%]|$)", re.ASCII)  # 1 1/2 cups
_PART_AFTER_UNIT: Final = re.compile(r"([a-z]+) ([a-z]+) and (a half|a quarter|three quarters)", re.IGNORECASE)
_VULGAR: Final = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # ½
_LEAD: Final = re.compile(rf"^{ANSWER_LEAD}(?:[a-z]+ ?[=:] ?)?", re.IGNORECASE)  # "The answer is", "x =", "Length:"
_NUMBER_AND_UNIT: Final = r"[0-9]+(?:\.[0-9]+)? ?[A-Za-z]+"
_SUM: Final = re.compile(rf"{_NUMBER_AND_UNIT}\.?(?:,? ?(?:and )?{_NUMBER_AND_UNIT}\.?)+", re.ASCII)  # 1 h 30 min
_FOOT: Final = re.compile(r"(?<=[0-9])['\u2019\u2032] ?(?=[0-9]|$)")
_INCH: Final = re.compile(r"(?<=[0-9])[\"\u201d\u2033]$")
_EXTENT: Final = re.compile(r"(?<=[a-z]) (?:long|wide|tall|high|deep|thick|in (?:length|width|height|depth|diameter))$")
_TWICE: Final = re.compile(r"(.+?) ?(?:= ?|\((?=[0-9]))(.+?)\)?")  # 3 cm (30 mm) and 3 cm = 30 mm
_SIZES: Final = {"k": "thousand", "m": "million", "b": "billion", "t": "trillion"}
_SIZE: Final = re.compile(rf"k|[mbt]n?|{'|'.join(_SIZES.values())}", re.IGNORECASE)  # of an amount of money
_CURRENCIES: Final = frozenset({"dollars", "euros", "yen", "USD", "EUR", "GBP"})
_HOUR_OR_SECOND: Final = frozenset({"h", "hr", "hrs", "s", "sec"})
_MAX_CHARS: Final = 80  # characters of a number with its unit
_PLAIN_NUMBER: Final = Unit("dimensionless", 1.0)


@reward(name="number", answer_types=(AnswerType.NUMBER,))
def exact(response: Response, sample: Sample, *, tolerance: Tolerance = 0.0, of: Of = "answer") -> RewardValue:
    """Return 1 if |answer - target| <= tolerance, else 0. It reads a bare number only: 3, 3.0 (equal), -1,500.5 or 1e3.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2).
    Departures: there is an absolute tolerance, in the unit of the target. For units and words see `quantity`.
    Unscorable: the target is not a finite number.
    """
    target = target_value(sample, AnswerType.NUMBER)
    value = part_value(response, AnswerType.NUMBER, of)
    within = _is_within(abs(value - target), tolerance)
    margin = f" within {tolerance:g}" if tolerance else ""
    return RewardValue(float(within), f"{value}, expected {target}{margin}")


@reward(name="relaxed", answer_types=(AnswerType.NUMBER,))
def relaxed(response: Response, sample: Sample, *, relative: Tolerance = 0.05, of: Of = "answer") -> RewardValue:
    """Return 1 if |answer - target| <= relative * |target|, else 0. It is the relaxed accuracy of chart questions.

    Five per cent of a year is a century, so use `number:exact` for questions about years.

    Source: ChartQA (arXiv:2203.10244), after PlotQA. Departures: none for numbers.
    Unscorable: the target is not a finite number.
    """
    target = target_value(sample, AnswerType.NUMBER)
    value = part_value(response, AnswerType.NUMBER, of)
    within = _is_within(abs(value - target), relative * abs(target))
    return RewardValue(float(within), f"{value}, expected {target} within {relative:g}")


@reward(name="graded", answer_types=(AnswerType.NUMBER,))
def graded(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return max(0, 1 - |answer - target| / |target|), one minus the relative error. For a target of 0, only 0 earns 1.

    Source: the reward of the task `regression` of Video-R1 (arXiv:2503.21776; its code, grpo.py).
    Departures: 1e-9 is not added to error and target; with it, no answer to a target of 0 would earn anything.
    Unscorable: the target is not a finite number.
    """
    target = target_value(sample, AnswerType.NUMBER)
    value = part_value(response, AnswerType.NUMBER, of)
    error = abs(value - target) / abs(target) if target else float(value != 0)
    return RewardValue(max(0.0, 1.0 - error), f"{value}, expected {target}: a relative error of {error:.3g}")


@reward(name="rounded", answer_types=(AnswerType.NUMBER,))
def rounded(
    response: Response, sample: Sample, *, decimals: Decimals = 2, column: str | None = None, of: Of = "answer"
) -> RewardValue:
    """Return 1 if answer and target are equal after both are rounded to `decimals` places, else 0.

    With `column`, the number of places of each sample is in `sample.meta[column]`.

    Source: MathVista's `precision` (arXiv:2310.02255). Departures: the target is rounded too.
    Unscorable: the target is not a finite number, or the column holds no whole number from 0 to 12.
    """
    target = target_value(sample, AnswerType.NUMBER)
    places = decimals
    if column is not None:
        given = sample.meta.get(column)
        # True == 1, and 2.0 is what a table with a gap in this column holds.
        if isinstance(given, bool) or not isinstance(given, int | float) or given not in range(13):
            raise Unscorable(f"the column {column!r} says {given!r:.40}, not how many decimals from 0 to 12 there are")
        places = int(given)
    value = part_value(response, AnswerType.NUMBER, of)
    equal = round(float(value), places) == round(float(target), places)
    return RewardValue(float(equal), f"{value}, expected {target} to {places} decimals")


@reward(name="quantity", answer_types=(AnswerType.TEXT,))
def quantity(
    response: Response, sample: Sample, *, relative: Tolerance = 0.0, unit_required: bool = True, of: Of = "answer"
) -> RewardValue:
    """Return 1 if |answer - target| <= relative * |target| after conversion to the same unit, else 0: 3 cm is 30 mm.

    Answer and target are a number and a unit that pint knows, in SI's case: MW is not mW. 25% is 0.25, and $, €, £ and
    "The length is" may come first. Bold, boxes and LaTeX's text, spaces, fractions and exponents are read, and so are
    "half an hour", "an hour and a half", 百分之五, 5公里, 12 500 m, $1.5 million, $2bn, 5'10" and sums in ever smaller
    units, such as 1h30m. Temperatures are converted, currencies are not. Unless `unit_required`, a number without a
    unit is taken to be in the other's unit.

    Source: MathVista's `unit` (arXiv:2310.02255), which its evaluation does not check; the units of pint.
    Departures: the unit is checked.
    Unscorable: the target is not a number with a known unit or with none.
    """
    try:
        expected, unit = _parse_quantity(target_value(sample, AnswerType.TEXT))
    except ValueError as error:
        raise Unscorable(f"the target is {error}") from error
    try:
        given, given_unit = _parse_quantity(part_value(response, AnswerType.TEXT, of))
    except ValueError as error:
        return RewardValue(0.0, f"the answer is {error}")
    if not unit_required:
        # Whichever of the two has a unit lends it to the other.
        unit, given_unit = unit or given_unit, given_unit or unit
    given_unit, unit = given_unit or _PLAIN_NUMBER, unit or _PLAIN_NUMBER
    if given_unit.dimension != unit.dimension:
        return RewardValue(0.0, f"in {given_unit.dimension}, expected {unit.dimension}")
    value = (given * given_unit.factor + given_unit.offset - unit.offset) / unit.factor
    # The offsets of temperatures round, too.
    rounding = _CONVERSION_TOLERANCE * (abs(expected) + abs(unit.offset / unit.factor))
    equal = abs(value - expected) <= max(relative * abs(expected), rounding)
    return RewardValue(float(equal), f"{value:g}, expected {expected:g}, in the target's unit")


def _is_within(error: float, bound: float) -> bool:
    """Return True if an error is at most a bound, or above it by rounding alone: 0.315 is 0.3 + 5 %."""
    return error <= bound or isclose(error, bound)


@lru_cache(maxsize=4096)  # siblings share their target, and often their answers
def _parse_quantity(text: str) -> tuple[float, Unit | None]:
    """Return a number and its unit, or None for a number without a unit.

    Raises:
        ValueError: the text is not a number with one known unit or none.
    """
    if len(text) > _MAX_CHARS:
        raise ValueError(f"no number with a unit: {text[:40]!r}")
    if text[:1].isdigit():
        text = _INCH.sub(" in", _FOOT.sub(" ft ", text))
    plain = GROUPED_DIGITS.sub(join_digits, _LEAD.sub("", to_english(strip_markup(write_exponents(text))), count=1))
    plain = _write_number(_POWER_OF_TEN.sub(r"e\1", plain))
    plain = _EXTENT.sub("", plain.rstrip("."))
    quantity = _read_twice(plain) or _add_up(plain) or _read_once(plain)
    if quantity is None:
        raise ValueError(f"no number with a unit: {text[:40]!r}")
    return quantity


def _read_twice(text: str) -> tuple[float, Unit] | None:
    """Return the first quantity in 3 cm (30 mm) and 3 cm = 30 mm; None for other texts, and if the two differ."""
    twice = _TWICE.fullmatch(text)
    if twice is None:
        return None
    (first, unit), (second, other) = map(_parse_quantity, twice.groups())
    if unit is None or other is None or unit.dimension != other.dimension:
        return None
    # 5 kg (11 lb) is one quantity, though rounded.
    is_same = isclose(first * unit.factor + unit.offset, second * other.factor + other.offset, rel_tol=0.01)
    return (first, unit) if is_same else None


def _read_once(text: str) -> tuple[float, Unit | None] | None:
    """Return the number and the unit of 3 cm, $5 and $1.5 million; ValueError for one that is unknown, else None."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    sign, digits, name = match[1], match[2], match[3] or ""
    size, _, currency = name.partition(" ")
    if _SIZE.fullmatch(size) and (currency in _CURRENCIES or (sign and not currency)):
        name = f"{_SIZES[size[0].lower()]} {currency}"
    elif sign and name:
        return None
    number = float(parse_answer_value(AnswerType.NUMBER, digits))
    name = f"{name} {sign}".strip(" .")
    unit = find_unit(name) if name else None
    if name and unit is None:
        raise ValueError(f"in an unknown unit: {name[:40]!r}")
    return number, unit


def _write_number(text: str) -> str:
    """Return a quantity with its number as a decimal fraction: "minus five cm" as -5 cm, 1 1/2 cups as 1.5 cups.

    "An hour and a half" is 1.5 hour.
    """
    negated = MINUS.match(text)
    if negated:
        return f"-{_write_number(text[negated.end() :])}"
    part = _PART_AFTER_UNIT.fullmatch(text)
    if part:
        text = f"{'one' if part[1].lower() in ('a', 'an') else part[1]} and {part[3]} {part[2]}"
    found = split_number(text.lower()) if text[:1].isalpha() else None
    if found:
        number, rest = found
        if isinstance(number, float) and rest[:2] in (["of", "a"], ["of", "an"]):
            rest = rest[2:]  # three quarters of an hour
        return " ".join([str(number), *text.split()[-len(rest) :]]) if rest else str(number)
    text = re.sub("^an? ", "1 ", text, flags=re.IGNORECASE)  # an hour
    text = _VULGAR.sub(lambda match: f" {normalize('NFKC', match[0])}".replace("\u2044", "/"), text)
    return _FRACTION.sub(lambda match: repr(int(match[1] or 0) + int(match[2]) / int(match[3])), " ".join(text.split()))


def _add_up(text: str) -> tuple[float, Unit] | None:
    """Return 1.5 and the hour for 1 h 30 min; None if a text is not a sum of ever smaller units of one dimension."""
    if not _SUM.fullmatch(text):
        return None
    total, first, before = 0.0, None, inf
    parts = re.findall(_NUMBER_AND_UNIT, text)
    names = [part.lstrip("0123456789. ") for part in parts]
    for part, name in zip(parts, names, strict=True):
        # 1h30m and 2m 5s
        unit = find_unit("min" if name == "m" and _HOUR_OR_SECOND & {*names} else name)
        first = first or unit
        if unit is None or first is None or unit.dimension != first.dimension or unit.offset or unit.factor >= before:
            return None
        before = unit.factor
        total += float(part.removesuffix(name)) * unit.factor / first.factor
    return None if first is None else (total, first)
