"""`mmrl explain` and `mmrl config schema`: print what a config says, or what one may say, without running it."""

from __future__ import annotations

import argparse
import json

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, echo

EXPLAIN_DETAILS = """\
example:
  mmrl explain configs/quickstart.yaml stages.rl.loss.kl.coef=0.01

Prints every value with the file and line it comes from, then the objective of each stage in formulas. Then it
loads the functions that the config names: one that cannot be loaded, or refuses an option, is an error. `mmrl doctor
CONFIG` checks model and engine too.
"""

CONFIG_DETAILS = """\
example:
  mmrl config schema > mmrl.schema.json

With this first line an editor that knows YAML schemas completes and checks a config as you type:
  # yaml-language-server: $schema=mmrl.schema.json
"""


def add_parser(commands: Subparsers) -> None:
    """Declare both commands."""
    explain = add_command(
        commands, "explain", "print every setting with its origin, and the objective in words", EXPLAIN_DETAILS
    )
    add_config_arguments(explain)
    explain.set_defaults(run=_explain)

    config = add_command(commands, "config", "print the JSON Schema of config files", CONFIG_DETAILS)
    config.add_argument("what", choices=["schema"], help="what to print")
    config.set_defaults(run=_print_schema)


def _explain(arguments: argparse.Namespace) -> int:
    from mmrl.config import explain, load_config, locate_errors

    loaded = load_config(arguments.config, arguments.overrides)
    echo(explain(loaded), end="")
    from mmrl.training.functions import load_functions  # loading takes half a second, so printing comes first

    with locate_errors(loaded):
        load_functions(loaded.config, loaded.files[0].parent)
    return 0


def _print_schema(arguments: argparse.Namespace) -> int:
    from mmrl.config import config_json_schema

    echo(json.dumps(config_json_schema(), indent=2))
    return 0
