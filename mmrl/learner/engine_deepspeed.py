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

from mmrl.config.schema import Deepspeed, Optimizer, Role
from mmrl.distributed.ranks import Ranks, even_part
from mmrl.policy.qwen_vl import Policy, gradient_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK_ELEMENTS = 100_000_000


class Sharded:
    """A policy whose model DeepSpeed runs; the `Runner` of its calls."""

    def __init__(self, policy: Policy, options: Deepspeed, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        self.parameters = policy.trainable
        self._model: nn.Module = policy.model
        self._is_whole = False
        __compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at this very moment
        groups: list[dict[str, Any]] = [
            {"params": own, "role": role, "matrices": matrices, "lr": 0.0}
            for role, parameters in self.parameters.items()
            for matrices in (True, False)
            if (own := [p for p in parameters if (p.ndim > 1) is matrices])
        ]
        self.ordered: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        exact = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        optimizer = torch.optim.AdamW(groups, fused=True)
        config, dtype = _config(options, self._model.dtype, ranks.size), self._model.dtype
        if options.zero == 3:
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
        self._begin_moments()
        policy.run_by(self)

    def __call__(self, **arguments: object) -> Any:  # noqa: ANN401  (transformers' ModelOutput)
        """The model's forward, by DeepSpeed unless the model is whole."""
        return self._model(**arguments) if self._is_whole else self.engine(**arguments)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather every weight, and leave out DeepSpeed's hooks, which would part with them layer by layer."""
        if self.options.zero < 3 or self._is_whole:
            with self._called_directly():
                yield
            return
        offload = self.optimizer.parameter_offload
        offload.partition_all_parameters()
        with deepspeed.zero.GatheredParameters(list(self._model.parameters())):
            offload._remove_module_hooks()
            with self._called_directly():
                yield
            offload.forward_hooks, offload.backward_hooks = [], []
            offload.setup_zero_stage3_hooks()

    @contextmanager
    def part(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Gather these weights alone; all ranks together."""
        if self.options.zero < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def collected(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """This rank's part of the weights, each whole, in its host memory."""
        return self._taken(parameters, even_part([_numel(p) for p in parameters.values()], self.ranks))

    def passed(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights one after the other, each whole while it is looked at; every rank must look at all."""
        for chunk in _chunks(parameters.items(), _CHUNK_ELEMENTS):
            with self.part([parameter for _, parameter in chunk]):
                yield from chunk

    def gradient(self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """A gradient that no update takes; under ZeRO-3 this rank's pieces of it."""
        if self.options.zero < 3:
            with self._called_directly():
                return gradient_of(loss(), parameters)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(loss(), scale_wrt_gas=False)
        pieces = [safe_get_local_grad(parameter).clone() for parameter in parameters]
        self.optimizer.zero_grad()
        return pieces

    def engine_of(self, options: Optimizer) -> DeepspeedEngine:
        """The engine of a stage: moments, rates and bounds anew."""
        return DeepspeedEngine(self, options)

    def dissolve(self, policy: Policy) -> None:
        """Back to an ordinary model, whole in the first rank's memory and empty elsewhere; DeepSpeed's work is done."""
        names = dict(self._model.named_parameters())
        weights = self._taken(names, range(0 if self.ranks.rank else len(names)))
        self.engine.destroy()
        fresh = {
            id(parameter): nn.Parameter(weights.get(name, torch.empty(0)), requires_grad=parameter.requires_grad)
            for name, parameter in names.items()
        }
        for module in self._model.modules():
            own = {name: None if p is None else fresh[id(p)] for name, p in dict.items(module._parameters)}
            module._parameters = own
        policy.run_by(None)

    def _taken(self, parameters: Mapping[str, nn.Parameter], own: range) -> dict[str, torch.Tensor]:
        """The weights at these places, gathered a few at a time."""
        every = enumerate(self.passed(parameters))
        return {name: _kept(tensor) for place, (name, tensor) in every if place in own}

    @contextmanager
    def _called_directly(self) -> Iterator[None]:
        before, self._is_whole = self._is_whole, True
        try:
            yield
        finally:
            self._is_whole = before

    @property
    def narrow(self) -> list[nn.Parameter]:
        """Trained parameters that are not float32, so that they have masters."""
        return [p for parameters in self.parameters.values() for p in parameters if p.dtype != torch.float32]

    def gradient_piece(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What this rank has of a gradient; of an undivided one, all."""
        if not self.options.zero:
            return parameter.grad
        piece: torch.Tensor | None
        if self.options.zero == 3:
            piece = safe_get_local_grad(parameter)
        else:
            held: Any = parameter
            mapping = held._hp_mapping  # None where this rank has no part of it
            piece = mapping and mapping.get_lp_grad_fragment(held._index_in_param_group)
        return piece

    def whole_state(self, parameter: nn.Parameter, moment: str | None = None) -> torch.Tensor:
        """A moment of a parameter, or its float32 master, gathered from all ranks."""
        whole: torch.Tensor
        if not self.options.zero:
            whole = self.optimizer.state[parameter][moment]  # it has no masters
        else:
            whole = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        return whole

    def set_state(self, parameter: nn.Parameter, value: torch.Tensor, moment: str | None = None) -> None:
        """Take this rank's part of a whole moment, or of a master."""
        if self.options.zero == 3:
            own = safe_get_local_optimizer_state(parameter, moment) if moment else safe_get_local_fp32_param(parameter)
            length, rank = own.numel(), self.ranks.rank
            value = pad(value.flatten(), (0, length * self.ranks.size - value.numel()))
            value = value[length * rank : length * (rank + 1)]
            set_moment, set_master = safe_set_local_optimizer_state, safe_set_local_fp32_param
        else:
            set_moment, set_master = safe_set_full_optimizer_state, safe_set_full_fp32_param
        if not self.options.zero:
            self.optimizer.state[parameter][moment].copy_(value)
        elif moment:
            set_moment(parameter, value, moment)
        else:
            set_master(parameter, value)

    def steps(self) -> float:
        """Updates since the moments began."""
        return float(next(iter(self.flat_optimizer.state.values()))["step"])

    def set_steps(self, steps: float) -> None:
        """Count on from here."""
        for moments in self.flat_optimizer.state.values():
            moments["step"].fill_(steps)

    @property
    def flat_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's pieces of the weights."""
        flat: torch.optim.Optimizer = self.optimizer.optimizer if self.options.zero else self.optimizer
        return flat

    def _begin_moments(self) -> None:
        """Moments of 0, as AdamW itself would make them at its first step: before it there is nothing to restore."""
        flat = self.flat_optimizer
        pieces = [p for group in flat.param_groups for p in group["params"]]
        if self.options.zero == 3:
            pieces = self.optimizer.fp32_partitioned_groups_flat
        for piece in pieces:
            moments = {moment: torch.zeros_like(piece) for moment in _MOMENTS}
            flat.state[piece] = {"step": torch.zeros((), device=piece.device), **moments}
        if self.options.zero in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()


class DeepspeedEngine:
    """A stage's updates of a sharded model."""

    def __init__(self, sharded: Sharded, options: Optimizer) -> None:
        self._sharded = sharded
        self._shares: list[float] = []
        for group in sharded.optimizer.param_groups:
            kept = group["matrices"] or options.decayed == "all"
            group |= {"betas": options.betas, "weight_decay": options.weight_decay if kept else 0.0}
            self._shares.append(options.rate(group["role"]) / options.lr)
        sharded.engine._config.gradient_clipping = options.max_grad_norm
        sharded.optimizer.clip_grad = options.max_grad_norm
        if sharded.narrow:  # what masters hold beyond their weights is the last stage's, and in no checkpoint
            sharded.optimizer.refresh_fp32_params()
        self.forget()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; sums over ranks are complete after the `last`."""
        self._sharded.engine.set_gradient_accumulation_boundary(last)
        self._sharded.engine.backward(loss * self._sharded.ranks.size, scale_wrt_gas=False)

    def step(self, lr: float) -> dict[Role, float]:
        """Clip, update, and forget the gradients; returns the norm of each role's before clipping.

        A norm that is not finite leaves weights and optimizer untouched.
        """
        engine, optimizer = self._sharded.engine, self._sharded.optimizer
        norms = self._norms()
        for group, share in zip(optimizer.param_groups, self._shares, strict=True):
            group["lr"] = lr * share
        if self._sharded.options.zero or math.isfinite(math.hypot(*norms.values())):
            engine.step()  # ZeRO leaves out what is not finite by itself
        else:
            engine.zero_grad()
        return norms

    def forget(self) -> None:
        """Drop the moments, as if the stage began here."""
        for moments in self._sharded.flat_optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()

    def state(self) -> dict[str, dict[int, Any]]:
        """What `TorchEngine` would have: of this rank's part, whole; all ranks must ask."""
        sharded, steps = self._sharded, self._sharded.steps()
        own = even_part([_numel(parameter) for parameter in sharded.ordered], sharded.ranks)
        moments, masters = {}, {}
        for place, parameter in enumerate(sharded.ordered):
            whole = {name: sharded.whole_state(parameter, name) for name in _MOMENTS if steps}
            master = None if parameter.dtype == torch.float32 else sharded.whole_state(parameter)
            if place in own and steps:
                moments[place] = {"step": torch.tensor(steps), **{name: _kept(whole[name]) for name in _MOMENTS}}
            if place in own and master is not None:
                masters[place] = _kept(master)
        return {"moments": moments, "masters": masters}

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the `state()` of all ranks, of which each takes its own pieces."""
        sharded = self._sharded
        for place, moments in state["moments"].items():
            for name in _MOMENTS:
                sharded.set_state(sharded.ordered[place], moments[name], name)
            sharded.set_steps(float(moments["step"]))
        for place, master in state["masters"].items():
            sharded.set_state(sharded.ordered[place], master)

    def _norms(self) -> dict[Role, float]:
        """Every rank adds up its own pieces of the gradient, unless it has all of it."""
        sharded = self._sharded
        squares = torch.zeros(len(sharded.parameters), dtype=torch.float64)
        for index, parameters in enumerate(sharded.parameters.values()):
            pieces = [sharded.gradient_piece(parameter) for parameter in parameters]
            squares[index] = sum(float(piece.float().square().sum()) for piece in pieces if piece is not None)
        if sharded.options.zero:
            sharded.ranks.add([squares])
        return dict(zip(sharded.parameters, squares.sqrt().tolist(), strict=True))


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _chunks(named: Iterable[tuple[str, nn.Parameter]], elements: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters in a row, so many that together they have at most `elements`, but at least one."""
    chunk: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        if chunk and sum(_numel(p) for _, p in chunk) + _numel(parameter) > elements:
            yield chunk
            chunk = []
        chunk.append((name, parameter))
    if chunk:
        yield chunk


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _config(options: Deepspeed, dtype: torch.dtype, size: int) -> dict[str, Any]:
    """DeepSpeed's own configuration. What it would do by the micro-batch, the engine does by the step."""
    zero: dict[str, Any] = {
        "stage": options.zero,
        "reduce_bucket_size": options.bucket_elements,
        "allgather_bucket_size": options.bucket_elements,
        "contiguous_gradients": True,
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": options.bucket_elements // 10,
            "stage3_param_persistence_threshold": options.persistent_elements,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,  # a stage sets its own
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled
    }
