"""Qwen3.5, 3.6 and 3.8 with experts: Gated DeltaNet and attention, experts and one shared expert in each layer."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families import qwen3_5, qwen3_vl
from mmrl.policy.families.base import FromScratchSupport, ModelFamily, VideoTimeEncoding
from mmrl.policy.families.experts import EXPERT_PARAMETERS, ExpertFamily, expert_config
from mmrl.types import CoordinateSystem


@dataclass(frozen=True, kw_only=True)
class HybridExpertFamily(qwen3_5.HybridFamily, ExpertFamily):
    """A family with recurrent layers and experts."""


def make_family() -> ModelFamily:
    """Return the family."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    return HybridExpertFamily(
        model_type="qwen3_5_moe",
        model_class=Qwen3_5MoeForConditionalGeneration,
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.TEXT_TIMESTAMPS,
        # The feed-forward network that every token passes is the shared expert.
        lora_layers={
            **qwen3_5.LORA_LAYERS,
            "language.mlp": r"model\.language_model\.layers\.\d+\.mlp\.shared_expert\.(gate|up|down)_proj",
        },
        lora_parameters=EXPERT_PARAMETERS,
        from_scratch=FromScratchSupport(
            processor_class="Qwen3VLProcessor",
            video_processor_class="Qwen3VLVideoProcessor",
            has_fixed_tokenizer=True,
            text_config=_text_config,
            vision_config=qwen3_vl.vision_config_without_deepstack,
        ),
    )


def _text_config(spec: FromScratchConfig) -> dict[str, object]:
    shared = {"shared_expert_intermediate_size": spec.language.expert_intermediate_size}
    return qwen3_5.text_config(spec) | expert_config(spec) | shared
