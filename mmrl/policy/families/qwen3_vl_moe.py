"""Qwen3-VL with experts: Qwen3-VL-30B-A3B and 235B-A22B, arXiv:2511.21631."""

from __future__ import annotations

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families import qwen3_vl
from mmrl.policy.families.base import FromScratchSupport, ModelFamily, VideoTimeEncoding
from mmrl.policy.families.experts import EXPERT_PARAMETERS, ExpertFamily, expert_config
from mmrl.types import CoordinateSystem, UserError


def make_family() -> ModelFamily:
    """Return the family."""
    from transformers import Qwen3VLMoeForConditionalGeneration

    return ExpertFamily(
        model_type="qwen3_vl_moe",
        model_class=Qwen3VLMoeForConditionalGeneration,
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.TEXT_TIMESTAMPS,
        lora_parameters=EXPERT_PARAMETERS,
        # No released model has a feed-forward layer that every token passes.
        default_lora_targets=("language.attention",),
        exports_transposed_experts=True,
        from_scratch=FromScratchSupport(
            processor_class="Qwen3VLProcessor",
            video_processor_class="Qwen3VLVideoProcessor",
            text_config=_text_config,
            vision_config=qwen3_vl.vision_config,
        ),
    )


def _text_config(spec: FromScratchConfig) -> dict[str, object]:
    hidden, width = spec.language.hidden_size, spec.language.expert_intermediate_size
    if hidden in (width, 2 * width):
        # Model folders hold these matrices transposed, which transformers can see only from their sizes.
        raise UserError(
            f"model.from_scratch.language: in qwen3_vl_moe, hidden_size {hidden} may be neither "
            f"expert_intermediate_size {width} nor twice as large: a saved square matrix would be read transposed"
        )
    # transformers' class has no field for `norm_topk_prob`, but keeps it, and vLLM asks for it.
    return qwen3_vl.text_config(spec) | expert_config(spec) | {"decoder_sparse_step": 1, "norm_topk_prob": True}
