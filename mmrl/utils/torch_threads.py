"""The threads that torch works with, and those that work with torch."""

from __future__ import annotations

import os

import torch


def set_thread_count(count: int, processes: int = 1) -> None:
    """Work with `count` threads; with 0, with this process's share of the cores."""
    torch.set_num_threads(count or max(1, (os.cpu_count() or 1) // processes))


def init_worker_thread(device: torch.device, count: int) -> None:
    """Begin a thread of Python's, on `device` and with `count` threads of torch's; it inherits neither."""
    torch.set_num_threads(count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
