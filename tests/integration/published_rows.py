"""Rows with the very columns that the recipes of published systems read; `{folder}` in them is where all files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

ROWS: Final[dict[str, Any]] = YAML(typ="safe", pure=True).load(Path(__file__).parents[1] / "data" / "recipe_rows.yaml")
"""By recipe, a table for each of its sources: a list of rows, or the content of one file."""
SAME: Final = {"cls_rl_no_thinking": "cls_rl", "ui_r1_e": "ui_r1", "ui_r1_e_fast": "ui_r1"}
"""Recipes that read the tables of another."""
MADE: Final = ("jigsaw_r1", "mobile_r1")
"""Recipes that make their data."""
