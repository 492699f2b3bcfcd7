"""Units of measurement, by pint."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple

from mmrl.utils.error_catcher import ErrorCatcher

# pint has no money and no number words; its own "cent" is an interval of music.
_DEFINITIONS: Final = (
    *(
        "dollar = [dollars] = $ = USD",
        "cent = 0.01 * dollar",
        "euro = [euros] = € = EUR",
        "sterling = [pounds] = £ = GBP",
    ),
    *("yen = [yen] = ¥ = JPY", "dozen = 12", "thousand = 1e3", "million = 1e6", "billion = 1e9", "kmh = km/h"),
)
_CURRENCIES: Final = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
_NAME: Final = re.compile(r"[A-Za-zµμΩ°%][A-Za-zµμΩ°%0-9 ./*·^()²³-]{0,39}")  # micro has two characters
_NO_EXPONENT: Final = re.compile(r"(?<![\^*^-])[0-9]|[0-9]{3}")  # a digit that is not one, which pint would multiply by
_ANY_CASE: Final = frozenset({"cm", "km", "kg", "ft", "lb", "lbs", "oz", "yd", "mph", "rpm", "min", "hr", "hrs", "sec"})


class Unit(NamedTuple):
    """Describes a unit of measurement: x of it are x * factor + offset base units."""

    dimension: str  # base units, such as "meter / second"
    factor: float  # such as 0.01 for cm
    offset: float = 0.0  # such as 273.15 for °C


@lru_cache(maxsize=4096)
def find_unit(name: str) -> Unit | None:
    """Return a unit by its name or symbol, or None for what pint does not know.

    The case of symbols counts, as in SI: Mm is not mm. Words may have capitals, and so may a few symbols that mean
    nothing else, such as KM.
    """
    text = _CURRENCIES.get(name, name).strip().replace("²", "^2").replace("³", "^3")
    text = re.sub(r"(?<=[a-zΩ])([23])(?![0-9])", r"^\1", text)  # m2
    text = re.sub(r"^degrees? (?=[CF])|^deg ?(?=[CF]$)|^° (?=[CF])", "°", text)
    text = text.replace("°Celsius", "°C").replace("°Fahrenheit", "°F")
    if not _NAME.fullmatch(text) or _NO_EXPONENT.search(text):
        return None
    registry = _load_registry()
    for spelling in (text, re.sub(r"[A-Za-z]+", _lower_word, text)):
        # pint raises errors of several kinds, some of them of Python's tokenizer.
        with ErrorCatcher():
            unit = registry.parse_units(spelling)
            zero, one = (registry.Quantity(size, unit).to_root_units() for size in (0.0, 1.0))
            return Unit(f"{zero.units}", one.magnitude - zero.magnitude, zero.magnitude)
    return None


@lru_cache(maxsize=1)
def _load_registry() -> Any:  # noqa: ANN401  (pint's class is generic over what it stores)
    """Return pint's registry. Loading it takes a second, so only quantities do."""
    import pint

    registry: Any = pint.UnitRegistry(on_redefinition="ignore")
    for definition in _DEFINITIONS:
        registry.define(definition)
    return registry


def _lower_word(match: re.Match[str]) -> str:
    word = match[0].lower()
    return word if len(word) > 3 or word in _ANY_CASE else match[0]
