"""pint's registry, with the units of `units.txt`. Loading it takes a second, as part of this module's import."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pint

REGISTRY: Final[Any] = pint.UnitRegistry(on_redefinition="ignore")
REGISTRY.load_definitions(Path(__file__).with_name("units.txt"))
REGISTRY._build_cache()  # else pint remembers a sievert as J/kg
