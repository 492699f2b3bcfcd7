"""One parser, one file per command, and the exit codes: 0 done, 2 the user's mistake, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import mmrl
from mmrl.cli import config, data, eval, explain, export, reward, train
from mmrl.distributed.ranks import RankLostError
from mmrl.types import UserError

EPILOG = """\
examples:
  mmrl train configs/quickstart.yaml
  mmrl train configs/quickstart.yaml run.seed=1 stages.rl.optimizer.lr=2e-4
  mmrl eval runs/quickstart --bench run:test
  mmrl export runs/quickstart --to my-model
  mmrl explain configs/quickstart.yaml
  mmrl reward list
  mmrl data check configs/quickstart.yaml

`mmrl COMMAND --help` says more about a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Raises:
        SystemExit: the command line itself is wrong (code 2), or asks for help or the version (code 0).
    """
    parser = _build_parser()
    arguments = _parse_arguments(parser, eval.insert_default_command(sys.argv[1:] if argv is None else argv))
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"mmrl: error: {line}", file=sys.stderr)
        if isinstance(error, RankLostError):
            _exit_immediately(2)
        return 2
    except BrokenPipeError:  # the reader left, as in `mmrl explain c.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return code


def _exit_immediately(code: int) -> NoReturn:
    """Leave connections to other ranks as they are: when one is gone, gloo's threads abort an interpreter that ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmrl",
        description="Reinforcement fine-tuning of Qwen-VL models on verifiable visual rewards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mmrl {mmrl.__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher says it, and in the environment
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in (train, eval, export, data, reward, explain, config):
        command.add_parser(commands)
    return parser


def _parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, letting `key=value` stand before, between and after options."""
    arguments, rest = parser.parse_known_args(argv)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(late) < len(rest) or (late and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word not in late) or late[0]}")
    if late:
        arguments.overrides += late
    return arguments
