"""Plain torch: AdamW, a global gradient clip, and float32 master weights where the model is narrower.

Every rank has the whole model and makes the same update, from gradients summed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmrl.config.schema import Component, OptimizerConfig
from mmrl.distributed.ranks import Ranks, SingleProcess, balanced_range


class TorchEngine:
    """Accumulates gradients and steps. A bfloat16 weight cannot hold an update of 1e-6, hence the masters."""

    def __init__(
        self,
        parameters: Mapping[Component, Sequence[nn.Parameter]],
        options: OptimizerConfig,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or SingleProcess()
        self._parameters = [parameter for own in parameters.values() for parameter in own]
        self._masters_by_component = {
            role: [_master_weight(parameter) for parameter in own] for role, own in parameters.items()
        }
        self._masters = [master for own in self._masters_by_component.values() for master in own]
        self._max_grad_norm = options.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            list(self._parameter_groups(options)), lr=options.lr, betas=options.betas, fused=True
        )

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Add the gradient of `loss`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float) -> dict[Component, float]:
        """Clip, update, and forget the gradients; returns the norm of each role's before clipping.

        `lr` is the stage's rate at this step, of which a role with a rate of its own takes its share. A norm that is
        not finite leaves weights and optimizer untouched.
        """
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        self._all_reduce_gradients()
        norms = {role: _gradient_norm(masters) for role, masters in self._masters_by_component.items()}
        total = math.hypot(*norms.values())
        if math.isfinite(total):
            nn.utils.clip_grads_with_norm_(self._masters, self._max_grad_norm, torch.tensor(total))
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["share"]
            self._optimizer.step()
            self._copy_masters_to_model()
        self._optimizer.zero_grad(set_to_none=True)
        return norms

    def reset(self) -> None:
        """Drop the moments, as if the stage began here."""
        self._optimizer.state.clear()

    def state(self) -> dict[str, dict[int, Any]]:
        """What a checkpoint keeps of this rank's part: the moments of each weight, and its master where it has one.

        By the weight's place in AdamW's groups.
        """
        moments, ordered = self._optimizer.state_dict()["state"], self._ordered_masters
        own = balanced_range([master.numel() for master in ordered], self._ranks)
        narrow = {id(m) for m, p in zip(self._masters, self._parameters, strict=True) if m is not p}
        return {
            "moments": {place: moments[place] for place in own if place in moments},
            "masters": {place: ordered[place] for place in own if id(ordered[place]) in narrow},
        }

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the `state()` of all ranks."""
        groups = self._optimizer.state_dict()["param_groups"]  # the stage's own, not what was written down of them
        self._optimizer.load_state_dict({"state": dict(state["moments"]), "param_groups": groups})
        ordered = self._ordered_masters
        with torch.no_grad():
            for place, master in state["masters"].items():
                ordered[place].copy_(master)
        self._copy_masters_to_model()

    @property
    def _ordered_masters(self) -> list[torch.Tensor]:
        return [master for group in self._optimizer.param_groups for master in group["params"]]

    def _parameter_groups(self, options: OptimizerConfig) -> Iterator[dict[str, Any]]:
        """By role, matrices apart from vectors."""
        for role, masters in self._masters_by_component.items():
            share = options.component_lr(role) / options.lr
            matrices = [master for master in masters if master.ndim > 1]
            vectors = [master for master in masters if master.ndim <= 1]
            kept = 0.0 if options.weight_decay_on == "matrices" else options.weight_decay
            yield {"params": matrices, "share": share, "weight_decay": options.weight_decay}
            yield {"params": vectors, "share": share, "weight_decay": kept}

    def _all_reduce_gradients(self) -> None:
        """A weight that nothing reached (the vision tower's, by text alone) has the gradient 0, here as under ZeRO."""
        gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in self._masters]
        self._ranks.all_reduce(gradients)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient

    @torch.no_grad()
    def _copy_masters_to_model(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)


def _master_weight(parameter: nn.Parameter) -> torch.Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()


def _gradient_norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(nn.utils.get_total_norm([tensor.grad for tensor in tensors if tensor.grad is not None]))
