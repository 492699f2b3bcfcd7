"""The common part of families with experts: names, LoRA targets, and the layouts of fused expert weights.

A layer's experts are two parameters, in transformers' layout while the model is trained: `experts.gate_up_proj`
[experts, 2 x width, hidden] and `experts.down_proj` [experts, hidden, width].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.config.schema import FromScratchConfig
from mmrl.config.schema.model import LoraTarget
from mmrl.policy.expert_routing import install_expert_routing
from mmrl.policy.families.base import ModelFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"\.mlp\.(gate|shared_expert_gate)\.weight$")

# Suffixes of the names of the fused parameters, which are not separate layers.
EXPERT_PARAMETERS: Mapping[LoraTarget, tuple[str, ...]] = {
    "language.experts": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class ExpertFamily(ModelFamily):
    """A family whose feed-forward layers are experts, of which a router picks a few for each token."""

    # True if released folders, and vLLM, hold each expert's matrices transposed against transformers' layout.
    exports_transposed_experts: bool = False

    def prepare(self, model: PreTrainedModel) -> None:
        """Let attention follow the `packed_groups` of a packed row, and routers record and replay."""
        super().prepare(model)
        install_expert_routing(model)

    def is_router(self, parameter_name: str) -> bool:
        """Return True for a weight that decides which experts a token goes to, or how much a shared one counts."""
        return _ROUTER.search(parameter_name) is not None

    def iter_engine_weights(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a weight under the names that an engine loads it by: fused experts one by one, as views.

        A fused `tensor` is [experts, out, in], any other [...]; an expert's matrix is [out, in].
        """
        # vLLM takes fused experts too, but in another layout for each family, and it cannot recognize a transposed
        # matrix whose two sizes are equal.
        fused = _FUSED.fullmatch(name)
        if fused is None:
            yield name, tensor
            return
        experts, projection = fused.groups()
        for number, matrix in enumerate(tensor):
            if projection == "down_proj":
                yield f"{experts}.{number}.down_proj.weight", matrix
                continue
            gate, up = matrix.chunk(2)
            yield f"{experts}.{number}.gate_proj.weight", gate
            yield f"{experts}.{number}.up_proj.weight", up

    def finish_export(self, folder: Path) -> None:
        """Rewrite fused experts of a folder in the layout of released ones; transformers reads both layouts."""
        if not self.exports_transposed_experts:
            return
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata()
            weights = load_file(file)
            fused = [name for name in weights if _FUSED.fullmatch(name)]
            for name in fused:
                weights[name] = weights[name].transpose(1, 2).contiguous()
            if fused:
                save_file(weights, file, metadata=metadata)


def expert_config(spec: FromScratchConfig) -> dict[str, object]:
    """Return the settings of a tiny model's experts."""
    language = spec.language
    return {
        "num_experts": language.num_experts,
        "num_experts_per_tok": language.experts_per_token,
        "moe_intermediate_size": language.expert_intermediate_size,
    }
