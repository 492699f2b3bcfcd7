"""Tokens of kept rollouts, from the .npz file beside them, as compact strings for the page."""

from __future__ import annotations

import zipfile
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

# Name in the document, name in the file, and the type that the page decodes. Typed arrays rather than lists: 60 million
# numbers of 10,000 long rollouts take half a minute of CPU as JSON, a second like this.
_COLUMNS: Final = (
    ("end", "end", "<i4"),
    ("id", "token_id", "<i4"),
    ("recorded", "recorded_logprob", "<f4"),
    ("logprob", "logprob", "<f4"),
    ("ratio", "ratio", "<f4"),
    ("entropy", "entropy", "<f4"),
    ("advantage", "advantage", "<f4"),
    ("clipped", "clipped", "i1"),
)
_NUM_AUTHORS: Final = 4


class TokenTable:
    """The tokens of all rollouts of a file."""

    def __init__(self, offsets: Sequence[int], columns: Mapping[str, Any]) -> None:
        """`columns` has an array for each name of a document, `offsets` where each rollout begins in it."""
        self._offsets, self._columns = offsets, columns

    def get(self, line: int, positions: Sequence[int] | None) -> dict[str, str] | None:
        """Return the tokens of the rollout on a line, counted from 0; None if the table has none of it.

        `positions` has the place of each character of the response in UTF-16, if that is not its own index.
        """
        if line + 1 >= len(self._offsets):
            return None
        start, stop = self._offsets[line], self._offsets[line + 1]
        if start == stop:
            return None
        tokens = {"author": bytes(self._columns["author"][start:stop]).decode("ascii")}
        for name, _, _ in _COLUMNS:
            values = self._columns[name][start:stop]
            if name == "end" and positions is not None:
                places = np.asarray(positions, dtype="<i4")
                values = np.where(values < 0, -1, places[values.clip(0, len(places) - 1)])
            tokens[name] = b64encode(values.tobytes()).decode("ascii")
        return tokens


def read_tokens(path: Path) -> TokenTable:
    """Read the tokens of a file of rollouts.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or its arrays do not fit together.
        OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            offsets = file["offset"].astype(np.int64).tolist()
            columns: dict[str, Any] = {}
            for name, stored, kind in _COLUMNS:
                columns[name] = file[stored].astype(kind)
            authors = file["author"].astype(np.uint8)
    except (KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"not a table of tokens: {error}") from error
    num_tokens = len(authors)
    ascending = offsets == sorted(offsets) and offsets[:1] == [0] and offsets[-1] == num_tokens
    if not ascending or any(column.shape != (num_tokens,) for column in columns.values()):
        raise ValueError("its arrays do not have one entry for each token")
    if num_tokens and authors.max() >= _NUM_AUTHORS:
        raise ValueError("it has an author that this version does not know")
    # Digits, so that a rollout's authors are a string like 000102.
    columns["author"] = (authors + ord("0")).astype(np.uint8)
    return TokenTable(offsets, columns)
