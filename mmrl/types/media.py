"""Images and videos by reference, and the coordinate systems of boxes in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class CoordinateSystem(StrEnum):
    """What a coordinate is measured in. x runs right, y runs down, both from the top left corner."""

    PX_ORIGINAL = "px_original"
    PX_RESIZED = "px_resized"
    NORM_1 = "norm_1"
    NORM_1000 = "norm_1000"


class Size(NamedTuple):
    """A picture's extent, in pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ResizeMap:
    """How one picture was resized before the model saw it; the only converter of coordinates between frames.

    Of a part of a picture, `original` is the part's extent and `corner` where it begins: PX_ORIGINAL counts from the
    corner of the whole, every other frame from that of the part.
    """

    original: Size
    resized: Size
    offset: tuple[int, int] = (0, 0)

    def convert(self, values: Sequence[float], source: CoordinateSystem, target: CoordinateSystem) -> tuple[float, ...]:
        """Convert x, y, x, y, ... from one frame to another.

        Raises:
            ValueError: an odd number of values.
        """
        if len(values) % 2:
            raise ValueError(f"coordinates come in x, y pairs, got {len(values)} values: {list(values)}")
        if source == target:
            return tuple(float(value) for value in values)
        (start, span), (other_start, other_span) = self._offset_and_extent(source), self._offset_and_extent(target)
        places = ((i % 2, value) for i, value in enumerate(values))
        return tuple((value - start[i]) / span[i] * other_span[i] + other_start[i] for i, value in places)

    def _offset_and_extent(self, coordinate_system: CoordinateSystem) -> tuple[tuple[int, int], tuple[float, float]]:
        """Where the picture begins and how far it goes."""
        match coordinate_system:
            case CoordinateSystem.PX_ORIGINAL:
                return self.offset, self.original
            case CoordinateSystem.PX_RESIZED:
                return (0, 0), self.resized
            case CoordinateSystem.NORM_1:
                return (0, 0), (1.0, 1.0)
            case CoordinateSystem.NORM_1000:
                return (0, 0), (1000.0, 1000.0)


class Corruption(StrEnum):
    """What hides a medium from a model, of which one wants to know whether it looks; its size stays."""

    GREY = "grey"
    NOISE = "noise"
    SHUFFLED = "shuffled"  # the frames of a video


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A picture by reference: a path and the sha256 (hex) of the file's bytes, never pixels. With `at`, the file is a
    video (with `fps`, a folder of frames) and the picture what it shows at that second; `crop` (left, top, right,
    bottom, in its pixels) is a part.
    """

    path: str
    sha256: str
    corruption: Corruption | None = None
    timestamp: float | None = None
    crop: tuple[int, int, int, int] | None = None
    fps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRef:
    """A video by reference, like `ImageRef`; `start` and `end` (seconds) choose a part of it. With `fps`, the path is a
    folder of pictures, its frames in natural order, so many a second.
    """

    path: str
    sha256: str
    start: float | None = None
    end: float | None = None
    corruption: Corruption | None = None
    fps: float | None = None


MediaRef = ImageRef | VideoRef


ContentPart = str | ImageRef | VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Which media may be read: files under `roots` (resolved), and URLs of these `schemes` (http, file, data)."""

    roots: tuple[Path, ...]
    schemes: tuple[str, ...] = ()
    max_bytes: int = 50_000_000
    max_video_bytes: int = 2_000_000_000
    max_data_url_bytes: int = 10_000_000


class DatasetContext(NamedTuple):
    """Where a dataset function works: files it makes go under `work`; relative paths start from `base`."""

    work_dir: Path
    base_dir: Path
    seed: int
    media_policy: MediaPolicy = MediaPolicy(roots=())
