"""Pictures in requests: the pictures of a sample as data URLs, and its question with marks in their places."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import Field

from mmrl.types import Sample, Unscorable, VideoRef
from mmrl_rewards.pixels import Pixels, encode_image, resize

# False for none, True for at most 1024 pixels of the longer side, or that number.
Images = bool | Annotated[int, Field(ge=28, le=8192)]

_DEFAULT_SIDE_PX = 1024
_MAX_IMAGE_BYTES = 1_000_000  # before base64, which adds a third
_VIDEO_FRAMES = 8


def show_question(sample: Sample, images: Images) -> tuple[str, tuple[str, ...]]:
    """Return the text of the question, a line for each part, and its pictures as data URLs in reading order.

    With pictures, `<image 1>` stands in the text for the first. Of a video, 8 frames are shown, evenly spaced.

    Raises:
        Unscorable: a picture cannot be opened, or a video does not state its end.
    """
    lines: list[str] = []
    urls: list[str] = []
    media_index = 0
    for part in sample.parts:
        if isinstance(part, str):
            lines.append(part)
            continue
        if images is not False:
            if isinstance(part, VideoRef):
                pictures = list(sample.video_frames(media_index, _spread_seconds(part)))
            else:
                pictures = [sample.image(media_index)]
            for pixels in pictures:
                urls.append(_data_url(pixels, _DEFAULT_SIDE_PX if images is True else images))
                lines.append(f"<image {len(urls)}>")
        media_index += 1
    return "\n".join(lines), tuple(urls)


def _spread_seconds(video: VideoRef) -> list[float]:
    """Return the middles of 8 equal parts of a video."""
    start, end = video.start or 0.0, video.end
    if end is None:
        raise Unscorable(f"the video {video.path} does not state its `end`, so its frames cannot be chosen")
    return [start + (end - start) * (frame + 0.5) / _VIDEO_FRAMES for frame in range(_VIDEO_FRAMES)]


def _data_url(pixels: Pixels, max_side: int) -> str:
    height, width = pixels.shape[:2]
    if max(height, width) > max_side:
        scale = max_side / max(height, width)
        pixels = resize(pixels, max(1, round(width * scale)), max(1, round(height * scale)))
    media_type, content = encode_image(pixels, _MAX_IMAGE_BYTES)
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
