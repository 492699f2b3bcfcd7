"""`mmrl doctor`: check that the installed libraries fit, and that everything a config names can be loaded."""

from __future__ import annotations

import argparse
import platform

import mmrl
from mmrl.cli.common import Subparsers, add_command, echo

DETAILS = """\
examples:
  mmrl doctor                            # versions and builds of libraries: do they fit?
  mmrl doctor my.yaml                    # and the model's files, the engine, every function with its options

No sample is read, no weight loaded, nothing written. Exit code 1: something is wrong.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "doctor", "check the installation, and what a config names", DETAILS)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file; its functions are imported")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="set one value by dotted path")
    parser.add_argument("--quiet", action="store_true", help="print only problems")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print versions and problems; return 1 if there is a problem."""
    from mmrl.utils.libraries import LIBRARIES, check_torch_companions, installed_build, installed_version

    if not arguments.quiet:
        print(f"mmrl {mmrl.__version__}, Python {platform.python_version()}")
        for name in LIBRARIES:
            found = installed_build(name) if name.startswith("torch") else installed_version(name)
            print(f"  {name:<22} {found or '-'}")
    problems = check_torch_companions()
    if arguments.config:
        from mmrl.config import load_config
        from mmrl.training.preflight import find_problems

        problems += find_problems(load_config(arguments.config, arguments.overrides))
    for problem in problems:
        echo(f"problem: {problem}")
    if not problems and not arguments.quiet:
        print("No problem found.")
    return int(bool(problems))
