"""`mmrl explain`: what a config means, without running it."""

from __future__ import annotations

import argparse

from mmrl.cli.common import Commands, add_command, add_config_arguments

DETAILS = """\
example:
  mmrl explain configs/quickstart.yaml stages.rl.loss.kl.coef=0.01

Prints every value with the file and line it comes from, then the objective of each stage in formulas.
"""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "explain", "print every setting with its origin, and the objective in words", DETAILS
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation."""
    from mmrl.config import explain, load

    print(explain(load(arguments.config, arguments.overrides)), end="")
    return 0
