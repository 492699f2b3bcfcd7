"""Digests that show whether something is what it was: SHA-256, in hexadecimal, of files and texts.

    file of a medium, of a checkpoint or of an evaluation   `file_digest`, compared whenever it is opened or restored
    folder of frames                                        `frames_digest`, over names and digests of the files
    weights that are not saved, or that an engine received  `torch_digests.sample_bytes`, a thousand values of each

Two records are other things than digests of contents, each for its reason. The record of a run's data
(`mmrl/data/data_record.py`) has 8 bytes of BLAKE2 for every field of every sample, so that it can name the field that
changed and stay small. The index of files (`mmrl/utils/file_index.py`) compares size and time of the last change,
since reading every file again is the work that it saves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def text_digest(text: str) -> str:
    """Return the digest of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def frames_digest(frames: Mapping[str, str]) -> str:
    """Return the digest of a folder of frames, over name and digest of each frame, in order."""
    return text_digest("".join(f"{digest} {name}\n" for name, digest in frames.items()))
