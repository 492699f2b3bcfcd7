"""Consoles that write into memory, as into a pipe or onto a terminal."""

import io
import re

from rich.console import Console as Screen

from mmrl.log.console import Console


def piped_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(out), out


def terminal_console() -> tuple[Console, io.StringIO]:
    console, out = piped_console()
    console._screen = Screen(file=out, force_terminal=True, width=100, highlight=False)
    return console, out


def without_escapes(out: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
