"""Calls rewards in worker processes: a call that hangs, dies or exceeds a limit costs no other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from mmrl.config.schema import ScoringConfig
from mmrl.scoring.outcomes import (
    RewardError,
    RewardOutcome,
    RewardProcessError,
    call_reward,
    excerpt_response,
    make_error,
)
from mmrl.scoring.terms import BoundTerm
from mmrl.types import Failure, FailureKind, MediaOpener, Response, Sample, use_media_opener
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerLimitError, WorkerPool, WorkerStartError, WorkerTimeoutError
from mmrl.utils.worker_server import ReportActivity
from mmrl_rewards.contract import BoundReward

FIRST_CALL_TIMEOUT_S: Final = 60.0
"""Least deadline, in seconds, of a reward's first call in a process: it may import libraries or load a model."""
_MAX_BATCH_SIZE = 64  # most rewards take microseconds, less than a message between processes


class RewardCall(NamedTuple):
    """One call of a reward."""

    term: str  # name of the reward term
    response: Response
    sample: Sample


class RewardWorkers:
    """Worker processes for all rewards if `workers` is set; else for those with `timeout_s` and, by default, users'."""

    def __init__(self, terms: Sequence[BoundTerm], options: ScoringConfig, media_opener: MediaOpener | None) -> None:
        """Choose the terms that run here; no process is started before the first call."""
        self._options, self._media_opener = options, media_opener
        self.terms: dict[str, BoundTerm] = {}  # by name; those that run here
        self._timeouts_s: dict[str, float] = {}  # seconds that a call of each may take
        for term in terms:
            is_isolated = options.custom_rewards == "worker" and not term.comes_with_mmrl
            if options.workers or term.timeout_s is not None or is_isolated:
                self.terms[term.name] = term
                self._timeouts_s[term.name] = term.timeout_s or options.timeout_s
        self._pool: WorkerPool[RewardCall, RewardOutcome] | None = None

    def call(self, calls: Sequence[RewardCall], *, is_trial: bool = False) -> list[RewardOutcome]:
        """Return the outcomes of calls. A process that hangs or dies costs one call; in a trial, it is an error.

        If a trial starts the processes, each reward is called once before workers are forked, with a longer deadline,
        since it may import libraries.

        Raises:
            RewardProcessError: no process can be started; or, in a trial, one hung, died or exceeded a limit.
            RewardError: a sample cannot be sent to a process.
            KeyboardInterrupt: this process was told to stop while a reward hangs.
        """
        with self._closed_at_errors():
            pool = self._start({call.term: call for call in calls} if is_trial else {})
            futures = pool.submit_all(calls, [self._timeouts_s[call.term] for call in calls])
            # A reward that hangs may hang on every sample, and each call would cost its deadline.
            pool.wait_for_calls(futures, stop_at_error=is_trial)
            if is_trial:
                self._raise_if_killed(futures, calls)
            return _read_outcomes(futures, calls)

    def close(self) -> None:
        """End the processes, if any were started."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _start(self, warm_up_calls: Mapping[str, RewardCall]) -> WorkerPool[RewardCall, RewardOutcome]:
        """Return the running processes. If there are none, start them, and make `warm_up_calls`, one for each term."""
        if self._pool is None:
            loaders = {name: term.load_reward for name, term in self.terms.items()}
            timeouts_s = {name: first_call_timeout_s(self._timeouts_s[name]) for name in warm_up_calls}
            self._pool = WorkerPool(
                partial(_load_rewards, loaders, list(warm_up_calls.values()), timeouts_s, self._media_opener),
                max(1, self._options.workers),
                limits=make_worker_limits(self._options),
                max_batch_size=_MAX_BATCH_SIZE,
            )
            self._pool.wait_until_ready()
        return self._pool

    @contextmanager
    def _closed_at_errors(self) -> Iterator[None]:
        """End the processes if the block raises; a WorkerStartError becomes a RewardProcessError."""
        try:
            yield
        except WorkerStartError as error:
            self.close()
            raise RewardProcessError(f"a process for rewards {error}") from error
        # KeyboardInterrupt too: the workers are in the middle of calls whose outcomes nobody will read.
        except BaseException:
            self.close()
            raise

    def _raise_if_killed(self, futures: Sequence[Future[RewardOutcome]], calls: Sequence[RewardCall]) -> None:
        """Raise a RewardProcessError for the first call whose worker hung, died or exceeded a limit."""
        for future, call in zip(futures, calls, strict=True):
            error = future.exception() if future.done() else None
            if isinstance(error, WorkerError) and not isinstance(error, WorkerStartError):
                failure = make_error(call.term, worker_failure(error), call.response, call.sample)
                place = self.terms[call.term].declaration.place
                raise RewardProcessError(
                    f"{failure}. Every step could lose time or rollouts to such calls: fix the reward ({place}), or "
                    "raise its timeout_s or rewards.worker_limits if it needs more"
                )


def first_call_timeout_s(timeout_s: float | None) -> float:
    """Return the deadline of a reward's first call, where later ones have `timeout_s`."""
    return max(FIRST_CALL_TIMEOUT_S, timeout_s or 0.0)


def make_worker_limits(options: ScoringConfig) -> WorkerLimits:
    """Return the limits of a worker that calls rewards."""
    limits = options.worker_limits
    return WorkerLimits(STARTUP_TIMEOUT_S, options.timeout_s, limits.memory_mib, limits.processes, reads_output=True)


def worker_failure(error: WorkerError) -> Failure:
    """Return the failure of a reward whose worker was killed, or ended, in the middle of a call."""
    match error:
        case WorkerTimeoutError():
            return Failure(FailureKind.TIMEOUT, str(error))
        case WorkerLimitError():
            return Failure(FailureKind.LIMIT, f"was stopped: its process {error}")
        case _:
            return Failure(FailureKind.CRASH, "its process died")


def _read_outcomes(futures: Sequence[Future[RewardOutcome]], calls: Sequence[RewardCall]) -> list[RewardOutcome]:
    """Return the outcome of each call, a failure where its worker was killed.

    Raises:
        WorkerStartError: no process could be started.
        RewardError: a sample cannot be sent to a process.
    """
    outcomes: list[RewardOutcome] = []
    for future in futures:
        try:
            outcomes.append(future.result())
        except WorkerStartError:
            raise
        except WorkerError as error:
            outcomes.append(worker_failure(error))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            # Calls are pickled in batches, so the error does not say which call is at fault.
            sample_ids = set()
            for call in calls:
                try:
                    pickle.dumps(call)
                except (pickle.PicklingError, TypeError, AttributeError):
                    sample_ids.add(call.sample.id)
            listed = f"{', '.join(sorted(sample_ids)):.200}"
            raise RewardError(f"cannot send samples {listed} to a worker process: {error}") from error
    return outcomes


def _load_rewards(
    loaders: Mapping[str, Callable[[], BoundReward]],
    warm_up_calls: Sequence[RewardCall],
    timeouts_s: Mapping[str, float],
    media_opener: MediaOpener | None,
    report: ReportActivity,
) -> Callable[[RewardCall], RewardOutcome]:
    """Load and warm up the rewards, and return the function that calls them. `timeouts_s` limit warm-up calls."""
    # Workers are forked from the process that runs this, so a reward and its libraries are loaded once for all of them.
    rewards: dict[str, BoundReward] = {}
    for term, load in loaders.items():
        report(f"loading reward {term!r}")
        rewards[term] = load()
    for call in warm_up_calls:
        named = f"{call.term!r} ({rewards[call.term].reward.place})"
        where = f"sample {call.sample.id!r}, response {excerpt_response(call.response)}"
        report(f"calling reward {named} on {where}", timeouts_s[call.term])
        _call_loaded_reward(rewards, media_opener, call)
    return partial(_call_loaded_reward, rewards, media_opener)


def _call_loaded_reward(
    rewards: Mapping[str, BoundReward], media_opener: MediaOpener | None, call: RewardCall
) -> RewardOutcome:
    with use_media_opener(media_opener):
        return call_reward(rewards[call.term], call.response, call.sample)
