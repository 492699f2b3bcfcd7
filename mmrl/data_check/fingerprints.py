"""Open images and videos, and find media that look the same although their bytes differ, such as resized copies.

The fingerprint of an image is a thumbnail of 12 x 12 RGB averages. Two images are similar if the correlation of their
thumbnails is at least `MIN_CORRELATION`. Correlation ignores brightness and contrast. All pairs are compared, in
blocks, because the bits of a perceptual hash are noise on plain diagrams.

Measured on 320 x 240 textures and diagrams of thin lines: copies (JPEG quality 60; 0.75 times the size; brighter and
with less contrast) had a correlation above 0.995, other images of the same kind one below 0.9.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.media.cache import MediaCache
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.types import ImageRef, Size, VideoRef

MIN_CORRELATION: Final = 0.99
THUMBNAIL_SIDE: Final = 12
# Thumbnails that are compared at once: a block of correlations takes 16 MiB.
_BLOCK_ROWS: Final = 2048


def image_fingerprint(image: Image.Image) -> bytes:
    """Return the thumbnail of an RGB image, `3 * THUMBNAIL_SIDE**2` bytes."""
    return image.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX).tobytes()


def inspect_image(cache: MediaCache, ref: ImageRef) -> tuple[Size, bytes]:
    """Return size and fingerprint of an image. Worker processes call this with their own empty cache.

    Raises:
        MediaError: the image cannot be used.
    """
    image = cache.get_image(ref)
    return Size(*image.size), image_fingerprint(image)


def inspect_video(cache: MediaCache, sampling: FrameSampling, ref: VideoRef) -> tuple[FramePlan, bytes]:
    """Decode the frames of a video that the model sees; return their plan, and the fingerprint of the middle one.

    Worker processes call this with their own empty cache.

    Raises:
        MediaError: the video cannot be used.
    """
    video = cache.check_video(ref, sampling)
    middle_CHW = video.frames_TCHW[len(video.frames_TCHW) // 2]
    # Bicubic resizing overshoots 0 and 255.
    image = Image.fromarray(middle_CHW.clamp(0, 255).byte().permute(1, 2, 0).numpy())
    return video.plan, image_fingerprint(image)


def find_most_similar(queries: list[bytes], others: list[bytes]) -> dict[int, int]:
    """Return query index → index of the most similar of `others`, for queries that have a similar one."""
    most_similar: dict[int, int] = {}
    for query_start in range(0, len(queries), _BLOCK_ROWS):
        block = _normalize_thumbnails(queries[query_start : query_start + _BLOCK_ROWS])
        best = np.full(len(block), MIN_CORRELATION, np.float32)
        for other_start in range(0, len(others), _BLOCK_ROWS):
            correlations = block @ _normalize_thumbnails(others[other_start : other_start + _BLOCK_ROWS]).T
            highest = correlations.max(axis=1)
            for row in np.flatnonzero(highest > best):
                most_similar[query_start + int(row)] = other_start + int(correlations[row].argmax())
            best = np.maximum(best, highest)
    return most_similar


def find_near_duplicates(fingerprints: list[bytes]) -> dict[int, int]:
    """Return index → index of the first similar fingerprint before it, for fingerprints that have one."""
    first_similar: dict[int, int] = {}
    for start in range(0, len(fingerprints), _BLOCK_ROWS):
        block = _normalize_thumbnails(fingerprints[start : start + _BLOCK_ROWS])
        rows = start + np.arange(len(block))
        for other_start in range(0, start + 1, _BLOCK_ROWS):
            others = _normalize_thumbnails(fingerprints[other_start : other_start + _BLOCK_ROWS])
            is_earlier = other_start + np.arange(len(others)) < rows[:, None]
            similar = (block @ others.T >= MIN_CORRELATION) & is_earlier
            for row in np.flatnonzero(similar.any(axis=1)):
                # Blocks come in order, so the first block with a similar one holds the first of all.
                first_similar.setdefault(start + int(row), other_start + int(similar[row].argmax()))
    return first_similar


def _normalize_thumbnails(thumbnails: list[bytes]) -> NDArray[np.float32]:
    """Return thumbnails as float32 [thumbnails, 3 * THUMBNAIL_SIDE**2], rows of mean 0 and length 1.

    The product of two rows is then their correlation. The row of an image of one colour is 0, so it is similar to none.
    """
    rows = np.frombuffer(b"".join(thumbnails), np.uint8).reshape(len(thumbnails), -1).astype(np.float32)
    rows -= rows.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    # Up to this length the standard deviation is at most 0.6 grey levels: rounding, not content.
    return np.asarray(rows / np.where(lengths > THUMBNAIL_SIDE, lengths, np.inf), np.float32)
