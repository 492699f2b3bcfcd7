"""The components of a model (vision tower, projector, language model): their parameters, and activation recomputing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mmrl.config.schema import COMPONENTS, Component
from mmrl.policy.families import ModelFamily, get_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSummary:
    """Sizes and data types of one component's parameters."""

    component: Component
    num_tensors: int
    """Parameter tensors."""
    num_parameters: int
    """Numbers in these tensors."""
    num_trained: int
    """Numbers in those of them that are trained."""
    dtypes: tuple[str, ...]
    """Data types of the tensors, such as `bfloat16`, in alphabetical order."""


def summarize_components(model: PreTrainedModel, family: ModelFamily | None = None) -> list[ComponentSummary]:
    """Count the parameters of each component, each parameter once; a tied one counts where it comes first.

    Args:
        model: the model, with or without adapters.
        family: its family; None for the built-in family of its config.
    """
    family = family or get_family(model.config)
    summaries = []
    for component in COMPONENTS:
        parameters = [
            parameter for name, parameter in model.named_parameters() if family.component_of(name) == component
        ]
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
        summaries.append(
            ComponentSummary(
                component=component,
                num_tensors=len(parameters),
                num_parameters=sum(parameter.numel() for parameter in parameters),
                num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                dtypes=tuple(sorted(dtypes)),
            )
        )
    return summaries


def enable_gradient_checkpointing(
    model: PreTrainedModel, components: Sequence[Literal["vision", "language"]], family: ModelFamily | None = None
) -> None:
    """Keep only the inputs of the blocks of these components, and run the blocks again in the backward pass.

    Args:
        model: the model; changed in place.
        components: the components whose activations are recomputed.
        family: its family; None for the built-in family of its config.
    """
    family = family or get_family(model.config)
    modules: dict[str, Any] = {
        "vision": family.get_vision_module(model),
        "language": family.get_language_module(model),
    }
    for component in components:
        # Reentrant checkpointing passes no gradient on where the inputs of a block need none: below an adapter, say.
        modules[component].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
