"""Write the media that datasets make, unpack or download, safely when several processes make the same files.

A sha256 identifies the content of a file; `ImageRef` and `VideoRef` hold it, so that a later change is noticed.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from mmrl.types import ImageRef, UserError, VideoRef
from mmrl.utils.digests import file_digest
from mmrl.utils.files import random_temporary_path

_MAX_STORED_BYTES: Final = 1 << 14  # of pixels: a file system has blocks of 4 KiB, so compressing them saves one or two
# One thread, no B-frames and no macroblock tree, so that one encoder turns the same frames into the same bytes each
# time. In frames smaller than 64 pixels, the tree reads memory that x264 has not written. Another version of the
# encoder may write other bytes. That does no harm: a reference holds the sha256 of the file that was written.
ENCODER_OPTIONS: Final = {"crf": "8", "bf": "0", "threads": "1", "x264-params": "mbtree=0"}


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


def encode_png(image: Image.Image) -> bytes:
    """Return a PNG file with the pixels of an image."""
    width, height = image.size
    # Pillow may keep what an image's `info` has, such as a transparent colour.
    if image.mode != "RGB" or image.info or 3 * width * height > _MAX_STORED_BYTES:
        buffer = io.BytesIO()
        # The lowest level that compresses: a generator waits for this, and the files are small anyway.
        image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()
    # Stored as they are, the rows of pixels take a seventh of the time that Pillow takes to compress them.
    scanlines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a row says that it has no filter
    scanlines[:, 1:] = np.frombuffer(image.tobytes(), np.uint8).reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(scanlines.tobytes(), level=0)), (b"IEND", b"")
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return content


def save_mp4(video: RenderedVideo, folder: Path, stem: str) -> VideoRef:
    """Encode a video to `folder`/`stem`-SHA256.mp4 and return the reference to it; names and raises as `save_png`."""
    path, sha256 = save_by_hash(encode_mp4(video), folder, stem, ".mp4")
    return VideoRef(path=path, sha256=sha256)


def save_png(image: Image.Image, folder: Path, stem: str) -> ImageRef:
    """Write an image to `folder`/`stem`-SHA256.png, with 8 digits of its sha256; raises as `write_if_changed`."""
    path, sha256 = save_by_hash(encode_png(image), folder, stem, ".png")
    return ImageRef(path=path, sha256=sha256)


def save_by_hash(content: bytes, folder: Path, stem: str, extension: str) -> tuple[str, str]:
    """Write `folder`/`stem`-SHA256`extension`; return its path and sha256. Raises as `write_if_changed`."""
    sha256 = hashlib.sha256(content).hexdigest()
    # The name has the start of the hash, so that a file made with other options never replaces this one.
    path = os.path.join(folder, f"{stem}-{sha256[:8]}{extension}")
    write_if_changed(path, content)
    return path, sha256


def image_ref(path: Path | str) -> ImageRef:
    """Return the reference to an image file; raises UserError if it cannot be read."""
    return ImageRef(path=str(path), sha256=_hash_file(Path(path)))


def video_ref(path: Path | str) -> VideoRef:
    """Return the reference to a video file; raises as `image_ref`."""
    return VideoRef(path=str(path), sha256=_hash_file(Path(path)))


def write_if_changed(path: Path | str, content: bytes) -> None:
    """Write a file through a temporary one beside it, unless the file has this content already.

    Raises:
        UserError: the file cannot be written.
    """
    fresh = random_temporary_path(Path(path))  # two runs may make the same file, even on two machines
    try:
        # The file is read in one call, so a buffer would only add a copy.
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            if file.read() == content:
                return
        if not os.path.isdir(os.path.dirname(path)):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(fresh, "wb") as file:
            file.write(content)
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(fresh)
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot write the file: {reason}; free space or choose another folder") from error


def _hash_file(path: Path) -> str:
    try:
        return file_digest(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
