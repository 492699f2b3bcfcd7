"""Writes the GPU memory that `mmrl plan` prints into the recipes that state it.

    python tools/dev/recipe_memory.py                                             # all of them: half an hour
    python tools/dev/recipe_memory.py configs/recipes/qwen2_5_vl_7b_8x80gb.yaml

The header of a recipe for a kind of GPU has the command, and what it prints in the comments below it. The header of a
system has, after its hardware, what a GPU needs most, and the command with the changes to the config that it needs;
a new one begins with `# Memory: 0 GB`.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

from mmrl.cli.main import main as mmrl_command

ROOT = Path(__file__).parents[2]


def update_memory(path: Path) -> str:
    """Return the text of a recipe, with the memory that `mmrl plan` prints now."""
    text = path.read_text(encoding="utf-8")
    if stated := re.search(rf"`mmrl plan (configs/recipes/{path.name}[^`]*)`:\n((?:#   .*\n)*)", text):
        printed = plan(stated[1].split()).partition("\nMemory of a GPU")[2].partition("\n\n")[0].splitlines()[1:]
        lines = "".join(f"#   {line.strip()}\n" for line in printed)
        return text[: stated.start(2)] + lines + text[stated.end(2) :]
    if stated := re.search(r"^# Hardware: (\d+) GPU.*\n(?:#   .*\n)*(# Memory: \d.*\n(?:#   .*\n)*)", text, re.M):
        return text[: stated.start(2)] + memory_of_system(path.stem, stated[1]) + text[stated.end(2) :]
    return text


def memory_of_system(recipe: str, gpus: str) -> str:
    """Return the lines of a header that state the memory of a recipe on so many GPUs of 80 GB."""
    command = [recipe, "--gpus", gpus]
    planned = json.loads(plan([*command, "--json"]))
    if planned["remedy"]:
        command += [f"{key}={_yaml(value)}" for key, value in planned["remedy"].items()]
        planned = json.loads(plan([*command, "--json"]))
    phase, gigabytes = max(planned["phase_gb"].items(), key=lambda item: item[1])
    needed = f"{gigabytes:.0f} GB of a GPU while {phase}"
    if not planned["fits"]:
        needed += ", more than 80 GB"
    text = f"# Memory: {needed} (`mmrl plan {' '.join(command)}`)."
    lines = textwrap.wrap(text, 120, subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, ""])


def plan(words: list[str]) -> str:
    """Return what `mmrl plan WORDS` prints."""
    output = io.StringIO()
    with redirect_stdout(output):
        mmrl_command(["plan", *words])
    return output.getvalue()


def _yaml(value: object) -> str:
    """Return a value as it is written on a command line, without spaces."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")


def main() -> None:
    """Update the recipes that are named, or all."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
    os.chdir(ROOT)
    for path in paths:
        path.write_text(update_memory(path), encoding="utf-8")


if __name__ == "__main__":
    main()
