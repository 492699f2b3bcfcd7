"""DeepSpeed's ZeRO behind the engine's port: one sharded model for a run, with an optimizer anew for each stage.

DeepSpeed divides a gradient by the number of ranks, so losses are multiplied by it. States are given and taken whole,
as `TorchEngine` has them, so a checkpoint of one engine and number of ranks fits any other.
"""

from __future__ import annotations

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
from mmrl.policy.qwen_vl import Policy, loss_gradient

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK_ELEMENTS = 100_000_000


class DeepspeedModel:
    """A policy whose model DeepSpeed runs; the `Runner` of its calls."""

    def __init__(self, policy: Policy, options: DeepspeedConfig, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        self.parameters_by_component = policy.trained_by_component
        self._model: nn.Module = policy.model
        self._is_gathered = False
        __compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at this very moment
        groups: list[dict[str, Any]] = [
            {"params": own, "role": role, "matrices": matrices, "lr": 0.0}
            for role, parameters in self.parameters_by_component.items()
            for matrices in (True, False)
            if (own := [p for p in parameters if (p.ndim > 1) is matrices])
        ]
        self.ordered_parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        exact = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        optimizer = torch.optim.AdamW(groups, fused=True)
        config, dtype = _deepspeed_config(options, self._model.dtype, ranks.size), self._model.dtype
        if options.zero_stage == 3:
            for parameter in self._model.parameters():
                parameter.data = parameter.data.to(dtype)
            # One weight after the other goes to the device and is divided there: `initialize` would take all at once.
            deepspeed.init_distributed(dist_init_required=False)
            deepspeed.zero.Init(module=self._model, config_dict_or_path=config, dtype=dtype)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self._model, optimizer=optimizer, config=config, dist_init_required=False
        )
        for name, buffer in self._model.named_buffers():  # bfloat16 is too coarse for the angles of positions
            buffer.data = exact[name].to(self.engine.device)
        self._init_moments()
        policy.set_sharded_forward(self)

    def __call__(self, **arguments: object) -> Any:  # noqa: ANN401  (transformers' ModelOutput)
        """The model's forward, by DeepSpeed unless the model is whole."""
        return self._model(**arguments) if self._is_gathered else self.engine(**arguments)

    @contextmanager
    def gather_all(self) -> Iterator[None]:
        """Gather every weight, and leave out DeepSpeed's hooks, which would part with them layer by layer."""
        if self.options.zero_stage < 3 or self._is_gathered:
            with self._bypass_engine():
                yield
            return
        offload = self.optimizer.parameter_offload
        offload.partition_all_parameters()
        with deepspeed.zero.GatheredParameters(list(self._model.parameters())):
            offload._remove_module_hooks()
            with self._bypass_engine():
                yield
            offload.forward_hooks, offload.backward_hooks = [], []
            offload.setup_zero_stage3_hooks()

    @contextmanager
    def gather_params(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Gather these weights alone; all ranks together."""
        if self.options.zero_stage < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def local_shard(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """This rank's part of the weights, each whole, in its host memory."""
        return self._gather_to_host(parameters, balanced_range([_numel(p) for p in parameters.values()], self.ranks))

    def iter_params(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights one after the other, each whole while it is looked at; every rank must look at all."""
        for chunk in _chunk_parameters(parameters.items(), _CHUNK_ELEMENTS):
            with self.gather_params([parameter for _, parameter in chunk]):
                yield from chunk

    def compute_gradient(
        self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """A gradient that no update takes; under ZeRO-3 this rank's pieces of it."""
        if self.options.zero_stage < 3:
            with self._bypass_engine():
                return loss_gradient(loss(), parameters)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(loss(), scale_wrt_gas=False)
        pieces = [safe_get_local_grad(parameter).clone() for parameter in parameters]
        self.optimizer.zero_grad()
        return pieces

    def create_stage_engine(self, options: OptimizerConfig) -> DeepspeedEngine:
        """The engine of a stage: moments, rates and bounds anew."""
        return DeepspeedEngine(self, options)

    def unwrap(self, policy: Policy) -> None:
        """Back to an ordinary model, whole in the first rank's memory and empty elsewhere; DeepSpeed's work is done."""
        names = dict(self._model.named_parameters())
        weights = self._gather_to_host(names, range(0 if self.ranks.rank else len(names)))
        self.engine.destroy()
        fresh = {
            id(parameter): nn.Parameter(weights.get(name, torch.empty(0)), requires_grad=parameter.requires_grad)
            for name, parameter in names.items()
        }
        for module in self._model.modules():
            own = {name: None if p is None else fresh[id(p)] for name, p in dict.items(module._parameters)}
            module._parameters = own
        policy.set_sharded_forward(None)

    def _gather_to_host(self, parameters: Mapping[str, nn.Parameter], places: range) -> dict[str, torch.Tensor]:
        """The weights at these places, gathered a few at a time."""
        every = enumerate(self.iter_params(parameters))
        return {name: _copy_to_host(tensor) for place, (name, tensor) in every if place in places}

    @contextmanager
    def _bypass_engine(self) -> Iterator[None]:
        before, self._is_gathered = self._is_gathered, True
        try:
            yield
        finally:
            self._is_gathered = before

    @property
    def low_precision_parameters(self) -> list[nn.Parameter]:
        """Trained parameters that are not float32, so that they have masters."""
        return [
            p for parameters in self.parameters_by_component.values() for p in parameters if p.dtype != torch.float32
        ]

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What this rank has of a gradient; of an undivided one, all."""
        if not self.options.zero_stage:
            return parameter.grad
        piece: torch.Tensor | None
        if self.options.zero_stage == 3:
            piece = safe_get_local_grad(parameter)
        else:
            held: Any = parameter
            mapping = held._hp_mapping  # None where this rank has no part of it
            piece = mapping and mapping.get_lp_grad_fragment(held._index_in_param_group)
        return piece

    def full_optimizer_state(self, parameter: nn.Parameter, moment: str | None = None) -> torch.Tensor:
        """A moment of a parameter, or its float32 master, gathered from all ranks."""
        whole: torch.Tensor
        if not self.options.zero_stage:
            whole = self.optimizer.state[parameter][moment]  # it has no masters
        else:
            whole = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        return whole

    def set_optimizer_state(self, parameter: nn.Parameter, value: torch.Tensor, moment: str | None = None) -> None:
        """Take this rank's part of a whole moment, or of a master."""
        if self.options.zero_stage == 3:
            own = safe_get_local_optimizer_state(parameter, moment) if moment else safe_get_local_fp32_param(parameter)
            length, rank = own.numel(), self.ranks.rank
            value = pad(value.flatten(), (0, length * self.ranks.size - value.numel()))
            value = value[length * rank : length * (rank + 1)]
            set_moment, set_master = safe_set_local_optimizer_state, safe_set_local_fp32_param
        else:
            set_moment, set_master = safe_set_full_optimizer_state, safe_set_full_fp32_param
        if not self.options.zero_stage:
            self.optimizer.state[parameter][moment].copy_(value)
        elif moment:
            set_moment(parameter, value, moment)
        else:
            set_master(parameter, value)

    def update_count(self) -> float:
        """Updates since the moments began."""
        return float(next(iter(self.local_optimizer.state.values()))["step"])

    def set_update_count(self, count: float) -> None:
        """Count on from here."""
        for moments in self.local_optimizer.state.values():
            moments["step"].fill_(count)

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's pieces of the weights."""
        flat: torch.optim.Optimizer = self.optimizer.optimizer if self.options.zero_stage else self.optimizer
        return flat

    def _init_moments(self) -> None:
        """Moments of 0, as AdamW itself would make them at its first step: before it there is nothing to restore."""
        flat = self.local_optimizer
        pieces = [p for group in flat.param_groups for p in group["params"]]
        if self.options.zero_stage == 3:
            pieces = self.optimizer.fp32_partitioned_groups_flat
        for piece in pieces:
            moments = {moment: torch.zeros_like(piece) for moment in _MOMENTS}
            flat.state[piece] = {"step": torch.zeros((), device=piece.device), **moments}
        if self.options.zero_stage in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()


class DeepspeedEngine:
    """A stage's updates of a sharded model."""

    def __init__(self, model: DeepspeedModel, options: OptimizerConfig) -> None:
        self._model = model
        self._lr_scales: list[float] = []
        for group in model.optimizer.param_groups:
            kept = group["matrices"] or options.weight_decay_on == "all"
            group |= {"betas": options.betas, "weight_decay": options.weight_decay if kept else 0.0}
            self._lr_scales.append(options.component_lr(group["role"]) / options.lr)
        model.engine._config.gradient_clipping = options.max_grad_norm
        model.optimizer.clip_grad = options.max_grad_norm
        if (
            model.low_precision_parameters
        ):  # what masters hold beyond their weights is the last stage's, and in no checkpoint
            model.optimizer.refresh_fp32_params()
        self.reset()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; sums over ranks are complete after the `last`."""
        self._model.engine.set_gradient_accumulation_boundary(last)
        self._model.engine.backward(loss * self._model.ranks.size, scale_wrt_gas=False)

    def step(self, lr: float) -> dict[Component, float]:
        """Clip, update, and forget the gradients; returns the norm of each role's before clipping.

        A norm that is not finite leaves weights and optimizer untouched.
        """
        engine, optimizer = self._model.engine, self._model.optimizer
        norms = self._gradient_norms()
        for group, share in zip(optimizer.param_groups, self._lr_scales, strict=True):
            group["lr"] = lr * share
        if self._model.options.zero_stage or math.isfinite(math.hypot(*norms.values())):
            engine.step()  # ZeRO leaves out what is not finite by itself
        else:
            engine.zero_grad()
        return norms

    def reset(self) -> None:
        """Drop the moments, as if the stage began here."""
        for moments in self._model.local_optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()

    def state(self) -> dict[str, dict[int, Any]]:
        """What `TorchEngine` would have: of this rank's part, whole; all ranks must ask."""
        sharded, steps = self._model, self._model.update_count()
        own = balanced_range([_numel(parameter) for parameter in sharded.ordered_parameters], sharded.ranks)
        moments, masters = {}, {}
        for place, parameter in enumerate(sharded.ordered_parameters):
            whole = {name: sharded.full_optimizer_state(parameter, name) for name in _MOMENTS if steps}
            master = None if parameter.dtype == torch.float32 else sharded.full_optimizer_state(parameter)
            if place in own and steps:
                moments[place] = {
                    "step": torch.tensor(steps),
                    **{name: _copy_to_host(whole[name]) for name in _MOMENTS},
                }
            if place in own and master is not None:
                masters[place] = _copy_to_host(master)
        return {"moments": moments, "masters": masters}

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the `state()` of all ranks, of which each takes its own pieces."""
        sharded = self._model
        for place, moments in state["moments"].items():
            for name in _MOMENTS:
                sharded.set_optimizer_state(sharded.ordered_parameters[place], moments[name], name)
            sharded.set_update_count(float(moments["step"]))
        for place, master in state["masters"].items():
            sharded.set_optimizer_state(sharded.ordered_parameters[place], master)

    def _gradient_norms(self) -> dict[Component, float]:
        """Every rank adds up its own pieces of the gradient, unless it has all of it."""
        sharded = self._model
        squares = torch.zeros(len(sharded.parameters_by_component), dtype=torch.float64)
        for index, parameters in enumerate(sharded.parameters_by_component.values()):
            pieces = [sharded.local_gradient(parameter) for parameter in parameters]
            squares[index] = sum(float(piece.float().square().sum()) for piece in pieces if piece is not None)
        if sharded.options.zero_stage:
            sharded.ranks.all_reduce([squares])
        return dict(zip(sharded.parameters_by_component, squares.sqrt().tolist(), strict=True))


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _chunk_parameters(
    named: Iterable[tuple[str, nn.Parameter]], max_elements: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters in a row, so many that together they have at most `elements`, but at least one."""
    chunk: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        if chunk and sum(_numel(p) for _, p in chunk) + _numel(parameter) > max_elements:
            yield chunk
            chunk = []
        chunk.append((name, parameter))
    if chunk:
        yield chunk


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _deepspeed_config(options: DeepspeedConfig, dtype: torch.dtype, num_ranks: int) -> dict[str, Any]:
    """DeepSpeed's own configuration. What it would do by the micro-batch, the engine does by the step."""
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
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": num_ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,  # a stage sets its own
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled
    }
