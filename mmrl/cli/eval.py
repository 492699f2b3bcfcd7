"""`mmrl eval`: benchmarks. `mmrl eval MODEL ..` is `mmrl eval take MODEL ..`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mmrl.cli import eval_diff, eval_score, eval_take
from mmrl.cli.common import Subparsers, add_command

DETAILS = """\
examples:
  mmrl eval runs/mine --benchmark mathvista --data MathVista   # ask, answer and score: `mmrl eval take --help`
  mmrl eval score --benchmark mathvista --items items.jsonl.gz --responses responses.jsonl --out scored
  mmrl eval diff scored other                              # which answers flipped, and is the difference real?

`mmrl eval COMMAND --help` says more about each.
"""


_EVAL_COMMANDS: Final = ("take", "score", "diff", "-h", "--help")


def insert_default_command(argv: Sequence[str]) -> list[str]:
    """The command line with `take`, where `mmrl eval` is followed by something else than a command."""
    if len(argv) > 1 and argv[0] == "eval" and argv[1] not in _EVAL_COMMANDS:
        return [argv[0], "take", *argv[1:]]
    return [*argv]


def add_parser(commands: Subparsers) -> None:
    """Declare the group and its commands."""
    parser = add_command(commands, "eval", "take benchmarks, score responses, compare runs", DETAILS)
    group = parser.add_subparsers(dest="eval_command", metavar="COMMAND", title="commands", required=True)
    for command in (eval_take, eval_score, eval_diff):
        command.add_parser(group)
