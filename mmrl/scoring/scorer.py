"""Calls every reward that applies to a response, in this process or in workers, and decides what a failure leads to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from time import monotonic

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardFailurePolicy, ScoringConfig, matches_conditions
from mmrl.config.schema.base import condition_value, matches_rollout
from mmrl.scoring.lint import build_attacks, make_samples, make_trial_response
from mmrl.scoring.reward_calls import RewardCall, load_rewards, make_error, raise_if_killed, read_outcomes
from mmrl.scoring.terms import (
    BoundTerm,
    RewardError,
    RewardOutcome,
    RewardProcessError,
    call_reward,
    check_parts,
    check_terms,
    combine_terms,
    divide_by_turn,
    find_counted_terms,
    is_unscorable,
    make_worker_limits,
)
from mmrl.types import (
    AnswerType,
    Author,
    Dropped,
    Group,
    MediaOpener,
    Response,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Rollout,
    Sample,
    Score,
    UserError,
    use_media_opener,
)
from mmrl.utils.worker_pool import WorkerPool, WorkerStartError
from mmrl_rewards.contract import TurnRewards

_MAX_BATCH_SIZE = 32  # most rewards take microseconds, less than a message between processes
_MAX_CHECK_BATCH_SIZE = 1000
_CHECK_BATCH_S = 1.0  # the batches of the trial grow while they take less
_TRIED_SAMPLES = 2  # samples of each answer type that wrong answers are tried on
_MAX_WRONG_CHARS = 10_000  # longer ones take time, and no model writes them
_LOCAL_SERVICES = ("render_svg", "render_latex")  # rewards whose service is a process of this machine

ENVIRONMENT = "environment"
"""Name by which the failure of a rollout's environment is counted, beside those of reward terms."""

# In place of the outcome of a term whose `when` excludes the rollout.
_NOT_FOR_ROLLOUT = RewardValue(0.0, "not for this rollout: see `when`")

ScoringPair = tuple[Response, Sample]
"""The arguments of a reward."""
OutcomesByTerm = Mapping[str, RewardOutcome]
"""Value or failure of each term that applies to a response."""


class RewardFunctionScorer:
    """Scores rollouts. Terms with a `timeout_s`, and those of users, run in worker processes; all do with `workers`."""

    def __init__(
        self, terms: Sequence[BoundTerm], options: ScoringConfig, media_opener: MediaOpener | None = None
    ) -> None:
        """Check the terms; no process is started before the first call.

        Rewards see pictures through `media_opener`, of which worker processes receive a pickled copy.

        Raises:
            UserError: the terms do not fit together.
        """
        check_terms(terms, options.combine)
        self.terms, self._options, self._media_opener = tuple(terms), options, media_opener
        self._terms_by_name = {term.name: term for term in terms}
        self._counted_terms = find_counted_terms(terms)
        self._sample_conditions = {term.name: term.options.sample_when for term in terms}
        self._condition_columns = {column for when in self._sample_conditions.values() for column in when}
        # Terms by evaluation and by what a sample has in these columns: few for many samples, each asked about often.
        self._applicable_terms: dict[tuple[object, ...], list[BoundTerm]] = {}
        # Seconds that a call may take, of the terms that run in worker processes.
        self._timeouts_s: dict[str, float] = {}
        for term in terms:
            is_isolated = options.custom_rewards == "worker" and not term.comes_with_mmrl
            if options.workers or term.timeout_s is not None or is_isolated:
                self._timeouts_s[term.name] = term.timeout_s or options.timeout_s
        self._pool: WorkerPool[RewardCall, RewardOutcome] | None = None
        # Terms whose service was asked in a check. Each row would cost a request, and show no more.
        self._asked_services: set[str] = set()

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each term that counts by itself, by its name, without schedules."""
        return {term.name: term.options.weight for term in self._counted_terms}

    def applicable_terms(self, sample: Sample, *, evaluation: bool = False) -> list[BoundTerm]:
        """Return the terms that score responses to a sample; in evaluation, none that is `training_only`.

        A term that is only the fallback of others is none of them. Conditions on the rollout are not looked at.
        """
        key = (evaluation, *[condition_value(sample, column) for column in self._condition_columns])
        terms = self._applicable_terms.get(key)
        if terms is None:
            terms = self._applicable_terms[key] = []
            for term in self._counted_terms:
                is_left_out = evaluation and term.options.training_only
                if not is_left_out and matches_conditions(self._sample_conditions[term.name], sample):
                    terms.append(term)
        return terms

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> tuple[Group, ...]:
        """Return a scored group for each prompt, in order.

        Args:
            rollouts: those of each prompt.
            step: the step of the stage, for scheduled weights.
            probes: for each prompt, extra rollouts by the name of their probe; they are scored as in evaluation.

        Raises:
            RewardError: a reward failed, and the config says to stop.
            UserError: no term applies to a sample.
        """
        scorable = [rollout for siblings in rollouts for rollout in siblings if rollout.failure is None]
        outcomes = iter(self._call_rewards(list(map(_scoring_pair, scorable))))
        groups: list[Group] = []
        for siblings in rollouts:
            pairs = [(rollout, next(outcomes) if rollout.failure is None else {}) for rollout in siblings]
            groups.append(self._build_group(pairs, step))
        for index, rollouts_by_probe in enumerate(probes):
            scores = {name: self.score_eval(answers) for name, answers in rollouts_by_probe.items()}
            groups[index] = replace(groups[index], probes=scores)
        return tuple(groups)

    def score_eval(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """Return one score for each rollout, in order, without schedules and without `training_only` terms.

        No rollout is dropped, so that two evaluations cover the same samples: a term that fails counts its fallback
        where training would drop the rollout, and all of them do if its environment failed. Raises the same errors as
        `score_groups`.
        """
        scored = iter(self.score([_scoring_pair(rollout) for rollout in rollouts if rollout.failure is None]))
        scores = []
        for rollout in rollouts:
            if rollout.failure is None:
                scores.append(next(scored))
                continue
            sample, failure = rollout.prompt.sample, rollout.failure
            outcomes = {term.name: failure for term in self.applicable_terms(sample, evaluation=True)}
            scores.append(self._combine_outcomes(sample, outcomes, num_turns=len(rollout.turns)))
        return tuple(scores)

    def score(self, pairs: Sequence[ScoringPair]) -> tuple[Score, ...]:
        """Score responses, as `score_eval` scores rollouts. Raises the same errors."""
        all_outcomes = self._call_rewards(pairs, evaluation=True)
        scores = []
        for (response, sample), outcomes in zip(pairs, all_outcomes, strict=True):
            scores.append(self._combine_outcomes(sample, outcomes, num_turns=len(response.turns)))
        return tuple(scores)

    def check_samples(
        self, samples: Iterable[Sample], response_format: ResponseFormat, *, evaluation: bool = False
    ) -> None:
        """Call every reward for every sample, with an empty response and with the correct one.

        A run does this at its start, so that an unusable target or a broken reward stops it before the first step. The
        correct response is written in `response_format`. In evaluation, `training_only` terms are left out. A reward
        that asks a service is called once in all, with a wrong answer: some ask about no other. Samples are taken in
        batches of about a second, so that an iterable which shows progress moves on.

        Raises:
            RewardProcessError: a worker hung, died or exceeded a limit. The calls after it are not made.
            RewardError: a reward failed, whatever `on_error` and `on_missing_score` say.
            UserError: no term applies to a sample, its target cannot be written in the response format, or a term reads
                a part that this format does not have.
        """
        check_parts(self.terms, response_format)
        remaining, batch_size = iter(samples), max(1, self._options.workers)
        # Scores of a whole dataset at once would fill memory; one sample at a time would leave workers idle.
        while batch := list(islice(remaining, batch_size)):
            started_at = monotonic()
            pairs: list[ScoringPair] = []
            for sample in batch:
                terms = self._terms_with_fallbacks(sample, evaluation=evaluation)
                for term in terms:
                    if _asks_remote_service(term) and term.name not in self._asked_services:
                        self._asked_services.add(term.name)
                        self._try_wrong_answers(term, sample, response_format)
                for text in ("", _build_correct_text(sample, response_format)):
                    pairs.append((self._make_trial_response(sample, text, response_format, terms), sample))
            all_outcomes = self._call_rewards(pairs, evaluation=evaluation, trial=True)
            for (_, sample), outcomes in zip(pairs, all_outcomes, strict=True):
                # A total needs a value of every term, those included whose service was asked about another sample.
                applicable = self.applicable_terms(sample, evaluation=evaluation)
                not_asked = [term for term in applicable if term.name not in outcomes]
                stand_ins = {term.name: RewardValue(term.reward.reward.high, "not asked") for term in not_asked}
                self._combine_outcomes(sample, {**outcomes, **stand_ins})
            if monotonic() - started_at < _CHECK_BATCH_S:
                batch_size = min(2 * batch_size, _MAX_CHECK_BATCH_SIZE)

    def check_wrong_answers(self, samples: Iterable[Sample], response_format: ResponseFormat) -> list[str]:
        """Call the rewards with wrong answers, those of `mmrl reward lint` too, for a few samples of each answer type.

        A reward may fail on wrong answers alone, which `check_samples` does not show. Services are not asked.

        Returns:
            A warning for each reward that fails where the config says to leave such rollouts out.

        Raises:
            RewardError: a reward fails, and the config says to stop: the run would end at such a response.
        """
        warnings: dict[str, str] = {}
        counts: Counter[tuple[str, AnswerType]] = Counter()
        for sample in samples:
            for term in self._terms_with_fallbacks(sample):
                kind = term.name, sample.target.answer_type
                counts[kind] += 1
                if counts[kind] > _TRIED_SAMPLES or term.name in warnings or term.reward.reward.uses_service:
                    continue
                error = self._try_wrong_answers(term, sample, response_format)
                if error is not None:
                    warnings[term.name] = str(error)
        return list(warnings.values())

    def close(self) -> None:
        """End the worker processes, if any were started."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _try_wrong_answers(
        self, term: BoundTerm, sample: Sample, response_format: ResponseFormat
    ) -> RewardError | None:
        """Return the first failure of a reward on wrong answers to a sample; raise it if the config says to stop.

        A service is asked about one of them, and every failure of it raised.
        """
        answer_type, is_remote = sample.target.answer_type, _asks_remote_service(term)
        correct_text = _build_correct_text(sample, response_format)
        correct = self._make_trial_response(sample, correct_text, response_format, [term])
        with use_media_opener(self._media_opener):
            texts = build_attacks(sample, response_format, correct.text, looks=term.reward.reward.looks)
        # None of those need be an answer of the right type, which alone reaches the comparison with the target.
        with suppress(UserError):
            texts["another answer"] = response_format.build_example(make_samples((answer_type,))[0].target)
        for name, text in texts.items():
            if len(text) > _MAX_WRONG_CHARS or (is_remote and name != "question echo"):
                continue
            response = replace(correct, text=text, answer=response_format.parse(text, answer_type))
            # One at a time, so that a reward that hangs costs its deadline once.
            if term.name in self._timeouts_s:
                outcome = self._run_in_workers([RewardCall(term.name, response, sample)])[0]
            else:
                with use_media_opener(self._media_opener):
                    outcome = call_reward(term.reward, response, sample)
            if not isinstance(outcome, RewardFailure):
                continue
            if not is_remote and self._find_fallback(term, outcome, response, sample):
                continue
            error = make_error(term.name, outcome, response, sample)
            if is_remote or self._failure_action(outcome) == "stop":
                raise RewardError(f"{error}; wrong answers are tried before the first step, as by `mmrl reward lint`")
            # To abstain is not a fault, where the run continues without the rollout.
            if not is_unscorable(outcome):
                return error
        return None

    def _make_trial_response(
        self, sample: Sample, text: str, response_format: ResponseFormat, terms: Sequence[BoundTerm]
    ) -> Response:
        """Return a response that nobody sampled, with the true sizes of images if one of these terms looks at them."""
        if not any(term.reward.reward.looks for term in terms):
            return make_trial_response(sample, text, response_format)
        with use_media_opener(self._media_opener):
            return make_trial_response(sample, text, response_format, looks=True)

    def _call_rewards(
        self, pairs: Sequence[ScoringPair], *, evaluation: bool = False, trial: bool = False
    ) -> list[OutcomesByTerm]:
        """Return the outcome of each term that applies to each response. A trial tolerates no failure."""
        all_outcomes: list[dict[str, RewardOutcome]] = [{} for _ in pairs]
        pending: list[tuple[int, BoundTerm]] = []
        for index, (response, sample) in enumerate(pairs):
            terms = self.applicable_terms(sample, evaluation=evaluation)
            if not terms:
                where = ", in evaluation" if evaluation else ""
                raise UserError(
                    f"no reward term applies to sample {sample.id!r} of task {sample.task!r}{where}: see `when`"
                )
            for term in terms:
                # Nobody sampled the responses of a trial, so they have none of the features that `when` may ask for.
                if term.options.when and not trial and not matches_rollout(term.options.when, response):
                    all_outcomes[index][term.name] = _NOT_FOR_ROLLOUT
                elif not (trial and _asks_remote_service(term)):
                    pending.append((index, term))
        # Each round calls the fallbacks of the terms that abstained in the one before.
        while pending:
            outcomes = self._call_terms([(term, pairs[index]) for index, term in pending], trial=trial)
            for (index, term), outcome in zip(pending, outcomes, strict=True):
                all_outcomes[index][term.name] = outcome
            fallbacks: dict[tuple[int, str], BoundTerm] = {}
            for (index, term), outcome in zip(pending, outcomes, strict=True):
                if not isinstance(outcome, RewardFailure):
                    continue
                response, sample = pairs[index]
                fallback = self._find_fallback(term, outcome, response, sample, trial=trial)
                if fallback is None:
                    if trial or self._failure_action(outcome) == "stop":
                        raise make_error(term.name, outcome, response, sample)
                elif fallback.name not in all_outcomes[index] and not (trial and _asks_remote_service(fallback)):
                    fallbacks[index, fallback.name] = fallback
            pending = [(index, fallback) for (index, _), fallback in fallbacks.items()]
        return list(all_outcomes)

    def _call_terms(self, calls: Sequence[tuple[BoundTerm, ScoringPair]], *, trial: bool) -> list[RewardOutcome]:
        """Return the outcomes of calls, those of workers together, so that none of them idles."""
        worker_calls = []
        for term, (response, sample) in calls:
            if term.name in self._timeouts_s:
                worker_calls.append(RewardCall(term.name, response, sample))
        worker_outcomes = iter(self._run_in_workers(worker_calls, trial=trial) if worker_calls else [])
        outcomes = []
        with use_media_opener(self._media_opener):
            for term, (response, sample) in calls:
                in_worker = term.name in self._timeouts_s
                outcomes.append(next(worker_outcomes) if in_worker else call_reward(term.reward, response, sample))
        return outcomes

    def _find_fallback(
        self, term: BoundTerm, failure: RewardFailure, response: Response, sample: Sample, *, trial: bool = False
    ) -> BoundTerm | None:
        """Return the term that decides in place of one that failed, or None where the failure policy does."""
        if term.fallback_term is None:
            return None
        is_bug = failure.error_kind is RewardErrorKind.ERROR
        if is_bug and (trial or self._options.on_error != "fallback"):
            return None
        fallback = self._terms_by_name[term.fallback_term]
        applies = matches_conditions(self._sample_conditions[fallback.name], sample)
        return fallback if applies and (trial or matches_rollout(fallback.options.when, response)) else None

    def _terms_with_fallbacks(self, sample: Sample, *, evaluation: bool = False) -> list[BoundTerm]:
        """Return the terms that apply to a sample, and those that may decide in their place."""
        terms = {term.name: term for term in self.applicable_terms(sample, evaluation=evaluation)}
        pending = list(terms.values())
        for term in pending:
            name = term.fallback_term
            if name and name not in terms and matches_conditions(self._sample_conditions[name], sample):
                terms[name] = self._terms_by_name[name]
                pending.append(terms[name])
        return pending

    def _run_in_workers(self, calls: Sequence[RewardCall], *, trial: bool = False) -> list[RewardOutcome]:
        """Return the outcomes of calls in worker processes. One that hangs or dies costs a single call.

        Raises:
            RewardProcessError: no process can be started; in a trial also, one hung, died or exceeded a limit.
            RewardError: a sample cannot be sent to a process.
            KeyboardInterrupt: this process is to stop, and a reward hangs.
        """
        options = self._options
        try:
            if self._pool is None:
                loaders = {term.name: term.load_reward for term in self.terms if term.name in self._timeouts_s}
                # Made before workers are forked and without deadline, so that the libraries which a first call imports
                # do not count against it.
                warm_up_calls = {call.term: call for call in calls} if trial else {}
                self._pool = WorkerPool(
                    partial(load_rewards, loaders, list(warm_up_calls.values()), self._media_opener),
                    max(1, options.workers),
                    limits=make_worker_limits(options),
                    max_batch_size=_MAX_BATCH_SIZE,
                )
                self._pool.wait_until_ready()
            futures = self._pool.submit_all(calls, [self._timeouts_s[call.term] for call in calls])
            # A reward that hangs may do so on every sample, and the trial would take their number times its deadline.
            self._pool.wait_for_calls(futures, stop_at_error=trial)
            if trial:
                raise_if_killed(futures, calls)
            return read_outcomes(futures, calls)
        except WorkerStartError as error:
            self.close()
            raise RewardProcessError(f"a process for rewards {error}") from error
        # KeyboardInterrupt too: the workers are in the middle of calls whose outcomes nobody will read.
        except BaseException:
            self.close()
            raise

    def _build_group(self, rollout_outcomes: Sequence[tuple[Rollout, OutcomesByTerm]], step: int) -> Group:
        """Return the scored group of one prompt, without the rollouts that the config drops for a failed reward."""
        prompt = rollout_outcomes[0][0].prompt
        kept: list[tuple[Rollout, OutcomesByTerm]] = []
        failures_of_rollouts: list[Dropped] = []
        skip_group = False
        for rollout, outcomes in rollout_outcomes:
            failures = {} if rollout.failure is None else {ENVIRONMENT: rollout.failure}
            for term in self._counted_terms:
                if not isinstance(outcomes.get(term.name), RewardFailure):
                    continue
                chain = self._list_deciding_terms(term, outcomes)
                last = outcomes[chain[-1].name]
                action = self._failure_action(last) if isinstance(last, RewardFailure) else "fallback"
                skip_group |= action == "skip_group"
                if action != "fallback":
                    failures |= _failures_by_term({asked.name: outcomes[asked.name] for asked in chain})
            failures_of_rollouts.append(Dropped(rollout, failures))
            if not failures:
                kept.append((rollout, outcomes))
        if skip_group:
            return Group(prompt=prompt, rollouts=(), scores=(), dropped=tuple(failures_of_rollouts))
        scores = []
        for rollout, outcomes in kept:
            score = self._combine_outcomes(prompt.sample, outcomes, step=step, num_turns=len(rollout.turns))
            scores.append(score)
        return Group(
            prompt=prompt,
            rollouts=tuple(rollout for rollout, _ in kept),
            scores=tuple(scores),
            dropped=tuple(dropped for dropped in failures_of_rollouts if dropped.failures),
        )

    def _failure_action(self, failure: RewardFailure) -> RewardFailurePolicy:
        return self._options.on_error if failure.error_kind is RewardErrorKind.ERROR else self._options.on_missing_score

    def _list_deciding_terms(self, term: BoundTerm, outcomes: OutcomesByTerm) -> list[BoundTerm]:
        """Return a term and the fallbacks that were asked in its place, in order; the last one decides."""
        chain: list[BoundTerm] = []
        following: BoundTerm | None = term
        while following is not None and following.name in outcomes:
            chain.append(following)
            has_value = not isinstance(outcomes[following.name], RewardFailure)
            name = None if has_value else following.fallback_term
            following = None if name is None else self._terms_by_name[name]
        return chain

    def _combine_outcomes(
        self, sample: Sample, outcomes: OutcomesByTerm, *, step: int | None = None, num_turns: int = 0
    ) -> Score:
        """Return the score of a response, with the fallback in place of each failure."""
        terms = [term for term in self._counted_terms if term.name in outcomes]
        reward_values: dict[str, RewardValue] = {}
        rewards_by_turn: dict[str, tuple[float, ...]] = {}
        decided_by: dict[str, str] = {}
        left_out: list[str] = []
        for term in terms:
            outcome = outcomes[term.name]
            if outcome is _NOT_FOR_ROLLOUT:
                left_out.append(term.name)
            if isinstance(outcome, TurnRewards):
                rewards_by_turn[term.name] = outcome.by_turn
            if isinstance(outcome, RewardValue):
                reward_values[term.name] = RewardValue(outcome.value, outcome.reason)
                continue
            chain = self._list_deciding_terms(term, outcomes)
            last = chain[-1]
            outcome = outcomes[last.name]
            if isinstance(outcome, RewardFailure):
                outcome = RewardValue(last.fallback, f"fallback: {outcome.reason}")
            else:
                decided_by[term.name] = last.name
                outcome = RewardValue(outcome.value, f"{last.name} decides: {outcome.reason}")
            value = outcome.value
            for decider in reversed(chain[1:]):
                value = decider.transform(value)
            reward_values[term.name] = RewardValue(value, outcome.reason)
        values = {name: reward_value.value for name, reward_value in reward_values.items()}
        try:
            total, contributions = combine_terms(terms, values, self._options.combine, step=step, left_out=left_out)
        except UserError as error:
            raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
        return Score(
            terms=reward_values,
            total=total,
            failures=_failures_by_term(outcomes),
            contributions=contributions,
            decided_by=decided_by,
            by_turn=divide_by_turn(
                terms,
                rewards_by_turn,
                contributions,
                total=total,
                method=self._options.combine,
                num_turns=num_turns,
            ),
        )


def _scoring_pair(rollout: Rollout) -> ScoringPair:
    """Return the arguments for which a reward is called."""
    return make_response(rollout), rollout.prompt.sample


def make_response(rollout: Rollout) -> Response:
    """Return what a reward may know of a rollout."""
    prompt = rollout.prompt
    # A reply with media has several segments in a row, and so has a response with a forced rethink.
    is_reply = [segment.author is Author.ENVIRONMENT for segment in rollout.segments]
    return Response(
        text=rollout.text,
        answer=rollout.answer,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_tokens,
        resize_maps=prompt.resize_maps,
        coordinate_system=prompt.coordinate_system,
        tool_resize_maps=tuple(observation.resize_map for observation in rollout.observations),
        num_turns=sum(not reply for reply, _ in groupby(is_reply)) if any(is_reply) else min(1, len(is_reply)),
        used_tool=any(is_reply),
        rethought=rollout.parent_index is not None,
        turns=rollout.turns,
    )


def _build_correct_text(sample: Sample, response_format: ResponseFormat) -> str:
    try:
        return response_format.build_example(sample.target)
    except UserError as error:
        raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error


def _asks_remote_service(term: BoundTerm) -> bool:
    """Return True for a reward whose calls cost a request or a model, False for drawings of this machine."""
    reward = term.reward
    is_local = reward.reward.name in _LOCAL_SERVICES and reward.args.get("encoder") is None
    return reward.reward.uses_service and not is_local


def _failures_by_term(outcomes: OutcomesByTerm) -> dict[str, RewardFailure]:
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RewardFailure)}
