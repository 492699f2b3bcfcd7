"""Tool calls in the text of a response. A response stops after a call and continues after its result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_CALL_END_PATTERN = re.compile(re.escape(CALL_END))


def find_final_call(text: str) -> str | None:
    """Return the call that ends a text, tags included, well-formed or not; None if the text ends in no call."""
    start = text.rfind(CALL_START)
    call = text[start:].strip()
    return call if start >= 0 and call.endswith(CALL_END) else None


def split_turns(text: str) -> Iterator[tuple[int, str]]:
    """Yield the parts of a response, cut after every call, each with its index. An empty response is one part."""
    start = 0
    ends = [call.end() for call in _CALL_END_PATTERN.finditer(text)]
    for end in (*ends, len(text)):
        if start < end or not text:
            yield start, text[start:end]
        start = end
