"""Qwen3.5, 3.6 and 3.8 without experts: three layers of Gated DeltaNet for each one of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.config.schema import FromScratchConfig
from mmrl.config.schema.model import LoraTarget
from mmrl.policy.families import qwen3_vl
from mmrl.policy.families.base import (
    QWEN_LORA_LAYERS,
    FromScratchSupport,
    ModelFamily,
    VideoTimeEncoding,
    mrope_parameters,
)
from mmrl.policy.gated_delta_kernels import describe_slow_path
from mmrl.policy.gated_delta_net import install_gated_delta_net
from mmrl.types import CoordinateSystem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROTATED_SHARE = 0.25  # share of a head's channels that rotary positions turn

LORA_LAYERS: Mapping[LoraTarget, str] = {
    **QWEN_LORA_LAYERS,
    # Both kinds of attention. The projections of decay and write strength are left out: they are a few rows each.
    "language.attention": r"model\.language_model\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))",
}


@dataclass(frozen=True, kw_only=True)
class HybridFamily(ModelFamily):
    """A family with recurrent layers."""

    has_recurrent_layers: bool = True

    def prepare(self, model: PreTrainedModel) -> None:
        """Let attention and recurrent layers follow the `packed_groups` of a packed row."""
        super().prepare(model)
        install_gated_delta_net(model)

    def describe_slow_path(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the recurrent layers run without kernels on a GPU, if they do."""
        return describe_slow_path(device.type, dtype)


def make_family() -> ModelFamily:
    """Return the family."""
    from transformers import Qwen3_5ForConditionalGeneration

    return HybridFamily(
        model_type="qwen3_5",
        model_class=Qwen3_5ForConditionalGeneration,
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.TEXT_TIMESTAMPS,
        lora_layers=LORA_LAYERS,
        from_scratch=FromScratchSupport(
            processor_class="Qwen3VLProcessor",
            video_processor_class="Qwen3VLVideoProcessor",
            has_fixed_tokenizer=True,
            text_config=text_config,
            vision_config=qwen3_vl.vision_config_without_deepstack,
        ),
    )


def text_config(spec: FromScratchConfig) -> dict[str, object]:
    """Return a tiny Qwen3.5's own language settings; every fourth layer attends, or the last of fewer."""
    language = spec.language
    # Twice the usual width, because a quarter of it is rotated: in thirds, by time, height and width.
    head_dim = 2 * language.hidden_size // language.num_heads
    rope = mrope_parameters(int(head_dim * ROTATED_SHARE))
    return {
        "head_dim": head_dim,
        "rope_parameters": rope | {"mrope_interleaved": True, "partial_rotary_factor": ROTATED_SHARE},
        "full_attention_interval": min(4, language.num_layers),
        "linear_key_head_dim": language.linear_head_dim,
        "linear_value_head_dim": language.linear_head_dim,
        "linear_num_key_heads": language.num_kv_heads,
        "linear_num_value_heads": language.num_heads,
        # vLLM keeps the state in this type; transformers always does.
        "mamba_ssm_dtype": "float32",
    }
