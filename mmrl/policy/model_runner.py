"""Everything that a policy asks of its model and that DeepSpeed does in another way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmrl.distributed.ranks import Ranks, balanced_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelRunner:
    """Calls a model and reads its weights, which this process holds whole.

    `mmrl.learner.optimizer_deepspeed.DeepspeedModel` does the same for weights that may be sharded over ranks; then
    every call is collective.
    """

    uses_deepspeed = False  # if so, ranks must run the same layers, and copies of the model need care

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, **arguments: object) -> Any:  # noqa: ANN401  (transformers' ModelOutput)
        """Return the output of the model's forward."""
        return self.model(**arguments)

    def gather_all(self) -> AbstractContextManager[None]:
        """Hold the whole model on every rank inside this block; each rank may then call it on its own."""
        return nullcontext()

    def gather_params(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Hold these weights whole on every rank inside this block."""
        return nullcontext()

    def copy_model(self, shared: Iterable[nn.Parameter]) -> PreTrainedModel:
        """Return a copy of the model that shares these of its weights."""
        # `deepcopy` takes what its memo holds as already copied.
        return copy.deepcopy(self.model, {id(parameter): parameter for parameter in shared})

    def iter_params(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights one by one in full shape, each valid until the next one. All ranks must take all of them."""
        yield from parameters.items()

    def local_shard(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> dict[str, torch.Tensor]:
        """Return this rank's share of the weights by name, each in its full shape."""
        share = balanced_range(list(map(torch.numel, parameters.values())), ranks)
        return dict(list(parameters.items())[share.start : share.stop])

    def compute_gradient(
        self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """Return the gradient of a scalar loss in each parameter, in its shape and dtype; no update uses it.

        If the weights are sharded, return this rank's piece of each gradient, [elements].
        """
        # Zeros where the loss does not depend on the parameter, such as the vision tower's without an image.
        return list(torch.autograd.grad(loss(), parameters, materialize_grads=True))
