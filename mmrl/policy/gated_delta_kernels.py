"""Gated DeltaNet by the kernels of flash-linear-attention and causal-conv1d where tensors suit them, else by torch.

Once a package is installed, transformers uses its kernel for every tensor. But the kernels run only on CUDA, and
multiply float32 as TF32, with a mantissa of 10 bits. So this module chooses at each call, by the call's tensors.

Source: `chunk_gated_delta_rule` of flash-linear-attention 0.5.1 to 0.6.0 and `causal_conv1d_fn` of causal-conv1d 1.6.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch

# The module that has the kernels of each package.
PACKAGES = {"flash-linear-attention": "fla.ops.gated_delta_rule", "causal-conv1d": "causal_conv1d"}
# Names, in a modeling file of transformers, of the functions that may be kernels.
_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
_CHOICES: list[Callable[..., Any]] = []  # functions that have been put into modeling files


def suits_kernel(tensor: torch.Tensor) -> bool:
    """Return True if the kernels may compute with a tensor, of any shape: on CUDA, in 16 bits."""
    return tensor.is_cuda and tensor.dtype.itemsize == 2


def install_kernel_choice(modeling: ModuleType) -> None:
    """Let a modeling file of transformers run a kernel where `suits_kernel` says so, and its torch code elsewhere."""
    for name in _FUNCTIONS:
        # For a second model of the class, the function is replaced already.
        function = getattr(modeling, name)
        if function not in _CHOICES:
            _CHOICES.append(_choose_by_tensor(function))
            setattr(modeling, name, _CHOICES[-1])


def has_rule_kernel(tensor: torch.Tensor) -> bool:
    """Return True if `run_rule_kernel` can compute here with tensors like this one, of any shape."""
    return suits_kernel(tensor) and not isinstance(import_kernels("flash-linear-attention"), Exception)


def run_rule_kernel(
    inputs: Sequence[torch.Tensor], initial_state: torch.Tensor | None, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the delta rule over N sequences that follow each other in one row of S tokens.

    Gradients flow to the inputs and to the initial state.

    Args:
        inputs: query and key [1, S, H, K], value [1, S, H, V], log decay, float32 [1, S, H], and write strength
            [1, S, H].
        initial_state: state before each sequence, float32 [N, H, K, V]; None for zeros.
        bounds: first token of each sequence, and the end of the last, int64 [N + 1]; none may be empty.

    Returns:
        Outputs [1, S, H, V], and the state after each sequence, float32 [N, H, K, V].
    """
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    output, state = import_kernels("flash-linear-attention").chunk_gated_delta_rule(
        *inputs, initial_state=initial_state, cu_seqlens=bounds, **options
    )
    return output, state


@cache
def import_kernels(package: str) -> Any:  # noqa: ANN401  (a module, whose functions mypy does not know)
    """Return the module that has a package's kernels, or the error that its import raised."""
    try:
        return importlib.import_module(PACKAGES[package])
    # A package that was built for another torch or CUDA raises any of these.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return error


def describe_slow_path(device_type: str, dtype: torch.dtype) -> str | None:
    """Return a notice for a user whose recurrent layers run without kernels on a GPU, or None."""
    if device_type != "cuda":
        return None
    head = "the Gated DeltaNet layers of this model run as plain torch code, much slower than kernels"
    if dtype == torch.float32:
        return f"{head}: model.dtype is float32, and the kernels compute in 16 bits; use bfloat16 unless you compare"
    tried = [(package, import_kernels(package)) for package in PACKAGES]
    failures = [f"{package}: {error}" for package, error in tried if isinstance(error, Exception)]
    if not failures:
        return None
    return f"{head}: {'; '.join(failures)}. `pip install --no-build-isolation 'mmrl[hybrid]'` installs them"


def _choose_by_tensor(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers that runs a kernel if its first tensor suits it, else its torch code."""
    torch_code = inspect.unwrap(function)

    @wraps(function)
    def choose(tensor: torch.Tensor, *args: object, **options: object) -> Any:  # noqa: ANN401
        """Call the kernel or the torch code; the first tensor is [batch, columns, ...]."""
        return (function if suits_kernel(tensor) else torch_code)(tensor, *args, **options)

    return choose
