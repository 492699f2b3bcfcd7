"""Files that the tests of readers write, and checks of the rows that come back."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmrl.types import DatasetContext, ImageRef, RejectedRow, Sample

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))  # readers never decode
MP4 = b"\0\0\0\x20ftypisom" + bytes(range(64))
# Annotations of one object in the layouts of COCO and of ReasonSeg.
INSTANCES = {
    "images": [{"id": 1, "file_name": "1.jpg"}],
    "categories": [{"id": 2, "name": "cat"}],
    "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": 0}],
}
OUTLINES = {"text": ["a seat"], "is_sentence": True, "shapes": [{"label": "target", "points": [[1, 2], [30, 40]]}]}


def json_lines(rows: Iterable[Mapping[str, Any] | bytes]) -> bytes:
    """Return rows as JSON Lines; a row of bytes is written as it is."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def stored_image(context: DatasetContext, content: bytes, extension: str = ".png") -> ImageRef:
    """Check that an embedded or downloaded file was stored, and return a reference to it."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = context.work_dir / "media" / sha256[:2] / f"{sha256}{extension}"
    assert path.read_bytes() == content
    return ImageRef(path=str(path), sha256=sha256)


def check_rejected(rows: Sequence[Sample | RejectedRow], reasons: Sequence[str]) -> None:
    """Check that all rows were rejected, each for the reason in its place."""
    assert len(rows) == len(reasons)
    for row, reason in zip(rows, reasons, strict=True):
        assert isinstance(row, RejectedRow), row
        assert reason in row.reason
