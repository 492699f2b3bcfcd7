"""Choose the frames of a video that the model sees, and decode them at their size, as `qwen_vl_utils.fetch_video`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import torch

from mmrl.config.schema import MediaLimitsConfig, VideoConfig
from mmrl.media.decord_reader import REMEDY, DecordFileReader
from mmrl.media.image import resized_size
from mmrl.media.video_reader import FrameFolderReader, VideoFileReader, VideoTimeline, open_video_file
from mmrl.types import MediaError, MediaPolicy, MediaRangeError, Size, VideoRef
from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

# Beside a CPU build of torch, `import torchvision` fails unless this has run; functions below import it.
tolerate_cuda_builds()

_CHUNK_BYTES: Final = 2**26  # bytes of frames that are in memory at their original size

# Grey levels by which a frame may differ between two decoders, from rounding that the resizing enlarges.
_MAX_DIFFERENCE: Final = 3.0

VideoReader = VideoFileReader | DecordFileReader | FrameFolderReader


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """The rule by which frames are chosen and resized."""

    video: VideoConfig  # the section `model.video`: frame rate, numbers of frames and pixels
    patch_size: int  # side of a patch of the vision tower, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlan:
    """The frames of a video that the model sees."""

    indices: tuple[int, ...]  # indices into the frames of the file, ascending
    fps: float  # average frame rate of the file
    total_frames: int  # number of frames in the file
    original_size: Size  # size of a frame in the file, upright
    resized_size: Size  # size of a frame for the model

    @property
    def sampled_fps(self) -> float:
        """Frame rate of the chosen frames."""
        return len(self.indices) / (self.indices[-1] - self.indices[0] + 1) * self.fps


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedVideo:
    """The decoded frames of a video."""

    plan: FramePlan
    frames_TCHW: torch.Tensor  # float32 [time, 3, height, width], RGB from 0 to 255, at the resized size


@contextmanager
def open_reader(ref: VideoRef, media_policy: MediaPolicy, limits: MediaLimitsConfig) -> Iterator[VideoReader]:
    """Open a video file, or a folder of frames.

    Raises:
        MediaError: it cannot be used (see `open_video_file`, `DecordFileReader` and `FrameFolderReader`). The block
            raises it, too, for damage that is found while frames are read.
    """
    if ref.fps is not None:
        yield FrameFolderReader(ref, ref.fps, media_policy.roots, limits)
        return
    with open_video_file(ref, media_policy.roots, limits) as reader:
        # PyAV checks the file and lists its frames in both cases.
        yield DecordFileReader(ref.path, reader) if media_policy.video_reader == "decord" else reader


def plan_frames(ref: VideoRef, sampling: FrameSampling, reader: VideoReader, limits: MediaLimitsConfig) -> FramePlan:
    """Choose the frames of a video and their size, without decoding them.

    Raises:
        MediaError: `start` and `end` lie outside; the rule asks for more frames than there are; the frame rate varies
            by more than `max_frame_drift_s`.
    """
    timeline = reader.timeline
    indices = _choose_indices(ref, sampling.video, timeline)
    # The prompt states one frame rate, so frames of a variable rate would be at other times than the prompt says.
    for index in indices:
        expected, actual = index / timeline.fps, timeline.seconds_at(index)
        if abs(actual - expected) > limits.max_frame_drift_s:
            raise MediaError(
                f"{ref.path}: its rate varies: frame {index} is at {actual:.3f} s, not at {expected:.3f} s, which "
                f"exceeds max_frame_drift_s={limits.max_frame_drift_s}; "
                "convert it to a constant rate or raise the limit"
            )
    return FramePlan(
        indices=indices,
        fps=timeline.fps,
        total_frames=len(timeline.timestamps),
        original_size=reader.size,
        resized_size=resized_frame_size(reader.size, len(indices), sampling),
    )


def find_frame(path: str, second: float, timeline: VideoTimeline) -> int:
    """Return the index of the frame that a video shows at a second, counted from its first frame.

    Raises:
        MediaRangeError: the video has no such second.
    """
    last_frame_s = timeline.seconds_at(-1)
    if not 0.0 <= second < last_frame_s + 1 / timeline.fps:
        raise MediaRangeError(f"{path}: there is nothing at {second:g} s; its last frame is at {last_frame_s:.3f} s")
    # Without the tolerance, the float from `seconds_at` could fall just before its own frame.
    tolerance_s = 1e-6
    tick = timeline.timestamps[0] + (second + tolerance_s) / float(timeline.time_base)
    return max(0, bisect_right(timeline.timestamps, tick) - 1)


def check_frames_agree(path: str, by_decord: DecodedVideo, by_pyav: DecodedVideo) -> None:
    """Raise a MediaError if a frame of decord differs from PyAV's: decord hides damage by repeating a neighbour."""
    differences_T = (by_decord.frames_TCHW - by_pyav.frames_TCHW).abs().amax((1, 2, 3))
    for index, difference in zip(by_decord.plan.indices, differences_T.tolist(), strict=True):
        if difference > _MAX_DIFFERENCE:
            raise MediaError(
                f"{path}: decord's frame {index} differs from PyAV's by {difference:.0f} grey levels; {REMEDY}"
            )


def _choose_indices(ref: VideoRef, video: VideoConfig, timeline: VideoTimeline) -> tuple[int, ...]:
    """Choose evenly spaced frames from `start` to `end` of the reference, as qwen-vl-utils does.

    If a video has fewer than `min_frames` frames, qwen-vl-utils takes fewer. Here that is an error.
    """
    # qwen-vl-utils imports torchvision, which takes seconds: a process that reads no video does not wait for it.
    from qwen_vl_utils.vision_process import calculate_video_frame_range, smart_nframes

    total = len(timeline.timestamps)
    seconds = total / timeline.fps
    start = 0.0 if ref.start is None else ref.start
    end = seconds if ref.end is None else ref.end
    if not 0.0 <= start < end <= seconds:
        raise MediaRangeError(
            f"{ref.path}: {start:g} to {end:g} s is not part of its {seconds:.3f} s; correct start and end"
        )
    try:
        span = {"video_start": ref.start, "video_end": ref.end}
        first, last, available = calculate_video_frame_range(span, total, timeline.fps)
    except ValueError as error:
        raise MediaRangeError(f"{ref.path}: no two frames from {start:g} to {end:g} s; lengthen that part") from error
    wanted = min(max(available / timeline.fps * video.fps, video.min_frames), video.max_frames)
    if math.floor(wanted) > available:
        raise MediaRangeError(
            f"{ref.path}: model.video asks for {math.floor(wanted)} frames (fps={video.fps:g}, "
            f"min_frames={video.min_frames}) of {available}; lower them or remove it"
        )
    rule = video.model_dump(include={"fps", "min_frames", "max_frames"})
    count = smart_nframes(rule, total_frames=available, video_fps=timeline.fps)
    return tuple(torch.linspace(first, last, count).round().long().tolist())


def resized_frame_size(size: Size, count: int, sampling: FrameSampling) -> Size:
    """Return the size that `fetch_video` gives each of `count` frames.

    The pixels of a frame are limited by `max_pixels`, by its share of `total_pixels`, and by 768 tokens, a constant of
    qwen-vl-utils that no option raises.
    """
    from qwen_vl_utils.vision_process import FRAME_FACTOR, SPATIAL_MERGE_SIZE, VIDEO_MAX_TOKEN_NUM

    side = sampling.patch_size * SPATIAL_MERGE_SIZE
    video = sampling.video
    share = min(VIDEO_MAX_TOKEN_NUM * side**2, video.total_pixels / count * FRAME_FACTOR)
    max_pixels = min(video.max_pixels, max(share, int(video.min_pixels * 1.05)))
    return resized_size(size, factor=side, min_pixels=video.min_pixels, max_pixels=max_pixels)


def decode_frames(reader: VideoReader, plan: FramePlan) -> DecodedVideo:
    """Decode and resize the frames of a plan; raises MediaError for one that does not decode."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    frames = reader.read_frames(plan.indices)
    # A few at a time, so that a long video need not fit in memory at its original size.
    chunk_frames = max(1, _CHUNK_BYTES // (3 * plan.original_size.width * plan.original_size.height))
    size = [plan.resized_size.height, plan.resized_size.width]
    resized_TCHW = torch.empty(len(plan.indices), 3, *size)
    done = 0
    while chunk := list(islice(frames, chunk_frames)):
        original_TCHW = torch.from_numpy(np.stack(chunk)).permute(0, 3, 1, 2)
        # The same interpolation as in `fetch_video`; the uint8 result is converted to float32 by the assignment.
        resized = resize(original_TCHW, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
        resized_TCHW[done : done + len(chunk)] = resized
        done += len(chunk)
    return DecodedVideo(plan=plan, frames_TCHW=resized_TCHW)
