"""Which frames of a video the model sees, how large, and their pixels: what `qwen_vl_utils.fetch_video` gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils.vision_process import (
    FRAME_FACTOR,
    SPATIAL_MERGE_SIZE,
    VIDEO_MAX_TOKEN_NUM,
    calculate_video_frame_range,
    smart_nframes,
)
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from mmrl.config.schema import MediaLimitsConfig, VideoConfig
from mmrl.media.checks import MediaError, MediaRangeError
from mmrl.media.frame_folder import FrameFolderReader
from mmrl.media.resize import resized_size
from mmrl.media.video_reader import VideoFileReader, VideoTimeline, open_video_file
from mmrl.types import ImageRef, Size, VideoRef

_CHUNK_BYTES: Final = 2**26  # frames decoded at full size at a time

VideoReader = VideoFileReader | FrameFolderReader


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """How videos are seen by a model whose patches have `patch` pixels a side."""

    video: VideoConfig
    patch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlan:
    """What will be seen of a video: `indices` of frames into the file, which has `total` at `fps` on average.

    `original` and `resized` are extents of a frame, upright.
    """

    indices: tuple[int, ...]
    fps: float
    total_frames: int
    original_size: Size
    resized_size: Size

    @property
    def sampled_fps(self) -> float:
        """Frames per second as seen."""
        return len(self.indices) / (self.indices[-1] - self.indices[0] + 1) * self.fps


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedVideo:
    """A plan and its pixels: float32 [T, C, H, W] from 0 to 255, RGB."""

    plan: FramePlan
    frames_TCHW: torch.Tensor


def plan_frames(ref: VideoRef, sampling: FrameSampling, roots: Sequence[Path], limits: MediaLimitsConfig) -> FramePlan:
    """What will be seen of a video, without its pixels.

    Raises:
        MediaError: as `open_track`, or `FolderReader`; `start` and `end` lie outside; the rule asks for more frames
            than there are; frames stand further from a constant rate than `max_frame_drift_s`.
    """
    with _open_reader(ref, roots, limits) as reader:
        return _plan_frames(ref, sampling, reader, limits)


def read_video_frames(
    ref: VideoRef, sampling: FrameSampling, roots: Sequence[Path], limits: MediaLimitsConfig
) -> DecodedVideo:
    """What is seen of a video, pixels and all.

    Raises:
        MediaError: as `plan_clip`; a frame does not decode.
    """
    with _open_reader(ref, roots, limits) as reader:
        plan = _plan_frames(ref, sampling, reader, limits)
        return DecodedVideo(plan=plan, frames_TCHW=_decode_resized_frames(reader, plan))


def read_video_frame(ref: ImageRef, second: float, roots: Sequence[Path], limits: MediaLimitsConfig) -> Image.Image:
    """What a video shows at a second, counted from its first frame; RGB, upright.

    Raises:
        MediaError: as `plan_clip`; there is nothing at that second; the frame does not decode.
    """
    with _open_reader(VideoRef(path=ref.path, sha256=ref.sha256, fps=ref.fps), roots, limits) as reader:
        track = reader.timeline
        if not 0.0 <= second < track.seconds_at(-1) + 1 / track.fps:
            raise MediaRangeError(
                f"{ref.path}: there is nothing at {second:g} s; its last frame is at {track.seconds_at(-1):.3f} s"
            )
        (pixels,) = reader.read_frames([track.frame_at(second)])
        return Image.fromarray(np.ascontiguousarray(pixels))


@contextmanager
def _open_reader(ref: VideoRef, roots: Sequence[Path], limits: MediaLimitsConfig) -> Iterator[VideoReader]:
    if ref.fps is not None:
        yield FrameFolderReader(ref, ref.fps, roots, limits)
        return
    with open_video_file(ref, roots, limits) as reader:
        yield reader


def _plan_frames(ref: VideoRef, sampling: FrameSampling, reader: VideoReader, limits: MediaLimitsConfig) -> FramePlan:
    track = reader.timeline
    indices = _choose_indices(ref, sampling.video, track)
    for index in indices:
        expected, actual = index / track.fps, track.seconds_at(index)
        if abs(actual - expected) > limits.max_frame_drift_s:
            raise MediaError(
                f"{ref.path}: its rate varies: frame {index} stands at {actual:.3f} s, not at {expected:.3f} s, which "
                f"exceeds max_frame_drift_s={limits.max_frame_drift_s}; convert it to a constant rate or raise the limit"
            )
    return FramePlan(
        indices=indices,
        fps=track.fps,
        total_frames=len(track.timestamps),
        original_size=reader.size,
        resized_size=_resized_frame_size(reader.size, len(indices), sampling),
    )


def _choose_indices(ref: VideoRef, video: VideoConfig, track: VideoTimeline) -> tuple[int, ...]:
    """Evenly spaced frames from `start` to `end`, as qwen-vl-utils chooses them."""
    total = len(track.timestamps)
    seconds = total / track.fps
    start, end = (0.0 if ref.start is None else ref.start), (seconds if ref.end is None else ref.end)
    if not 0.0 <= start < end <= seconds:
        raise MediaRangeError(
            f"{ref.path}: {start:g} to {end:g} s is no part of its {seconds:.3f} s; correct start and end"
        )
    try:
        span = {"video_start": ref.start, "video_end": ref.end}
        first, last, available = calculate_video_frame_range(span, total, track.fps)
    except ValueError as error:
        raise MediaRangeError(f"{ref.path}: no two frames from {start:g} to {end:g} s; lengthen that part") from error
    wanted = min(max(available / track.fps * video.fps, video.min_frames), video.max_frames)
    if math.floor(wanted) > available:
        raise MediaRangeError(
            f"{ref.path}: model.video asks for {math.floor(wanted)} frames (fps={video.fps:g}, "
            f"min_frames={video.min_frames}) of {available}; lower them or remove it"
        )
    rule = video.model_dump(include={"fps", "min_frames", "max_frames"})
    count = smart_nframes(rule, total_frames=available, video_fps=track.fps)
    return tuple(torch.linspace(first, last, count).round().long().tolist())


def _resized_frame_size(size: Size, count: int, sampling: FrameSampling) -> Size:
    """The extent `fetch_video` gives each of `count` frames: at most its 768 tokens a frame, whatever the rule says."""
    side = sampling.patch_size * SPATIAL_MERGE_SIZE
    video = sampling.video
    share = min(VIDEO_MAX_TOKEN_NUM * side**2, video.total_pixels / count * FRAME_FACTOR)
    most = min(video.max_pixels, max(share, int(video.min_pixels * 1.05)))
    return resized_size(size, factor=side, min_pixels=video.min_pixels, max_pixels=most)


def _decode_resized_frames(reader: VideoReader, plan: FramePlan) -> torch.Tensor:
    """Decoded and resized a few at a time: a long video need not fit in memory at full size."""
    pictures = reader.read_frames(plan.indices)
    step = max(1, _CHUNK_BYTES // (3 * plan.original_size.width * plan.original_size.height))
    size = [plan.resized_size.height, plan.resized_size.width]
    frames_TCHW = torch.empty(len(plan.indices), 3, *size)
    done = 0
    while chunk := list(islice(pictures, step)):
        large = torch.from_numpy(np.stack(chunk)).permute(0, 3, 1, 2)
        frames_TCHW[done : done + len(chunk)] = resize(
            large, size, interpolation=InterpolationMode.BICUBIC, antialias=True
        )
        done += len(chunk)
    return frames_TCHW
