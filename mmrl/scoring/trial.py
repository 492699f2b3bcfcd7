"""Tries the rewards of a run on its samples, so that a broken reward or target is found before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from time import monotonic

from mmrl.answer import ResponseFormat
from mmrl.scoring.outcomes import RewardError, is_unscorable, make_error
from mmrl.scoring.reward_calls import RewardCaller, ScoringPair
from mmrl.scoring.scorer import RewardFunctionScorer
from mmrl.scoring.term_checks import check_parts
from mmrl.scoring.terms import BoundTerm
from mmrl.scoring.trial_responses import build_attacks, make_samples, make_trial_response
from mmrl.types import AnswerType, Failure, Response, Sample, UserError, use_media_opener

_MAX_BATCH_SIZE = 1000
_BATCH_S = 1.0  # batches grow while they take less
_TRIED_SAMPLES = 2  # samples of each answer type that wrong answers are tried on
_MAX_WRONG_CHARS = 10_000  # longer ones take time, and no model writes them


class RewardTrial:
    """Tries the rewards of a scorer on samples."""

    def __init__(self, scorer: RewardFunctionScorer, response_format: ResponseFormat) -> None:
        """Store the scorer, and the format in which responses are written for it."""
        self._scorer, self._caller, self._response_format = scorer, scorer.caller, response_format
        # A bug stops the trial, whatever the config says. A reward that abstains does not.
        options = scorer.caller.options.model_copy(update={"on_error": "stop", "on_missing_score": "skip"})
        self._trial_caller = RewardCaller(
            scorer.caller.terms, options, scorer.caller.media_opener, scorer.caller.workers, is_trial=True
        )
        # Terms whose costly service was asked. Asking for further rows would cost requests and show nothing new.
        self._asked_services: set[str] = set()

    def check_in_batches(self, samples: Iterable[Sample], *, evaluation: bool = False) -> Iterator[dict[str, str]]:
        """Call every reward for every sample, with an empty response and with the correct one.

        Yields after each batch its samples that a reward cannot score, by id with the reason.

        In evaluation, `training_only` terms are left out. A reward whose service is costly is called only once, with a
        wrong answer, because some skip the service for a correct one. Batches take about a second each, so that the
        progress shown by `samples` keeps moving.

        Raises:
            RewardProcessError: a worker hung, died or exceeded a limit. The calls after it are not made.
            RewardError: a reward failed other than by `Unscorable`, whatever `on_error` says.
            UserError: no term applies to a sample, its target cannot be written in the response format, or a term reads
                a part that this format does not have.
        """
        check_parts(self._caller.terms, self._response_format)
        remaining, batch_size = iter(samples), max(1, self._caller.options.workers)
        # Scores of a whole dataset at once would fill memory; one sample at a time would leave workers idle.
        while batch := list(islice(remaining, batch_size)):
            started_at = monotonic()
            abstained = self._check_batch(batch, evaluation=evaluation)
            if monotonic() - started_at < _BATCH_S:
                batch_size = min(2 * batch_size, _MAX_BATCH_SIZE)
            yield abstained

    def check_wrong_answers(self, samples: Iterable[Sample]) -> list[str]:
        """Call the rewards with wrong answers, such as the attacks of `mmrl reward lint`, for a few samples a type.

        Some rewards fail only on wrong answers, which `check_in_batches` does not try. Services are not asked.

        Returns:
            A warning for each reward that fails where the config says to leave such rollouts out.

        Raises:
            RewardError: a reward fails, and the config says to stop: the run would end at such a response.
        """
        warnings: dict[str, str] = {}
        counts: Counter[tuple[str, AnswerType]] = Counter()
        for sample in samples:
            for term in self._caller.terms_with_fallbacks(sample):
                kind = term.name, sample.target.answer_type
                counts[kind] += 1
                if counts[kind] > _TRIED_SAMPLES or term.name in warnings or term.declaration.uses_service:
                    continue
                error = self._try_wrong_answers(term, sample)
                if error is not None:
                    warnings[term.name] = str(error)
        return list(warnings.values())

    def _check_batch(self, batch: Sequence[Sample], *, evaluation: bool) -> dict[str, str]:
        """Call every reward for each sample; return those that a reward cannot score, by id with the reason."""
        pairs: list[ScoringPair] = []
        terms_of_pairs: list[list[BoundTerm]] = []
        for sample in batch:
            terms = self._caller.terms_with_fallbacks(sample, evaluation=evaluation)
            for term in terms:
                if term.is_costly and term.name not in self._asked_services:
                    self._asked_services.add(term.name)
                    self._try_wrong_answers(term, sample)
            for text in ("", self._build_correct_text(sample)):
                pairs.append((self._make_response(sample, text, terms), sample))
                terms_of_pairs.append(terms)
        all_outcomes = self._trial_caller.call(pairs, evaluation=evaluation)
        abstained: dict[str, str] = {}
        for (response, sample), terms, outcomes in zip(pairs, terms_of_pairs, all_outcomes, strict=True):
            # Raises a UserError if a term requires another that does not apply to the sample.
            self._scorer.combine_outcomes(sample, outcomes)
            for term in terms:
                failure = outcomes.get(term.name)
                # Where a fallback was called, its own outcome counts.
                if isinstance(failure, Failure) and term.fallback_term not in outcomes:
                    abstained.setdefault(sample.id, str(make_error(term.name, failure, response, sample)))
        return abstained

    def _try_wrong_answers(self, term: BoundTerm, sample: Sample) -> RewardError | None:
        """Return the first failure of a reward on wrong answers to a sample; raise it if the config says to stop.

        A costly service is asked about one wrong answer only, and any failure of it is raised.
        """
        answer_type, is_costly = sample.target.answer_type, term.is_costly
        response_format = self._response_format
        correct = self._make_response(sample, self._build_correct_text(sample), [term])
        with use_media_opener(self._caller.media_opener):
            texts = build_attacks(sample, response_format, correct.text, looks=term.declaration.looks)
        # Only an answer of the right type is compared with the target, and the attacks may all be of other types.
        with suppress(UserError):
            texts["another answer"] = response_format.build_example(make_samples((answer_type,))[0].target)
        for name, text in texts.items():
            if len(text) > _MAX_WRONG_CHARS or (is_costly and name != "question echo"):
                continue
            response = replace(correct, text=text, answer=response_format.parse(text, answer_type))
            # One at a time, so that a reward that hangs costs its deadline once.
            outcome = self._caller.call_term(term, response, sample)
            if not isinstance(outcome, Failure) or outcome.counts_low_end:
                continue
            if not is_costly and self._caller.find_fallback(term, outcome, response, sample):
                continue
            error = make_error(term.name, outcome, response, sample)
            if is_costly or self._caller.failure_action(outcome) == "stop":
                raise RewardError(f"{error}; wrong answers are tried before the first step, as by `mmrl reward lint`")
            # Abstaining is not a fault if the run continues without the rollout.
            if not is_unscorable(outcome):
                return error
        return None

    def _make_response(self, sample: Sample, text: str, terms: Sequence[BoundTerm]) -> Response:
        """Return a response with this text, with the true sizes of images if one of these terms looks at them."""
        looks = any(term.declaration.looks for term in terms)
        with use_media_opener(self._caller.media_opener):
            return make_trial_response(sample, text, self._response_format, looks=looks)

    def _build_correct_text(self, sample: Sample) -> str:
        try:
            return self._response_format.build_example(sample.target)
        except UserError as error:
            raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
