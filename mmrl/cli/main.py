"""The parser of all commands, and their exit codes: 0 done, 2 a mistake of the user, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import ENOSPC

import mmrl
from mmrl.cli import config, data, doctor, eval, export, plan, recipe, reward, train, view
from mmrl.cli.common import echo, option_overrides
from mmrl.distributed.ranks import RankLostError
from mmrl.types import UserError

EPILOG = """\
examples:
  mmrl train configs/quickstart.yaml
  mmrl train configs/quickstart.yaml run.seed=1 stages.rl.optimizer.lr=2e-4
  mmrl recipe list
  mmrl view runs/quickstart
  mmrl eval runs/quickstart --benchmark run:test
  mmrl export runs/quickstart --out my-model
  mmrl explain configs/quickstart.yaml
  mmrl plan configs/recipes/qwen2_5_vl_7b_8x80gb.yaml --gpus 8
  mmrl reward list
  mmrl data check configs/quickstart.yaml
  mmrl doctor configs/quickstart.yaml

`mmrl COMMAND --help` says more about a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Raises:
        SystemExit: the command line itself is wrong (code 2), or asks for help or the version (code 0).
    """
    # torch reads this variable when it is imported. Warnings of its C++ code, about devices and threads, reach no
    # logger; errors are still printed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parser = build_parser()
    arguments = _parse_arguments(parser, eval.insert_default_command(sys.argv[1:] if argv is None else argv))
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _explain_plugin_errors():
            code = int(arguments.run(arguments))
        print(end="", flush=True)  # without a stdout, as in some daemons, it does nothing
    except UserError as error:
        for line in str(error).split("\n"):
            echo(f"mmrl: error: {line}", file=sys.stderr)
        if isinstance(error, RankLostError):
            # Connections to the other ranks stay open: once one is lost, gloo's threads abort a normal exit.
            print(end="", flush=True)
            print(end="", flush=True, file=sys.stderr)
            os._exit(2)
        return 2
    except OSError as error:
        is_pipe = isinstance(error, BrokenPipeError)
        if not is_pipe and error.errno != ENOSPC:
            raise
        # The reader of a pipe has closed it, as in `mmrl explain c.yaml | head`, or the disk of the output is full.
        # Python would complain when it flushes stdout at exit, so stdout goes to /dev/null from here on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_pipe:
            return 141
        echo(f"mmrl: error: the output cannot be written: {error.strerror}; free space", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


@contextmanager
def _explain_plugin_errors() -> Iterator[None]:
    """Turn an error in a function of the user's into a UserError with role, file, line and cause."""
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        from mmrl.utils.plugins import describe_plugin_error  # it takes time to import, and most commands never need it

        explained = describe_plugin_error(error)
        if explained is None:
            raise
        raise UserError(explained) from error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="mmrl",
        description="Reinforcement fine-tuning of Qwen's vision-language models on verifiable visual rewards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mmrl {mmrl.__version__}")
    # DeepSpeed's launcher passes it to every process; the environment has the same number.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in (train, recipe, view, eval, export, plan, data, reward, config, doctor):
        command.add_parser(commands)
    return parser


def _parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line in which `key=value` may be before, between and after options."""
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if overrides and "overrides" not in arguments:
        unknown = unknown or overrides[:1]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides:
        arguments.overrides += overrides
    if "overlays+" in arguments:
        arguments.overrides = option_overrides(arguments) + arguments.overrides
    return arguments
