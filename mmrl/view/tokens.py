"""Tokens of kept rollouts, from the .npz file beside them, as compact strings for the page."""

from __future__ import annotations

import zipfile
import zlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

# By name in the document, the name in the file and the type that the page decodes. Typed arrays rather than lists: 60
# million numbers of 10,000 long rollouts take half a minute of CPU as JSON, a second like this.
_COLUMNS: Final = {
    **{"end": ("end", "<i4"), "id": ("token_id", "<i4"), "recorded": ("recorded_logprob", "<f4")},
    **{name: (name, "<f4") for name in ("logprob", "ratio", "entropy", "advantage")},
    "clipped": ("clipped", "i1"),
}
_NUM_AUTHORS: Final = 4


class TokenTable(NamedTuple):
    """The tokens of all rollouts of a file."""

    offsets: list[int]  # where each rollout begins, and the number of tokens
    columns: dict[str, Any]  # by name in the document, an array with one entry for each token

    def get(self, line: int, places: Sequence[int]) -> dict[str, str] | None:
        """Return the tokens of the rollout on a line, counted from 0; None if there are none.

        `places` has the place of each character of the response, and of its end, in a JavaScript string.
        """
        if line + 1 >= len(self.offsets) or self.offsets[line] == self.offsets[line + 1]:
            return None
        start, stop = self.offsets[line : line + 2]
        tokens = {"author": bytes(self.columns["author"][start:stop]).decode("ascii")}
        for name in _COLUMNS:
            values = self.columns[name][start:stop]
            if name == "end" and places[-1] != len(places) - 1:
                moved = np.asarray(places, dtype="<i4")[values.clip(0, len(places) - 1)]
                values = np.where(values < 0, -1, moved)
            tokens[name] = b64encode(values.tobytes()).decode("ascii")
        return tokens


def read_tokens(path: Path) -> TokenTable:
    """Read the tokens of a file of rollouts.

    Raises:
        ValueError: it is damaged, or its arrays do not fit together.
        OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            offsets = file["offset"].astype(np.int64).tolist()
            columns = {name: file[stored].astype(kind) for name, (stored, kind) in _COLUMNS.items()}
            authors = file["author"].astype(np.uint8)
    except (KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"not a table of tokens: {error}") from error
    ascending = offsets == sorted(offsets) and offsets[:1] == [0] and offsets[-1] == len(authors)
    if not ascending or any(column.shape != authors.shape for column in columns.values()):
        raise ValueError("its arrays do not have one entry for each token")
    if authors.size and authors.max() >= _NUM_AUTHORS:
        raise ValueError("it has an author that this version does not know")
    # Digits, so that a rollout's authors are a string like 000102.
    return TokenTable(offsets, {**columns, "author": (authors + ord("0")).astype(np.uint8)})
