"""Draws SVG and formulas, in the worker processes of `renderer.draw`, each of which draws once and ends.

The libraries that draw are imported in the functions, so that no other process loads them.

A drawing has limits of processor time, memory and size, writes no file and starts no program. SVG that passes
`validate_value` refers to nothing outside itself.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from mmrl.answer import validate_value
from mmrl.types import AnswerType
from mmrl.utils.worker_server import ReportActivity

_WHITE = "#ffffff"
_FONT_SIZE = 32.0
_MAX_SIDE_PX = 2048.0  # of a square as large as the largest formula
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


class DrawingRequest(NamedTuple):
    """One drawing."""

    language: str  # svg or latex
    source: str
    side: int  # pixels of the square that an SVG is fitted into; formulas keep their size


def load_drawing(cpu_s: int, memory_bytes: int, report: ReportActivity) -> Callable[[DrawingRequest], bytes]:
    """Return the function that draws, after fonts and tables have been loaded for all drawings at once.

    It may use `cpu_s` seconds of processor time and `memory_bytes` of address space.
    """
    report("loading fonts")
    os.environ.clear()
    # Libraries print what they think of a source, and a drawing that fails leaves a traceback: it is the response's.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
    draw_svg("<svg/>", 32)
    draw_latex(r"\frac{1}{2}", 0)
    return partial(_draw_within_limits, cpu_s, memory_bytes)


def draw_svg(source: str, side: int) -> bytes:
    """Return a PNG of `side` x `side` pixels with the drawing fitted in and centred on white.

    Without a viewBox, the width and height of the drawing serve as one. All text is set in one font, which comes with
    a library.

    Raises:
        ValueError: the source is not a valid SVG answer, or cannot be drawn.
    """
    from lxml import etree

    root = etree.fromstring(validate_value(AnswerType.SVG, source).encode(), etree.XMLParser(resolve_entities=False))
    if "viewBox" not in root.attrib:
        sides = []
        for name in ("width", "height"):
            length = root.get(name, "100")
            # Fails for other units, and for a percentage, since there is no page.
            sides.append(float(length.strip().removesuffix("px")))
            if not 0.0 < sides[-1] < 1e6:
                raise ValueError(f"a drawing {length!r:.20} wide or high")
        root.set("viewBox", f"0 0 {sides[0]:g} {sides[1]:g}")
    root.set("width", str(side))
    root.set("height", str(side))
    root.set("preserveAspectRatio", "xMidYMid meet")
    return _rasterize(etree.tostring(root, encoding="unicode"))


def draw_latex(source: str, _: int) -> bytes:
    """Return a PNG of a formula in its natural size, black on white.

    Raises:
        ValueError: the source is not a formula, or takes more pixels than 2048 x 2048.
    """
    import ziamath

    formula = ziamath.Latex(validate_value(AnswerType.LATEX, source), size=_FONT_SIZE).svgxml()
    if not 0.0 < float(formula.get("width")) * float(formula.get("height")) <= _MAX_SIDE_PX**2:
        raise ValueError("too large, or nothing at all")
    return _rasterize(ElementTree.tostring(formula, encoding="unicode"))


def _draw_within_limits(cpu_s: int, memory_bytes: int, request: DrawingRequest) -> bytes:
    """Limit this process for good, then draw."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # No file can be written, nor can a core dump.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_forbid_event)
    draw = {"svg": draw_svg, "latex": draw_latex}[request.language]
    return draw(request.source, request.side)


def _forbid_event(event: str, details: tuple[object, ...]) -> None:
    if event.startswith(_FORBIDDEN_EVENTS) or (
        event == "open" and not str(details[0]).endswith((".py", ".pyc", ".ttf"))
    ):
        raise PermissionError(f"a drawing may not {event}")


def _rasterize(drawing: str) -> bytes:
    import resvg_py
    import ziafont

    font = Path(ziafont.__file__).parent / "fonts" / "DejaVuSans.ttf"
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=drawing,
            background=_WHITE,
            skip_system_fonts=True,  # every machine draws the same
            font_files=[str(font)],
            font_family=_FONT_FAMILY,
            serif_family=_FONT_FAMILY,
            sans_serif_family=_FONT_FAMILY,
            monospace_family=_FONT_FAMILY,
        )
    )
