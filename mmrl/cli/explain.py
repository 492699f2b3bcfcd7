"""`mmrl explain`: print the settings of a config and its objective, without running it."""

from __future__ import annotations

import argparse

from mmrl.cli.common import Subparsers, add_command, add_config_arguments

DETAILS = """\
example:
  mmrl explain configs/quickstart.yaml stages.rl.loss.kl.coef=0.01

Prints every value with the file and line it comes from, then the objective of each stage in formulas.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "explain", "print every setting with its origin, and the objective in words", DETAILS
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation."""
    from mmrl.config import explain, load_config

    print(explain(load_config(arguments.config, arguments.overrides)), end="")
    return 0
