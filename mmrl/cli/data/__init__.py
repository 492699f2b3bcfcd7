"""`mmrl data`: check, show or make data before a run uses it."""

from __future__ import annotations

from mmrl.cli.common import Subparsers, add_command
from mmrl.cli.data import check, make, show

DETAILS = """\
examples:
  mmrl data check configs/quickstart.yaml                  # what would stop the run, what would mislead it
  mmrl data show configs/quickstart.yaml --out seen.png    # one sample as the model sees it
  mmrl data make mmrl_datasets.generators.scenes:counting split=train size=100 --out shapes

`mmrl data COMMAND --help` says more about each.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the group and its commands."""
    parser = add_command(
        commands, "data", "check the data of a config, show samples as the model sees them, or make a dataset", DETAILS
    )
    group = parser.add_subparsers(dest="data_command", metavar="COMMAND", title="commands", required=True)
    for command in (check, show, make):
        command.add_parser(group)
