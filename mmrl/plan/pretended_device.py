"""A GPU that is only pretended: the code of a run runs on it, at any size, with a CPU build of torch.

A tensor on it has a shape and a dtype, but no memory, and nothing is computed. Tensors on the CPU stay what they are.
A mixture of both raises as on CUDA. Waits of the CPU for the device, and operators that a GPU would run, are reported
to a subclass.

Small tensors keep their values if these follow from values on the CPU, because code reads grids and lengths. An unknown
value, such as a sampled token, reads as 1, so a mask is true everywhere and a loss is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from mmrl.policy import gated_delta_net, shared_prefix_attention
from mmrl.types import UserError

_NAME = "gpu"
_MOST_VALUES = 2**18  # numbers of a tensor whose values are known: grids and ids of long rows, but no patches
_STAGED_BYTES = 2**16  # CUDA waits before it copies more than this out of memory that is not pinned

_Operator = Any  # torch gives operators no type
_Values = Any  # what operators take and return: tensors, numbers, lists of them
_kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # `register_device` fills it
# Operators by name, without overload.
_READS = {"_local_scalar_dense", "is_nonzero", "equal"}
# CUDA reads values before it can allocate these results.
_SIZED_BY_VALUES = {"nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive", "unique_dim"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class PretendedDevice(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """The device, made by `pretend_device`. A subclass may count what a GPU would be asked to do."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = torch.device(_NAME, 0)
        self._is_nested = False

    def synchronise(self) -> None:
        """Do nothing: the CPU waits for the device at the line that runs."""

    def count_call(self, func: _Operator, args: Sequence[Any], out: _Values) -> None:
        """Do nothing: an operator made `out` of `args`, perhaps as a view."""

    def flex_attention(self, *tensors: torch.Tensor, scale: float, **_: object) -> torch.Tensor:
        """Attend as compiled FlexAttention would, in one call; `tensors` are queries, keys and values."""
        return _attend(*tensors, scale=scale)

    def place(self, model: nn.Module) -> None:
        """Replace the weights of a model by tensors of their shapes on this device. Tied weights stay tied."""
        empty_like = cache(self._empty_like)  # torch hashes tensors by identity
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = tensor if tensor is None else empty_like(tensor)  # type: ignore[assignment]

    def read(self, tensor: _Values) -> _Values:
        """Return the values of a tensor on the CPU, in its shape; ones if they are unknown."""
        values = self._values_of(tensor)
        if values is None and isinstance(tensor, FakeTensor):
            # All places of a large tensor share one number, so that its copy on the CPU takes no memory.
            ones = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
            return ones.clone() if tensor.numel() <= _MOST_VALUES else ones
        return tensor if values is None else values

    def dispatch(
        self, func: _Operator, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Values:
        """Run an operator: as usual if it concerns only the CPU, else on the pretended device."""
        kwargs, name = kwargs or {}, func._overloadpacket.__name__
        if func is torch.ops.prim.device.default:
            return super().dispatch(func, types, args, kwargs)  # asked for more often than all others together
        leaves = list(_iter_leaves(*args, *kwargs.values()))
        target = next((leaf.type for leaf in leaves if isinstance(leaf, torch.device)), None)
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if not is_fake and target != _NAME:
            return _pin(args[0]) if name == "_pin_memory" else func(*args, **kwargs)
        if name in _READS:
            self.synchronise()
            return func(*map(self.read, args))
        is_mixed = not is_fake or not all(isinstance(tensor, FakeTensor) for tensor in _find_tensors(*args))
        if name in ("_to_copy", "copy_") and (target == "cpu" or is_mixed):
            return self._copy_across(func, args, kwargs, target)
        if name in ("cat", "stack") and not all(isinstance(tensor, FakeTensor) for tensor in args[0]):
            # Elsewhere, a tensor without dimensions may come from the CPU.
            raise RuntimeError(f"{func} needs all tensors on the device {self.device}")
        if name in _INDEXING:
            args = (args[0], self._index_by_numbers(args[1]), *args[2:])
        is_repeat = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _SIZED_BY_VALUES or is_repeat:
            self.synchronise()
            is_known = all(self._values_of(tensor) is not None for tensor in _find_tensors(*leaves))
            values = func(*tree_map_only(torch.Tensor, self.read, args), **kwargs)
            out = tree_map_only(torch.Tensor, partial(self._place_values, is_known=is_known), values)
        else:
            # torch would derive the shape of a tensor that is given.
            is_given = "out" in kwargs and not is_mixed
            out = kwargs["out"] if is_given else self._derive(func, types, args, kwargs)
            if self._is_nested:
                return out
            if any(tensor.device.type != _NAME for tensor in _find_tensors(out)):
                raise RuntimeError(f"{func} reads a tensor of the CPU by indices on the device {self.device}")
            self._carry_values(func, args, kwargs, out)
        self.count_call(func, args, out)
        return out

    def _derive(self, func: _Operator, types: Sequence[type], args: _Values, kwargs: Mapping[str, Any]) -> _Values:
        """Return what an operator makes, by shape. To derive some shapes, torch runs operators that a GPU does not."""
        is_nested, self._is_nested = self._is_nested, True
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self._is_nested = is_nested

    def _copy_across(
        self, func: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any], target: str | None
    ) -> torch.Tensor:
        """Copy a tensor to the other device, into a new one or into an old one, and count the wait."""
        makes_new = func._overloadpacket.__name__ == "_to_copy"
        source = args[0] if makes_new else args[1]
        dtype = (kwargs.get("dtype") or source.dtype) if makes_new else args[0].dtype
        if isinstance(source, FakeTensor):
            self.synchronise()
            values: torch.Tensor = self.read(source)
            if not makes_new:
                return args[0].copy_(values)  # type: ignore[no-any-return]
            return values.to(dtype, copy=source.numel() <= _MOST_VALUES)
        is_staged = source.nbytes <= _STAGED_BYTES or hasattr(source, "_is_pinned")
        if source.numel() and not (is_staged and (kwargs.get("non_blocking") or args[2:] == (True,))):
            self.synchronise()
        if makes_new:
            moved = self._place_values(source.detach().to(dtype, copy=source.numel() <= _MOST_VALUES))
            self.count_call(func, (), moved)
            return moved
        moved = self._place_values(source.detach().expand(args[0].shape).to(dtype, copy=True))
        self.dispatch(func, (), (args[0], moved))
        return args[0]  # type: ignore[no-any-return]

    def _index_by_numbers(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return indices on the device in which masks are replaced by the numbers of the elements that they select."""
        numbers: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or (isinstance(index, FakeTensor) and index.dtype not in (torch.bool, torch.uint8)):
                numbers.append(index)
                continue
            self.synchronise()
            is_known, values = self._values_of(index) is not None, self.read(index)
            parts = values.nonzero().unbind(1) if values.dtype in (torch.bool, torch.uint8) else [values]
            numbers += [self._place_values(part, is_known=is_known) for part in parts]
        return numbers

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with self:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
        return empty

    def _place_values(self, values: torch.Tensor, *, is_known: bool = True) -> torch.Tensor:
        """Return a tensor on the device like one on the CPU, with its values unless they are too many or invented."""
        placed = self._empty_like(values.detach())
        if is_known and values.numel() <= _MOST_VALUES:
            placed._known_values = values  # type: ignore[attr-defined]
        return placed

    def _values_of(self, tensor: _Values) -> torch.Tensor | None:
        """Return the values of a tensor on the CPU, in its shape, or None if they are not known or too many."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach() if tensor.numel() <= _MOST_VALUES else None
        if hasattr(tensor.untyped_storage(), "_is_overwritten"):
            return None
        values: torch.Tensor | None = getattr(tensor, "_known_values", None)
        return values

    def _carry_values(self, func: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any], out: _Values) -> None:
        """Give results the values that follow from those of the arguments; forget values that were overwritten."""
        results: list[Any] = _find_tensors(out)
        is_random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__
        tensors = _find_tensors(*args, *kwargs.values())
        is_known = all(self._values_of(tensor) is not None for tensor in tensors) and not is_random
        if is_known and all(result.numel() <= _MOST_VALUES for result in results):
            cpu_args, cpu_kwargs = tree_map_only(torch.Tensor, self._values_of, (args, dict(kwargs)))
            if "device" in cpu_kwargs:
                cpu_kwargs["device"] = torch.device("cpu")
            with torch.no_grad():
                values = _find_tensors(func(*cpu_args, **cpu_kwargs))
            for result, value in zip(results, values, strict=True):
                result._known_values = value
        elif func._schema.is_mutable:
            # A view of the same memory must not keep its values either.
            for result in results:
                result.untyped_storage()._is_overwritten = True


@contextmanager
def pretend_device(kind: type[PretendedDevice] = PretendedDevice) -> Iterator[PretendedDevice]:
    """Offer a pretended device inside this block. All its tensors must be made, and dropped, inside.

    Raises:
        UserError: this torch lacks what the device needs, or computed a gradient before the device was registered.
    """
    register_device()
    with PretendedDevice() as probe:
        # Autograd makes its queues, one a device, at a process's first gradient.
        number = torch.zeros((), device=probe.device, requires_grad=True)
        try:
            number.clone().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise UserError(
                "a device cannot be pretended in a process that has computed gradients before; use a new process, or "
                "call mmrl.plan.pretended_device.register_device() at its start"
            ) from error
    device = kind()
    lifts_cpu_only = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == _NAME)))
        stack.enter_context(patch.object(FakeTensor, "tolist", _tolist))
        # Compiling FlexAttention takes half a minute, and needs a GPU.
        find_kernel = "_compiled_flex_attention"
        stack.enter_context(patch.object(shared_prefix_attention, find_kernel, lambda: device.flex_attention))
        # `torch.tensor(..., device=...)` would otherwise make its tensor on the device, outside the mode.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts_cpu_only)
        for plan in (shared_prefix_attention.build_block_mask, gated_delta_net.plan_fork):
            plan.cache_clear()  # plans hold tensors of this device, which must not meet another device
            stack.callback(plan.cache_clear)
        stack.enter_context(device)
        yield device


@cache
def register_device() -> None:
    """Register a device implemented in Python with torch. This cannot be undone, and nothing else uses the device.

    Raises:
        UserError: this torch lacks what the device needs.
    """
    # torch 2.11 registers the device, and ends the process in the first backward pass that runs on it.
    if torch.__version__ < "2.13":
        raise UserError(f"torch {torch.__version__} cannot pretend a device; torch 2.13 can")
    try:
        backend_registration._setup_privateuseone_for_python_backend(_NAME)
    except (AttributeError, RuntimeError) as error:
        raise UserError(f"torch {torch.__version__} cannot pretend a device: {error}; torch 2.13 can") from error
    # Once there is a device, checkpointing asks for its autocast in each backward pass, even on the CPU.
    torch.get_device_module(_NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
    # A GPU runs each of these as one kernel. torch would decompose them on a device that it does not know.
    _kernels.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    _kernels.impl("silu_backward", lambda grad, values: torch.empty_like(values), "PrivateUse1")


def _iter_leaves(*values: _Values) -> Iterator[Any]:
    """Yield arguments or results of an operator, and those in lists. torch's `tree_leaves` takes ten times as long."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _iter_leaves(*value)
        else:
            yield value


def _find_tensors(*values: _Values) -> list[torch.Tensor]:
    """Return the tensors among arguments or results of an operator."""
    return [leaf for leaf in _iter_leaves(*values) if isinstance(leaf, torch.Tensor)]


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    pinned: Any = tensor.clone()
    pinned._is_pinned = True
    return pinned  # type: ignore[no-any-return]


def _tolist(tensor: FakeTensor) -> _Values:
    """Return the values of a tensor as lists. Torch's own would read them one by one; a GPU copies them at once."""
    device: Any = tensor.fake_mode
    device.synchronise()
    return device.read(tensor).tolist()


def _attend(*arguments: _Values, scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """Attend in one operator, as SDPA does on a GPU. It copies no keys for the query heads that share them."""
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(*arguments, scale=scale)[0]
    return output
