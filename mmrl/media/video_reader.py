"""The pictures in a video's file, by PyAV: when each is shown, which of them decode on their own, and their pixels.

decord gives the same pixels, but where a picture does not decode it repeats a neighbour, behind an "open" key frame it
is some pictures off, and it counts pictures that an edit list hides and may wait for them forever. Here a picture is
found by its time, or the file is refused.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.checks import (
    MediaError,
    check_digest,
    check_dimensions,
    check_length,
    resolve_media_path,
    unreadable_error,
)
from mmrl.types import Size, VideoRef
from mmrl.utils.files import compute_sha256

# ffmpeg reads play lists too, which name other files and addresses; these demuxers read the file they are given.
_CONTAINER_OPTIONS: Final = {"format_whitelist": "mov,matroska,avi", "protocol_whitelist": "file"}
# Quarter turns to the left by display matrix (a, b, c, d), whose unit is 2^16. Every other matrix mirrors or slants.
_QUARTER_TURNS: Final = {(1, 0, 0, 1): 0, (0, -1, 1, 0): 1, (-1, 0, 0, -1): 2, (0, 1, -1, 0): 3}
_MATRIX_UNIT: Final = 2**16

FramePixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTimeline:
    """The pictures a file shows: their times, ascending, in ticks; `keys` are the times of those that decode alone."""

    timestamps: tuple[int, ...]
    keyframe_timestamps: tuple[int, ...]
    time_base: Fraction
    fps: float

    def seconds_at(self, index: int) -> float:
        """When a picture is shown, counted from the first one."""
        return float((self.timestamps[index] - self.timestamps[0]) * self.time_base)

    def frame_at(self, second: float) -> int:
        """The picture that is shown at a second, counted from the first one; what `seconds` says finds its own."""
        rounding = 1e-6
        return max(
            0, bisect_right(self.timestamps, self.timestamps[0] + (second + rounding) / float(self.time_base)) - 1
        )


class VideoFileReader:
    """An open video, judged by its header, its packets and its first picture; gives any of its pictures."""

    def __init__(self, path: str, container: InputContainer, limits: MediaLimitsConfig) -> None:
        self._path, self._container, self._limits = path, container, limits
        self._stream = self._select_video_stream()
        self._coded_size = Size(self._stream.width, self._stream.height)
        self._check_header()
        self.timeline = self._read_timeline()
        self._quarter_turns = self._read_rotation()

    @property
    def size(self) -> Size:
        """Width and height of the pictures, upright."""
        return Size(self._coded_size.height, self._coded_size.width) if self._quarter_turns % 2 else self._coded_size

    def read_frames(self, indices: Sequence[int]) -> Iterator[FramePixels]:
        """The pictures of these ascending indices: uint8 [H, W, 3], RGB, upright.

        Raises:
            MediaError: one of them does not decode, or has another size than the header says.
        """
        for frame in self._decode_frames([self.timeline.timestamps[index] for index in indices]):
            yield np.rot90(frame.to_ndarray(format="rgb24"), self._quarter_turns)

    def _select_video_stream(self) -> VideoStream:
        stream = self._container.streams.best("video")
        if not isinstance(stream, VideoStream) or stream.disposition & Disposition.attached_pic:
            raise MediaError(f"{self._path}: has no moving pictures (sound alone, or damaged); restore or remove it")
        if stream.codec_context is None:  # what the stubs deny
            raise MediaError(f"{self._path}: damaged, or in a codec that cannot be decoded; convert it to H.264")
        stream.thread_type = "AUTO"
        stream.codec_context.options = {"err_detect": "explode"}  # what is damaged raises rather than being guessed
        return stream

    def _check_header(self) -> None:
        stream, path = self._stream, self._path
        if stream.codec_context.pix_fmt is None or not stream.average_rate or not stream.time_base:
            raise MediaError(f"{path}: damaged (its pictures have no format, rate or time); restore or remove it")
        check_dimensions(path, self._coded_size, self._limits)
        if max(component.bits for component in stream.format.components) > 8:
            raise MediaError(f"{path}: more than 8 bits per channel ({stream.pix_fmt}); convert it to 8 bits")
        check_length(path, stream.frames, float((stream.duration or 0) * stream.time_base), self._limits)

    def _read_timeline(self) -> VideoTimeline:
        times: list[int] = []
        keys: list[int] = []
        end = 0.0
        for packet in self._container.demux():
            if packet.size == 0:  # the end of the file
                continue
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index != self._stream.index:
                continue
            if packet.pts is None or packet.is_corrupt:
                raise MediaError(f"{self._path}: frame {len(times)} is damaged or has no time; convert it to mp4")
            if packet.is_keyframe:
                keys.append(packet.pts)
            if not packet.is_discard:  # an edit list hides it, though others may be decoded from it
                times.append(packet.pts)
            check_length(self._path, len(times), 0.0, self._limits)
        if not (times and keys):
            raise MediaError(f"{self._path}: contains no frames; restore or remove it")
        track = VideoTimeline(
            timestamps=tuple(sorted(times)),
            keyframe_timestamps=tuple(sorted(keys)),
            time_base=Fraction(self._stream.time_base or 0),
            fps=float(self._stream.average_rate or 0),
        )
        check_length(self._path, len(times), max(len(times) / track.fps, track.seconds_at(-1)), self._limits)
        self._check_not_truncated(end, track.fps)
        return track

    def _check_not_truncated(self, end: float, fps: float) -> None:
        """Refuse a file that was cut off: what it holds, sound included, ends before its header says."""
        begin, duration = self._container.start_time or 0, self._container.duration or 0
        declared = (begin + duration) / av.time_base
        if end < declared - 2 / fps:  # some headers and packets are a frame off
            raise MediaError(f"{self._path}: ends at {end:.3f} s, not at {declared:.3f} s; it is cut off, restore it")

    def _read_rotation(self) -> int:
        """Quarter turns to the left that put the pictures upright; a player applies them, a decoder does not."""
        (first,) = self._decode_frames(self.timeline.timestamps[:1])
        matrix = first.side_data.get("DISPLAYMATRIX")
        if not isinstance(matrix, SideData):
            return 0
        a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
        for turned, turns in _QUARTER_TURNS.items():
            if (a, b, c, d) == tuple(_MATRIX_UNIT * entry for entry in turned):
                return turns
        raise MediaError(f"{self._path}: is shown mirrored or slanted; convert it to upright pictures")

    def _decode_frames(self, times: Sequence[int]) -> Iterator[VideoFrame]:
        """The frames of these ascending times; what lies between them is skipped where a key frame allows it."""
        keys = self.timeline.keyframe_timestamps
        decoding: Iterator[VideoFrame] = iter(())
        position = None
        for time in times:
            key = keys[max(0, bisect_right(keys, time) - 1)]
            if position is None or position < key:
                decoding = self._decode_from(key)
            try:
                frame = self._find_frame(decoding, time)
            except MediaError:
                if key == keys[0]:
                    raise
                keys = keys[:1]  # "open" key frames do not stand alone: go through the file in order
                decoding = self._decode_from(keys[0])
                frame = self._find_frame(decoding, time)
            yield frame
            position = time

    def _decode_from(self, key: int) -> Iterator[VideoFrame]:
        self._container.seek(key, stream=self._stream)
        for packet in self._container.demux(self._stream):
            # What is shown before the key frame yet stored after it needs frames before it, and nothing needs it.
            if packet.pts is None or packet.pts >= key:
                yield from packet.decode()

    def _find_frame(self, decoding: Iterator[VideoFrame], time: int) -> VideoFrame:
        try:
            frame = next((f for f in decoding if f.is_corrupt or f.pts is None or f.pts >= time), None)
        except av.FFmpegError:
            frame = None
        if frame is None or frame.is_corrupt or frame.pts != time:
            seconds = float((time - self.timeline.timestamps[0]) * self.timeline.time_base)
            raise MediaError(f"{self._path}: the frame at {seconds:.3f} s does not decode; restore or remove it")
        if (frame.width, frame.height) != self._coded_size:
            coded = f"{self._coded_size.width}x{self._coded_size.height}"
            raise MediaError(
                f"{self._path}: a frame of {frame.width}x{frame.height} in a video of {coded}; convert it to one size"
            )
        return frame


@contextmanager
def open_video_file(ref: VideoRef, roots: Sequence[Path], limits: MediaLimitsConfig) -> Iterator[VideoFileReader]:
    """Open a video and check it before anything is decoded.

    Raises:
        MediaError: outside the roots, missing, unreadable, changed since it was referenced, over a limit, not a video,
            without frames, deeper than 8 bits, mirrored, or damaged; also for damage found while it is read.
    """
    place = resolve_media_path(ref.path, roots, limits.max_video_bytes, "max_video_bytes")
    check_digest(ref.path, _file_sha256(place, ref.path), ref.sha256)
    try:
        with _open_container(place, ref.path) as container:
            yield VideoFileReader(ref.path, container, limits)
    except av.FFmpegError as error:
        raise MediaError(f"{ref.path}: damaged ({error.strerror}); restore or remove it") from error


def _open_container(place: Path, path: str) -> InputContainer:
    try:
        return av.open(str(place), options=_CONTAINER_OPTIONS, metadata_errors="replace")
    except av.FFmpegError as error:
        raise MediaError(
            f"{path}: no MP4, MOV, MKV, WEBM or AVI video ({error.strerror}); convert, restore or remove it"
        ) from error


def _file_sha256(place: Path, path: str) -> str:
    try:
        return compute_sha256(place)
    except OSError as error:
        raise unreadable_error(path, error) from error
