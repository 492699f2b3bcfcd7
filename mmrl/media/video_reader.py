"""Read frames of a video file by PyAV, or of a folder of images: their times, their key frames and their pixels.

A frame is found by its time, or the file is refused. `decord_reader.py` reads the same files by decord.
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
from mmrl.media.checks import check_dimensions, check_length, check_sha256, resolve_media_path, unreadable_error
from mmrl.media.image import open_image
from mmrl.types import ImageRef, MediaError, Size, UserError, VideoRef
from mmrl.utils.digests import file_digest, frames_digest
from mmrl.utils.files import list_frames, resolve_inside

# ffmpeg reads playlists too, which name other files and URLs. These demuxers read only the file that they are given.
_CONTAINER_OPTIONS: Final = {"format_whitelist": "mov,matroska,avi", "protocol_whitelist": "file"}
# Counter-clockwise quarter turns by display matrix (a, b, c, d), whose unit is 2^16. Any other mirrors or slants.
_QUARTER_TURNS: Final = {(1, 0, 0, 1): 0, (0, -1, 1, 0): 1, (-1, 0, 0, -1): 2, (0, 1, -1, 0): 3}
_MATRIX_UNIT: Final = 2**16
# Their frames are shown in the order in which they are stored.
_CODECS_IN_ORDER: Final = ("vp8", "vp9", "av1")

FramePixels = np.ndarray[Any, np.dtype[np.uint8]]  # uint8 [height, width, 3], RGB, upright


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTimeline:
    """The times of a video's frames, in ticks of `time_base`."""

    timestamps: tuple[int, ...]  # when each frame is shown, ascending
    # Times of the frames that decode on their own, ascending; an edit list may hide some of them.
    keyframe_timestamps: tuple[int, ...]
    time_base: Fraction  # seconds per tick
    fps: float  # average frames per second

    def seconds_at(self, index: int) -> float:
        """Return when a frame is shown, in seconds after the first frame."""
        return float((self.timestamps[index] - self.timestamps[0]) * self.time_base)


class VideoFileReader:
    """Reads frames of an open video file. Its header, packets and first frame are checked at construction."""

    def __init__(self, path: str, container: InputContainer, limits: MediaLimitsConfig) -> None:
        """Check the file and list its frames; raises as `open_video_file`."""
        self._path, self._container, self._limits = path, container, limits
        self.file: Final = container.name
        self._stream = self._select_video_stream()
        self._coded_size = Size(self._stream.width, self._stream.height)
        self._check_header()
        # The reason why decord, which counts frames from a key frame, would return wrong ones; None if it would not.
        self.counting_problem: str | None = None
        self.timeline = self._read_timeline()
        self._quarter_turns = self._read_rotation()
        width, height = self._coded_size
        # Size of the frames as they are shown, upright.
        self.size: Final = Size(height, width) if self._quarter_turns % 2 else Size(width, height)

    def read_frames(self, indices: Sequence[int]) -> Iterator[FramePixels]:
        """Yield the frames of these ascending indices: uint8 [height, width, 3], RGB, upright.

        Raises:
            MediaError: one of them does not decode, or has another size than the header says.
        """
        for frame in self._decode_frames([self.timeline.timestamps[index] for index in indices]):
            yield np.rot90(frame.to_ndarray(format="rgb24"), self._quarter_turns)

    def _select_video_stream(self) -> VideoStream:
        stream = self._container.streams.best("video")
        if not isinstance(stream, VideoStream) or stream.disposition & Disposition.attached_pic:
            raise MediaError(f"{self._path}: has no video stream (only sound, or damaged); restore or remove it")
        # PyAV's stubs wrongly exclude None.
        if stream.codec_context is None:
            raise MediaError(f"{self._path}: damaged, or in a codec that cannot be decoded; convert it to H.264")
        stream.thread_type = "AUTO"
        # Damaged frames raise an error; by default ffmpeg conceals the damage by guessed pixels.
        stream.codec_context.options = {"err_detect": "explode"}
        return stream

    def _check_header(self) -> None:
        stream, path = self._stream, self._path
        if stream.codec_context.pix_fmt is None or not stream.average_rate or not stream.time_base:
            raise MediaError(f"{path}: damaged (its frames have no format, rate or time); restore or remove it")
        check_dimensions(path, self._coded_size, self._limits)
        if max(component.bits for component in stream.format.components) > 8:
            raise MediaError(f"{path}: more than 8 bits per channel ({stream.pix_fmt}); convert it to 8 bits")
        check_length(path, stream.frames, float((stream.duration or 0) * stream.time_base), self._limits)

    def _read_timeline(self) -> VideoTimeline:
        """List the frames by reading all packets, without decoding them."""
        times: list[int] = []
        keys: list[int] = []
        num_hidden = 0
        end_s = 0.0
        for packet in self._container.demux():
            # PyAV ends each stream with an empty packet.
            if not packet.size:
                continue
            if packet.pts is not None:
                end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index != self._stream.index:
                continue
            if packet.pts is None or packet.is_corrupt:
                raise MediaError(f"{self._path}: frame {len(times)} is damaged or has no time; convert it to mp4")
            if packet.is_keyframe:
                keys.append(packet.pts)
            # An edit list hides discarded frames, though others may be decoded from them.
            if packet.is_discard:
                num_hidden += 1
            else:
                times.append(packet.pts)
            check_length(self._path, len(times), 0.0, self._limits)
        if not (times and keys):
            raise MediaError(f"{self._path}: contains no frames; restore or remove it")
        timeline = VideoTimeline(
            timestamps=tuple(sorted(times)),
            keyframe_timestamps=tuple(sorted(keys)),
            time_base=Fraction(self._stream.time_base or 0),
            fps=float(self._stream.average_rate or 0),
        )
        check_length(self._path, len(times), max(len(times) / timeline.fps, timeline.seconds_at(-1)), self._limits)
        self._check_not_truncated(end_s, timeline.fps)
        self._check_stored_order(times, timeline)
        self.counting_problem = self._find_counting_problem(times, set(keys), num_hidden)
        return timeline

    def _find_counting_problem(self, times: Sequence[int], keys: set[int], num_hidden: int) -> str | None:
        """Return why frames cannot be counted from a key frame, given the times of the frames as they are stored."""
        if "avi" in self._container.format.name:
            return "it is an AVI file, which decord reads differently each time"
        if num_hidden:
            return f"its edit list hides {num_hidden} frames"
        if times[0] not in keys:
            return "it does not begin with a key frame"
        for index, (stored, shown) in enumerate(zip(times, sorted(times), strict=True)):
            if stored in keys and stored != shown:
                return f"frames stored after key frame {index} are shown before it (B-frames of an open GOP)"
        return None

    def _check_stored_order(self, times: Sequence[int], timeline: VideoTimeline) -> None:
        """Refuse damaged times, given the times of the frames in the order of storage.

        Decoding that starts at another key frame skips a frame whose time is wrong. Frames that depend on it would then
        decode without an error, but to other pixels than when decoding starts at the beginning of the file.
        """
        codec = self._stream.codec_context.codec.canonical_name
        in_order = set(times if codec in _CODECS_IN_ORDER else timeline.keyframe_timestamps)
        seen: set[int] = set()
        latest = times[0]
        for time in times:
            if time in seen or (time < latest and time in in_order):
                seconds = float((time - timeline.timestamps[0]) * timeline.time_base)
                raise MediaError(f"{self._path}: the frame at {seconds:.3f} s is stored out of order; restore it")
            seen.add(time)
            latest = max(latest, time)

    def _check_not_truncated(self, end_s: float, fps: float) -> None:
        """Refuse a file that was cut off: its streams, sound included, end before its header says."""
        start, duration = self._container.start_time or 0, self._container.duration or 0
        declared_s = (start + duration) / av.time_base
        # Headers and packets of some good files differ by a frame.
        if end_s < declared_s - 2 / fps:
            raise MediaError(
                f"{self._path}: ends at {end_s:.3f} s, not at {declared_s:.3f} s; it is cut off, restore it"
            )

    def _read_rotation(self) -> int:
        """Return the counter-clockwise quarter turns that put frames upright. Players apply them, decoders do not."""
        (first,) = self._decode_frames(self.timeline.timestamps[:1])
        matrix = first.side_data.get("DISPLAYMATRIX")
        if not isinstance(matrix, SideData):
            return 0
        a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
        for rotation, turns in _QUARTER_TURNS.items():
            if (a, b, c, d) == tuple(_MATRIX_UNIT * entry for entry in rotation):
                return turns
        raise MediaError(f"{self._path}: is shown mirrored or slanted; convert it to upright frames")

    def _decode_frames(self, times: Sequence[int]) -> Iterator[VideoFrame]:
        """Yield the frames at these ascending times, seeking to a key frame where one lies between them."""
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
                # Frames after an "open" key frame may need frames before it: decode the file from its beginning.
                keys = keys[:1]
                decoding = self._decode_from(keys[0])
                frame = self._find_frame(decoding, time)
            yield frame
            position = time

    def _decode_from(self, key: int) -> Iterator[VideoFrame]:
        self._container.seek(key, stream=self._stream)
        for packet in self._container.demux(self._stream):
            # Frames stored after the key frame but shown before it need earlier frames. They are never requested.
            if packet.pts is None or packet.pts >= key:
                yield from packet.decode()

    def _find_frame(self, decoding: Iterator[VideoFrame], time: int) -> VideoFrame:
        frame: VideoFrame | None = None
        try:
            for frame in decoding:
                # A damaged frame ends the search, too: it may be the one that is wanted.
                if frame.is_corrupt or frame.pts is None or frame.pts >= time:
                    break
            else:
                frame = None
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
    """Open a video file and check it before its frames are decoded.

    Raises:
        MediaError: outside the roots, missing, unreadable, changed since it was referenced, over a limit, not a video,
            without frames, deeper than 8 bits, mirrored, or damaged. The block raises it, too, for damage that is found
            while frames are read.
    """
    file = resolve_media_path(ref.path, roots, limits.max_video_bytes, "max_video_bytes")
    try:
        sha256 = file_digest(file)
    except OSError as error:
        raise unreadable_error(ref.path, error) from error
    check_sha256(ref.path, sha256, ref.sha256)
    try:
        # Titles and authors in other encodings than UTF-8 are common and do not matter here.
        container = av.open(str(file), options=_CONTAINER_OPTIONS, metadata_errors="replace")
    except av.FFmpegError as error:
        raise MediaError(
            f"{ref.path}: not an MP4, MOV, MKV, WEBM or AVI video ({error.strerror}); convert, restore or remove it"
        ) from error
    try:
        with container:
            yield VideoFileReader(ref.path, container, limits)
    except av.FFmpegError as error:
        raise MediaError(f"{ref.path}: damaged ({error.strerror}); restore or remove it") from error


class FrameFolderReader:
    """Reads a folder of images as a video, in natural order of their names: 9.jpg before 10.jpg.

    It has the interface of `VideoFileReader`. The frame rate comes from the reference; all have the size of the first.
    """

    def __init__(self, ref: VideoRef, fps: float, roots: Sequence[Path], limits: MediaLimitsConfig) -> None:
        """List and check the frames.

        Raises:
            MediaError: outside the roots, missing, changed since it was referenced, over a limit, or not a folder
                that holds only images.
        """
        self._path, self._roots, self._limits = ref.path, roots, limits
        self._frames = self._list_frames()
        hashes = {Path(frame.path).name: frame.sha256 for frame in self._frames}
        check_sha256(ref.path, frames_digest(hashes), ref.sha256)
        count = len(self._frames)
        check_length(ref.path, count, count / fps, limits)
        # Time is counted in frames, and each frame decodes on its own.
        times = tuple(range(count))
        self.timeline: Final = VideoTimeline(
            timestamps=times, keyframe_timestamps=times, time_base=1 / Fraction(fps), fps=fps
        )
        self.size: Final = Size(*open_image(self._frames[0], roots, limits).size)

    def read_frames(self, indices: Sequence[int]) -> Iterator[FramePixels]:
        """Yield the frames of these indices: uint8 [height, width, 3], RGB, upright.

        Raises:
            MediaError: one of them cannot be opened, or has another size than the first.
        """
        for index in indices:
            frame = open_image(self._frames[index], self._roots, self._limits)
            if frame.size != self.size:
                size, first_size = "x".join(map(str, frame.size)), "x".join(map(str, self.size))
                path = self._frames[index].path
                raise MediaError(f"{path}: a frame of {size} in a folder of {first_size}; make them one size")
            yield np.asarray(frame)

    def _list_frames(self) -> list[ImageRef]:
        try:
            folder = resolve_inside(Path(self._path), self._roots)
            if not folder.is_dir():
                raise MediaError(f"{self._path}: no such folder of frames; correct the path or restore it")
            files = list_frames(folder, self._roots)
            # Counted before the files are read for their sha256.
            check_length(self._path, len(files), 0.0, self._limits)
            frames = []
            for file in files:
                path = resolve_media_path(str(file), self._roots, self._limits.max_image_bytes, "max_image_bytes")
                frames.append(ImageRef(path=str(file), sha256=file_digest(path)))
            return frames
        except OSError as error:
            raise unreadable_error(self._path, error) from error
        except UserError as error:
            raise MediaError(str(error)) from error
