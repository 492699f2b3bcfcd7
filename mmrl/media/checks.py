"""What every medium must pass before anything looks inside: its place, its kind, its size on disk, its extent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.config.schema import MediaLimitsConfig
from mmrl.types import Size, UserError
from mmrl.utils.files import resolve_inside


class MediaError(UserError):
    """A medium that cannot or may not be used; the message names the file, the reason and what to do."""


class MediaRangeError(MediaError):
    """The medium is as it should be, but has no such part, second or frames."""


def resolve_media_path(path: str, roots: Sequence[Path], max_bytes: int, limit_name: str) -> Path:
    """The resolved path of a regular file that is not empty and not larger than the limit of that name.

    Raises:
        MediaError: outside the roots, missing, not a regular file (a folder, a pipe), empty or too large.
    """
    try:
        place = resolve_inside(Path(path), roots)
    except UserError as error:
        raise MediaError(str(error)) from error
    try:
        if not place.is_file():
            problem = "not a file" if place.exists() else "no such file"
            raise MediaError(f"{path}: {problem}; correct the path or restore it")
        size = place.stat().st_size
    except OSError as error:
        raise unreadable_error(path, error) from error
    if size > max_bytes:
        raise MediaError(f"{path}: {size:,} bytes exceed {limit_name}={max_bytes:,}; shrink it or raise the limit")
    if not size:
        raise MediaError(f"{path}: empty file; restore or remove it")
    return place


def check_length(path: str, count: int, seconds: float, limits: MediaLimitsConfig) -> None:
    """Refuse a video of too many frames, or one that is too long."""
    if count > limits.max_video_frames:
        raise MediaError(
            f"{path}: {count:,} frames exceed max_video_frames={limits.max_video_frames:,}; cut it or raise the limit"
        )
    if seconds > limits.max_video_seconds:
        raise MediaError(
            f"{path}: {seconds:,.1f} s exceed max_video_seconds={limits.max_video_seconds:g}; cut it or raise the limit"
        )


def unreadable_error(path: str, error: OSError) -> MediaError:
    """What to raise when the system refuses to read a file."""
    return MediaError(f"{path}: cannot be read ({error.strerror}); check its permissions")


def check_digest(path: str, digest: str, expected: str) -> None:
    """Refuse a file whose sha256 is not the one it was referenced by."""
    if digest != expected:
        raise MediaError(f"{path}: changed since it was referenced ({digest[:12]} is not {expected[:12]}); restore it")


def check_dimensions(path: str, size: Size, limits: MediaLimitsConfig) -> None:
    """Refuse a picture or frame that has too many pixels or is too long for its width."""
    width, height = size
    if width * height > limits.max_pixels:
        raise MediaError(
            f"{path}: {width}x{height} pixels exceed max_pixels={limits.max_pixels:,}; shrink it or raise the limit"
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise MediaError(
            f"{path}: {width}x{height} is longer than max_aspect_ratio={limits.max_aspect_ratio} allows; crop it"
        )
