"""Text from data, models and users, made safe for a terminal."""

from __future__ import annotations

from typing import Final

# All of C0 and C1 but tab and line feed. A terminal obeys them: ESC begins commands that clear the screen or rename
# the window, a carriage return hides the start of a line, and 0x9b is ESC [ in one character.
_ESCAPES: Final = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def escape_controls(text: str) -> str:
    r"""Return the text with each control character as JSON would write it: ESC becomes \u001b. Tab and newline stay."""
    return text.translate(_ESCAPES)
