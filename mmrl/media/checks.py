"""Checks that an image or video must pass before it is decoded: its path, its file, its size and its length."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from mmrl.config.schema import MediaConfig, MediaLimitsConfig
from mmrl.types import MediaError, MediaPolicy, Size, UserError
from mmrl.utils.files import resolve_inside

# Longer over shorter side of an image or frame. MAX_RATIO of qwen-vl-utils: beyond it resize rules fail.
MAX_ASPECT_RATIO: Final = 200
MAX_DECOMPRESSION_RATIO: Final = 2000  # bytes of pixels per byte of a file; with more it is a decompression bomb


def make_media_policy(
    limits: MediaLimitsConfig, roots: Iterable[Path], *, schemes: Sequence[str], media: MediaConfig
) -> MediaPolicy:
    """Return a policy that allows media in these folders and from these kinds of URLs, within the size limits."""
    return MediaPolicy(
        # Resolved, so that a link or `..` in a sample's path cannot lead out of a root unnoticed.
        roots=tuple(root.resolve() for root in roots),
        schemes=tuple(schemes),
        max_bytes=limits.max_image_bytes,
        max_video_bytes=limits.max_video_bytes,
        max_data_url_bytes=limits.max_data_url_bytes,
        video_reader=media.video_reader,
    )


def resolve_media_path(path: str, roots: Sequence[Path], max_bytes: int, limit_name: str) -> Path:
    """Return the resolved path of a regular file in one of the `roots`; `limit_name` is the key of `max_bytes`.

    Raises:
        MediaError: outside the roots, missing, not a regular file (a folder, a pipe), empty or too large.
    """
    try:
        resolved = resolve_inside(path, roots)
        status = resolved.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaError(f"{path}: no such file; correct the path or restore it") from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    except UserError as error:
        raise MediaError(str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{path}: not a file; correct the path or restore it")
    size = status.st_size
    if size > max_bytes:
        raise MediaError(f"{path}: {size:,} bytes exceed {limit_name}={max_bytes:,}; shrink it or raise the limit")
    if not size:
        raise MediaError(f"{path}: empty file; restore or remove it")
    return resolved


def check_length(path: str, num_frames: int, seconds: float, limits: MediaLimitsConfig) -> None:
    """Raise a MediaError for a video that exceeds `max_video_frames` or `max_video_seconds`."""
    if num_frames > limits.max_video_frames:
        raise MediaError(
            f"{path}: {num_frames:,} frames exceed max_video_frames={limits.max_video_frames:,}; "
            "cut it or raise the limit"
        )
    if seconds > limits.max_video_seconds:
        raise MediaError(
            f"{path}: {seconds:,.1f} s exceed max_video_seconds={limits.max_video_seconds:g}; cut it or raise the limit"
        )


def unreadable_error(path: str, error: OSError) -> MediaError:
    """Return the error to raise if the operating system refuses to read a file."""
    return MediaError(f"{path}: cannot be read ({error.strerror}); check its permissions")


def check_sha256(path: str, sha256: str, expected: str) -> None:
    """Raise a MediaError if the sha256 of a file differs from the one in its reference: the file has changed."""
    if sha256 != expected:
        raise MediaError(
            f"{path}: changed since it was referenced ({sha256[:12]} is not {expected[:12]}); restore it, "
            "or touch it if the change is meant"
        )


def check_dimensions(path: str, size: Size, limits: MediaLimitsConfig) -> None:
    """Raise a MediaError for an image or frame that has too many pixels, or is too long and thin."""
    width, height = size
    if width * height > limits.max_pixels:
        raise MediaError(
            f"{path}: {width}x{height} pixels exceed max_pixels={limits.max_pixels:,}; shrink it or raise the limit"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaError(
            f"{path}: {width}x{height} has one side more than {MAX_ASPECT_RATIO} times as long as the other; crop it"
        )


def check_image_size(path: str, size: Size, num_bytes: int, limits: MediaLimitsConfig) -> None:
    """Raise a MediaError for an image of this size that must not be decoded from a file of `num_bytes`."""
    check_dimensions(path, size, limits)
    if 3 * size.width * size.height > MAX_DECOMPRESSION_RATIO * num_bytes:
        raise MediaError(
            f"{path}: {size.width}x{size.height} pixels in {num_bytes:,} bytes are more than "
            f"{MAX_DECOMPRESSION_RATIO} bytes of pixels per byte of file, as in a decompression bomb; "
            "save it again in another format"
        )
