"""Parts of messages, and text from data, models and users made safe for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

_NUM_LISTED: Final = 5  # things that a message names before it counts the rest
# All of C0 and C1 but tab and line feed. A terminal obeys them: ESC begins commands that clear the screen or rename
# the window, a carriage return hides the start of a line, and 0x9b is ESC [ in one character. Halves of surrogate pairs
# are no characters in UTF-8, so printing one raises.
_CONTROLS: Final = (*range(32), *range(127, 160), *range(0xD800, 0xE000))
_ESCAPES: Final = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\t\n"}


def did_you_mean(word: str, known: Iterable[str], *, limit: int = 1, cutoff: float = 0.6, quote: str = "'") -> str:
    """Return "did you mean 'size'?" for the `limit` known words that are most similar; empty if none is similar."""
    close = [f"{quote}{name}{quote}" for name in get_close_matches(word, list(known), n=limit, cutoff=cutoff)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def first_names(names: Sequence[str], limit: int = _NUM_LISTED) -> str:
    """Return the first `limit` names with commas between them, and how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def first_lines(lines: Sequence[str], limit: int = _NUM_LISTED) -> list[str]:
    """Return the first `limit` lines, indented by two spaces, and a line that says how many more there are."""
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  and {len(lines) - limit:,} more")
    return shown


def shorten(text: str, max_chars: int) -> str:
    """Return a text, cut after `max_chars` characters and marked with "..." if it is longer."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def escape_controls(text: str) -> str:
    r"""Return the text with each control character as JSON would write it: ESC becomes \u001b. Tab and newline stay."""
    return text.translate(_ESCAPES)
