"""The interface of optimizers. `optimizer_torch` and `optimizer_deepspeed` implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from mmrl.config.schema import Component


class Optimizer(Protocol):
    """Turns losses into updates of the weights, for one stage. With several ranks, its methods are collective."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss; `last` marks the last one before `update`."""

    def update(self, lr: float) -> Mapping[Component, float]:
        """Clip the gradients, update the weights, and drop the gradients.

        `lr` is the rate of this update; a component with a rate of its own gets it scaled in proportion. If the norm of
        the gradient is not finite, weights and optimizer stay as they are.

        Returns:
            The norm of each component's gradient after summing it over ranks, before clipping.
        """

    def reset(self) -> None:
        """Drop the moments, as if the stage began here."""

    def state(self) -> dict[str, dict[int, Any]]:
        """Return this rank's share of the optimizer's checkpoint.

        By a weight's index among AdamW's groups: `moments`, and `masters` of weights that are not float32.
        """

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the merged `state()` of all ranks."""
