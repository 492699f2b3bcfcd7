"""The program that draws SVG and formulas, apart from the process that asks: each drawing in a process of its own.

Requests and replies are lines of JSON: {"language": "svg" | "latex", "source": .., "side": ..} is answered by
{"png": base64} or {"failure": why}. A drawing has limits of processor time, memory and size, writes no file and
starts no program; what the answer grammar lets through as SVG names nothing outside itself. Run with the limits:

    python -m mmrl_rewards.services.drawing CPU_SECONDS MEMORY_BYTES MAX_BYTES
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import resource
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import resvg_py
import ziafont
import ziamath
from lxml import etree

from mmrl.answer import validate_value
from mmrl.types import AnswerType

_WHITE = "#ffffff"
_FONT_SIZE = 32.0
_MAX_SIDE_PX = 2048.0  # pixels, the side of a square as large as the largest formula
_FONT_FAMILY = "DejaVu Sans"
_FORBIDDEN_EVENTS = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.system",
    "ctypes.",
    "shutil.",
)
_WALL_SECONDS_PER_CPU_SECOND = 20  # a machine this busy is not the drawing's fault, and it is not waited for


class DrawingProcessLimits(NamedTuple):
    """What one drawing may take."""

    cpu_s: int
    memory_bytes: int
    max_bytes: int


def draw_svg(source: str, side: int) -> bytes:
    """A PNG of `side` x `side` pixels, the drawing fitted in and centred on white.

    Without a viewBox its width and height are taken for one. Text is set in one font that comes with a library.

    Raises:
        ValueError: the answer grammar refuses it, or it cannot be drawn.
    """
    root = etree.fromstring(validate_value(AnswerType.SVG, source).encode(), etree.XMLParser(resolve_entities=False))
    if "viewBox" not in root.attrib:
        width, height = (_parse_pixels(root.get(name, "100")) for name in ("width", "height"))
        root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("width", str(side))
    root.set("height", str(side))
    root.set("preserveAspectRatio", "xMidYMid meet")
    return _rasterize(etree.tostring(root, encoding="unicode"))


def draw_latex(source: str, _: int) -> bytes:
    """A PNG of a formula in its natural size, black on white.

    Raises:
        ValueError: it is no formula, or of more than 2048 x 2048 pixels.
    """
    picture = ziamath.Latex(validate_value(AnswerType.LATEX, source), size=_FONT_SIZE).svgxml()
    if not 0.0 < float(picture.get("width")) * float(picture.get("height")) <= _MAX_SIDE_PX**2:
        raise ValueError("too large, or nothing at all")
    return _rasterize(ElementTree.tostring(picture, encoding="unicode"))


def serve(limits: DrawingProcessLimits) -> None:
    """Answer requests until there are no more."""
    draw_latex(r"\frac{1}{2}", 0)  # fonts and tables are loaded once, before any drawing is under watch
    for line in sys.stdin:
        print(json.dumps(_draw_in_process(json.loads(line), limits)), flush=True)


def _draw_in_process(request: Mapping[str, Any], limits: DrawingProcessLimits) -> dict[str, str]:
    """A request answered in another process, which ends with it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_draw_limited, args=(request, limits, there), daemon=True)
    process.start()
    there.close()
    try:
        reply = here.recv_bytes(limits.max_bytes) if here.poll(limits.cpu_s * _WALL_SECONDS_PER_CPU_SECOND) else None
    except EOFError:
        process.join()
        slow = process.exitcode == -signal.SIGXCPU
        return {"failure": f"takes more than {limits.cpu_s} s to draw" if slow else "cannot be drawn"}
    except OSError:
        return {"failure": f"more than {limits.max_bytes} bytes when drawn"}
    finally:
        process.kill()
        process.join()
    if reply is None:
        return {"busy": "the machine is too busy to draw"}
    return {"png": base64.b64encode(reply).decode()}


def _draw_limited(request: Mapping[str, Any], limits: DrawingProcessLimits, out: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_forbid_event)
    out.send_bytes({"svg": draw_svg, "latex": draw_latex}[request["language"]](request["source"], request["side"]))


def _forbid_event(event: str, details: tuple[object, ...]) -> None:
    if event.startswith(_FORBIDDEN_EVENTS) or (
        event == "open" and not str(details[0]).endswith((".py", ".pyc", ".ttf"))
    ):
        raise PermissionError(f"a drawing may not {event}")


def _rasterize(drawing: str) -> bytes:
    font = Path(ziafont.__file__).parent / "fonts" / "DejaVuSans.ttf"
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=drawing,
            background=_WHITE,
            skip_system_fonts=True,  # every machine draws alike
            font_files=[str(font)],
            font_family=_FONT_FAMILY,
            serif_family=_FONT_FAMILY,
            sans_serif_family=_FONT_FAMILY,
            monospace_family=_FONT_FAMILY,
        )
    )


def _parse_pixels(length: str) -> float:
    """A length in pixels; other units and shares of a page that is not there are none."""
    value = float(length.strip().removesuffix("px"))
    if not 0.0 < value < 1e6:
        raise ValueError(f"a drawing {length!r:.20} wide or high")
    return value


if __name__ == "__main__":
    serve(DrawingProcessLimits(*map(int, sys.argv[1:])))
