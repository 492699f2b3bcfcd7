"""DeepSpeed's ZeRO: one sharded model for a run, with a new optimizer for each stage.

DeepSpeed divides gradients by the number of ranks, so losses are multiplied by it. A checkpoint holds whole moments and
masters, as `TorchOptimizer` has them, so any optimizer and any number of ranks can load it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn
from torch.nn.functional import pad

from mmrl.config.schema import Component, DeepspeedConfig, OptimizerConfig
from mmrl.distributed.ranks import Ranks, balanced_range
from mmrl.policy.model_runner import ModelRunner
from mmrl.policy.policy import PolicyModel

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK_ELEMENTS = 100_000_000  # elements gathered at a time during export: 200 MB of bfloat16 weights


class DeepspeedModel(ModelRunner):
    """A policy's model run by DeepSpeed. The policy then calls its model through this object."""

    uses_deepspeed = True

    def __init__(self, policy: PolicyModel, options: DeepspeedConfig, ranks: Ranks) -> None:
        """Hand the model of a policy to DeepSpeed. Collective."""
        super().__init__(policy.model)
        self.options = options
        self.ranks = ranks
        self.parameters_by_component = policy.trained_by_component
        self._is_gathered = False
        # DeepSpeed would compile its shared-memory collectives at this moment, which needs a compiler.
        __compatible_ops__["deepspeed_shm_comm"] = False
        groups = list(_parameter_groups(self.parameters_by_component))
        self.ordered_parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        exact_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        optimizer = torch.optim.AdamW(groups, fused=True)
        config, dtype = _deepspeed_config(options, self.model.dtype, ranks.size), self.model.dtype
        if options.zero_stage == 3:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(dtype)
            # Weights go to the device and are sharded one by one; `initialize` would move the whole model there first.
            deepspeed.init_distributed(dist_init_required=False)
            deepspeed.zero.Init(module=self.model, config_dict_or_path=config, dtype=dtype)
        self.deepspeed_engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=config, dist_init_required=False
        )
        # DeepSpeed converts buffers too, and bfloat16 is too coarse for the frequencies of rotary positions.
        for name, buffer in self.model.named_buffers():
            buffer.data = exact_buffers[name].to(self.deepspeed_engine.device)
        self.local_optimizer: torch.optim.Optimizer = self.optimizer.optimizer if options.zero_stage else self.optimizer
        """AdamW over this rank's pieces of the weights."""
        self._init_moments()
        policy.runner = self

    def __call__(self, **arguments: object) -> Any:  # noqa: ANN401  (transformers' ModelOutput)
        """Call the model through DeepSpeed's engine, or directly while it is gathered."""
        return self.model(**arguments) if self._is_gathered else self.deepspeed_engine(**arguments)

    @contextmanager
    def gather_all(self) -> Iterator[None]:
        """Gather all weights in full on every rank inside this block."""
        if self.options.zero_stage < 3 or self._is_gathered:
            with self._bypass_deepspeed():
                yield
            return
        # DeepSpeed's hooks are removed meanwhile: they would release the weights of each layer after its forward.
        offload = self.optimizer.parameter_offload
        offload.partition_all_parameters()
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            offload._remove_module_hooks()
            try:
                with self._bypass_deepspeed():
                    yield
            finally:
                offload.forward_hooks, offload.backward_hooks = [], []
                offload.setup_zero_stage3_hooks()

    @contextmanager
    def gather_params(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Gather these weights in full on every rank inside this block. Collective."""
        if self.options.zero_stage < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def copy_model(self, shared: Iterable[nn.Parameter]) -> nn.Module:
        """Return a whole copy of the model on each rank; it shares no weights. Collective."""
        with self.gather_all():
            model: nn.Module = copy.deepcopy(self.model)
        # DeepSpeed's hooks would gather the weights of this ordinary copy. So would its dictionary of parameters, which
        # gathers each weight that is read from it.
        for module in model.modules():
            module._parameters = dict(dict.items(module._parameters))
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
                hooks.clear()
        return model

    def local_shard(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> dict[str, torch.Tensor]:
        """Return this rank's share of the weights, each in its full shape, in CPU memory. Collective."""
        sizes = list(map(_numel, parameters.values()))
        return self._gather_to_host(parameters, balanced_range(sizes, ranks))

    def iter_params(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights in full shape, each valid until the next one. Collective: every rank must take all of them."""
        # In chunks: each gathering waits for all ranks, and all weights at a time might not fit into memory.
        chunks: list[dict[str, nn.Parameter]] = []
        num_elements = 0
        for name, parameter in parameters.items():
            num_elements += _numel(parameter)
            if not chunks or num_elements > _CHUNK_ELEMENTS:
                chunks.append({})
                num_elements = _numel(parameter)
            chunks[-1][name] = parameter
        for chunk in chunks:
            with self.gather_params(list(chunk.values())):
                yield from chunk.items()

    def compute_gradient(
        self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """Return the gradient of a scalar loss, or under ZeRO-3 this rank's pieces of it. No update uses it."""
        if self.options.zero_stage < 3:
            with self._bypass_deepspeed():
                return super().compute_gradient(loss, parameters)
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)
        self.deepspeed_engine.backward(loss(), scale_wrt_gas=False)
        pieces = [safe_get_local_grad(parameter).clone() for parameter in parameters]
        self.optimizer.zero_grad()
        return pieces

    def unwrap(self, policy: PolicyModel) -> None:
        """Take the model back from DeepSpeed, in full on rank 0 and with empty weights on the others."""
        parameters = dict(self.model.named_parameters())
        weights = self._gather_to_host(parameters, range(0 if self.ranks.rank else len(parameters)))
        self.deepspeed_engine.destroy()
        # By identity, so that tied weights stay one parameter.
        plain: dict[int, nn.Parameter] = {}
        for name, parameter in parameters.items():
            weight = weights.get(name, torch.empty(0))
            plain[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        for module in self.model.modules():
            registry: dict[str, nn.Parameter | None] = {}
            for name, registered in dict.items(module._parameters):
                registry[name] = None if registered is None else plain[id(registered)]
            module._parameters = registry
        policy.runner = ModelRunner(policy.model)

    def _gather_to_host(self, parameters: Mapping[str, nn.Parameter], indices: range) -> dict[str, torch.Tensor]:
        """Return copies of the weights at these indices. Gathers all, a few at a time: other ranks keep others."""
        weights = {}
        for index, (name, tensor) in enumerate(self.iter_params(parameters)):
            if index in indices:
                # A clone, because the next round of the loop frees the gathered weight.
                weights[name] = tensor.detach().cpu().clone()
        return weights

    @contextmanager
    def _bypass_deepspeed(self) -> Iterator[None]:
        before, self._is_gathered = self._is_gathered, True
        try:
            yield
        finally:
            self._is_gathered = before

    def full_optimizer_state(self, parameter: nn.Parameter, moment: str | None = None) -> torch.Tensor:
        """Return a parameter's moment, or with None its master, from all ranks: float32 in the parameter's shape."""
        whole: torch.Tensor
        if not self.options.zero_stage:
            # Without ZeRO, DeepSpeed keeps no masters.
            whole = self.optimizer.state[parameter][moment]
        else:
            whole = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        return whole

    def set_optimizer_state(self, parameter: nn.Parameter, value: torch.Tensor, moment: str | None = None) -> None:
        """Set a parameter's moment, or with None its float32 master, from a value in the parameter's shape.

        Each rank keeps its piece.
        """
        if not self.options.zero_stage:
            # Without ZeRO, DeepSpeed keeps no masters.
            self.optimizer.state[parameter][moment].copy_(value)
        elif self.options.zero_stage < 3:
            if moment:
                safe_set_full_optimizer_state(parameter, value, moment)
            else:
                safe_set_full_fp32_param(parameter, value)
        else:
            part = safe_get_local_optimizer_state(parameter, moment) if moment else safe_get_local_fp32_param(parameter)
            # ZeRO-3 pads the flattened weight so that all ranks have pieces of one length.
            padded = pad(value.flatten(), (0, part.numel() * self.ranks.size - value.numel()))
            piece = padded.view(self.ranks.size, part.numel())[self.ranks.rank]
            if moment:
                safe_set_local_optimizer_state(parameter, piece, moment)
            else:
                safe_set_local_fp32_param(parameter, piece)

    def _init_moments(self) -> None:
        """Make moments of 0, as AdamW does in its first update, because a checkpoint is restored before that."""
        optimizer = self.local_optimizer
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        if self.options.zero_stage == 3:
            pieces = self.optimizer.fp32_partitioned_groups_flat
        for piece in pieces:
            moments = {moment: torch.zeros_like(piece) for moment in _MOMENTS}
            optimizer.state[piece] = {"step": torch.zeros((), device=piece.device), **moments}
        if self.options.zero_stage in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()


class DeepspeedOptimizer:
    """Accumulates gradients and updates a sharded model during one stage. Implements `Optimizer`."""

    def __init__(self, model: DeepspeedModel, options: OptimizerConfig) -> None:
        """Set moments to 0, and take learning rates, weight decay and gradient clipping from `options`."""
        self._model = model
        self._lr_scales: list[float] = []
        for group in model.optimizer.param_groups:
            decays = group["matrices"] or options.weight_decay_on == "all"
            group |= {"betas": options.betas, "weight_decay": options.weight_decay if decays else 0.0}
            # A component frozen in this stage keeps its groups. It gets no gradient; a rate of 0 stops weight decay.
            is_trained = model.parameters_by_component[group["component"]][0].requires_grad
            self._lr_scales.append(options.component_lr(group["component"]) / options.lr if is_trained else 0.0)
        model.deepspeed_engine._config.gradient_clipping = options.max_grad_norm
        model.optimizer.clip_grad = options.max_grad_norm
        # Masters still hold the last stage's extra digits. A checkpoint between stages has no masters, so a run that is
        # not interrupted must drop them too.
        if any(parameter.dtype != torch.float32 for parameter in model.ordered_parameters):
            model.optimizer.refresh_fp32_params()
        # Offloaded gradients outlive their update. If this stage freezes a component, its last gradients would count in
        # every norm, and so in the clipping of the other components.
        if model.options.offload_optimizer and model.options.zero_stage < 3:
            model.optimizer.norm_for_param_grads.clear()
            for piece in model.optimizer.single_partition_of_fp32_groups:
                if piece.grad is not None:
                    piece.grad.zero_()
        self.reset()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss; sums over ranks are complete after the `last` one of an update."""
        self._model.deepspeed_engine.set_gradient_accumulation_boundary(last)
        self._model.deepspeed_engine.backward(loss * self._model.ranks.size, scale_wrt_gas=False)

    def update(self, lr: float) -> dict[Component, float]:
        """Clip the gradients, update the weights and drop the gradients, as `Optimizer.update` says."""
        model, optimizer = self._model, self._model.optimizer
        device_squares = []
        for parameters in model.parameters_by_component.values():
            square = torch.zeros((), dtype=torch.float64, device=model.deepspeed_engine.device)
            for parameter in parameters:
                piece = self._local_gradient(parameter)
                if piece is not None:
                    square += piece.float().square().sum()
            device_squares.append(square)
        # One transfer for all, because the CPU waits for each.
        squares = torch.stack(device_squares).cpu()
        # Under ZeRO each rank has squared its pieces alone; without it every rank has the whole gradient.
        if model.options.zero_stage:
            model.ranks.all_reduce([squares])
        norms = dict(zip(model.parameters_by_component, squares.sqrt().tolist(), strict=True))
        for group, lr_scale in zip(optimizer.param_groups, self._lr_scales, strict=True):
            group["lr"] = lr * lr_scale
        if model.options.zero_stage or math.isfinite(math.hypot(*norms.values())):
            # ZeRO skips an update by itself when a gradient is not finite; stage 0 does not.
            model.deepspeed_engine.step()
        else:
            model.deepspeed_engine.zero_grad()
        return norms

    def reset(self) -> None:
        """Drop the moments, as if the stage began here."""
        for moments in self._model.local_optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()

    def state(self) -> dict[str, dict[int, Any]]:
        """Return this rank's share of the optimizer's checkpoint, as `Optimizer.state` says."""
        model = self._model
        num_updates = float(next(iter(model.local_optimizer.state.values()))["step"])
        share = balanced_range(list(map(_numel, model.ordered_parameters)), model.ranks)
        moments, masters = {}, {}
        # Every rank takes part in gathering the state of every weight, and keeps its own share.
        for index, parameter in enumerate(model.ordered_parameters):
            # ZeRO-3 gives no state of a weight that the stage freezes: its moments are 0, and its master is the weight.
            if not parameter.requires_grad:
                continue
            whole = {name: model.full_optimizer_state(parameter, name) for name in _MOMENTS if num_updates}
            master = None if parameter.dtype == torch.float32 else model.full_optimizer_state(parameter)
            if index in share and num_updates:
                copies = {name: whole[name].detach().cpu().clone() for name in _MOMENTS}
                moments[index] = {"step": torch.tensor(num_updates), **copies}
            if index in share and master is not None:
                masters[index] = master.detach().cpu().clone()
        return {"moments": moments, "masters": masters}

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the merged `state()` of all ranks; this rank keeps its pieces of it."""
        model = self._model
        for index, moments in state["moments"].items():
            for name in _MOMENTS:
                model.set_optimizer_state(model.ordered_parameters[index], moments[name], name)
            # AdamW's bias correction depends on the number of updates, which DeepSpeed's setters leave as it is.
            for local_moments in model.local_optimizer.state.values():
                local_moments["step"].fill_(float(moments["step"]))
        for index, master in state["masters"].items():
            model.set_optimizer_state(model.ordered_parameters[index], master)

    def _local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's piece of a gradient, [elements]; without ZeRO the whole, in the shape of the parameter.

        None if this rank has no piece of it.
        """
        zero_stage = self._model.options.zero_stage
        if not zero_stage:
            return parameter.grad
        piece: torch.Tensor | None
        if zero_stage == 3:
            piece = safe_get_local_grad(parameter)
        else:
            annotated: Any = parameter
            # DeepSpeed's map from the parameter to the flat buffers of this rank; None if they hold nothing of it.
            mapping = annotated._hp_mapping
            piece = mapping and mapping.get_lp_grad_fragment(annotated._index_in_param_group)
        return piece


def _parameter_groups(parameters_by_component: Mapping[Component, Sequence[nn.Parameter]]) -> Iterator[dict[str, Any]]:
    """Yield AdamW's groups: the matrices of each component, then its vectors, without empty groups.

    A stage sets learning rate, betas and weight decay by a group's `component` and `matrices`.
    """
    for component, parameters in parameters_by_component.items():
        for matrices in (True, False):
            members = [parameter for parameter in parameters if (parameter.ndim > 1) is matrices]
            if members:
                yield {"params": members, "component": component, "matrices": matrices, "lr": 0.0}


def _numel(parameter: nn.Parameter) -> int:
    # A weight that ZeRO-3 has sharded is an empty tensor; `ds_numel` has its full size.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _deepspeed_config(options: DeepspeedConfig, dtype: torch.dtype, num_ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's own configuration."""
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "reduce_bucket_size": options.bucket_elements,
        "allgather_bucket_size": options.bucket_elements,
        "contiguous_gradients": True,
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": options.bucket_elements // 10,
            "stage3_param_persistence_threshold": options.param_persistence_elements,
        }
    return {
        # DeepSpeed requires equally many micro-batches in every update: it is given 1, and `backward` accumulates.
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": num_ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,  # each stage sets its own
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU optimizer has to be compiled first
    }
