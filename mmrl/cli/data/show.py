"""`mmrl data show`: samples as the model sees them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, pause_gc_for_imports, positive_int

DETAILS = """\
examples:
  mmrl data show my.yaml                                   # the first training sample, in words
  mmrl data show my.yaml --split test --id count/test/r7
  mmrl data show my.yaml --random 3 --count 6 --out six.png

Prints the exact prompt, each medium's tokens as one <image 640x480 -> 84x56, 6 tokens>. The image shows the pixels that
the model is given, put together from its patches, with the target (green) and the label (orange) drawn in.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "show", "show samples as the model sees them", DETAILS)
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "validation", "test"], default="train", help="default: train")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--id", help="the sample of this id")
    choice.add_argument("--index", type=int, default=0, metavar="N", help="the Nth sample, from 0; -1 is the last")
    choice.add_argument("--random", type=int, metavar="SEED", help="samples drawn with this seed")
    parser.add_argument(
        "--count", type=positive_int, default=1, metavar="N", help="this many samples, from the chosen one on"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw them into an image")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the samples, and draw them into an image if asked to."""
    from mmrl.config import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    # A wrong config should be refused before these are imported, which takes seconds.
    with pause_gc_for_imports():
        from mmrl.data_check.contact_sheet import draw_contact_sheet
        from mmrl.data_check.sample_view import SampleBrowser, describe_sample
        from mmrl.log.console import Console
        from mmrl.utils.files import report_write_errors

    console = Console()
    with tempfile.TemporaryDirectory(prefix="mmrl-show-") as work_dir:
        browser = SampleBrowser(loaded.config, loaded.files[0].parent, Path(work_dir), arguments.split, console)
        indices = browser.select_indices(
            sample_id=arguments.id, index=arguments.index, seed=arguments.random, count=arguments.count
        )
        views = list(map(browser.open_sample, indices))
        for view in views:
            console.info(describe_sample(view) + "\n")
        if arguments.out is not None:
            with report_write_errors(arguments.out):
                draw_contact_sheet(views).save(arguments.out)
            console.info(f"Written: {arguments.out}")
    return 0
