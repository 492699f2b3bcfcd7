"""Helpers that commands share: sub-parsers, arguments, imports."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

from mmrl.utils.messages import escape_controls

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def echo(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text that may quote data, ids, paths or responses; their control characters are escaped."""
    print(escape_controls(text), end=end, file=file)


def add_command(commands: Subparsers, name: str, summary: str, details: str) -> argparse.ArgumentParser:
    """Add a sub-command whose help shows `summary`, then `details` as written."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[:1].upper()}{summary[1:]}.",
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an option added later would change what an abbreviation means
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments CONFIG and `key=value` overrides, and options that stand for overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a recipe (`mmrl recipe list`)")
    parser.add_argument("--model", metavar="DIR", dest="model.path", help="model.path: the model to train")
    parser.add_argument("--data", metavar="DIR", dest="data.dir", help="data.dir: the folder that `${data}` stands for")
    parser.add_argument("--overlay", metavar="NAME", action="append", dest="overlays+", help="a method laid on top")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="set one value by dotted path, written as YAML; stages by name or index: stages.rl.steps=50",
    )


def option_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides that the options of `add_config_arguments` stand for."""
    given, keys = vars(arguments), ("model.path", "data.dir", "overlays+")
    return [f"{key}={json.dumps(given[key])}" for key in keys if given[key] is not None]


def positive_int(text: str) -> int:
    """Parse a whole number from 1 up; the `type` of an argument.

    Raises:
        ArgumentTypeError: the text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


@contextmanager
def pause_gc_for_imports() -> Iterator[None]:
    """Pause garbage collection while torch and other large packages are imported inside this block."""
    # They create half a million objects that stay. Python would search them for garbage repeatedly during the import,
    # and in every full collection after it, and find none; `gc.freeze` excludes them.
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
