"""`mmrl data show`: samples as the model sees them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, pause_gc_for_imports, positive_int

DETAILS = """\
examples:
  mmrl data show my.yaml                                   # the first training sample, in words
  mmrl data show my.yaml --part test --id count/test/r7
  mmrl data show my.yaml --random 3 --sheet 6 --out six.png

Prints the exact prompt, each medium's tokens as one <image 640x480 -> 84x56, 6 tokens>. The picture shows the pixels
that the model is given, put together from its patches, with the answer (green) and the label (orange) drawn in.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "show", "show samples as the model sees them", DETAILS)
    add_config_arguments(parser)
    parser.add_argument("--part", choices=["train", "validation", "test"], default="train", help="default: train")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--id", help="the sample of this id")
    which.add_argument("--index", type=int, default=0, metavar="N", help="the Nth sample, from 0; -1 is the last")
    which.add_argument("--random", type=int, metavar="SEED", help="samples drawn with this seed")
    parser.add_argument(
        "--sheet", type=positive_int, default=1, metavar="N", help="this many samples, from the chosen one"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="write a picture of them")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print, and draw where asked; returns 0."""
    from mmrl.config import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    with pause_gc_for_imports():  # after the config is known to be right
        from mmrl.data_check.contact_sheet import draw_contact_sheet
        from mmrl.data_check.sample_view import SampleBrowser, describe_sample
        from mmrl.log.console import Console
        from mmrl.utils.files import report_write_errors

    console = Console()
    with tempfile.TemporaryDirectory(prefix="mmrl-show-") as work:
        album = SampleBrowser(loaded.config, loaded.files[0].parent, Path(work), arguments.part, console)
        chosen = album.select_indices(
            sample_id=arguments.id, index=arguments.index, seed=arguments.random, count=arguments.sheet
        )
        views = [album.open_sample(index) for index in chosen]
        for view in views:
            console.info(describe_sample(view) + "\n")
        if arguments.out is not None:
            with report_write_errors(arguments.out):
                draw_contact_sheet(views).save(arguments.out)
            console.info(f"Written: {arguments.out}")
    return 0
