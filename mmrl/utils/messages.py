"""Parts of error messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

_NUM_LISTED: Final = 5  # things of one kind that a message names


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6, quote: str = "'") -> str:
    """Return "did you mean 'size'?" for the known word that is most similar, or an empty string if none is similar."""
    close = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {quote}{close[0]}{quote}?" if close else ""


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
