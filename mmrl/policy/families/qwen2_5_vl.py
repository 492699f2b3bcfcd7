"""Qwen2.5-VL, arXiv:2502.13923."""

from __future__ import annotations

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families import qwen2_vl
from mmrl.policy.families.base import FromScratchSupport, ModelFamily, VideoTimeEncoding
from mmrl.types import CoordinateSystem


def make_family() -> ModelFamily:
    """Return the family; `get_family` adds the positions a second that the model's own config states."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    return ModelFamily(
        model_type="qwen2_5_vl",
        model_class=Qwen2_5_VLForConditionalGeneration,
        # "Absolute coordinates": pixels of the resized image.
        coordinate_system=CoordinateSystem.PX_RESIZED,
        video_time=VideoTimeEncoding.SECONDS,
        from_scratch=FromScratchSupport(
            processor_class="Qwen2_5_VLProcessor",
            video_processor_class="Qwen2VLVideoProcessor",
            text_config=qwen2_vl.text_config,
            vision_config=_vision_config,
        ),
    )


def _vision_config(spec: FromScratchConfig) -> dict[str, object]:
    vision = spec.vision
    return {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "out_hidden_size": spec.language.hidden_size,
        # Every block attends to the whole image; window_size and tokens_per_second are as released.
        "fullatt_block_indexes": list(range(vision.num_layers)),
        "window_size": 112,
        "tokens_per_second": 2,
    }
