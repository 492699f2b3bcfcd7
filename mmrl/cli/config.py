"""`mmrl config schema`: print the JSON Schema of config files, for editors."""

from __future__ import annotations

import argparse
import json

from mmrl.cli.common import Subparsers, add_command

DETAILS = """\
example:
  mmrl config schema > mmrl.schema.json

With this first line an editor that knows YAML schemas completes and checks a config as you type:
  # yaml-language-server: $schema=mmrl.schema.json
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "config", "print the JSON Schema of config files", DETAILS)
    parser.add_argument("what", choices=["schema"], help="what to print")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    from mmrl.config import config_json_schema

    print(json.dumps(config_json_schema(), indent=2))
    return 0
