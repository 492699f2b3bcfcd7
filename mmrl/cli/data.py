"""`mmrl data`: make a dataset."""

from __future__ import annotations

from mmrl.cli import data_make
from mmrl.cli.common import Commands, add_command

DETAILS = """\
example:
  mmrl data make mmrl_datasets.scenes:counting split=train size=100 --out shapes
"""


def add_parser(commands: Commands) -> None:
    """Declare the command and what it can do."""
    parser = add_command(commands, "data", "make a dataset", DETAILS)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    data_make.add_parser(actions)
