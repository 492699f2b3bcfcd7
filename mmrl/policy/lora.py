"""Low-rank adapters by peft, put into the model in place: it keeps its class and its forward."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mmrl.config.schema import LoraConfig
from mmrl.config.schema.model import LoraTarget
from mmrl.policy.families import ModelFamily, get_family
from mmrl.types import UserError
from mmrl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel


_INNER_ADAPTER = ".base_layer"  # suffix of the name of an adapter that is nested in another one of the same module


class LoraAdapter:
    """Adapter layers that compute W + s B A instead of each targeted W; all weights of the model itself are frozen.

    B starts at 0, so a new adapter changes nothing. A and B are float32 in a bfloat16 model.

    Source: LoRA, arXiv:2106.09685, equation 3. s is alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).
    DoRA (arXiv:2402.09353, equation 5) scales the rows of the sum to learned lengths.
    """

    def __init__(
        self, model: PreTrainedModel, options: LoraConfig, *, seed: int, family: ModelFamily | None = None
    ) -> None:
        """Put a new adapter into `model`, on the CPU, and freeze the rest.

        Only `seed` decides A; torch's generator is neither read nor changed. `family` has the names of the
        targets; None for the built-in family of the model's config.

        Raises:
            UserError: the model has no layer of a target.
        """
        # peft takes a second to import, and most runs train no adapter.
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model

        family = family or get_family(model.config)
        targets = options.targets or family.default_lora_targets
        patterns, parameters = _find_targets(model, family, targets)
        config = PeftLoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            use_dora=options.use_dora,
            use_rslora=options.use_rslora,
            target_modules="|".join(patterns),
            target_parameters=parameters,
        )
        # `devices=[]`: the adapter is made on the CPU, and forking the generators of GPUs would initialise CUDA.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft: PeftModel = get_peft_model(model, config)

    def save_pretrained(self, save_directory: Path) -> None:
        """Write only the adapter, in the layout that `PeftModel.from_pretrained` reads."""
        # By default, peft would query the hub to learn whether the embedding of the base model was resized.
        self._peft.save_pretrained(str(save_directory), save_embedding_layers=False)

    def merge(self) -> None:
        """Add the adapter to the weights for good: the model then has no adapter."""
        self._peft.merge_and_unload()


def create_adapter(
    model: PreTrainedModel, options: LoraConfig | None, seed: int, family: ModelFamily
) -> LoraAdapter | None:
    """Put the adapter that a run with this seed starts with into `model`; return None if `options` is None."""
    if options is None:
        return None
    return LoraAdapter(model, options, seed=derive_seed(seed, "adapter"), family=family)


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that an adapter was put into. It shares every weight with `model`, and so takes no memory."""
    # `deepcopy` takes what its memo holds as already copied, so all weights are shared.
    base = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for name, layer in list(iter_adapted_layers(base)):
        # Adapters of two parameters of one module are nested; replacing the outer one replaces both.
        if not name.endswith(_INNER_ADAPTER):
            base.set_submodule(name, layer.get_base_layer())
    return base


def has_adapter(model: nn.Module) -> bool:
    """Return True if an adapter is in the model."""
    return next(iter_adapted_layers(model), None) is not None


def iter_adapted_layers(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """Yield the layers that an adapter changes, each with the name that the layer has without the adapter."""
    # If peft was never imported, no layer is adapted; importing it takes a second.
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@torch.no_grad()
def merged_weight(name: str, layer: BaseTunerLayer) -> tuple[str, torch.Tensor]:
    """Return the name of an adapted weight in the model without adapter, and the weight with the adapter added.

    It is a matrix, [out, in], or the fused matrices of all experts, [experts, out, in]. The layer stays as it is.
    """
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(layer, ParamWrapper):
        while name.endswith(_INNER_ADAPTER):
            name = name.removesuffix(_INNER_ADAPTER)
        update = layer.get_delta_weight(layer.active_adapter[0])  # type: ignore[no-untyped-call]
        return f"{name}.{layer.parameter_name}", layer.get_param() + update  # type: ignore[no-untyped-call]
    # peft merges in place, and the adapter must stay apart to be trained further.
    merged = copy.deepcopy(layer)
    merged.merge()
    return f"{name}.weight", merged.get_base_layer().get_parameter("weight")


def _find_targets(
    model: PreTrainedModel, family: ModelFamily, targets: Sequence[LoraTarget]
) -> tuple[list[str], list[str]]:
    """Return regular expressions of the layers to adapt, and ends of the names of parameters to adapt.

    Raises:
        UserError: the model has no layer of a target.
    """
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    patterns: dict[LoraTarget, str] = {}
    for target, pattern in family.lora_layers.items():
        if any(re.fullmatch(pattern, name) for name in modules):
            patterns[target] = pattern
    ends_of: dict[LoraTarget, tuple[str, ...]] = {}
    for target, ends in family.lora_parameters.items():
        if any(name.endswith(ends) for name in parameters):
            ends_of[target] = ends
    for target in targets:
        if target not in {*patterns, *ends_of}:
            known = ", ".join(sorted({*patterns, *ends_of}))
            raise UserError(f"model.lora.targets: this {family.model_type} has no layer of {target}; it has {known}")
    adapted = [end for target in targets for end in ends_of.get(target, ())]
    return [patterns[target] for target in targets if target in patterns], adapted
