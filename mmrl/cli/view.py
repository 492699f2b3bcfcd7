"""`mmrl view`: look at runs and evaluations in the browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, echo
from mmrl.types import UserError

DETAILS = """\
examples:
  mmrl view runs/quickstart                                # live, on this machine; Ctrl-C ends it
  mmrl view runs/quickstart runs/other                     # two runs side by side
  mmrl view runs/quickstart --out report                   # a folder; open report/index.html
  mmrl view runs/quickstart --single run.html              # one file to send
  mmrl view evals/quickstart-mathvista                     # predictions of `mmrl eval`

The live page follows a run in progress. Other pages hold copies of its pictures. docs/view.md explains the page.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "view", "look at runs in the browser: curves, pictures, responses, rewards", DETAILS)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or of `mmrl eval`")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="FOLDER", help="write the page into this new or empty folder")
    place.add_argument("--single", type=Path, metavar="FILE", help="write the page into one file, such as run.html")
    parser.add_argument("--no-media", action="store_true", help="leave out images and videos")
    roots_help = "a folder with the run's images or videos, besides its data.media_roots; may be given again"
    parser.add_argument("--media-root", type=Path, action="append", default=[], metavar="DIR", help=roots_help)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the live page (a free one)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from mmrl.view.bundle import write_folder, write_single
    from mmrl.view.media import PictureStore
    from mmrl.view.page_server import PageServer
    from mmrl.view.run_documents import RunDocuments, build_all_documents

    out, single = arguments.out, arguments.single
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: it exists and is not an empty folder; delete it or name another one")
    for root in arguments.media_root:
        if not root.is_dir():
            raise UserError(f"--media-root {root}: no such folder")
    is_live = out is None and single is None
    pictures = PictureStore(with_media=not arguments.no_media, is_live=is_live)
    runs = []
    for number, path in enumerate(arguments.runs):
        runs.append(RunDocuments(f"r{number}", path, pictures, arguments.media_root))
    if is_live:
        with PageServer(runs, pictures, arguments.port) as server:
            echo(f"Open {server.url}\nCtrl-C ends it.")
            sys.stdout.flush()
            server.serve_forever()
        return 0
    write = write_single if out is None else write_folder
    try:
        write(out or single, build_all_documents(runs), pictures.items())
    except OSError as error:
        raise UserError(f"{out or single} cannot be written: {error.strerror}; choose another place") from error
    sizes = [len(content) for _, content in pictures.items()]
    file = out / "index.html" if out else single
    plural = "" if len(sizes) == 1 else "s"
    echo(f"Written: {file}, {len(sizes)} picture{plural} copied ({sum(sizes) / 1e6:.1f} MB)")
    return 0
