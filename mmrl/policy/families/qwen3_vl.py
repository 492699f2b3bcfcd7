"""Qwen3-VL without experts, arXiv:2511.21631."""

from __future__ import annotations

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families.base import FromScratchSupport, ModelFamily, VideoTimeEncoding, mrope_parameters
from mmrl.types import CoordinateSystem


def make_family() -> ModelFamily:
    """Return the family."""
    from transformers import Qwen3VLForConditionalGeneration

    return ModelFamily(
        model_type="qwen3_vl",
        model_class=Qwen3VLForConditionalGeneration,
        # "Grounding": back to the relative range of 1000. "Timestamp": times in words.
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.TEXT_TIMESTAMPS,
        from_scratch=FromScratchSupport(
            processor_class="Qwen3VLProcessor",
            video_processor_class="Qwen3VLVideoProcessor",
            text_config=text_config,
            vision_config=vision_config,
        ),
    )


def text_config(spec: FromScratchConfig) -> dict[str, object]:
    """Return a tiny Qwen3-VL's language settings beyond those that all families share."""
    head_dim = spec.language.hidden_size // spec.language.num_heads
    return {"head_dim": head_dim, "rope_parameters": mrope_parameters(head_dim) | {"mrope_interleaved": True}}


def vision_config(spec: FromScratchConfig) -> dict[str, object]:
    """Return a tiny Qwen3-VL's vision settings beyond those that all families share."""
    return vision_config_without_deepstack(spec) | {"deepstack_visual_indexes": [0]}


def vision_config_without_deepstack(spec: FromScratchConfig) -> dict[str, object]:
    """Return the settings of the tower that Qwen3-VL shares with its successors."""
    return {
        "hidden_size": spec.vision.hidden_size,
        "intermediate_size": spec.vision.intermediate_size,
        "out_hidden_size": spec.language.hidden_size,
        "num_position_embeddings": 256,
    }
