"""Qwen2-VL, arXiv:2409.12191."""

from __future__ import annotations

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families.base import FromScratchSupport, ModelFamily, VideoTimeEncoding, mrope_parameters
from mmrl.types import CoordinateSystem, UserError


def make_family() -> ModelFamily:
    """Return the family."""
    from transformers import Qwen2VLForConditionalGeneration

    return ModelFamily(
        model_type="qwen2_vl",
        model_class=Qwen2VLForConditionalGeneration,
        # "Unified multimodal training": boxes normalised to [0, 1000).
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.FRAME_INDEX,
        from_scratch=FromScratchSupport(
            processor_class="Qwen2VLProcessor",
            video_processor_class="Qwen2VLVideoProcessor",
            text_config=text_config,
            vision_config=_vision_config,
        ),
    )


def text_config(spec: FromScratchConfig) -> dict[str, object]:
    """Return a tiny Qwen2-VL's language settings beyond those that all families share."""
    return {"rope_parameters": mrope_parameters(spec.language.hidden_size // spec.language.num_heads)}


def _vision_config(spec: FromScratchConfig) -> dict[str, object]:
    vision = spec.vision
    if vision.intermediate_size % vision.hidden_size:
        raise UserError(
            f"model.from_scratch.vision: in qwen2_vl, intermediate_size {vision.intermediate_size} must be a "
            f"multiple of hidden_size {vision.hidden_size}"
        )
    return {
        "embed_dim": vision.hidden_size,
        "hidden_size": spec.language.hidden_size,
        "mlp_ratio": vision.intermediate_size // vision.hidden_size,
    }
