"""`mmrl eval`: benchmarks. `mmrl eval MODEL ...` is short for `mmrl eval run MODEL ...`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mmrl.cli.common import Subparsers, add_command
from mmrl.cli.eval import compare, run, score

DETAILS = """\
examples:
  mmrl eval runs/mine --benchmark mathvista --data MathVista   # generate and score: `mmrl eval run --help`
  mmrl eval score --benchmark mathvista --items items.jsonl.gz --responses responses.jsonl --out scored
  mmrl eval compare scored other                               # which answers flipped, and is the difference real?

`mmrl eval COMMAND --help` says more about each.
"""

_EVAL_COMMANDS: Final = ("run", "score", "compare", "-h", "--help")


def insert_default_command(argv: Sequence[str]) -> list[str]:
    """Insert `run` where `mmrl eval` is followed by something else than a command."""
    if len(argv) > 1 and argv[0] == "eval" and argv[1] not in _EVAL_COMMANDS:
        return [argv[0], "run", *argv[1:]]
    return [*argv]


def add_parser(commands: Subparsers) -> None:
    """Declare the group and its commands."""
    parser = add_command(commands, "eval", "run benchmarks, score responses, compare results", DETAILS)
    group = parser.add_subparsers(dest="eval_command", metavar="COMMAND", title="commands", required=True)
    for command in (run, score, compare):
        command.add_parser(group)
