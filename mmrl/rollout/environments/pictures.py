"""Pictures that environments draw, as files of a run: named by digest, and deleted once nothing refers to them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mmrl.types import ImageRef
from mmrl.utils.files import random_temporary_path, report_write_errors

PICTURES_FOLDER: Final = "frames"
"""Folder of the pictures, inside the folder of a run's data, whose checkpoints and records have this name."""
_PICTURE_NAME: Final = re.compile(rf"{PICTURES_FOLDER}/([0-9a-f]{{64}}\.(?:png|jpg))")
_CLOCK_SKEW_S: Final = 60.0  # between this machine and one that keeps the files


def save_picture(folder: Path, content: bytes) -> ImageRef:
    """Save the bytes of a PNG or JPEG file under their digest; raises UserError if the file cannot be written."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = folder / (sha256 + (".png" if content.startswith(b"\x89PNG") else ".jpg"))
    with report_write_errors(path):
        if path.exists() and path.stat().st_size == len(content):
            os.utime(path)  # in use again, so that it is not deleted now
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # Other ranks may write the same picture. It is not synced to disk, which would take longer than the rest
            # of a step: its size, or its digest when it is opened, shows damage by a power cut.
            fresh = random_temporary_path(path)
            fresh.write_bytes(content)
            fresh.replace(path)
    return ImageRef(path=str(path), sha256=sha256)


def delete_unused_pictures(folder: Path, named_in: Iterable[Path], *, older_than: float) -> None:
    """Delete pictures that none of the text files `named_in` names. Raises UserError if it cannot.

    Pictures that were written or used after the time `older_than`, in seconds since 1970, stay: the step that drew them
    may not have been saved yet.
    """
    with report_write_errors(folder):
        old = {}
        for path in folder.iterdir():
            if path.stat().st_mtime < older_than - _CLOCK_SKEW_S:
                old[path.name] = path
        if not old:
            return
        for text_file in named_in:
            for name in _PICTURE_NAME.findall(text_file.read_text()):
                old.pop(name, None)
        for path in old.values():
            path.unlink(missing_ok=True)
