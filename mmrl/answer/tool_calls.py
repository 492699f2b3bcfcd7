"""Calls of tools, as a response makes them: it stops behind one, hears what the tool says, and goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_CALL_END_PATTERN = re.compile(re.escape(CALL_END))


def find_final_call(text: str) -> str | None:
    """What is meant as a call and ends a text, tags included; None where nothing is."""
    start = text.rfind(CALL_START)
    call = text[start:].strip()
    return call if start >= 0 and call.endswith(CALL_END) else None


def split_turns(text: str) -> Iterator[tuple[int, str]]:
    """A response cut behind every call: where each part begins, and the part. One that says nothing is one part."""
    start = 0
    for end in (*(call.end() for call in _CALL_END_PATTERN.finditer(text)), len(text)):
        if start < end or not text:
            yield start, text[start:end]
        start = end
