"""The judge: calls every reward that applies to a response, here or in workers, and settles what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardFailurePolicy, ScoringConfig
from mmrl.scoring.call import RewardError, RewardOutcome, call_reward
from mmrl.scoring.combine import BoundTerm, check_terms, combine_terms
from mmrl.scoring.reward_workers import RewardCall, RewardWorkers
from mmrl.types import (
    Answer,
    AnswerType,
    CoordinateSystem,
    Dropped,
    FinishReason,
    Group,
    ResizeMap,
    Response,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Rollout,
    Sample,
    Score,
    Size,
    UserError,
)

_MAX_RESPONSE_CHARS = 200
_CHECK_BATCH_SIZE = 1000

ScoringPair = tuple[Response, Sample]
OutcomesByTerm = Mapping[str, RewardOutcome]


class RewardFunctionScorer:
    """Scores rollouts. Terms run in worker processes where `options.workers` says so or where they have a deadline."""

    def __init__(self, terms: Sequence[BoundTerm], options: ScoringConfig) -> None:
        """Raises UserError when the terms do not fit together."""
        check_terms(terms, options.combine)
        self._terms, self._options = tuple(terms), options
        self._terms_by_name = {term.name: term for term in terms}
        self._worker_terms = {term.name for term in terms if options.workers or term.timeout_s is not None}
        self._workers: RewardWorkers | None = None

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each term, without schedules."""
        return {term.name: term.weight_at(None) for term in self._terms}

    def applicable_term_names(self, sample: Sample) -> tuple[str, ...]:
        """Names of the terms that apply to a sample."""
        return tuple(term.name for term in self._terms if term.applies_to(sample, evaluation=False))

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> tuple[Group, ...]:
        """One group per prompt, in order; weights are those of `step`. Probes are judged as evaluation is.

        Raises:
            RewardError: a reward failed and the policy for that is to stop.
            UserError: no term applies to a sample.
        """
        called = iter(self._call_rewards([_scoring_pair(rollout) for siblings in rollouts for rollout in siblings]))
        groups = tuple(
            self._build_group([(rollout, next(called)) for rollout in siblings], step) for siblings in rollouts
        )
        if not probes:
            return groups
        return tuple(
            replace(group, probes={name: self.score_eval(drawn) for name, drawn in of_prompt.items()})
            for group, of_prompt in zip(groups, probes, strict=True)
        )

    def score_eval(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """One score per rollout, in order, without the terms that only shape training and without schedules.

        Nothing is skipped, so that two looks compare: where the policy is to skip, the term's fallback counts.

        Raises:
            RewardError, UserError: as `judge` does.
        """
        return self.score([_scoring_pair(rollout) for rollout in rollouts])

    def score(self, pairs: Sequence[ScoringPair]) -> tuple[Score, ...]:
        """As `evaluate`, of responses with their samples. Raises as it does."""
        called = self._call_rewards(pairs, evaluation=True)
        return tuple(
            self._combine_outcomes(sample, outcomes, None) for (_, sample), outcomes in zip(pairs, called, strict=True)
        )

    def check_samples(self, samples: Sequence[Sample], grammar: ResponseFormat, *, evaluation: bool = False) -> None:
        """Try every reward on every sample, with an empty response and with the target as the response.

        Meant for the start of a run: an unusable target or a reward that fails stops it before the first step.

        Raises:
            RewardError: a reward failed, whatever the policies say.
            UserError: no term applies to a sample, or its target cannot be written in the grammar.
        """
        nothing = {kind: grammar.parse("", kind) for kind in AnswerType}
        for start in range(0, len(samples), _CHECK_BATCH_SIZE):
            chunk = samples[start : start + _CHECK_BATCH_SIZE]
            pairs = [(response, sample) for sample in chunk for response in _trial_responses(sample, grammar, nothing)]
            called = self._call_rewards(pairs, evaluation=evaluation, trial=True)
            for (_, sample), outcomes in zip(pairs, called, strict=True):
                self._combine_outcomes(sample, outcomes, None)

    def unused_terms(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """Names of the terms that apply to none of the samples."""
        return tuple(
            term.name
            for term in self._terms
            if not any(term.applies_to(sample, evaluation=False) for sample in samples)
        )

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _call_rewards(
        self, pairs: Sequence[ScoringPair], *, evaluation: bool = False, trial: bool = False
    ) -> list[OutcomesByTerm]:
        """What each term that applies says of each response; in a trial, no failure is tolerated."""
        chosen = [self._applicable_terms(sample, evaluation) for _, sample in pairs]
        isolated = [
            RewardCall(term.name, *pair)
            for terms, pair in zip(chosen, pairs, strict=True)
            for term in terms
            if term.name in self._worker_terms
        ]
        elsewhere = iter(self._run_in_workers(isolated, warm_up=isolated if trial else []))
        called: list[OutcomesByTerm] = []
        for terms, (response, sample) in zip(chosen, pairs, strict=True):
            outcomes = {
                term.name: next(elsewhere)
                if term.name in self._worker_terms
                else call_reward(term.reward, response, sample)
                for term in terms
            }
            for name, outcome in outcomes.items():
                if isinstance(outcome, RewardFailure) and (trial or self._failure_action(outcome) == "stop"):
                    raise _make_error(name, outcome, response, sample)
            called.append(outcomes)
        return called

    def _applicable_terms(self, sample: Sample, evaluation: bool) -> list[BoundTerm]:
        chosen = [term for term in self._terms if term.applies_to(sample, evaluation=evaluation)]
        if not chosen:
            when = ", in evaluation" if evaluation else ""
            raise UserError(f"no reward term applies to sample {sample.id!r} of task {sample.task!r}{when}: see `when`")
        return chosen

    def _run_in_workers(self, calls: Sequence[RewardCall], *, warm_up: Sequence[RewardCall]) -> list[RewardOutcome]:
        """Outcomes from workers; should they have to be started, one call of `warm_up` for each term comes first."""
        if not calls:
            return []
        try:
            if self._workers is None:
                terms = [term for term in self._terms if term.name in self._worker_terms]
                self._workers = RewardWorkers(
                    {term.name: term.load_reward for term in terms},
                    {term.name: term.timeout_s or self._options.timeout_s for term in terms},
                    max(1, self._options.workers),
                    list({call.term: call for call in warm_up}.values()),
                )
            return self._workers.run(calls)
        except BaseException:
            self.close()  # they are in the midst of calls whose outcomes nobody will read
            raise

    def _build_group(self, rollout_outcomes: Sequence[tuple[Rollout, OutcomesByTerm]], step: int) -> Group:
        prompt = rollout_outcomes[0][0].prompt
        skips = [Dropped(rollout, self._dropping_failures(outcomes)) for rollout, outcomes in rollout_outcomes]
        if any(self._failure_action(failure) == "skip_group" for skip in skips for failure in skip.failures.values()):
            return Group(prompt=prompt, rollouts=(), scores=(), dropped=tuple(skips))
        kept = [pair for pair, skip in zip(rollout_outcomes, skips, strict=True) if not skip.failures]
        return Group(
            prompt=prompt,
            rollouts=tuple(rollout for rollout, _ in kept),
            scores=tuple(self._combine_outcomes(prompt.sample, outcomes, step) for _, outcomes in kept),
            dropped=tuple(skip for skip in skips if skip.failures),
        )

    def _dropping_failures(self, outcomes: OutcomesByTerm) -> dict[str, RewardFailure]:
        """The failures that leave a rollout out."""
        return {
            name: failure
            for name, failure in _failures_by_term(outcomes)
            if self._failure_action(failure) != "fallback"
        }

    def _failure_action(self, failure: RewardFailure) -> RewardFailurePolicy:
        return self._options.on_error if failure.error_kind is RewardErrorKind.ERROR else self._options.on_unscorable

    def _combine_outcomes(self, sample: Sample, outcomes: OutcomesByTerm, step: int | None) -> Score:
        """The score where every failure is answered by a fallback."""
        chosen = [term for term in self._terms if term.name in outcomes]
        terms = {term.name: _value_or_fallback(term, outcomes[term.name]) for term in chosen}
        values = {name: term.value for name, term in terms.items()}
        try:
            score = combine_terms(chosen, values, self._options.combine, step=step)
        except UserError as error:
            raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
        return Score(terms=terms, total=score, failures=dict(_failures_by_term(outcomes)))


def _scoring_pair(rollout: Rollout) -> ScoringPair:
    """What a reward sees of a rollout."""
    prompt = rollout.prompt
    response = Response(
        text=rollout.text,
        answer=rollout.answer,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_tokens,
        resize_maps=prompt.resize_maps,
        coordinate_system=prompt.coordinate_system,
        tool_resize_maps=tuple(view.resize_map for view in rollout.observations),
    )
    return response, prompt.sample


def _trial_responses(
    sample: Sample, grammar: ResponseFormat, empty_answers: Mapping[AnswerType, Answer]
) -> tuple[Response, Response]:
    """An empty response, which reads as `nothing`, and the right one."""
    kind = sample.target.answer_type
    try:
        right = grammar.build_example(sample.target)
    except UserError as error:
        raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
    return _make_trial_response("", empty_answers[kind], sample), _make_trial_response(
        right, grammar.parse(right, kind), sample
    )


def _make_trial_response(text: str, answer: Answer, sample: Sample) -> Response:
    """A response nobody sampled. Pictures are not opened for it, so it has a nominal size and the target's frame."""
    nominal = Size(1000, 1000)
    return Response(
        text=text,
        answer=answer,
        finish_reason=FinishReason.EOS,
        num_tokens=0,
        resize_maps=tuple(ResizeMap(nominal, nominal) for _ in sample.media),
        coordinate_system=sample.target.coordinate_system or CoordinateSystem.PX_ORIGINAL,
    )


def _failures_by_term(outcomes: OutcomesByTerm) -> list[tuple[str, RewardFailure]]:
    return [(name, outcome) for name, outcome in outcomes.items() if isinstance(outcome, RewardFailure)]


def _value_or_fallback(term: BoundTerm, outcome: RewardOutcome) -> RewardValue:
    return RewardValue(term.fallback, f"fallback: {outcome.reason}") if isinstance(outcome, RewardFailure) else outcome


def _make_error(name: str, failure: RewardFailure, response: Response, sample: Sample) -> RewardError:
    text = response.text if len(response.text) <= _MAX_RESPONSE_CHARS else response.text[:_MAX_RESPONSE_CHARS] + "..."
    return RewardError(
        f"reward {name!r} on sample {sample.id!r} (task {sample.task!r}): {failure.reason}; response: {text!r}"
    )
