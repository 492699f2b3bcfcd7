"""Short videos that a dataset makes, as mp4 files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from mmrl.types import VideoRef
from mmrl_datasets.file_writes import write_if_changed

# One thread and no look-ahead: the same frames become the same bytes with the same encoder. Another encoder may write
# others; a reference names the bytes that lie there, so it is right in either case.
ENCODER_OPTIONS: Final = {"crf": "8", "bf": "0", "threads": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedVideo:
    """RGB frames of one even size, `fps` of them a second."""

    frames: Sequence[Image.Image]
    fps: int


def encode_mp4(film: RenderedVideo) -> bytes:
    """An mp4 file with one H.264 stream at a constant rate."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=film.fps, options=ENCODER_OPTIONS)
        stream.width, stream.height = film.frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in film.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def save_mp4(film: RenderedVideo, folder: Path, stem: str) -> VideoRef:
    """Write a film once; its name carries the start of its digest, as a picture's does.

    Raises:
        UserError: the file cannot be written.
    """
    content = encode_mp4(film)
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{digest[:8]}.mp4"
    write_if_changed(path, content)
    return VideoRef(path=str(path), sha256=digest)
