"""Writes what `mmrl plan` prints of a GPU's memory into the recipes that state it.

    python tools/dev/recipe_memory.py                                             # all of them: six minutes
    python tools/dev/recipe_memory.py configs/recipes/qwen2_5_vl_7b_8x80gb.yaml

The command is in the header of the recipe, and what it prints in the comments below it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from mmrl.cli.main import main as mmrl_command

ROOT = Path(__file__).parents[2]


def update_memory(path: Path) -> str:
    """Return the text of a recipe, with the lines that the command in its header prints now if it has one."""
    text = path.read_text(encoding="utf-8")
    stated = re.search(rf"`mmrl plan (configs/recipes/{path.name}[^`]*)`:\n((?:#   .*\n)*)", text)
    if not stated:
        return text
    output = io.StringIO()
    with redirect_stdout(output):
        mmrl_command(["plan", *stated[1].split()])
    printed = output.getvalue().partition("\nMemory of a GPU")[2].partition("\n\n")[0].splitlines()[1:]
    lines = "".join(f"#   {line.strip()}\n" for line in printed)
    return text[: stated.start(2)] + lines + text[stated.end(2) :]


def main() -> None:
    """Update the recipes that are named, or all."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
    os.chdir(ROOT)
    for path in paths:
        path.write_text(update_memory(path), encoding="utf-8")


if __name__ == "__main__":
    main()
