"""pint's registry, with money and number words. Loading it takes a second, as part of this module's import."""

from __future__ import annotations

from typing import Any, Final

import pint

# pint has no money and no number words. Its own "cent" is an interval of music, and Mb a megabarn.
_DEFINITIONS: Final = (
    *("dollar = [dollars] = $ = USD", "cent = 0.01 * dollar", "euro = [euros] = € = EUR"),
    *("sterling = [pounds] = £ = GBP", "yen = [yen] = ¥ = JPY"),
    *("dozen = 12", "thousand = 1e3", "million = 1e6", "billion = 1e9", "kmh = km/h"),
    *("kb = 1e3 bit", "Mb = 1e6 bit", "Gb = 1e9 bit", "KB = 1e3 byte", "AU = au", "floz = fluid_ounce"),
    *("gm = g", "kgs = kg", "cms = cm", "kms = km", "kilo = kg", "kilos = kg", "kmph = km/h", "amps = ampere"),
    *("mpg = mile / gallon", "trillion = 1e12"),
)

REGISTRY: Final[Any] = pint.UnitRegistry(on_redefinition="ignore")
for definition in _DEFINITIONS:
    REGISTRY.define(definition)
