"""The optimizer of plain torch: AdamW, a global gradient clip, float32 master weights.

Every rank has the whole model and makes the same update, from gradients summed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmrl.config.schema import Component, OptimizerConfig
from mmrl.distributed.ranks import Ranks, SingleProcess, balanced_range
from mmrl.utils.torch_transfer import send


class TorchOptimizer:
    """Accumulates gradients and updates weights. Implements `Optimizer`.

    AdamW updates a float32 master of each weight that is not float32, and the weight is copied from it: an update of
    1e-6 would be lost in a bfloat16 weight.
    """

    def __init__(
        self,
        parameters_by_component: Mapping[Component, Sequence[nn.Parameter]],
        options: OptimizerConfig,
        ranks: Ranks | None = None,
    ) -> None:
        """Make a new optimizer for the trained weights of each component."""
        self._ranks = ranks or SingleProcess()
        self._parameters: list[nn.Parameter] = []
        self._masters: list[torch.Tensor] = []
        self._masters_by_component: dict[Component, list[torch.Tensor]] = {}
        vector_decay = 0.0 if options.weight_decay_on == "matrices" else options.weight_decay
        groups: list[dict[str, Any]] = []
        for component, parameters in parameters_by_component.items():
            masters: list[torch.Tensor] = []
            for parameter in parameters:
                masters.append(parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone())
            self._parameters += parameters
            self._masters += masters
            self._masters_by_component[component] = masters
            # The matrices of a component, then its vectors (norms and biases), which may be spared weight decay.
            lr_scale = options.component_lr(component) / options.lr
            matrices = [master for master in masters if master.ndim > 1]
            vectors = [master for master in masters if master.ndim <= 1]
            groups.append({"params": matrices, "lr_scale": lr_scale, "weight_decay": options.weight_decay})
            groups.append({"params": vectors, "lr_scale": lr_scale, "weight_decay": vector_decay})
        # In the order of AdamW's indices, which name weights in a checkpoint.
        self._ordered_masters: list[torch.Tensor] = [master for group in groups for master in group["params"]]
        self._max_grad_norm = options.max_grad_norm
        self._optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=True)

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Add the gradient of a scalar loss. `last` makes no difference: ranks sum gradients in `update`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, lr: float) -> dict[Component, float]:
        """Clip the gradients, update the weights and drop the gradients, as `Optimizer.update` says."""
        gradients = []
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
            if master.grad is None:
                # All ranks must sum the same list, so a missing gradient counts as zero, as under ZeRO: a text-only
                # batch leaves the vision tower without gradients.
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        self._ranks.all_reduce(gradients)
        component_norms = []
        for masters in self._masters_by_component.values():
            component_gradients = [master.grad for master in masters if master.grad is not None]
            component_norms.append(send(nn.utils.get_total_norm(component_gradients), gradients[0].device))
        # One transfer for all, because the CPU waits for each.
        norms = dict(zip(self._masters_by_component, torch.stack(component_norms).tolist(), strict=True))
        total = math.hypot(*norms.values())
        # One overflow would make every weight NaN.
        if math.isfinite(total):
            total_norm = send(torch.tensor(total), gradients[0].device)
            nn.utils.clip_grads_with_norm_(self._masters, self._max_grad_norm, total_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self._optimizer.step()
            self._copy_masters_to_model()
        self._optimizer.zero_grad(set_to_none=True)
        return norms

    def reset(self) -> None:
        """Drop the moments, as if the stage began here."""
        self._optimizer.state.clear()

    def state(self) -> dict[str, dict[int, Any]]:
        """Return this rank's share of the optimizer's checkpoint, as `Optimizer.state` says."""
        # Indices do not depend on the number of ranks, so a run may resume with another number of them.
        moments, ordered = self._optimizer.state_dict()["state"], self._ordered_masters
        share = balanced_range(list(map(torch.numel, ordered)), self._ranks)
        pairs = zip(self._masters, self._parameters, strict=True)
        copied = {id(master) for master, parameter in pairs if master is not parameter}
        return {
            "moments": {index: moments[index] for index in share if index in moments},
            "masters": {index: ordered[index] for index in share if id(ordered[index]) in copied},
        }

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the merged `state()` of all ranks."""
        # Groups hold learning rates and weight decay, which come from the stage, not from the checkpoint.
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": dict(state["moments"]), "param_groups": groups})
        with torch.no_grad():
            for index, master in state["masters"].items():
                self._ordered_masters[index].copy_(master)
        self._copy_masters_to_model()

    @torch.no_grad()
    def _copy_masters_to_model(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
