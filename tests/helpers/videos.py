"""Real videos for tests, written with PyAV: every frame differs from the others."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from mmrl.config.schema import VideoConfig
from mmrl.types import VideoRef

RATE = 12
SMALL = VideoConfig(min_pixels=1024, max_pixels=2304)
"""Frames for a tiny model."""
ENCODER_OPTIONS = {"x264-params": "mbtree=0"}
"""With its tree of macroblocks, x264 writes other bytes for the same small frames from time to time."""
_TICKS = 100  # of a frame's duration, so that times may vary


def picture(index: int, width: int, height: int) -> np.ndarray:
    """Coloured tiles that move with `index`: uint8 [height, width, 3]."""
    tiles = np.random.default_rng(0).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.ascontiguousarray(np.roll(np.kron(tiles, np.ones((8, 8, 1), np.uint8)), 3 * index, 1)[:height, :width])


def write_video(
    path: Path,
    times: Iterable[float] = tuple(range(48)),
    *,
    size: tuple[int, int] = (128, 96),
    codec: str = "libx264",
    pixels: str = "yuv420p",
    turn: int = 0,
    matrix: Sequence[int] | None = None,
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
) -> VideoRef:
    """Write one frame at each of `times`, in frames of 1/12 s; the file's name says the container."""
    with av.open(str(path), "w", options=dict(container or {})) as file:
        stream = file.add_stream(codec, rate=RATE, options={**ENCODER_OPTIONS, **(options or {})})
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.codec_context.time_base = Fraction(1, RATE * _TICKS)
        if turn:
            stream.set_display_rotation(turn)
        if matrix:
            stream.set_display_matrix(matrix)
        file.start_encoding()
        for index, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(index, *size), format="rgb24")
            frame.pts, frame.time_base = round(_TICKS * time), Fraction(1, RATE * _TICKS)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return video_ref(path)


def blank_frame(path: Path, index: int) -> None:
    """Overwrite the second half of the frame that is stored in this place, and leave all else as it is."""
    with av.open(str(path)) as file:
        packets = [packet for packet in file.demux(video=0) if packet.size]
        start, size = packets[index].pos, packets[index].size
    content = bytearray(path.read_bytes())
    content[start + size // 2 : start + size] = bytes(size - size // 2)
    path.write_bytes(content)


def write_sound(path: Path) -> VideoRef:
    """An MP4 with a second of silence and no video."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return video_ref(path)


def video_ref(path: Path, **span: float) -> VideoRef:
    """Return a reference to a file as it is now."""
    return VideoRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest(), **span)
