"""The model families: which transformers class, what coordinates are measured in, how a video's time is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from mmrl.policy.mrope import Grid, PlaceholderRun
from mmrl.types import CoordinateSystem


class VideoTimeEncoding(StrEnum):
    """How a model is told when the frames of a video were taken."""

    FRAME_INDEX = "steps"  # it is not: each pair of frames stands one position later
    SECONDS = "seconds"  # by positions, in proportion to seconds
    TEXT_TIMESTAMPS = "stamps"  # in words before each pair of frames, which is a picture of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One line of Qwen-VL models. `frame` is the frame its boxes and points are trained in."""

    model_type: str
    model_class: type[PreTrainedModel]
    coordinate_system: CoordinateSystem
    video_time: VideoTimeEncoding
    tokens_per_second: float = 1.0
    """Positions per second, where the clock runs in seconds; a model's own config has the last word."""

    def video_placeholder_runs(self, grid: Grid, second_per_grid: float) -> tuple[PlaceholderRun, ...]:
        """How the placeholder tokens of a video follow each other; a pair of frames lasts `second_per_grid`."""
        match self.video_time:
            case VideoTimeEncoding.FRAME_INDEX:
                return (PlaceholderRun(grid),)
            case VideoTimeEncoding.SECONDS:
                # vLLM reads the seconds from a float32 tensor; positions are rounded down, so the last bit counts.
                seconds = torch.tensor(second_per_grid, dtype=torch.float32).item()
                return (PlaceholderRun(grid, time_step=self.tokens_per_second * seconds),)
            case VideoTimeEncoding.TEXT_TIMESTAMPS:
                time, height, width = grid
                return (PlaceholderRun((1, height, width)),) * time


FAMILIES = {
    family.model_type: family
    for family in (
        # arXiv:2409.12191, "Unified multimodal training": boxes normalised to [0, 1000).
        ModelFamily(
            model_type="qwen2_vl",
            model_class=Qwen2VLForConditionalGeneration,
            coordinate_system=CoordinateSystem.NORM_1000,
            video_time=VideoTimeEncoding.FRAME_INDEX,
        ),
        # arXiv:2502.13923, "Absolute coordinates": pixels of the resized picture.
        ModelFamily(
            model_type="qwen2_5_vl",
            model_class=Qwen2_5_VLForConditionalGeneration,
            coordinate_system=CoordinateSystem.PX_RESIZED,
            video_time=VideoTimeEncoding.SECONDS,
        ),
        # arXiv:2511.21631, "Grounding": back to the relative range of 1000; "Timestamp": times in words.
        ModelFamily(
            model_type="qwen3_vl",
            model_class=Qwen3VLForConditionalGeneration,
            coordinate_system=CoordinateSystem.NORM_1000,
            video_time=VideoTimeEncoding.TEXT_TIMESTAMPS,
        ),
    )
}


def get_family(config: PretrainedConfig) -> ModelFamily:
    """The family of a model, with what this very model's config says.

    Raises:
        KeyError: it is none of `FAMILIES`.
    """
    family = FAMILIES[config.model_type]
    if family.video_time is not VideoTimeEncoding.SECONDS:
        return family
    return replace(family, tokens_per_second=config.vision_config.tokens_per_second)
