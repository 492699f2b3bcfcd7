"""Videos: frames chosen and resized as qwen-vl-utils does."""

from __future__ import annotations

from dataclasses import dataclass

import decord
import torch
from qwen_vl_utils.vision_process import calculate_video_frame_range, smart_nframes, smart_resize
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from mmrl.config.schema import Video
from mmrl.types import Size, VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRule:
    """Which frames, and their size in multiples of 2 x `patch` pixels."""

    video: Video
    patch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPlan:
    """Frames to take."""

    indices: tuple[int, ...]
    fps: float
    total: int
    original: Size
    resized: Size

    @property
    def sample_fps(self) -> float:
        """Frames per second as sampled."""
        return len(self.indices) / self.total * self.fps


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Frames taken."""

    plan: ClipPlan
    frames_TCHW: torch.Tensor


def plan(ref: VideoRef, rule: ClipRule) -> ClipPlan:
    """Which frames."""
    reader = decord.VideoReader(ref.path)
    fps, v = reader.get_avg_fps(), rule.video
    span = {k: x for k, x in (("video_start", ref.start), ("video_end", ref.end)) if x is not None}
    start, end, total = calculate_video_frame_range(span, len(reader), fps)
    n = smart_nframes({"fps": v.fps, "min_frames": v.min_frames, "max_frames": v.max_frames}, total, fps)
    height, width = reader[0].shape[:2]
    most = max(min(v.max_pixels, v.total_pixels / n * 2), int(v.min_pixels * 1.05))
    h, w = smart_resize(height, width, factor=2 * rule.patch, min_pixels=v.min_pixels, max_pixels=int(most))
    indices = tuple(torch.linspace(start, end, n).round().long().tolist())
    return ClipPlan(indices=indices, fps=fps, total=total, original=Size(width, height), resized=Size(w, h))


def clip(ref: VideoRef, rule: ClipRule) -> Clip:
    """The frames."""
    planned = plan(ref, rule)
    frames = torch.tensor(decord.VideoReader(ref.path).get_batch(planned.indices).asnumpy()).permute(0, 3, 1, 2)
    size = [planned.resized.height, planned.resized.width]
    frames = resize(frames, size, interpolation=InterpolationMode.BICUBIC, antialias=True).float()
    return Clip(plan=planned, frames_TCHW=frames)
