"""Calls the reward terms that apply to responses, and their fallbacks where they abstain or fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.config.schema import RewardFailurePolicy, ScoringConfig, matches_conditions
from mmrl.config.schema.base import condition_value, matches_rollout
from mmrl.scoring.outcomes import RewardOutcome, call_reward, make_error
from mmrl.scoring.reward_workers import RewardCall, RewardWorkers
from mmrl.scoring.terms import BoundTerm, find_counted_terms
from mmrl.types import (
    Failure,
    FailureKind,
    MediaOpener,
    Response,
    RewardValue,
    Sample,
    UserError,
    use_media_opener,
)

NOT_FOR_ROLLOUT = RewardValue(0.0, "not for this rollout: see `when`")
"""Outcome of a term whose `when` excludes the rollout."""

ScoringPair = tuple[Response, Sample]
"""The arguments of a reward."""
OutcomesByTerm = Mapping[str, RewardOutcome]
"""Value or failure of each term that applies to a response."""


@dataclass(slots=True)
class _PendingResponse:
    """A response, with the outcomes it has so far."""

    pair: ScoringPair
    outcomes: dict[str, RewardOutcome]  # by term name
    terms: list[BoundTerm]  # those that the next round calls


class RewardCaller:
    """Calls the terms that apply to a response, in this process or in workers, and fallbacks of those that fail."""

    def __init__(
        self,
        terms: Sequence[BoundTerm],
        options: ScoringConfig,
        media_opener: MediaOpener | None,
        workers: RewardWorkers,
        *,
        is_trial: bool = False,
    ) -> None:
        """Store the terms, which see pictures through `media_opener`, and the processes that run some of them.

        In a trial, before the first step, a worker that hangs or dies is an error, the highest value stands for that of
        a costly service, and responses need not meet conditions on rollouts, whose features they lack.
        """
        self.terms, self.counted_terms, self.media_opener = tuple(terms), find_counted_terms(terms), media_opener
        self.options, self.workers, self.is_trial = options, workers, is_trial
        self._terms_by_name = {term.name: term for term in terms}
        self._sample_conditions = {term.name: term.options.sample_when for term in terms}
        self._condition_columns = {column for when in self._sample_conditions.values() for column in when}
        # Cached by evaluation and the sample's values in these columns, since most samples share a few combinations.
        self._applicable_terms: dict[tuple[object, ...], list[BoundTerm]] = {}

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

    def call(self, pairs: Sequence[ScoringPair], *, evaluation: bool = False) -> list[OutcomesByTerm]:
        """Return the outcome of each term that applies to each response, and of the fallbacks that were called.

        Raises:
            RewardError: a reward failed, and the config says to stop.
            UserError: no term applies to a sample.
        """
        all_pending = [self._make_pending(pair, evaluation=evaluation) for pair in pairs]
        # The first round calls the terms of all responses, each later one the fallbacks of those that failed.
        while due := [pending for pending in all_pending if pending.terms]:
            calls = [(pending, term) for pending in due for term in pending.terms]
            if self.is_trial:
                for pending, term in calls:
                    if term.is_costly:
                        pending.outcomes[term.name] = RewardValue(term.declaration.high, "not asked")
                calls = [(pending, term) for pending, term in calls if not term.is_costly]
            worker_calls: dict[int, RewardCall] = {}  # by index in `calls`
            for index, (pending, term) in enumerate(calls):
                if term.name in self.workers.terms:
                    worker_calls[index] = RewardCall(term.name, *pending.pair)
            # Workers get all of their calls at once, so that none idles.
            returned = self.workers.call([*worker_calls.values()], is_trial=self.is_trial) if worker_calls else []
            worker_outcomes = dict(zip(worker_calls, returned, strict=True))
            with use_media_opener(self.media_opener):
                for index, (pending, term) in enumerate(calls):
                    in_worker = index in worker_outcomes
                    outcome = worker_outcomes[index] if in_worker else call_reward(term.reward, *pending.pair)
                    pending.outcomes[term.name] = outcome
            for pending in due:
                pending.terms = self._list_fallbacks(pending)
        return [pending.outcomes for pending in all_pending]

    def call_term(self, term: BoundTerm, response: Response, sample: Sample) -> RewardOutcome:
        """Return the outcome of one call of a term, without its fallbacks."""
        if term.name in self.workers.terms:
            return self.workers.call([RewardCall(term.name, response, sample)])[0]
        with use_media_opener(self.media_opener):
            return call_reward(term.reward, response, sample)

    def find_fallback(self, term: BoundTerm, failure: Failure, response: Response, sample: Sample) -> BoundTerm | None:
        """Return the term that decides in place of one that failed, or None if the failure policy decides."""
        if term.fallback_term is None:
            return None
        if failure.kind is FailureKind.ERROR and self.options.on_error != "fallback":
            return None
        fallback = self._terms_by_name[term.fallback_term]
        applies = matches_conditions(self._sample_conditions[fallback.name], sample)
        return fallback if applies and self._applies_to_rollout(fallback, response) else None

    def list_deciding_terms(self, term: BoundTerm, outcomes: OutcomesByTerm) -> list[BoundTerm]:
        """Return a term and the fallbacks that were called in its place, in order; the last one decides."""
        chain = [term]
        while isinstance(failure := outcomes[chain[-1].name], Failure):
            name = chain[-1].fallback_term
            if name is None or name not in outcomes:
                break
            # The fallback may have an outcome because another term called it. It must not replace a reward with a bug.
            if failure.kind is FailureKind.ERROR and self.options.on_error != "fallback":
                break
            chain.append(self._terms_by_name[name])
        return chain

    def failure_action(self, failure: Failure) -> RewardFailurePolicy:
        """Return the config's policy for a failure that no fallback replaces."""
        return self.options.on_error if failure.kind is FailureKind.ERROR else self.options.on_missing_score

    def _applies_to_rollout(self, term: BoundTerm, response: Response) -> bool:
        return self.is_trial or matches_rollout(term.options.when, response)

    def _make_pending(self, pair: ScoringPair, *, evaluation: bool) -> _PendingResponse:
        """Return a response with the terms to call first. Raises UserError if no term applies to it."""
        response, sample = pair
        applicable = self.applicable_terms(sample, evaluation=evaluation)
        if not applicable:
            where = f"sample {sample.id!r} of task {sample.task!r}{', in evaluation' if evaluation else ''}"
            raise UserError(f"no reward term applies to {where}: see `when`")
        pending = _PendingResponse(pair, {}, [])
        for term in applicable:
            if self._applies_to_rollout(term, response):
                pending.terms.append(term)
            else:
                pending.outcomes[term.name] = NOT_FOR_ROLLOUT
        return pending

    def _list_fallbacks(self, pending: _PendingResponse) -> list[BoundTerm]:
        """Return the terms to call in place of those that failed in this round, each once.

        Raises:
            RewardError: no term replaces one that failed, and the config says to stop.
        """
        fallbacks: dict[str, BoundTerm] = {}
        for term in pending.terms:
            failure = pending.outcomes[term.name]
            if not isinstance(failure, Failure):
                continue
            fallback = self.find_fallback(term, failure, *pending.pair)
            if fallback is None and failure.counts_low_end:
                pending.outcomes[term.name] = RewardValue(term.declaration.low, failure.reason)
            elif fallback is None and self.failure_action(failure) == "stop":
                raise make_error(term.name, failure, *pending.pair)
            elif fallback is not None and fallback.name not in pending.outcomes:
                fallbacks[fallback.name] = fallback
        return list(fallbacks.values())
