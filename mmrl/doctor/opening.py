"""What worker processes do: open a medium and look at it. Nothing heavy is imported, so that they start fast."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.config.schema import Limits
from mmrl.doctor.likeness import fingerprint
from mmrl.media.store import MediaStore
from mmrl.types import ImageRef, Size


@dataclass(frozen=True, slots=True)
class Seen:
    """What opening a picture told."""

    size: Size
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Inspect:
    """Opens a picture and takes its size and fingerprint, in whatever process it is called."""

    limits: Limits

    def __call__(self, ref: ImageRef) -> Seen:
        """Raises MediaError as the store does."""
        picture = MediaStore(self.limits, max_bytes=0).open(ref)
        return Seen(Size(*picture.size), fingerprint(picture))
