"""`mmrl track`: send a run to a tracker, while it runs without one or later."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command

DETAILS = """\
examples:
  mmrl track runs/quickstart --to tensorboard
  mmrl track runs/mine --to wandb                        # with the options in RUN/config.yaml, if it has any
  mmrl track runs/mine --to mlflow project=vlm           # an option of docs/trackers.md

Everything in metrics.jsonl and timings.jsonl is sent that the tracker has not got yet, with pictures of the kept
rollouts. A run that is in progress is followed by the trackers in its config, `logging.trackers`.
"""

TRACKERS = ["tensorboard", "wandb", "trackio", "mlflow"]


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "track", "send the metrics of a run to a tracker", DETAILS)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory, such as runs/quickstart")
    parser.add_argument("--to", choices=TRACKERS, required=True, help="the tracker")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="an option of the tracker")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send what the tracker lacks.

    Raises:
        UserError: there is no such run, an option is unknown, a library is missing, or the tracker fails.
    """
    from mmrl.log.run_dir import RunDir
    from mmrl.trackers.replay import replay_run

    print(replay_run(RunDir(arguments.run_dir), arguments.to, arguments.overrides))
    return 0
