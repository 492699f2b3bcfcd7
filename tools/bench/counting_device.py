"""A pretended GPU that counts the operators that it is asked to run, and how often the CPU waits for it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mmrl.plan import pretended_device
from mmrl.plan.pretended_device import PretendedDevice

PACKAGES = re.compile(".*/((?:mmrl|transformers)/.*)")  # a wait is ascribed to the innermost line of one of them
_IGNORED = (__file__, pretended_device.__file__)


class CountingDevice(PretendedDevice):
    """Offered by `pretend_device(CountingDevice)`."""

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
        """Count a call, unless it made a view or allocated memory alone."""
        if func.__name__.startswith(("empty", "new_empty")):
            return
        if func._schema.is_mutable or _find_storages(out) - _find_storages(args):
            self.calls[str(func)] += 1


def _find_storages(values: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
