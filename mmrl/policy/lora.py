"""Low-rank adapters by peft, put into the model in place: it stays of its own class and keeps its own forward."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mmrl.config.schema import LoraConfig
from mmrl.policy.families import ModelFamily, get_family
from mmrl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel


class LoraAdapter:
    """Adapter layers that compute W + s B A in place of each targeted W; all weights of the model itself are frozen.

    B starts at 0, so a new adapter changes nothing. A and B are float32 in a bfloat16 model.

    Source: LoRA, arXiv:2106.09685, equation 3. s is alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).
    DoRA (arXiv:2402.09353, equation 5) scales the rows of the sum to learned lengths.
    """

    def __init__(
        self, model: PreTrainedModel, options: LoraConfig, *, seed: int, family: ModelFamily | None = None
    ) -> None:
        """Put a new adapter into `model`, on the CPU, and freeze the rest.

        `seed` decides A, whatever the state of torch's generator, which stays as it is. `family` knows the names of the
        targets; None for the built-in family of the model's config.
        """
        # peft takes a second to import, and most runs train no adapter.
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model

        layers = (family or get_family(model.config)).lora_layers
        config = PeftLoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            use_dora=options.use_dora,
            use_rslora=options.use_rslora,
            target_modules="|".join(layers[target] for target in options.targets),
        )
        # `devices=[]`: the adapter is made on the CPU, and forking the generators of GPUs would initialise CUDA.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft: PeftModel = get_peft_model(model, config)

    def save_pretrained(self, save_directory: Path) -> None:
        """Write the adapter alone, as `PeftModel.from_pretrained` reads it."""
        # Left to itself, peft asks the hub whether the embedding of the base model was resized.
        self._peft.save_pretrained(str(save_directory), save_embedding_layers=False)

    def merge(self) -> None:
        """Add the adapter to the weights for good: the model is then one like any other."""
        self._peft.merge_and_unload()


def create_adapter(
    model: PreTrainedModel, options: LoraConfig | None, seed: int, family: ModelFamily | None = None
) -> LoraAdapter | None:
    """Put the adapter that a run with this seed begins with into its model; return None if `options` are None."""
    if options is None:
        return None
    return LoraAdapter(model, options, seed=derive_seed(seed, "adapter"), family=family)


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that an adapter was put into. It shares every weight with `model`, and so takes no memory."""
    # `deepcopy` takes what its memo holds as already copied, so all weights are shared.
    base = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for name, layer in list(iter_adapted_layers(base)):
        base.set_submodule(name, layer.get_base_layer())
    return base


def has_adapter(model: nn.Module) -> bool:
    """Return True if an adapter is in the model."""
    return next(iter_adapted_layers(model), None) is not None


def iter_adapted_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """Yield the layers that an adapter changes, each with the name that the layer has without the adapter."""
    # A process that has not imported peft has no adapted layer, and need not import it to find none.
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@torch.no_grad()
def merged_weight(layer: BaseTunerLayer) -> torch.Tensor:
    """Return the weight matrix of an adapted layer with the adapter added, [out, in]; the layer stays as it is."""
    # peft merges in place, and the adapter must stay apart to be trained further.
    merged = copy.deepcopy(layer)
    merged.merge()
    return merged.get_base_layer().get_parameter("weight")
