"""The model families: which transformers class, and what a family's coordinates are measured in."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    AutoConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from mmrl.types import Frame, UserError


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


def family_of(path: str) -> Family:
    """The family of a local folder or hub id.

    Raises:
        UserError: nothing loadable is there, or it is not a Qwen-VL model.
    """
    try:
        model_type = AutoConfig.from_pretrained(path).model_type
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: cannot load {path!r}: {first_line}") from error
    if model_type not in FAMILIES:
        raise UserError(f"model.path: {path!r} is a {model_type!r} model; mmrl trains {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
