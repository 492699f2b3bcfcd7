"""Calls every reward that applies to a response, in this process or in workers, and decides what a failure leads to."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import NamedTuple

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardFailurePolicy, ScoringConfig, matches_conditions
from mmrl.scoring.lint import build_attacks, make_samples, make_trial_response
from mmrl.scoring.terms import (
    BoundTerm,
    RewardError,
    RewardOutcome,
    RewardProcessError,
    call_reward,
    check_parts,
    check_terms,
    combine_terms,
    is_unscorable,
    make_worker_limits,
    worker_failure,
)
from mmrl.types import (
    AnswerType,
    Dropped,
    Group,
    Response,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Rollout,
    Sample,
    Score,
    UserError,
)
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity
from mmrl_rewards.contract import BoundReward

_MAX_BATCH_SIZE = 32  # most rewards take microseconds, less than a message between processes
_MAX_RESPONSE_CHARS = 200
_MAX_CHECK_BATCH_SIZE = 1000
_CHECK_BATCH_S = 1.0  # the batches of the trial grow while they take less
_TRIED_SAMPLES = 2  # samples of each answer type that wrong answers are tried on
_MAX_WRONG_CHARS = 10_000  # longer ones take time, and no model writes them
_LOCAL_SERVICES = ("render_svg", "render_latex")  # rewards whose service is a process of this machine

ScoringPair = tuple[Response, Sample]
"""The arguments of a reward."""
OutcomesByTerm = Mapping[str, RewardOutcome]
"""Value or failure of each term that applies to a response."""


class RewardCall(NamedTuple):
    """One call of a reward."""

    term: str  # name of the reward term
    response: Response
    sample: Sample


class RewardFunctionScorer:
    """Scores rollouts. Terms with a `timeout_s`, and those of users, run in worker processes; all do with `workers`."""

    def __init__(self, terms: Sequence[BoundTerm], options: ScoringConfig) -> None:
        """Check the terms; no process is started before the first call.

        Raises:
            UserError: the terms do not fit together.
        """
        check_terms(terms, options.combine)
        self.terms, self._options = tuple(terms), options
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
        """The weight of each term by its name, without schedules."""
        return {term.name: term.options.weight for term in self.terms}

    def applicable_terms(self, sample: Sample, *, evaluation: bool = False) -> list[BoundTerm]:
        """Return the terms that score responses to a sample; in evaluation, none that is `training_only`."""
        terms = []
        for term in self.terms:
            is_left_out = evaluation and term.options.training_only
            if not is_left_out and matches_conditions(term.options.when, sample):
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
        pairs = [_scoring_pair(rollout) for siblings in rollouts for rollout in siblings]
        outcomes = iter(self._call_rewards(pairs))
        groups: list[Group] = []
        for siblings in rollouts:
            groups.append(self._build_group([(rollout, next(outcomes)) for rollout in siblings], step))
        for index, rollouts_by_probe in enumerate(probes):
            scores = {name: self.score_eval(answers) for name, answers in rollouts_by_probe.items()}
            groups[index] = replace(groups[index], probes=scores)
        return tuple(groups)

    def score_eval(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """Return one score for each rollout, in order, without schedules and without `training_only` terms.

        No rollout is dropped, so that two evaluations cover the same samples: a term that fails counts its fallback
        where training would drop the rollout. Raises the same errors as `score_groups`.
        """
        return self.score(list(map(_scoring_pair, rollouts)))

    def score(self, pairs: Sequence[ScoringPair]) -> tuple[Score, ...]:
        """Score responses, as `score_eval` scores rollouts. Raises the same errors."""
        all_outcomes = self._call_rewards(pairs, evaluation=True)
        return tuple(
            self._combine_outcomes(sample, outcomes, None)
            for (_, sample), outcomes in zip(pairs, all_outcomes, strict=True)
        )

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
                for term in self.applicable_terms(sample, evaluation=evaluation):
                    if _asks_remote_service(term) and term.name not in self._asked_services:
                        self._asked_services.add(term.name)
                        self._try_wrong_answers(term, sample, response_format)
                correct = _make_correct_response(sample, response_format)
                pairs += [(make_trial_response(sample, "", response_format), sample), (correct, sample)]
            all_outcomes = self._call_rewards(pairs, evaluation=evaluation, trial=True)
            for (_, sample), outcomes in zip(pairs, all_outcomes, strict=True):
                # A total needs a value of every term, those included whose service was asked about another sample.
                applicable = self.applicable_terms(sample, evaluation=evaluation)
                stand_ins = {term.name: RewardValue(term.reward.reward.high, "not asked") for term in applicable}
                self._combine_outcomes(sample, {**stand_ins, **outcomes}, None)
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
            for term in self.applicable_terms(sample):
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
        correct = _make_correct_response(sample, response_format)
        texts = build_attacks(sample, response_format, correct.text)
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
                outcome = call_reward(term.reward, response, sample)
            if not isinstance(outcome, RewardFailure):
                continue
            error = _make_error(term.name, outcome, response, sample)
            if is_remote or self._failure_action(outcome) == "stop":
                raise RewardError(f"{error}; wrong answers are tried before the first step, as by `mmrl reward lint`")
            # To abstain is not a fault, where the run continues without the rollout.
            if not is_unscorable(outcome):
                return error
        return None

    def _call_rewards(
        self, pairs: Sequence[ScoringPair], *, evaluation: bool = False, trial: bool = False
    ) -> list[OutcomesByTerm]:
        """Return the outcome of each term that applies to each response. A trial tolerates no failure."""
        terms_of_pairs = []
        worker_calls: list[RewardCall] = []
        for response, sample in pairs:
            terms = self.applicable_terms(sample, evaluation=evaluation)
            if not terms:
                where = ", in evaluation" if evaluation else ""
                raise UserError(
                    f"no reward term applies to sample {sample.id!r} of task {sample.task!r}{where}: see `when`"
                )
            if trial:
                terms = [term for term in terms if not _asks_remote_service(term)]
            terms_of_pairs.append(terms)
            for term in terms:
                if term.name in self._timeouts_s:
                    worker_calls.append(RewardCall(term.name, response, sample))
        # The calls of all responses go to the workers together, so that none of them idles.
        worker_outcomes = iter(self._run_in_workers(worker_calls, trial=trial) if worker_calls else [])
        all_outcomes: list[OutcomesByTerm] = []
        for terms, (response, sample) in zip(terms_of_pairs, pairs, strict=True):
            outcomes: dict[str, RewardOutcome] = {}
            for term in terms:
                in_worker = term.name in self._timeouts_s
                outcomes[term.name] = next(worker_outcomes) if in_worker else call_reward(term.reward, response, sample)
            for name, failure in _failures_by_term(outcomes).items():
                if trial or self._failure_action(failure) == "stop":
                    raise _make_error(name, failure, response, sample)
            all_outcomes.append(outcomes)
        return all_outcomes

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
                    partial(_load_rewards, loaders, list(warm_up_calls.values())),
                    max(1, options.workers),
                    limits=make_worker_limits(options),
                    max_batch_size=_MAX_BATCH_SIZE,
                )
                self._pool.wait_until_ready()
            futures = self._pool.submit_all(calls, [self._timeouts_s[call.term] for call in calls])
            # A reward that hangs may do so on every sample, and the trial would take their number times its deadline.
            self._pool.wait_for_calls(futures, stop_at_error=trial)
            if trial:
                _raise_if_killed(futures, calls)
            return _read_outcomes(futures, calls)
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
            failures = {}
            for name, failure in _failures_by_term(outcomes).items():
                action = self._failure_action(failure)
                skip_group |= action == "skip_group"
                if action != "fallback":
                    failures[name] = failure
            failures_of_rollouts.append(Dropped(rollout, failures))
            if not failures:
                kept.append((rollout, outcomes))
        if skip_group:
            return Group(prompt=prompt, rollouts=(), scores=(), dropped=tuple(failures_of_rollouts))
        return Group(
            prompt=prompt,
            rollouts=tuple(rollout for rollout, _ in kept),
            scores=tuple(self._combine_outcomes(prompt.sample, outcomes, step) for _, outcomes in kept),
            dropped=tuple(dropped for dropped in failures_of_rollouts if dropped.failures),
        )

    def _failure_action(self, failure: RewardFailure) -> RewardFailurePolicy:
        return self._options.on_error if failure.error_kind is RewardErrorKind.ERROR else self._options.on_missing_score

    def _combine_outcomes(self, sample: Sample, outcomes: OutcomesByTerm, step: int | None) -> Score:
        """Return the score of a response, with the fallback in place of each failure."""
        terms = [term for term in self.terms if term.name in outcomes]
        reward_values: dict[str, RewardValue] = {}
        for term in terms:
            outcome = outcomes[term.name]
            if isinstance(outcome, RewardFailure):
                outcome = RewardValue(term.fallback, f"fallback: {outcome.reason}")
            reward_values[term.name] = outcome
        values = {name: reward_value.value for name, reward_value in reward_values.items()}
        try:
            total, contributions = combine_terms(terms, values, self._options.combine, step=step)
        except UserError as error:
            raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
        return Score(
            terms=reward_values, total=total, failures=_failures_by_term(outcomes), contributions=contributions
        )


def _scoring_pair(rollout: Rollout) -> ScoringPair:
    """Return the arguments for which a reward is called."""
    return make_response(rollout), rollout.prompt.sample


def make_response(rollout: Rollout) -> Response:
    """Return what a reward may know of a rollout."""
    prompt = rollout.prompt
    return Response(
        text=rollout.text,
        answer=rollout.answer,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_tokens,
        resize_maps=prompt.resize_maps,
        coordinate_system=prompt.coordinate_system,
        tool_resize_maps=tuple(observation.resize_map for observation in rollout.observations),
    )


def _make_correct_response(sample: Sample, response_format: ResponseFormat) -> Response:
    try:
        text = response_format.build_example(sample.target)
    except UserError as error:
        raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
    return make_trial_response(sample, text, response_format)


def _asks_remote_service(term: BoundTerm) -> bool:
    """Return True for a reward whose calls cost a request or a model, False for drawings of this machine."""
    reward = term.reward
    is_local = reward.reward.name in _LOCAL_SERVICES and reward.args.get("encoder") is None
    return reward.reward.uses_service and not is_local


def _failures_by_term(outcomes: OutcomesByTerm) -> dict[str, RewardFailure]:
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RewardFailure)}


def _make_error(name: str, failure: RewardFailure, response: Response, sample: Sample) -> RewardError:
    where = f"reward {name!r} on sample {sample.id!r} (task {sample.task!r})"
    return RewardError(f"{where}: {failure.reason}; response: {_quote(response)}")


def _quote(response: Response) -> str:
    """Return the text of a response in quotes, cut where it is long."""
    text = response.text
    return repr(text if len(text) <= _MAX_RESPONSE_CHARS else text[:_MAX_RESPONSE_CHARS] + "...")


def _raise_if_killed(futures: Sequence[Future[RewardOutcome]], calls: Sequence[RewardCall]) -> None:
    """Raise a RewardProcessError for the first call whose worker hung, died or exceeded a limit."""
    for future, call in zip(futures, calls, strict=True):
        error = future.exception() if future.done() else None
        if isinstance(error, WorkerError) and not isinstance(error, WorkerStartError):
            failure = _make_error(call.term, worker_failure(error), call.response, call.sample)
            raise RewardProcessError(
                f"{failure}. Every step could lose time or rollouts to such calls: fix the reward, or raise "
                "rewards.timeout_s or rewards.worker_limits if it needs more"
            )


def _read_outcomes(futures: Sequence[Future[RewardOutcome]], calls: Sequence[RewardCall]) -> list[RewardOutcome]:
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
        report(f"calling reward {call.term!r} on sample {call.sample.id!r}, response {_quote(call.response)}")
        call_reward(rewards[call.term], call.response, call.sample)
    return partial(_call_loaded_reward, rewards)


def _call_loaded_reward(rewards: Mapping[str, BoundReward], call: RewardCall) -> RewardOutcome:
    return call_reward(rewards[call.term], call.response, call.sample)
