"""Write the media that datasets make, unpack or download, safely when several processes make the same files.

A sha256 identifies the content of a file; `ImageRef` and `VideoRef` hold it, so that a later change is noticed.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from mmrl.types import ImageRef, UserError, VideoRef
from mmrl.utils.digests import file_digest

# One thread and no B-frames, so that one encoder turns the same frames into the same bytes each time. Another version
# of the encoder may write other bytes. That does no harm: a reference holds the sha256 of the file that was written.
ENCODER_OPTIONS: Final = {"crf": "8", "bf": "0", "threads": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedVideo:
    """The frames of a video before encoding."""

    frames: Sequence[Image.Image]  # RGB, all of one size; H.264 needs an even width and height
    fps: int  # frames per second


def encode_mp4(video: RenderedVideo) -> bytes:
    """Return an mp4 file with one H.264 stream at a constant frame rate."""
    # Loads ffmpeg, which only generators of videos need.
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=video.fps, options=ENCODER_OPTIONS)
        stream.width, stream.height = video.frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in video.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        # Without a frame, `encode` returns the packets that the encoder still holds.
        container.mux(stream.encode())
    return buffer.getvalue()


def save_mp4(video: RenderedVideo, folder: Path, stem: str) -> VideoRef:
    """Encode a video to `folder`/`stem`-SHA256.mp4 and return the reference to it; names and raises as `save_png`."""
    path, sha256 = _save_by_hash(encode_mp4(video), folder, stem, ".mp4")
    return VideoRef(path=path, sha256=sha256)


def save_png(image: Image.Image, folder: Path, stem: str) -> ImageRef:
    """Write an image to `folder`/`stem`-SHA256.png, with 8 digits of its sha256; raises as `write_if_changed`."""
    buffer = io.BytesIO()
    # The lowest level that compresses: a generator waits for this, and the files are small anyway.
    image.save(buffer, "PNG", compress_level=1)
    path, sha256 = _save_by_hash(buffer.getvalue(), folder, stem, ".png")
    return ImageRef(path=path, sha256=sha256)


def image_ref(path: Path | str) -> ImageRef:
    """Return the reference to an image file; raises UserError if it cannot be read."""
    return ImageRef(path=str(path), sha256=_hash_file(Path(path)))


def video_ref(path: Path | str) -> VideoRef:
    """Return the reference to a video file; raises as `image_ref`."""
    return VideoRef(path=str(path), sha256=_hash_file(Path(path)))


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it, unless the file has this content already.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        # The file is read in one call, so a buffer would only add a copy.
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            if file.read() == content:
                return
        # The process id keeps two runs that make the same file from writing into one temporary file.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot write the file: {reason}; free space or choose another folder") from error


def _hash_file(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _save_by_hash(content: bytes, folder: Path, stem: str, extension: str) -> tuple[str, str]:
    sha256 = hashlib.sha256(content).hexdigest()
    # The name carries the start of the hash, so that the file of other options never takes the place of this one.
    path = folder / f"{stem}-{sha256[:8]}{extension}"
    write_if_changed(path, content)
    return str(path), sha256
