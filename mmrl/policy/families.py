"""The model families: which transformers class, and what a family's coordinates are measured in."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from mmrl.types import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One line of Qwen-VL models. `frame` is the frame its boxes and points are trained in."""

    model_type: str
    model_class: type[PreTrainedModel]
    frame: Frame


FAMILIES = {
    family.model_type: family
    for family in (
        # arXiv:2409.12191, "Unified multimodal training": boxes normalised to [0, 1000).
        Family(model_type="qwen2_vl", model_class=Qwen2VLForConditionalGeneration, frame=Frame.NORM_1000),
        # arXiv:2502.13923, "Absolute coordinates": pixels of the resized picture.
        Family(model_type="qwen2_5_vl", model_class=Qwen2_5_VLForConditionalGeneration, frame=Frame.PX_RESIZED),
        # arXiv:2511.21631, "Grounding": back to the relative range of 1000.
        Family(model_type="qwen3_vl", model_class=Qwen3VLForConditionalGeneration, frame=Frame.NORM_1000),
    )
}
