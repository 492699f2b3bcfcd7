"""Checks that SVG is safe for a renderer: one well-formed element, nothing that runs, loads or expands."""

from __future__ import annotations

import re
from typing import NoReturn
from xml.parsers import expat

_MAX_CHARS = 500_000
_MAX_DEPTH = 200
_FORBIDDEN_ELEMENTS = frozenset({"script", "foreignobject", "iframe", "embed", "object", "audio", "video", "handler"})
_EXTERNAL_REFERENCE = re.compile(r"@import|url\(\s*['\"]?\s*(?!#)[^)]", re.IGNORECASE)


def check_svg(value: object) -> str:
    """Return the text of one <svg> element, stripped.

    Refused are doctypes (hence entities), processing instructions, scripts and event handlers, references to anything
    but parts of the same drawing, more than half a million characters, and more than 200 levels.

    Raises:
        ValueError: the value is anything else; the message names it.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError("not an SVG")
    text = value.strip()
    if len(text) > _MAX_CHARS:
        raise ValueError(f"an SVG of {len(text)} characters, at most {_MAX_CHARS} are read")
    parser = expat.ParserCreate(encoding="utf-8")
    checker = _SvgChecker()
    parser.StartElementHandler = checker.start_element
    parser.EndElementHandler = checker.end_element
    parser.CharacterDataHandler = checker.character_data
    parser.StartDoctypeDeclHandler = checker.start_doctype
    parser.ProcessingInstructionHandler = checker.processing_instruction
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise ValueError(f"not well-formed ({expat.ErrorString(error.code)})") from None
    except UnicodeEncodeError:
        raise ValueError("text that is not Unicode") from None
    return text


class _SvgChecker:
    """Checks elements, attributes and style sheets as the parser reports them."""

    def __init__(self) -> None:
        self._depth = 0
        self._style: list[str] | None = None

    def start_element(self, name: str, attributes: dict[str, str]) -> None:
        local_name = name.rpartition(":")[2].lower()
        self._depth += 1
        if self._depth == 1 and local_name != "svg":
            _reject(f"a <{name}> where <svg> belongs")
        if self._depth > _MAX_DEPTH:
            _reject(f"more than {_MAX_DEPTH} levels")
        if local_name in _FORBIDDEN_ELEMENTS:
            _reject(f"a <{name}>")
        if local_name == "style":
            self._style = []
        for key, value in attributes.items():
            attribute = key.rpartition(":")[2].lower()
            if attribute.startswith("on"):
                _reject(f"the event handler {key!r}")
            if attribute in ("href", "src") and not value.strip().startswith("#"):
                _reject("a reference that leads out of the drawing")
            if _EXTERNAL_REFERENCE.search(value):
                _reject("a reference that leads out of the drawing")

    def start_doctype(self, name: str, system_id: str | None, public_id: str | None, has_subset: bool) -> None:
        _reject("a doctype")

    def processing_instruction(self, target: str, data: str) -> None:
        _reject("a processing instruction")

    def character_data(self, text: str) -> None:
        if self._style is not None:
            self._style.append(text)

    def end_element(self, name: str) -> None:
        self._depth -= 1
        if self._style is not None and name.rpartition(":")[2].lower() == "style":
            if _EXTERNAL_REFERENCE.search("".join(self._style)):
                _reject("a style sheet that loads another file")
            self._style = None


def _reject(reason: str) -> NoReturn:
    raise ValueError(f"an SVG with {reason}")
