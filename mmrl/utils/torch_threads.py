"""The number of torch's compute threads, in this process and in new Python threads."""

from __future__ import annotations

import os

import torch


def set_thread_count(count: int, processes: int = 1) -> None:
    """Let torch use `count` threads, or with 0 an equal share of the cores for each of `processes` processes."""
    torch.set_num_threads(count or max(1, (os.cpu_count() or 1) // processes))


def init_worker_thread(device: torch.device, count: int) -> None:
    """Set torch's thread count and current device in a new Python thread, which inherits neither."""
    torch.set_num_threads(count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
