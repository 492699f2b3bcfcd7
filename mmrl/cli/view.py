"""`mmrl view`: look at runs and evaluations in the browser."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command, echo
from mmrl.types import UserError

if TYPE_CHECKING:
    from mmrl.view.media import PictureStore
    from mmrl.view.run_documents import RunDocuments

DETAILS = """\
examples:
  mmrl view runs/quickstart                                # live, on this machine; Ctrl-C ends it
  mmrl view runs/quickstart runs/other                     # two runs side by side
  mmrl view runs/quickstart --out report                   # a folder; open report/index.html
  mmrl view runs/quickstart --single run.html              # one file to send
  mmrl view evals/quickstart-mathvista                     # predictions of `mmrl eval`

A run may still be going on: the live page follows it. The page needs no network. An exported page holds copies of the
pictures; --no-media leaves them out. docs/view.md explains what the page shows.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "view", "look at runs in the browser: curves, pictures, responses, rewards", DETAILS)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or of `mmrl eval`")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="FOLDER", help="write the page into this new or empty folder")
    place.add_argument("--single", type=Path, metavar="FILE", help="write the page into one file, such as run.html")
    parser.add_argument("--no-media", action="store_true", help="leave out images and videos")
    parser.add_argument(
        "--media-root",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with the run's images or videos, besides its data.media_roots; may be given again",
    )
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="port of the live page (a free one)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of the live page (127.0.0.1: this machine alone)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Write the page, or serve it until Ctrl-C."""
    from mmrl.view.media import MAX_SIDE, MAX_SIDE_IN_SINGLE_FILE, PictureStore
    from mmrl.view.records import find_run
    from mmrl.view.run_documents import RunDocuments

    started = time.monotonic()
    is_live = arguments.out is None and arguments.single is None
    max_side = MAX_SIDE_IN_SINGLE_FILE if arguments.single else MAX_SIDE
    pictures = PictureStore(with_media=not arguments.no_media, max_side=max_side, when_asked=is_live)
    runs = []
    for number, name in enumerate(arguments.runs):
        folder = find_run(Path(name), f"r{number}", name)
        runs.append(RunDocuments(folder, pictures, arguments.media_root))
    if is_live:
        _serve(runs, pictures, arguments.host, arguments.port)
        return 0
    file = _export(runs, pictures, arguments.out, arguments.single)
    seconds = time.monotonic() - started
    copied = f"{pictures.num_pictures} pictures copied ({pictures.num_bytes / 1e6:.1f} MB)"
    echo(f"Written: {file}, {'no pictures (--no-media)' if arguments.no_media else copied}, in {seconds:.1f} s")
    return 0


def _export(runs: Sequence[RunDocuments], pictures: PictureStore, out: Path | None, single: Path | None) -> Path:
    """Write the page, and return the file to open."""
    from mmrl.view import bundle
    from mmrl.view.documents import build_all_documents

    documents = build_all_documents(runs)
    if single is not None:
        if single.is_dir():
            raise UserError(f"--single {single}: it is a folder; name a file, such as {single / 'run.html'}")
        bundle.write_single(single, documents, pictures.items())
        return single
    assert out is not None
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: it exists and is not an empty folder; delete it or name another one")
    bundle.write_folder(out, documents, pictures.items())
    return out / "index.html"


def _serve(runs: Sequence[RunDocuments], pictures: PictureStore, host: str, port: int) -> None:
    from mmrl.view.server import PageServer, is_loopback

    with PageServer(runs, pictures, host=host, port=port) as server:
        if not is_loopback(host):
            echo(
                f"mmrl: warning: --host {host}: other machines can reach this page, unencrypted; whoever sees its "
                "address sees the run. `ssh -L` is safer: docs/view.md",
                file=sys.stderr,
            )
        echo(f"Open {server.url}\nCtrl-C ends it.")
        sys.stdout.flush()
        server.serve_forever()


def _port(text: str) -> int:
    """Parse a port; the `type` of an argument."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)
