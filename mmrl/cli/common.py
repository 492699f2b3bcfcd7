"""Arguments that commands share."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Subparsers, name: str, summary: str, details: str) -> argparse.ArgumentParser:
    """A sub-command whose help shows `summary`, then `details` as written."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[:1].upper()}{summary[1:]}.",
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and any number of `key=value` overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="set one value by dotted path, written as YAML; stages by name or index: stages.rl.steps=50",
    )


def positive_int(text: str) -> int:
    """A whole number from 1 up, as an argument's type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


@contextmanager
def pause_gc_for_imports() -> Iterator[None]:
    """Import torch and its like inside. They make half a million objects that stay, which Python would look through for
    garbage again and again, while it imports them and ever after.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
