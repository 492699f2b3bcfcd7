"""Low-rank adapters by peft, put into the model itself, which stays of its own class and keeps its own forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import LoraConfig as LoraOptions
from mmrl.config.schema import LoraTarget

# Full names of linear layers, in all three families.
_LAYER_PATTERNS: dict[LoraTarget, str] = {
    "language.attention": r"model\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj",
    "language.mlp": r"model\.language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
    "vision.attention": r"model\.visual\.blocks\.\d+\.attn\.(qkv|proj)",
    "vision.mlp": r"model\.visual\.blocks\.\d+\.mlp\.((gate|up|down)_proj|(linear_)?fc[12])",
    "projector.mlp": r"model\.visual\.(merger|deepstack_merger_list\.\d+)\.(mlp\.[02]|linear_fc[12])",
}


class LoraAdapter:
    """W + s B A in place of each targeted W, which is frozen like all else: LoRA, arXiv:2106.09685, equation 3.

    s is alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732). DoRA (arXiv:2402.09353, equation 5) scales the
    rows of the sum to learned lengths. B starts at 0, so a new adapter changes nothing. A and B are float32 in a
    bfloat16 model.
    """

    def __init__(self, model: PreTrainedModel, options: LoraOptions, *, seed: int) -> None:
        """Put a new adapter into `model`, on the CPU, and freeze the rest; `seed` alone decides A."""
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            use_dora=options.use_dora,
            use_rslora=options.use_rslora,
            target_modules="|".join(_LAYER_PATTERNS[target] for target in options.targets),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft: PeftModel = get_peft_model(model, config)

    def save_pretrained(self, save_directory: Path) -> None:
        """Write the adapter alone, as `PeftModel.from_pretrained` reads it."""
        self._peft.save_pretrained(str(save_directory), save_embedding_layers=False)

    def merge(self) -> None:
        """Add the adapter to the weights, for good: the model is then one like any other."""
        self._peft.merge_and_unload()


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """The model that an adapter was put into. It shares every weight with `model`, and so takes no memory."""
    bare = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for name, layer in list(iter_adapted_layers(bare)):
        bare.set_submodule(name, layer.get_base_layer())
    return bare


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is in a model."""
    return next(iter_adapted_layers(model), None) is not None


def iter_adapted_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """The layers that an adapter changes, by the names they have without."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@torch.no_grad()
def merged_weight(layer: BaseTunerLayer) -> torch.Tensor:
    """The matrix of a layer, whole, with its adapter added."""
    alone = copy.deepcopy(layer)
    alone.merge()
    return alone.get_base_layer().get_parameter("weight")


def create_adapter(model: PreTrainedModel, options: LoraOptions | None, seed: int) -> LoraAdapter | None:
    """The adapter that a run with this seed begins with, on its model; None where it trains none."""
    return LoraAdapter(model, options, seed=derive_seed(seed, "adapter")) if options else None
