"""Rewards for one number, with or without a unit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from mmrl.answer import parse_answer_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import Of, part_value, reward, target_value

Tolerance = Annotated[float, Field(ge=0.0)]
Decimals = Annotated[int, Field(ge=0, le=12)]
_CONVERSION_TOLERANCE: Final = 1e-9  # relative; converting units rounds
_QUANTITY: Final = re.compile(r"([$€£]?)\s*([+-]?[0-9.][0-9.,]*(?:[eE][+-]?[0-9]+)?)\s*(\D.*)?", re.ASCII)
_MAX_CHARS: Final = 80  # characters of a number with its unit


class Unit(NamedTuple):
    """Describes a unit of measurement."""

    dimension: str  # quantity that it measures, such as "length"
    factor: float  # size in base units of that quantity, such as 0.01 for cm


_PLAIN_NUMBER: Final = Unit("number", 1.0)
_UNITS_BY_DIMENSION: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "length": {
            **{"nm": 1e-9, "um": 1e-6, "µm": 1e-6, "mm": 1e-3, "cm": 0.01, "dm": 0.1, "m": 1.0, "km": 1000.0},
            **{"millimeter": 1e-3, "centimeter": 0.01, "meter": 1.0, "metre": 1.0, "kilometer": 1000.0},
            **{"in": 0.0254, "inch": 0.0254, "inches": 0.0254, "ft": 0.3048, "foot": 0.3048, "feet": 0.3048},
            **{"yd": 0.9144, "yard": 0.9144, "mi": 1609.344, "mile": 1609.344},
        },
        "area": {
            **{"mm^2": 1e-6, "cm^2": 1e-4, "m^2": 1.0, "km^2": 1e6, "ha": 1e4},
            **{"in^2": 0.0254**2, "ft^2": 0.3048**2},
        },
        "volume": {
            **{"mm^3": 1e-9, "cm^3": 1e-6, "m^3": 1.0, "in^3": 0.0254**3, "ft^3": 0.3048**3, "ml": 1e-6, "mL": 1e-6},
            **{"l": 1e-3, "L": 1e-3, "liter": 1e-3, "litre": 1e-3, "milliliter": 1e-6},
        },
        "mass": {
            **{"mg": 1e-6, "g": 1e-3, "gram": 1e-3, "kg": 1.0, "kilogram": 1.0, "t": 1000.0, "tonne": 1000.0},
            **{"oz": 0.028349523125, "ounce": 0.028349523125, "lb": 0.45359237, "pound": 0.45359237},
        },
        "time": {
            **{"ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0},
            **{"hr": 3600.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0},
        },
        "years": {"year": 1.0, "yr": 1.0},
        "speed": {"m/s": 1.0, "km/h": 1 / 3.6, "mph": 0.44704},
        "angle": {"°": 1.0, "deg": 1.0, "degree": 1.0, "rad": 57.29577951308232, "radian": 57.29577951308232},
        "Celsius": {"°C": 1.0},
        "Fahrenheit": {"°F": 1.0},
        "Kelvin": {"K": 1.0},
        "dollars": {"$": 1.0, "USD": 1.0, "dollar": 1.0, "cent": 0.01},
        "euros": {"€": 1.0, "EUR": 1.0, "euro": 1.0},
        "pounds sterling": {"£": 1.0, "GBP": 1.0},
        "number": {"%": 0.01, "percent": 0.01, "thousand": 1e3, "million": 1e6, "billion": 1e9},
    }
)
UNITS: Final[Mapping[str, Unit]] = MappingProxyType(
    {name: Unit(measure, factor) for measure, names in _UNITS_BY_DIMENSION.items() for name, factor in names.items()}
)
"""All known units by name. Temperatures and currencies are not converted into each other."""


@reward(name="number", answer_types=(AnswerType.NUMBER,))
def exact(response: Response, sample: Sample, *, tolerance: Tolerance = 0.0, of: Of = "answer") -> RewardValue:
    """Return 1 if |answer - target| <= tolerance, else 0. 3 and 3.0 are equal.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2).
    Departures: there is an absolute tolerance, in the unit of the target.
    Unscorable: the target is not a finite number.
    """
    target = target_value(sample, AnswerType.NUMBER)
    value = part_value(response, AnswerType.NUMBER, of)
    within = abs(value - target) <= tolerance
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
    within = abs(value - target) <= relative * abs(target)
    return RewardValue(float(within), f"{value}, expected {target} within {relative:g}")


@reward(name="graded", answer_types=(AnswerType.NUMBER,))
def graded(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return max(0, 1 - |answer - target| / |target|), one minus the relative error. For a target of 0, only 0 earns 1.

    Source: the reward of the task `regression` of Video-R1 (arXiv:2503.21776; its code, grpo.py).
    Departures: 1e-9 is not added to error and target, with which no answer to a target of 0 earned anything.
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

    Answer and target are a number and one of `UNITS`, singular or plural. $, € and £ may come first, and 25% is 0.25.
    Unless `unit_required`, a number without a unit is taken to be in the other's unit.

    Source: MathVista's `unit` (arXiv:2310.02255), which its evaluation does not check.
    Departures: the unit is checked, against a closed table.
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
        return RewardValue(0.0, f"{given_unit.dimension}, expected {unit.dimension}")
    value, target = given * given_unit.factor, expected * unit.factor
    equal = abs(value - target) <= max(relative, _CONVERSION_TOLERANCE) * abs(target)
    return RewardValue(float(equal), f"{value:g}, expected {target:g} ({unit.dimension})")


def _parse_quantity(text: str) -> tuple[float, Unit | None]:
    """Return a number and its unit, or None for a number without a unit.

    Raises:
        ValueError: the text is not a number with one known unit or none.
    """
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if not match or (match[1] and match[3]):
        raise ValueError(f"no number with a unit: {text[:40]!r}")
    number = float(parse_answer_value(AnswerType.NUMBER, match[2]))
    name = match[1] or (match[3] or "").strip().rstrip(".").replace("²", "^2").replace("³", "^3")
    if not name:
        return number, None
    # As written first, since names such as K and USD have capitals; then in lower case, and then without a plural s.
    unit = UNITS.get(name) or UNITS.get(name.lower()) or UNITS.get(name.lower().removesuffix("s"))
    if unit is None:
        raise ValueError(f"in an unknown unit: {name[:40]!r}")
    return number, unit
