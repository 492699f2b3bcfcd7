"""Pictures that look alike although their bytes differ: re-encoded, resized, slightly cropped or brightened copies.

A picture's fingerprint is a thumbnail of 12 x 12 RGB averages; two pictures are alike when the correlation of their
thumbnails, which knows neither brightness nor contrast, is at least `ALIKE`. All pairs are compared, in blocks, so
nothing hangs on the luck of a hash's bits, which are noise on plain diagrams. On 320 x 240 textures and diagrams of
thin lines, copies (JPEG quality 60; 0.75 times the size; brighter and flatter) came out above 0.995, and other pictures
of the same making below 0.9.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MIN_CORRELATION: Final = 0.99
THUMBNAIL_SIDE: Final = 12
_BLOCK_ROWS: Final = 2048


def image_fingerprint(picture: Image.Image) -> bytes:
    """The thumbnail of an RGB picture, 3 x SIDE x SIDE bytes."""
    return picture.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX).tobytes()


def find_most_similar(queries: list[bytes], others: list[bytes]) -> dict[int, int]:
    """For each query that has a picture like it among the others: which one is most alike."""
    found: dict[int, int] = {}
    for start in range(0, len(queries), _BLOCK_ROWS):
        block = _normalize_thumbnails(queries[start : start + _BLOCK_ROWS])
        best = np.full(len(block), MIN_CORRELATION, np.float32)
        for first in range(0, len(others), _BLOCK_ROWS):
            correlations = block @ _normalize_thumbnails(others[first : first + _BLOCK_ROWS]).T
            highest = correlations.max(axis=1)
            for row in np.flatnonzero(highest > best):
                found[start + int(row)] = first + int(correlations[row].argmax())
            best = np.maximum(best, highest)
    return found


def find_near_duplicates(pictures: list[bytes]) -> dict[int, int]:
    """For each picture that looks like an earlier one: the first it looks like."""
    found: dict[int, int] = {}
    for start in range(0, len(pictures), _BLOCK_ROWS):
        block = _normalize_thumbnails(pictures[start : start + _BLOCK_ROWS])
        rows = start + np.arange(len(block))
        for first in range(0, start + 1, _BLOCK_ROWS):
            others = _normalize_thumbnails(pictures[first : first + _BLOCK_ROWS])
            earlier = first + np.arange(len(others)) < rows[:, None]
            alike = (block @ others.T >= MIN_CORRELATION) & earlier
            for row in np.flatnonzero(alike.any(axis=1)):
                found.setdefault(start + int(row), first + int(alike[row].argmax()))
    return found


def _normalize_thumbnails(thumbnails: list[bytes]) -> NDArray[np.float32]:
    """Rows of mean 0 and length 1, so that a product of two is their correlation; of a flat picture a row of zeros."""
    rows = np.frombuffer(b"".join(thumbnails), np.uint8).reshape(len(thumbnails), -1).astype(np.float32)
    rows -= rows.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > THUMBNAIL_SIDE, lengths, np.inf), np.float32)
