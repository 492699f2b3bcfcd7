"""Worker processes that call rewards: their limits, and the failure of a call whose process is lost."""

from __future__ import annotations

from typing import Final

from mmrl.config.schema import ScoringConfig
from mmrl.types import RewardErrorKind, RewardFailure
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerLimitError, WorkerTimeoutError

FIRST_CALL_TIMEOUT_S: Final = 60.0
"""Least deadline, in seconds, of a reward's first call in a process: it may import libraries or load a model."""


def first_call_timeout_s(timeout_s: float | None) -> float:
    """Return the deadline of a reward's first call, where later ones have `timeout_s`."""
    return max(FIRST_CALL_TIMEOUT_S, timeout_s or 0.0)


def make_worker_limits(options: ScoringConfig) -> WorkerLimits:
    """Return the limits of a worker that calls rewards."""
    limits = options.worker_limits
    return WorkerLimits(STARTUP_TIMEOUT_S, options.timeout_s, limits.memory_mib, limits.processes, reads_output=True)


def worker_failure(error: WorkerError) -> RewardFailure:
    """Return the failure of a reward whose worker was killed, or ended, in the middle of a call."""
    match error:
        case WorkerTimeoutError():
            return RewardFailure(RewardErrorKind.TIMEOUT, str(error))
        case WorkerLimitError():
            return RewardFailure(RewardErrorKind.LIMIT, f"was stopped: its process {error}")
        case _:
            return RewardFailure(RewardErrorKind.CRASH, "its process died")
