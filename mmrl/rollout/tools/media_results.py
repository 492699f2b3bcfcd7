"""What a tool may ask to be shown instead of words, and which media that is. Nothing heavy is loaded here.

Media are counted from 1 in the order in which a response saw them: the question's, then what tools showed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from mmrl.types import Frame, ImageRef, MediaRef, ResizeMap, Rollout, VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Zoom:
    """A part of a picture: x1, y1, x2, y2 on that very picture, in the frame in which the model writes coordinates."""

    medium: int
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """What a video shows at these seconds of it, a picture each."""

    medium: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A part of a video, in seconds of it; its frames are chosen as those of any video."""

    medium: int
    start: float
    end: float


Look = Zoom | Frames | Passage


def found(look: Look, rollout: Rollout) -> Iterator[tuple[str, MediaRef]]:
    """The media that are to be shown, each with words that say what it is.

    Raises:
        ValueError: there are none, in words for the model.
    """
    media = rollout.media
    if not 1 <= look.medium <= len(media):
        raise ValueError(f"there is no medium {look.medium}; there are {len(media)}, counted from 1")
    ref = media[look.medium - 1]
    if isinstance(look, Zoom):
        if isinstance(ref, VideoRef):
            raise ValueError(f"medium {look.medium} is a video; look at one of its frames first")
        yield _part(look, ref, _resizes(rollout)[look.medium - 1], rollout.prompt.frame)
        return
    if isinstance(ref, ImageRef):
        raise ValueError(f"medium {look.medium} is a picture, and no video")
    if isinstance(look, Passage):
        part = replace(ref, start=look.start, end=look.end)
        yield f"from {look.start:g} to {look.end:g} seconds of medium {look.medium}", part
        return
    for second in look.seconds:
        frame = ImageRef(path=ref.path, sha256=ref.sha256, veil=ref.veil, at=second, fps=ref.fps)
        yield f"medium {look.medium} at {second:g} seconds", frame


def _resizes(rollout: Rollout) -> Sequence[ResizeMap]:
    return (*rollout.prompt.resizes, *(view.resize for view in rollout.views))


def _part(look: Zoom, ref: ImageRef, resize: ResizeMap, frame: Frame) -> tuple[str, ImageRef]:
    """All pixels that the box touches, as far as there are any."""
    x1, y1, x2, y2 = resize.convert(look.box, frame, Frame.PX_ORIGINAL)
    (left, top), (width, height) = resize.corner, resize.original
    crop = (
        max(left, floor(x1)),
        max(top, floor(y1)),
        min(left + width, ceil(x2)),
        min(top + height, ceil(y2)),
    )
    if crop[0] >= crop[2] or crop[1] >= crop[3]:
        raise ValueError(f"the box {_box(look.box)} holds nothing of medium {look.medium}")
    where = resize.convert(crop, Frame.PX_ORIGINAL, frame)
    return f"the part {_box(where)} of medium {look.medium}", replace(ref, crop=crop)


def _box(box: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.5g}' for value in box)}]"
