"""One process, plain torch: AdamW, a global gradient clip, and float32 master weights where the model is narrower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmrl.config.schema import Optimizer


class TorchEngine:
    """Accumulates gradients and steps. A bfloat16 weight cannot hold an update of 1e-6, hence the masters."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: Optimizer) -> None:
        self._parameters = list(parameters)
        self._masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self._parameters]
        self._max_grad_norm = options.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay, fused=True
        )

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float) -> float:
        """Clip, update, and forget the gradients; returns the norm before clipping.

        A norm that is not finite leaves weights and optimizer untouched.
        """
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = float(nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm))
        if norm < float("inf"):
            self._optimizer.param_groups[0]["lr"] = lr
            self._optimizer.step()
            self._publish()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def forget(self) -> None:
        """Drop the moments, as if the stage began here."""
        self._optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: optimizer moments, and the masters where they are not the weights themselves."""
        masters = [m for m, p in zip(self._masters, self._parameters, strict=True) if m is not p]
        return {"optimizer": self._optimizer.state_dict(), "masters": masters}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self._optimizer.load_state_dict(state["optimizer"])
        saved = iter(state["masters"])
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                if master is not parameter:
                    master.copy_(next(saved))
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
