"""Samples of a dataset: text, references to images and videos, coordinates in them, and the correct answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mmrl.types.errors import MediaError, MediaRangeError, Unscorable, UserError

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # uint8, RGB, upright, read-only


class CoordinateSystem(StrEnum):
    """Units of a coordinate. x runs right and y runs down, both from the top left corner."""

    PX_ORIGINAL = "px_original"  # pixels of the image file
    PX_RESIZED = "px_resized"  # pixels of what the model sees
    NORM_1 = "norm_1"  # from 0 to 1
    NORM_1000 = "norm_1000"  # from 0 to 1000


class Size(NamedTuple):
    """Width and height of an image or frame, in pixels."""

    width: int  # pixels, at least 1
    height: int  # pixels, at least 1


@dataclass(frozen=True, slots=True)
class ResizeMap:
    """Records how one image was resized before the model saw it; the converter between coordinate systems.

    An image can be a crop of a larger one. Then PX_ORIGINAL counts from the corner of the larger image, and every other
    system from the corner of the crop.

    Example: `ResizeMap(Size(640, 480), Size(336, 252)).convert((320, 240), PX_ORIGINAL, NORM_1)` is `(0.5, 0.5)`.
    """

    original: Size  # size before resizing, of the crop if it is one
    resized: Size  # size of what the model sees
    offset: tuple[int, int] = (0, 0)  # left and top of the crop, in pixels of the larger image

    def convert(self, values: Sequence[float], source: CoordinateSystem, target: CoordinateSystem) -> tuple[float, ...]:
        """Convert x, y, x, y, ... from one coordinate system to another.

        Raises:
            ValueError: there is an odd number of values.
        """
        if len(values) % 2:
            raise ValueError(f"coordinates come in x, y pairs, got {len(values)} values: {list(values)}")
        if source == target:
            # Not by way of a fraction, which would change the last digits.
            return tuple(map(float, values))
        source_offsets, source_extents = self._offset_and_extent(source)
        target_offsets, target_extents = self._offset_and_extent(target)
        converted = [0.0] * len(values)
        for axis in (0, 1):
            start, extent = source_offsets[axis], source_extents[axis]
            target_start, target_extent = target_offsets[axis], target_extents[axis]
            converted[axis::2] = [(value - start) / extent * target_extent + target_start for value in values[axis::2]]
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

    path: str  # path of the image; of a video or a folder of frames where `timestamp` is set
    sha256: str  # hash of the file's bytes, 64 hex digits; a file that no longer matches is refused
    corruption: Corruption | None = None  # how the image is hidden from the model; None shows it
    timestamp: float | None = None  # second of the video whose frame is the image, at least 0
    crop: tuple[int, int, int, int] | None = None  # left, top, right, bottom of what is shown, pixels; None for all
    fps: float | None = None  # frames a second, above 0, for a path that is a folder of frames


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRef:
    """A reference to a video, or to a part of it.

    Example: `VideoRef(path="clip.mp4", sha256="cd34...", start=2.0, end=5.5)`
    """

    path: str  # path of the video, or of a folder of frames where `fps` is set
    sha256: str  # hash of the file's bytes, 64 hex digits; a file that no longer matches is refused
    start: float | None = None  # second at which the part begins; None for the video's start
    end: float | None = None  # second at which the part ends; None for the video's end
    corruption: Corruption | None = None  # how the video is hidden from the model; None shows it
    fps: float | None = None  # frames a second, above 0, of a folder of frames; taken in natural order of their names


MediaRef = ImageRef | VideoRef
"""An image or a video."""

_MediaT = TypeVar("_MediaT", ImageRef, VideoRef)
_ROUNDING_PX = 1e-6

ContentPart = str | ImageRef | VideoRef
"""A piece of a question: text, or an image or video at its place in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """The media files that may be read, their largest sizes, and the library that reads videos."""

    roots: tuple[Path, ...]  # resolved folders that files must lie in
    schemes: tuple[str, ...] = ()  # allowed kinds of URLs: http, file, data
    max_bytes: int = 50_000_000  # largest image file, in bytes
    max_video_bytes: int = 2_000_000_000  # largest video file, in bytes
    max_data_url_bytes: int = 10_000_000  # largest image or video in a data URL, in bytes
    video_reader: str = "pyav"  # library that decodes videos: pyav or decord


class MediaOpener(Protocol):
    """Opens the media of samples for rewards and environments; implemented by `mmrl.media.pixel_reader.PixelReader`.

    Both methods raise a MediaError for a file that cannot be used, and resize to `size` if it is not None.
    """

    def read_image(self, ref: ImageRef, size: Size | None) -> Pixels:
        """Return an image, without its corruption: uint8 [height, width, 3]."""

    def read_frames(self, ref: VideoRef, seconds: Sequence[float], size: Size | None) -> Pixels:
        """Return the frames that a video shows at these seconds: uint8 [frames, height, width, 3].

        Raises:
            MediaRangeError: the video, or the part of it that the reference names, has no such second.
        """


# Samples hold references but no opener: their digests, records and messages to workers must not depend on one.
_media_opener: ContextVar[MediaOpener | None] = ContextVar("media_opener", default=None)


@contextmanager
def use_media_opener(opener: MediaOpener | None) -> Iterator[None]:
    """Let `Sample.image`, `crop` and `video_frames` open media through `opener` within the block.

    All callers of rewards or environments do this: scorers, case tables, `mmrl reward`, and worker processes.
    """
    token = _media_opener.set(opener)
    try:
        yield
    finally:
        _media_opener.reset(token)


class DatasetContext(NamedTuple):
    """Arguments of every dataset function: folders, a seed, and which media it may name."""

    work_dir: Path  # folder for files that the function makes
    base_dir: Path  # folder that relative paths start from: the config's
    seed: int  # the run's seed
    media_policy: MediaPolicy = MediaPolicy(roots=())  # which media files may be read; by default none
    # Receives each image that a generator has just encoded from RGB pixels: a run need not open it to check it.
    drawn_images: dict[ImageRef, Size] | None = None
    media_opener: MediaOpener | None = None  # opens pictures for generators that cut them; None opens none


class AnswerType(StrEnum):
    """Type of an answer, which decides how it is written, parsed and compared. Beside each, its Python value."""

    TEXT = "text"  # str
    CHOICE = "choice"  # str, one upper-case letter
    NUMBER = "number"  # int | float, finite
    BOX = "box"  # (x1, y1, x2, y2)
    BOXES = "boxes"  # tuple[Region, ...], four coordinates each
    POINT = "point"  # (x, y)
    POINTS = "points"  # tuple[Region, ...], two coordinates each
    SPAN = "span"  # (start, end), seconds
    SPANS = "spans"  # tuple of (start, end), seconds
    PERMUTATION = "permutation"  # tuple[int, ...], a bijection of 1..n
    ACTION = "action"  # Action
    LIST = "list"  # tuple[str, ...]
    JSON = "json"  # any value of json.loads
    LATEX = "latex"  # str, without delimiters
    SVG = "svg"  # str, one <svg> element
    TOOL_CALL = "tool_call"  # Action


class Region(NamedTuple):
    """A box or point among several.

    Example: `Region((10.0, 20.0, 40.0, 60.0), label="cat", confidence=0.9)`
    """

    coordinates: tuple[float, ...]  # x1, y1, x2, y2 of a box, or x, y of a point
    label: str = ""  # name of the object; empty if it has none
    confidence: float | None = None  # the model's own confidence, if it gives one


class Action(NamedTuple):
    """An action on a screen, or a tool call."""

    name: str  # name of the action or tool
    arguments: Mapping[str, Any]  # by name; coordinates in them are in the coordinate system of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Correct answer to a sample."""

    answer_type: AnswerType  # decides the Python type of `value`
    value: Any  # the answer as the Python value of its type
    coordinate_system: CoordinateSystem | None = None  # units of the coordinates in `value`; None without any
    media_index: int = 0  # image or video that coordinates refer to, from 0 in reading order


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question of a dataset, with its correct answer."""

    id: str  # unique within a run; random draws derive from it
    task: str  # name of the task: metrics are grouped by it, and rewards can be restricted to it
    parts: tuple[ContentPart, ...]  # the question: text, images and videos, in reading order
    target: Target  # the correct answer, which rewards compare with
    label: Target | None = None  # an annotator's answer, correct or not, for supervised training
    thinking: str | None = None  # thinking that leads to the answer, for supervised training
    response: str | None = None  # a full response in the model's format and coordinates, for supervised training
    meta: Mapping[str, Any] = field(default_factory=dict)  # other columns of the row, for `when`, row filters, orders

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """Images, without videos, in reading order."""
        return tuple(part for part in self.parts if isinstance(part, ImageRef))

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """Images and videos, in reading order."""
        return tuple([part for part in self.parts if not isinstance(part, str)])  # faster than from a generator

    @property
    def modality(self) -> str:
        """`video` for a sample with a video, else `image` for one with an image, else `text`."""
        if VideoRef in map(type, self.media):
            return "video"
        return "image" if self.media else "text"

    def image(self, index: int = 0, *, size: Size | None = None) -> Pixels:
        """Return the pixels of an image: uint8 [height, width, 3], RGB, upright, read-only.

        The pixels are the true ones, even if a blind probe hid the image from the model. The first call opens the file.
        `PIL.Image.fromarray` makes a picture of the pixels.

        Args:
            index: number among images and videos, from 0 in reading order, as `Target.media_index`.
            size: size to resize to; `response.resize_maps[index].resized` is what the model saw. None for the original.

        Raises:
            Unscorable: there is no such image, or its file is missing, changed, damaged or may not be read.
        """
        ref = self._medium(index, ImageRef)
        try:
            return _get_media_opener().read_image(ref, size)
        except MediaError as error:
            raise Unscorable(str(error)) from error

    def video_frames(self, index: int, seconds: Sequence[float], *, size: Size | None = None) -> Pixels:
        """Return the frames that a video shows at these seconds: uint8 [frames, height, width, 3], as `image` does.

        Seconds count from the first frame of the file, as in the prompt of the model.

        Raises:
            Unscorable: there is no such video, or its file is missing, changed, damaged or may not be read.
            MediaRangeError: the video, or the part of it that the sample shows, has no such second.
        """
        ref = self._medium(index, VideoRef)
        try:
            return _get_media_opener().read_frames(ref, seconds, size)
        except MediaRangeError:
            raise
        except MediaError as error:
            raise Unscorable(str(error)) from error

    def crop(
        self,
        box: Sequence[float],
        coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL,
        *,
        index: int = 0,
        resized: Size | None = None,
    ) -> Pixels:
        """Return all pixels of an image that a box (x1, y1, x2, y2) touches: uint8 [height, width, 3], as `image` does.

        `resized` is the size that the model saw, which PX_RESIZED needs.

        Raises:
            Unscorable: as `image`.
            MediaRangeError: the box is empty or not within the image.
            ValueError: the coordinate system is PX_RESIZED, and `resized` is None.
        """
        pixels, ref = self.image(index), self._medium(index, ImageRef)
        size = Size(pixels.shape[1], pixels.shape[0])
        if coordinate_system is CoordinateSystem.PX_RESIZED and resized is None:
            raise ValueError("a box in px_resized needs `resized`, the size that the model saw")
        x, y = (0, 0) if ref.crop is None else ref.crop[:2]
        resize_map = ResizeMap(size, resized or size, (x, y))
        x1, y1, x2, y2 = resize_map.convert(box, coordinate_system, CoordinateSystem.PX_ORIGINAL)
        # A conversion may leave a corner some 1e-10 of a pixel outside.
        left, top = floor(x1 - x + _ROUNDING_PX), floor(y1 - y + _ROUNDING_PX)
        right, bottom = ceil(x2 - x - _ROUNDING_PX), ceil(y2 - y - _ROUNDING_PX)
        if not (0 <= left < right <= size.width and 0 <= top < bottom <= size.height):
            raise MediaRangeError(
                f"{ref.path}: the box {list(box)} ({coordinate_system}) is not within its "
                f"{size.width}x{size.height} pixels"
            )
        return pixels[top:bottom, left:right]

    def media_size(self, index: int) -> Size:
        """Open an image or video and return its original width and height. Raises `Unscorable` as `image` does.

        `index` is its number among images and videos, from 0.
        """
        media = self.media
        if 0 <= index < len(media) and isinstance(ref := media[index], VideoRef):
            pixels = self.video_frames(index, [ref.start or 0.0])[0]
        else:
            pixels = self.image(index)
        return Size(pixels.shape[1], pixels.shape[0])

    def _medium(self, index: int, kind: type[_MediaT]) -> _MediaT:
        media = self.media
        ref = media[index] if 0 <= index < len(media) else None
        if not isinstance(ref, kind):
            wanted = "image" if kind is ImageRef else "video"
            kinds = ["image" if isinstance(medium, ImageRef) else "video" for medium in media]
            raise Unscorable(f"the sample has no {wanted} number {index}, from 0; it has {', '.join(kinds) or 'none'}")
        return ref


def _get_media_opener() -> MediaOpener:
    opener = _media_opener.get()
    if opener is None:
        raise UserError(
            "nothing opens media here: a reward that looks declares @reward(..., looks=True); other code looks in a "
            "block `with mmrl.use_media_opener(...)`"
        )
    return opener


class RejectedRow(NamedTuple):
    """A row of a dataset that could not be turned into a sample."""

    id: str  # id that the sample would have had
    reason: str  # what is wrong with the row, in one line
