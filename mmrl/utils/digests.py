"""Digests that show whether content has changed: SHA-256, in hexadecimal, of files and texts.

    file of a medium, of a checkpoint or of an evaluation   `file_digest`, compared whenever it is opened or restored
    folder of frames                                        `frames_digest`, over names and digests of the files
    weights that are not saved, or that an engine received  `torch_digests.sample_bytes`, a thousand values of each

Two records do not use these digests, each for its own reason. The record of a run's data
(`mmrl/data/data_record.py`) has 8 bytes of BLAKE2 for every field of every sample, so that it can name the field that
changed and stay small. The index of files (`mmrl/utils/file_index.py`) compares size and time of the last change,
since reading every file again is the work that it saves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_BLOCK_BYTES: Final = 1 << 16  # of a file that are read at a time


def text_digest(text: str) -> str:
    """Return the digest of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file's bytes. Raises OSError."""
    # `hashlib.file_digest` fills a buffer of 256 KiB with zeros first, which takes longer than most images.
    sha256 = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
    return sha256.hexdigest()


def frames_digest(frames: Mapping[str, str]) -> str:
    """Return the digest of a folder of frames, over name and digest of each frame, in order."""
    return text_digest("".join(f"{digest} {name}\n" for name, digest in frames.items()))
