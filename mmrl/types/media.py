"""Images and videos by reference, and the coordinate systems of boxes and points in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class CoordinateSystem(StrEnum):
    """Units of a coordinate. x runs right and y runs down, both from the top left corner."""

    PX_ORIGINAL = "px_original"  # pixels of the image file
    PX_RESIZED = "px_resized"  # pixels of what the model sees
    NORM_1 = "norm_1"  # from 0 to 1
    NORM_1000 = "norm_1000"  # from 0 to 1000


class Size(NamedTuple):
    """Width and height of an image or frame, in pixels.

    Example: `Size(width=640, height=480)`
    """

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ResizeMap:
    """Records how one image was resized before the model saw it; the only converter between coordinate systems.

    An image can be a crop of a larger one. Then PX_ORIGINAL counts from the corner of the larger image, and every other
    system from the corner of the crop.

    Example: `ResizeMap(Size(640, 480), Size(336, 252)).convert((320, 240), PX_ORIGINAL, NORM_1)` is `(0.5, 0.5)`.
    """

    original: Size
    """Size before resizing, of the crop if it is one."""
    resized: Size
    """Size of what the model sees."""
    offset: tuple[int, int] = (0, 0)
    """Left and top of the crop, in pixels of the larger image."""

    def convert(self, values: Sequence[float], source: CoordinateSystem, target: CoordinateSystem) -> tuple[float, ...]:
        """Convert x, y, x, y, ... from one coordinate system to another.

        Raises:
            ValueError: there is an odd number of values.
        """
        if len(values) % 2:
            raise ValueError(f"coordinates come in x, y pairs, got {len(values)} values: {list(values)}")
        if source == target:
            return tuple(map(float, values))
        source_offset, source_extent = self._offset_and_extent(source)
        target_offset, target_extent = self._offset_and_extent(target)
        converted = []
        for index, value in enumerate(values):
            axis = index % 2
            fraction = (value - source_offset[axis]) / source_extent[axis]
            converted.append(fraction * target_extent[axis] + target_offset[axis])
        return tuple(converted)

    def _offset_and_extent(self, coordinate_system: CoordinateSystem) -> tuple[tuple[int, int], tuple[float, float]]:
        """Return where the image begins and how far it reaches, as x and y of a coordinate system."""
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
    """A way to hide the content of an image or video from the model. Its size stays as it is."""

    GREY = "grey"  # one grey for all pixels
    NOISE = "noise"  # random pixels
    SHUFFLED = "shuffled"  # a video's frames, in random order


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A reference to an image. Pixels are loaded when they are needed, and never stored with a sample.

    The file can be a video, of which `timestamp` chooses a frame.

    Example: `ImageRef(path="7.png", sha256="ab12...")`
    """

    path: str
    """Path of the image; of a video or a folder of frames where `timestamp` is set."""
    sha256: str
    """Hash of the file's bytes, in hex. A file that no longer matches is refused."""
    corruption: Corruption | None = None
    """How the image is hidden from the model; None shows it."""
    timestamp: float | None = None
    """Second of the video whose frame is the image."""
    crop: tuple[int, int, int, int] | None = None
    """Left, top, right and bottom of the part that is shown, in pixels; None for all of it."""
    fps: float | None = None
    """Frames a second, for a path that is a folder of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRef:
    """A reference to a video, or to a part of it.

    Example: `VideoRef(path="clip.mp4", sha256="cd34...", start=2.0, end=5.5)`
    """

    path: str
    """Path of the video, or of a folder of frames where `fps` is set."""
    sha256: str
    """Hash of the file's bytes, in hex. A file that no longer matches is refused."""
    start: float | None = None
    """Second at which the part begins; None for the video's start."""
    end: float | None = None
    """Second at which the part ends; None for the video's end."""
    corruption: Corruption | None = None
    """How the video is hidden from the model; None shows it."""
    fps: float | None = None
    """Frames a second of a folder of frames, which are taken in natural order of their names."""


MediaRef = ImageRef | VideoRef
"""An image or a video."""

ContentPart = str | ImageRef | VideoRef
"""A piece of a question: text, or an image or video at its place in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Which media files may be read, and how large they may be.

    Example: `MediaPolicy(roots=(Path("/data"),), schemes=("http",))`
    """

    roots: tuple[Path, ...]
    """Resolved folders that files must lie in."""
    schemes: tuple[str, ...] = ()
    """Allowed kinds of URLs: http, file, data."""
    max_bytes: int = 50_000_000
    """Largest image file, in bytes."""
    max_video_bytes: int = 2_000_000_000
    """Largest video file, in bytes."""
    max_data_url_bytes: int = 10_000_000
    """Largest image or video in a data URL, in bytes."""


class DatasetContext(NamedTuple):
    """Arguments of every dataset function: folders, a seed, and which media it may name.

    Example: `DatasetContext(work_dir=Path("runs/a/data"), base_dir=Path("configs"), seed=0)`
    """

    work_dir: Path
    """Folder for files that the function makes."""
    base_dir: Path
    """Folder that relative paths start from: the config's."""
    seed: int
    """The run's seed."""
    media_policy: MediaPolicy = MediaPolicy(roots=())
    """Which media files may be read; by default none."""
