"""A pretended GPU that counts the operators that it is asked to run, and how often the CPU waits for it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from traceback import walk_stack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from mmrl.plan import pretended_device
from mmrl.plan.pretended_device import PretendedDevice

PACKAGES = re.compile(".*/((?:mmrl|transformers)/.*)")  # a wait is ascribed to the innermost line of one of them
_IGNORED = (__file__, pretended_device.__file__)


class CountingDevice(PretendedDevice):
    """The device of `pretend_device(CountingDevice)`. It also refuses a mask of FlexAttention from another device."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronisations: Counter[str] = Counter()
        """Waits of the CPU for the device, counted by file and line, such as `mmrl/policy/policy.py:385`."""
        self.calls: Counter[str] = Counter()
        """Operators that a GPU would run, by name. Views and allocations are not among them."""

    def synchronise(self) -> None:
        """Count that the CPU waits for the device here."""
        place = "elsewhere"
        for frame, line in walk_stack(sys._getframe(1)):
            path = frame.f_code.co_filename
            if path not in _IGNORED and (found := PACKAGES.match(path)):
                place = f"{found[1]}:{line}"
                break
        self.synchronisations[place] += 1

    def count_call(self, func: Any, args: Sequence[Any], out: Any) -> None:
        """Count a call, unless it only made a view or allocated memory."""
        if func.__name__.startswith(("empty", "new_empty")):
            return
        if func._schema.is_mutable or _find_storages(out) - _find_storages(args):
            self.calls[str(func)] += 1

    def flex_attention(self, *tensors: torch.Tensor, scale: float, **options: Any) -> torch.Tensor:
        """Attend in one call, after a check of the mask.

        Raises:
            RuntimeError: a tensor of the mask, or what its rule returns, is on another device.
        """
        query, mask = tensors[0], options["block_mask"]
        # Not counted: a GPU evaluates the rule inside the kernel.
        with patch.object(self, "count_call", lambda *_: None):
            place = torch.arange(query.shape[2], device=query.device)
            visible = mask.mask_mod(place[:1], place[:1], place, place)
        parts = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        for tensor in (*parts, visible):
            if tensor is not None and tensor.device != query.device:
                raise RuntimeError(f"the mask of FlexAttention is on {tensor.device}, its queries on {query.device}")
        return super().flex_attention(*tensors, scale=scale)


def _find_storages(values: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
