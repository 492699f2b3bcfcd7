"""Calls the rewards of responses, in this process or in workers, and their fallbacks if they abstain or fail."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mmrl.config.schema import RewardFailurePolicy, ScoringConfig, matches_conditions
from mmrl.config.schema.base import condition_value, matches_rollout
from mmrl.scoring.outcomes import (
    RewardError,
    RewardOutcome,
    RewardProcessError,
    call_reward,
    excerpt_response,
    is_unscorable,
    make_error,
)
from mmrl.scoring.reward_workers import first_call_timeout_s, make_worker_limits, worker_failure
from mmrl.scoring.terms import BoundTerm, find_counted_terms
from mmrl.types import (
    MediaOpener,
    Response,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Sample,
    UserError,
    use_media_opener,
)
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity
from mmrl_rewards.contract import BoundReward

_MAX_BATCH_SIZE = 64  # most rewards take microseconds, less than a message between processes
_LOCAL_SERVICES = ("render_svg", "render_latex")  # rewards whose service runs on this machine

NOT_FOR_ROLLOUT = RewardValue(0.0, "not for this rollout: see `when`")
"""Outcome of a term whose `when` excludes the rollout."""

ScoringPair = tuple[Response, Sample]
"""The arguments of a reward."""
OutcomesByTerm = Mapping[str, RewardOutcome]
"""Value or failure of each term that applies to a response."""


class RewardCall(NamedTuple):
    """One call of a reward."""

    term: str  # name of the reward term
    response: Response
    sample: Sample


@dataclass(slots=True)
class _PendingResponse:
    """A response, with the outcomes it has so far."""

    pair: ScoringPair
    outcomes: dict[str, RewardOutcome]  # by term name
    terms: list[BoundTerm]  # those that the next round calls


class RewardCaller:
    """Calls reward terms. With `workers`, all run in workers; else those with `timeout_s` and, by default, users'."""

    def __init__(self, terms: Sequence[BoundTerm], options: ScoringConfig, media_opener: MediaOpener | None) -> None:
        """Store the terms, which see pictures through `media_opener`; no process is started before the first call."""
        self.terms, self.counted_terms, self.media_opener = tuple(terms), find_counted_terms(terms), media_opener
        self._terms_by_name, self._options = {term.name: term for term in terms}, options
        self._sample_conditions = {term.name: term.options.sample_when for term in terms}
        self._condition_columns = {column for when in self._sample_conditions.values() for column in when}
        # Cached by evaluation and the sample's values in these columns, since most samples share a few combinations.
        self._applicable_terms: dict[tuple[object, ...], list[BoundTerm]] = {}
        # Seconds that a call may take, of the terms that run in worker processes.
        self._timeouts_s: dict[str, float] = {}
        for term in terms:
            is_isolated = options.custom_rewards == "worker" and not term.comes_with_mmrl
            if options.workers or term.timeout_s is not None or is_isolated:
                self._timeouts_s[term.name] = term.timeout_s or options.timeout_s
        self._pool: WorkerPool[RewardCall, RewardOutcome] | None = None

    def applicable_terms(self, sample: Sample, *, evaluation: bool = False) -> list[BoundTerm]:
        """Return the terms that score responses to a sample; in evaluation, `training_only` terms are left out.

        A term that is only the fallback of others is not included. Conditions on the rollout are not checked.
        """
        key = (evaluation, *[condition_value(sample, column) for column in self._condition_columns])
        terms = self._applicable_terms.get(key)
        if terms is None:
            terms = self._applicable_terms[key] = []
            for term in self.counted_terms:
                is_left_out = evaluation and term.options.training_only
                if not is_left_out and matches_conditions(self._sample_conditions[term.name], sample):
                    terms.append(term)
        return terms

    def terms_with_fallbacks(self, sample: Sample, *, evaluation: bool = False) -> list[BoundTerm]:
        """Return the terms that apply to a sample, and the fallbacks that may decide in their place."""
        terms = {term.name: term for term in self.applicable_terms(sample, evaluation=evaluation)}
        pending = list(terms.values())
        for term in pending:
            name = term.fallback_term
            if name and name not in terms and matches_conditions(self._sample_conditions[name], sample):
                terms[name] = self._terms_by_name[name]
                pending.append(terms[name])
        return pending

    def call(
        self, pairs: Sequence[ScoringPair], *, evaluation: bool = False, abstained: dict[str, str] | None = None
    ) -> list[OutcomesByTerm]:
        """Return the outcome of each term that applies to each response. A trial fills `abstained`: id → reason.

        Raises:
            RewardError: a reward failed, and the config says to stop.
            UserError: no term applies to a sample.
        """
        all_pending = [self._make_pending(pair, evaluation=evaluation, trial=abstained is not None) for pair in pairs]
        while due := [pending for pending in all_pending if pending.terms]:
            self._run_round(due, abstained)
        return [pending.outcomes for pending in all_pending]

    def call_terms(self, calls: Sequence[tuple[BoundTerm, ScoringPair]], *, trial: bool = False) -> list[RewardOutcome]:
        """Return the outcomes of calls. Workers get all of their calls at once, so that none idles."""
        worker_calls = [RewardCall(term.name, *pair) for term, pair in calls if term.name in self._timeouts_s]
        worker_outcomes = iter(self._run_in_workers(worker_calls, trial=trial) if worker_calls else [])
        outcomes = []
        with use_media_opener(self.media_opener):
            for term, pair in calls:
                in_worker = term.name in self._timeouts_s
                outcomes.append(next(worker_outcomes) if in_worker else call_reward(term.reward, *pair))
        return outcomes

    def find_fallback(
        self, term: BoundTerm, failure: RewardFailure, response: Response, sample: Sample, *, trial: bool = False
    ) -> BoundTerm | None:
        """Return the term that decides in place of one that failed, or None if the failure policy decides."""
        if term.fallback_term is None:
            return None
        is_bug = failure.error_kind is RewardErrorKind.ERROR
        if is_bug and (trial or self._options.on_error != "fallback"):
            return None
        fallback = self._terms_by_name[term.fallback_term]
        applies = matches_conditions(self._sample_conditions[fallback.name], sample)
        return fallback if applies and (trial or matches_rollout(fallback.options.when, response)) else None

    def list_deciding_terms(self, term: BoundTerm, outcomes: OutcomesByTerm) -> list[BoundTerm]:
        """Return a term and the fallbacks that were called in its place, in order; the last one decides."""
        chain = [term]
        while isinstance(failure := outcomes[chain[-1].name], RewardFailure):
            name = chain[-1].fallback_term
            if name is None or name not in outcomes:
                break
            # Another term may have called the fallback, which does not decide in place of a bug.
            if failure.error_kind is RewardErrorKind.ERROR and self._options.on_error != "fallback":
                break
            chain.append(self._terms_by_name[name])
        return chain

    def failure_action(self, failure: RewardFailure) -> RewardFailurePolicy:
        """Return the config's policy for a failure that no fallback replaces."""
        return self._options.on_error if failure.error_kind is RewardErrorKind.ERROR else self._options.on_missing_score

    def close(self) -> None:
        """End the worker processes, if any were started."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _make_pending(self, pair: ScoringPair, *, evaluation: bool, trial: bool) -> _PendingResponse:
        """Return a response with the terms to call first. Raises UserError if no term applies to it."""
        response, sample = pair
        applicable = self.applicable_terms(sample, evaluation=evaluation)
        if not applicable:
            where = f"sample {sample.id!r} of task {sample.task!r}{', in evaluation' if evaluation else ''}"
            raise UserError(f"no reward term applies to {where}: see `when`")
        pending = _PendingResponse(pair, {}, [])
        for term in applicable:
            # Responses of a trial were not sampled, so they lack the features of a rollout that `when` may require.
            if term.options.when and not trial and not matches_rollout(term.options.when, response):
                pending.outcomes[term.name] = NOT_FOR_ROLLOUT
            else:
                pending.terms.append(term)
        return pending

    def _run_round(self, due: Sequence[_PendingResponse], abstained: dict[str, str] | None) -> None:
        """Call the terms of all responses, then replace them with the fallbacks of those that failed."""
        trial = abstained is not None
        calls = [(pending, term) for pending in due for term in pending.terms]
        if trial:
            calls = [(pending, term) for pending, term in calls if not asks_remote_service(term)]
        outcomes = self.call_terms([(term, pending.pair) for pending, term in calls], trial=trial)
        for (pending, term), outcome in zip(calls, outcomes, strict=True):
            pending.outcomes[term.name] = outcome
        for pending in due:
            pending.terms = self._list_fallbacks(pending, abstained)

    def _list_fallbacks(self, pending: _PendingResponse, abstained: dict[str, str] | None) -> list[BoundTerm]:
        """Return the terms to call in place of those that failed in this round, each once.

        Raises:
            RewardError: no term replaces one that failed, and the config says to stop, or a trial finds a bug.
        """
        fallbacks: dict[str, BoundTerm] = {}
        for term in pending.terms:
            # None for a service that a trial does not ask.
            failure = pending.outcomes.get(term.name)
            if isinstance(failure, RewardFailure):
                fallback = self.find_fallback(term, failure, *pending.pair, trial=abstained is not None)
                if fallback is None and failure.is_low:
                    pending.outcomes[term.name] = RewardValue(term.reward.reward.low, failure.reason)
                elif fallback is None and abstained is not None and is_unscorable(failure):
                    abstained.setdefault(pending.pair[1].id, str(make_error(term.name, failure, *pending.pair)))
                elif fallback is None and (abstained is not None or self.failure_action(failure) == "stop"):
                    raise make_error(term.name, failure, *pending.pair)
                if fallback is not None and fallback.name not in pending.outcomes:
                    fallbacks[fallback.name] = fallback
        return list(fallbacks.values())

    def _run_in_workers(self, calls: Sequence[RewardCall], *, trial: bool = False) -> list[RewardOutcome]:
        """Return the outcomes of calls in worker processes. A process that hangs or dies costs one call.

        Raises:
            RewardProcessError: no process can be started; in a trial also, one hung, died or exceeded a limit.
            RewardError: a sample cannot be sent to a process.
            KeyboardInterrupt: this process was told to stop while a reward hangs.
        """
        options = self._options
        try:
            if self._pool is None:
                loaders = {name: self._terms_by_name[name].load_reward for name in self._timeouts_s}
                # These calls run before workers are forked, with a longer deadline: the first call of a reward may
                # import libraries.
                warm_up_calls = {call.term: call for call in calls} if trial else {}
                timeouts_s = {name: first_call_timeout_s(self._timeouts_s[name]) for name in warm_up_calls}
                self._pool = WorkerPool(
                    partial(_load_rewards, loaders, list(warm_up_calls.values()), timeouts_s, self.media_opener),
                    max(1, options.workers),
                    limits=make_worker_limits(options),
                    max_batch_size=_MAX_BATCH_SIZE,
                )
                self._pool.wait_until_ready()
            futures = self._pool.submit_all(calls, [self._timeouts_s[call.term] for call in calls])
            # A reward that hangs may hang on every sample, and the trial would wait for its deadline each time.
            self._pool.wait_for_calls(futures, stop_at_error=trial)
            if trial:
                self._raise_if_killed(futures, calls)
            return _read_outcomes(futures, calls)
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
                place = self._terms_by_name[call.term].reward.reward.place
                raise RewardProcessError(
                    f"{failure}. Every step could lose time or rollouts to such calls: fix the reward ({place}), or "
                    "raise its timeout_s or rewards.worker_limits if it needs more"
                )


def asks_remote_service(term: BoundTerm) -> bool:
    """Return True for a reward whose calls cost a request or a model, False if this machine only draws."""
    reward = term.reward
    is_local = reward.reward.name in _LOCAL_SERVICES and reward.args.get("encoder") is None
    return reward.reward.uses_service and not is_local


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
