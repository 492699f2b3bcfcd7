"""`mmrl reward`: what rewards there are, and a bench to test them like units."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command

DETAILS = """\
examples:
  mmrl reward list                                  # every reward: kinds of answers, range, formula
  mmrl reward show box:iou                          # its docstring, options and where it is
  mmrl reward new close                             # close.py and close.json, to fill in
  mmrl reward test                                  # every case table; or those named, or of one reward
  mmrl reward test my_rewards.json
  mmrl reward lint ./my_rewards.py:close            # is it fit to train with?
  mmrl reward score --fn box:iou --sample s.json --response '<answer>[1, 2, 3, 4]</answer>'

A reward is named `module:function`, `./file.py:function`, or, of those that come with mmrl, `box:iou` for short.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command and its sub-commands."""
    parser = add_command(commands, "reward", "list, show, make, test, lint and try rewards", DETAILS)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    add_command(verbs, "list", "print every reward in a table", "").set_defaults(run=_list_rewards)

    show = add_command(verbs, "show", "print what a reward does, its options, and where it is", "")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(run=_show_reward)

    new = add_command(verbs, "new", "write a reward and its case table, to fill in", "")
    new.add_argument("name", metavar="NAME", help="a Python name: NAME.py and NAME.json are written")
    new.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where; the current folder by default")
    new.set_defaults(run=_create_reward)

    test = add_command(verbs, "test", "run case tables; exit code 1 when a row fails", "")
    test.add_argument(
        "what", metavar="NAME|FILE", nargs="*", help="a reward or a table; all that come with mmrl if none"
    )
    test.add_argument("--verbose", action="store_true", help="print rows that pass, too")
    test.set_defaults(run=_test_rewards)

    lint = add_command(verbs, "lint", "try to break a reward; exit code 1 when that works", "")
    lint.add_argument("names", metavar="NAME", nargs="*", help="rewards; all that come with mmrl if none")
    lint.add_argument(
        "--args", type=_parse_json_object, default={}, metavar="JSON", help="options, such as '{\"threshold\": 0.5}'"
    )
    lint.add_argument("--cases", type=Path, metavar="FILE", help="a case table whose samples to use")
    lint.set_defaults(run=_lint_rewards)

    score = add_command(verbs, "score", "score one response; prints JSON", "")
    score.add_argument("--fn", required=True, metavar="NAME", help="the reward")
    score.add_argument(
        "--sample", required=True, type=Path, metavar="FILE", help="a sample, written as in a case table"
    )
    score.add_argument("--response", required=True, metavar="TEXT|@FILE", help="what the model wrote")
    score.add_argument("--args", type=_parse_json_object, default={}, metavar="JSON", help="options of the reward")
    score.add_argument(
        "--case",
        type=_parse_json_object,
        default={},
        metavar="JSON",
        help='other keys of a row: \'{"frame": "norm_1"}\'',
    )
    score.set_defaults(run=_try_reward)


def _list_rewards(arguments: argparse.Namespace) -> int:
    from mmrl.cli.reward_bench import print_rewards

    return print_rewards()


def _show_reward(arguments: argparse.Namespace) -> int:
    from mmrl.cli.reward_bench import print_reward

    return print_reward(arguments.name)


def _create_reward(arguments: argparse.Namespace) -> int:
    from mmrl.cli.reward_new import create_reward

    return create_reward(arguments.name, arguments.out)


def _test_rewards(arguments: argparse.Namespace) -> int:
    from mmrl.cli.reward_bench import run_case_tables

    return run_case_tables(arguments.what, verbose=arguments.verbose)


def _lint_rewards(arguments: argparse.Namespace) -> int:
    from mmrl.cli.reward_bench import lint_rewards

    return lint_rewards(arguments.names, arguments.args, arguments.cases)


def _try_reward(arguments: argparse.Namespace) -> int:
    from mmrl.cli.reward_bench import try_reward

    row = {"fn": arguments.fn, "args": arguments.args, **arguments.case}
    return try_reward(row, arguments.sample, arguments.response)


def _parse_json_object(text: str) -> dict[str, object]:
    import json

    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return found
