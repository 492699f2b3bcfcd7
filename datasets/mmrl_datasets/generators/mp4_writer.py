"""Encode drawn frames as short mp4 videos."""

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

# One thread and no B-frames, so that one encoder turns the same frames into the same bytes each time. Another version
# of the encoder may write other bytes. That does no harm: a reference holds the digest of the file that was written.
ENCODER_OPTIONS: Final = {"crf": "8", "bf": "0", "threads": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedVideo:
    """The frames of a video before encoding."""

    frames: Sequence[Image.Image]
    """RGB, all of one size; H.264 needs an even width and height."""
    fps: int
    """Frames per second."""


def encode_mp4(video: RenderedVideo) -> bytes:
    """Return an mp4 file with one H.264 stream at a constant frame rate."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=video.fps, options=ENCODER_OPTIONS)
        stream.width, stream.height = video.frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in video.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def save_mp4(video: RenderedVideo, folder: Path, stem: str) -> VideoRef:
    """Encode a video to `folder`/`stem`-DIGEST.mp4 and return the reference to it.

    The name carries the start of the digest, so another video never takes the place of this one.

    Raises:
        UserError: the file cannot be written.
    """
    content = encode_mp4(video)
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{digest[:8]}.mp4"
    write_if_changed(path, content)
    return VideoRef(path=str(path), sha256=digest)
