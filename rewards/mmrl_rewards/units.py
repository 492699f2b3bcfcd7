"""Units of measurement, by pint."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple
from unicodedata import normalize

from mmrl_rewards.chinese import UNITS

# pint takes Nm for the count of yarn in textiles.
_ALIASES: Final = {
    **{"US$": "USD", "$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "¢": "cent"},
    **{"US dollar": "dollar", "per cent": "percent"},
    **UNITS,
    **{"Nm": "N*m", "⋅": "*", r"\cdot": "*", r"\Omega": "Ω", "fl oz": "floz", "−": "-"},  # noqa: RUF001
}
_NAME: Final = re.compile(r"[A-Za-zμΩÅ°%][A-Za-zμΩÅ°%0-9 ./*·^()-]{0,39}")
_NO_EXPONENT: Final = re.compile(r"(?<![\^*^-])[0-9]|[0-9]{3}")  # not an exponent: pint would take it for a factor
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
    text = normalize("NFKC", name).strip()
    for alias, known in _ALIASES.items():
        text = text.replace(alias, known)
    text = re.sub(r"(?<=[a-zΩ])(-?[1-4])(?![0-9])", r"^\1", text)  # m2 and s-1, as NFKC writes m² and s⁻¹
    text = re.sub(r"(?<=[a-z]{3})-(?=[a-z]{3})", "*", text)  # kilowatt-hours
    text = re.sub(r"^degrees? (?=[CF])|^deg ?(?=[CF]$)|^° (?=[CF])", "°", text)
    text = re.sub(r"\bsq\.? ", "square ", re.sub(r"\bcu\.? ", "cubic ", text))
    text = text.replace("°Celsius", "°C").replace("°Fahrenheit", "°F")
    # "5 units" has no unit; pint would read micronits.
    if re.search(r"\bunits?\b", text) or not _NAME.fullmatch(text) or _NO_EXPONENT.search(text):
        return None
    from mmrl_rewards.services.unit_registry import REGISTRY  # takes a second

    for spelling in (text, re.sub(r"[A-Za-z]+", _lower_word, text)):
        # pint raises errors of several kinds, some of them of Python's tokenizer.
        with suppress(Exception, SystemExit):
            unit = REGISTRY.parse_units(spelling)
            zero, one = (REGISTRY.Quantity(size, unit).to_root_units() for size in (0.0, 1.0))
            return Unit(f"{zero.units}", one.magnitude - zero.magnitude, zero.magnitude)
    return None


def _lower_word(match: re.Match[str]) -> str:
    word = match[0].lower()
    return word if len(word) > 3 or word in _ANY_CASE else match[0]
