"""Calls of rewards in worker processes: what is sent to them, what they load, and what comes back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from mmrl.scoring.terms import RewardError, RewardOutcome, RewardProcessError, call_reward, worker_failure
from mmrl.types import MediaOpener, Response, RewardFailure, Sample, use_media_opener
from mmrl.utils.worker_pool import WorkerError, WorkerStartError
from mmrl.utils.worker_server import ReportActivity
from mmrl_rewards.contract import BoundReward

_MAX_RESPONSE_CHARS = 200


class RewardCall(NamedTuple):
    """One call of a reward."""

    term: str  # name of the reward term
    response: Response
    sample: Sample


def make_error(name: str, failure: RewardFailure, response: Response, sample: Sample) -> RewardError:
    """Return an error that names the reward, the sample, the cause and the response."""
    where = f"reward {name!r} on sample {sample.id!r} (task {sample.task!r})"
    return RewardError(f"{where}: {failure.reason}; response: {_quote(response)}")


def _quote(response: Response) -> str:
    """Return the text of a response in quotes, cut where it is long."""
    text = response.text
    return repr(text if len(text) <= _MAX_RESPONSE_CHARS else text[:_MAX_RESPONSE_CHARS] + "...")


def raise_if_killed(futures: Sequence[Future[RewardOutcome]], calls: Sequence[RewardCall]) -> None:
    """Raise a RewardProcessError for the first call whose worker hung, died or exceeded a limit."""
    for future, call in zip(futures, calls, strict=True):
        error = future.exception() if future.done() else None
        if isinstance(error, WorkerError) and not isinstance(error, WorkerStartError):
            failure = make_error(call.term, worker_failure(error), call.response, call.sample)
            raise RewardProcessError(
                f"{failure}. Every step could lose time or rollouts to such calls: fix the reward, or raise "
                "rewards.timeout_s or rewards.worker_limits if it needs more"
            )


def read_outcomes(futures: Sequence[Future[RewardOutcome]], calls: Sequence[RewardCall]) -> list[RewardOutcome]:
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
            # Calls are pickled by the batch: its error does not say which of them is at fault.
            sample_ids = set()
            for call in calls:
                try:
                    pickle.dumps(call)
                except (pickle.PicklingError, TypeError, AttributeError):
                    sample_ids.add(call.sample.id)
            listed = f"{', '.join(sorted(sample_ids)):.200}"
            raise RewardError(f"cannot send samples {listed} to a worker process: {error}") from error
    return outcomes


def load_rewards(
    loaders: Mapping[str, Callable[[], BoundReward]],
    warm_up_calls: Sequence[RewardCall],
    media_opener: MediaOpener | None,
    report: ReportActivity,
) -> Callable[[RewardCall], RewardOutcome]:
    """Load and warm up the rewards, and return the function that calls them."""
    # Workers are forked from the process that runs this, so a reward and its libraries are loaded once for all of them.
    rewards: dict[str, BoundReward] = {}
    for term, load in loaders.items():
        report(f"loading reward {term!r}")
        rewards[term] = load()
    for call in warm_up_calls:
        report(f"calling reward {call.term!r} on sample {call.sample.id!r}, response {_quote(call.response)}")
        _call_loaded_reward(rewards, media_opener, call)
    return partial(_call_loaded_reward, rewards, media_opener)


def _call_loaded_reward(
    rewards: Mapping[str, BoundReward], media_opener: MediaOpener | None, call: RewardCall
) -> RewardOutcome:
    with use_media_opener(media_opener):
        return call_reward(rewards[call.term], call.response, call.sample)
