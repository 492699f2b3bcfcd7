"""Calls rewards in worker processes, so that one that hangs or crashes costs a single call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple

from mmrl.scoring.terms import RewardError, RewardOutcome, call_reward
from mmrl.types import Response, RewardErrorKind, RewardFailure, Sample
from mmrl.utils.worker_pool import WorkerDiedError, WorkerPool, WorkerStartError, WorkerTimeoutError
from mmrl.utils.worker_server import ReportActivity
from mmrl_rewards.contract import BoundReward

_STARTUP_TIMEOUT_S = 60.0
_MAX_BATCH_SIZE = 32  # most rewards take microseconds, less than a message between processes


class RewardCall(NamedTuple):
    """One call of a reward."""

    term: str  # name of the reward term
    response: Response
    sample: Sample


class RewardWorkers:
    """`num_workers` processes that have loaded the rewards of some terms."""

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], BoundReward]],
        timeouts_s: Mapping[str, float],
        num_workers: int,
        warm_up_calls: Sequence[RewardCall] = (),
    ) -> None:
        """Load the rewards in another process and wait for it.

        Args:
            loaders: a picklable loader for each term.
            timeouts_s: seconds that one call of a term may take.
            num_workers: calls that run at the same time.
            warm_up_calls: calls that are made once, before workers are forked and without their deadline, so that the
                libraries which a first call imports do not count against it.

        Raises:
            RewardError: a reward did not load, or a warm-up call did not return.
        """
        self._timeouts_s = timeouts_s
        self._pool: WorkerPool[RewardCall, RewardOutcome] = WorkerPool(
            partial(_load_rewards, loaders, warm_up_calls),
            num_workers,
            startup_timeout_s=_STARTUP_TIMEOUT_S,
            max_batch_size=_MAX_BATCH_SIZE,
        )
        try:
            self._pool.wait_until_ready()
        except WorkerStartError as error:
            self.close()
            raise RewardError(f"a process for rewards {error}") from error

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._pool.close()

    def run(self, calls: Sequence[RewardCall]) -> list[RewardOutcome]:
        """Return the outcome of each call, in order.

        Raises:
            RewardError: no process can be started, or a sample cannot be sent to one.
        """
        futures = self._pool.submit_all(calls, [self._timeouts_s[call.term] for call in calls])
        wait(futures)  # one wake-up for all: waking up for each would take longer than the calls
        try:
            return list(map(_read_outcome, futures))
        except WorkerStartError as error:
            raise RewardError(f"a process for rewards {error}") from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            # Calls are pickled by the batch: its error does not say which of them is at fault.
            sample_ids = set()
            for call in calls:
                try:
                    pickle.dumps(call)
                except (pickle.PicklingError, TypeError, AttributeError):
                    sample_ids.add(call.sample.id)
            raise RewardError(
                f"cannot send samples {', '.join(sorted(sample_ids)):.200} to a worker process: {error}"
            ) from error


def _read_outcome(future: Future[RewardOutcome]) -> RewardOutcome:
    try:
        return future.result()
    except WorkerTimeoutError as error:
        return RewardFailure(RewardErrorKind.TIMEOUT, str(error))
    except WorkerDiedError:
        return RewardFailure(RewardErrorKind.CRASH, "its process died")


def _load_rewards(
    loaders: Mapping[str, Callable[[], BoundReward]], warm_up_calls: Sequence[RewardCall], report: ReportActivity
) -> Callable[[RewardCall], RewardOutcome]:
    """Load and warm up the rewards, and return the function that calls them."""
    # Workers are forked from the process that runs this, so a reward and its libraries are loaded once for all of them.
    rewards: dict[str, BoundReward] = {}
    for term, load in loaders.items():
        report(f"loading reward {term!r}")
        rewards[term] = load()
    for call in warm_up_calls:
        report(f"scoring sample {call.sample.id!r} with reward {call.term!r}")
        call_reward(rewards[call.term], call.response, call.sample)
    return partial(_call_loaded_reward, rewards)


def _call_loaded_reward(rewards: Mapping[str, BoundReward], call: RewardCall) -> RewardOutcome:
    return call_reward(rewards[call.term], call.response, call.sample)
