"""The three parts of a Qwen-VL model: which parameter belongs to which, what is trained, what is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from mmrl.config.schema import COMPONENTS, Component


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSummary:
    """What a model has of one role: tensors, parameters, how many of these are trained, and in which types."""

    component: Component
    num_tensors: int
    num_parameters: int
    num_trained: int
    dtypes: tuple[str, ...]


def component_of(parameter_name: str) -> Component:
    """Whether a parameter belongs to the vision tower, the projector (its merger) or the language model."""
    if ".visual." not in f".{parameter_name}":
        return "language"
    return "projector" if "merger" in parameter_name else "vision"


def summarize_components(model: nn.Module) -> list[ComponentSummary]:
    """Every parameter counted once, under its role; tied ones where they come first."""
    named = list(model.named_parameters())
    counts = []
    for role in COMPONENTS:
        own = [parameter for name, parameter in named if component_of(name) == role]
        counts.append(
            ComponentSummary(
                component=role,
                num_tensors=len(own),
                num_parameters=sum(parameter.numel() for parameter in own),
                num_trained=sum(parameter.numel() for parameter in own if parameter.requires_grad),
                dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in own})),
            )
        )
    return counts


def enable_gradient_checkpointing(model: PreTrainedModel, components: Sequence[Literal["vision", "language"]]) -> None:
    """Keep only the inputs of these roles' blocks, and run the blocks again in the backward pass."""
    parts = {"vision": model.model.visual, "language": model.model.language_model}
    for role in components:
        # Reentrant checkpointing would pass no gradient on where the inputs of a block need none.
        parts[role].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
