"""`mmrl reward`: list, show, make, test, lint and try rewards."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command
from mmrl.types import AnswerType

DETAILS = """\
examples:
  mmrl reward list                                  # every reward: answer types, range, formula
  mmrl reward show box:iou                          # its docstring, options and source
  mmrl reward show look:likeness --png case.png     # a row of its case table, drawn
  mmrl reward new close                             # close.py and close.json, to fill in
  mmrl reward new overlap --answer box              # of boxes; --looks for one that sees the picture
  mmrl reward test                                  # every case table; or those named, or of one reward
  mmrl reward test my_rewards.json
  mmrl reward lint ./my_rewards.py:close            # is it fit to train with?
  mmrl reward try --fn box:iou --sample s.json --response '<answer>[1, 2, 3, 4]</answer>'

A reward is named `module:function`, `./file.py:function`, or, if it comes with mmrl, `box:iou` for short.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command and its sub-commands."""
    parser = add_command(commands, "reward", "list, show, make, test, lint and try rewards", DETAILS)
    parser.set_defaults(run=run)
    group = parser.add_subparsers(dest="reward_command", metavar="COMMAND", title="commands", required=True)
    add_command(group, "list", "print every reward in a table", "")

    show = add_command(group, "show", "print a reward's docstring, options and source", "")
    show.add_argument("name", metavar="NAME")
    show.add_argument(
        "--png", type=Path, metavar="FILE", help="draw a row of its case table that names a picture instead"
    )
    show.add_argument(
        "--row", type=int, default=0, metavar="N", help="which of the reward's rows to draw, from 0; 0 by default"
    )

    new = add_command(group, "new", "write a reward and its case table, to fill in", "")
    new.add_argument("name", metavar="NAME", help="a Python name: NAME.py and NAME.json are written")
    new.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="folder for them; the current one by default"
    )
    new.add_argument(
        "--answer",
        choices=[str(answer_type) for answer_type in AnswerType],
        metavar="TYPE",
        help=f"type of its targets, number by default, box with --looks: {', '.join(AnswerType)}",
    )
    new.add_argument("--looks", action="store_true", help="it looks at the picture; NAME.png is written, too")

    test = add_command(group, "test", "run case tables; exit code 1 when a row fails", "")
    test.add_argument(
        "names", metavar="NAME|FILE", nargs="*", help="a reward or a table; by default all that come with mmrl"
    )
    test.add_argument("--verbose", action="store_true", help="print rows that pass, too")

    lint = add_command(group, "lint", "try to break a reward; exit code 1 when that works", "")
    lint.add_argument("names", metavar="NAME", nargs="*", help="rewards; by default all that come with mmrl")
    lint.add_argument(
        "--args", type=_parse_json_object, default={}, metavar="JSON", help="options, such as '{\"threshold\": 0.5}'"
    )
    lint.add_argument("--cases", type=Path, metavar="FILE", help="a case table whose samples to use")

    try_ = add_command(group, "try", "score one response and print the result as JSON", "")
    try_.add_argument("--fn", required=True, metavar="NAME", help="the reward")
    try_.add_argument("--sample", required=True, type=Path, metavar="FILE", help="a sample, written as in a case table")
    try_.add_argument("--response", required=True, metavar="TEXT|@FILE", help="the response")
    try_.add_argument("--args", type=_parse_json_object, default={}, metavar="JSON", help="options of the reward")
    try_.add_argument(
        "--case",
        type=_parse_json_object,
        default={},
        metavar="JSON",
        help='other keys of a row of a case table: \'{"coordinates": "norm_1"}\'',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a sub-command and return its exit code."""
    # Imported here: it imports every reward, which is too slow for `mmrl --help`.
    from mmrl.cli import reward_commands

    match arguments.reward_command:
        case "list":
            return reward_commands.print_rewards()
        case "show":
            if arguments.png is None:
                reward_commands.print_reward(arguments.name)
            else:
                reward_commands.draw_reward_case(arguments.name, arguments.row, arguments.png)
            return 0
        case "new":
            answer_type = AnswerType(arguments.answer or ("box" if arguments.looks else "number"))
            return reward_commands.create_reward(arguments.name, answer_type, arguments.out, looks=arguments.looks)
        case "test":
            return reward_commands.run_case_tables(arguments.names, verbose=arguments.verbose)
        case "lint":
            return reward_commands.lint_rewards(arguments.names, arguments.args, arguments.cases)
        case _:
            row = {"fn": arguments.fn, "args": arguments.args, **arguments.case}
            return reward_commands.try_reward(row, arguments.sample, arguments.response)


def _parse_json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
