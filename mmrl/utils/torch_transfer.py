"""Copies from the host to a device that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor on a device, in its shape, and in another dtype if one is given.

    A tensor that is there already, in that dtype, is returned as it is.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device, dtype)
    # An ordinary copy to CUDA waits until all earlier work of the device is done, and so does a copy of more than
    # 64 KiB out of memory that is not pinned. torch keeps pinned memory until the copy out of it is done.
    return tensor.to(dtype).pin_memory().to(device, non_blocking=True)


def send_numbers(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return numbers, or rows of as many numbers each, as an int64 tensor of that shape on a device."""
    return send(torch.tensor(numbers, dtype=torch.int64), device)
