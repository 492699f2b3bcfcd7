"""Worker processes that open media while this one trains. A file that crashes its decoder fails only its own item."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from mmrl.types import UserError
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerDiedError, WorkerError, WorkerPool, WorkerTimeoutError
from mmrl.utils.worker_server import ReportActivity

ItemT = TypeVar("ItemT")
EncodedT = TypeVar("EncodedT")

_EXIT_CODE_OF_ERRORS = 1


def start_media_workers(
    work: Callable[[ItemT], EncodedT], num_workers: int, *, timeout_s: float, name: Callable[[ItemT], str]
) -> WorkerPool[ItemT, EncodedT]:
    """Return a pool that applies `work`, which must be picklable, to `num_workers` items at a time.

    A future raises the UserError that `work` raised. It raises a UserError that names the item if the process ended (a
    crash in a decoder, memory running out) or took longer than `timeout_s` seconds, and a RuntimeError if `work` failed
    in any other way. `name` returns the name of an item in such errors, like `sample x` or a file.
    """
    return WorkerPool(
        partial(_use_one_thread, work),
        num_workers,
        limits=WorkerLimits(STARTUP_TIMEOUT_S, call_timeout_s=timeout_s),
        shared_imports=("mmrl.policy.processor",),
        pickler=_TensorPickler,
        make_error=partial(_make_error, name),
    )


def _use_one_thread(work: Callable[[ItemT], EncodedT], _: ReportActivity) -> Callable[[ItemT], EncodedT]:
    torch.set_num_threads(1)  # data.media_workers sets the number of processes, each meant for one core
    return work


def _make_error(name: Callable[[ItemT], str], item: ItemT, error: WorkerError) -> Exception:
    if not isinstance(error, WorkerDiedError):
        hint = "; is it damaged? See data.media_timeout_s" if isinstance(error, WorkerTimeoutError) else ""
        return UserError(f"{name(item)}: a process that opens media {error}{hint}")
    if error.exit_code == _EXIT_CODE_OF_ERRORS:
        return RuntimeError(f"{name(item)}: the process that opened it failed; its traceback is above")
    return UserError(
        f"{name(item)}: the process that opened it {error}; a file crashes its decoder, or memory ran out: "
        "look at the file, or lower data.media_workers"
    )


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as arrays, which are sent without a copy.

    torch itself uses shared memory, of which containers have little.
    """

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401
        if isinstance(obj, torch.Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented
