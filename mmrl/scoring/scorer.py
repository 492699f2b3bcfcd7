"""The judge: calls every reward that applies to a response, here or in workers, and settles what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmrl.answer import Grammar
from mmrl.config.schema import Judging, OnFailure
from mmrl.scoring.call import Outcome, RewardError, attempt
from mmrl.scoring.combine import BoundTerm, check_terms, total
from mmrl.scoring.reward_workers import Call, Workers
from mmrl.types import (
    Answer,
    Failure,
    Fault,
    Finish,
    Frame,
    Group,
    Kind,
    ResizeMap,
    Response,
    Rollout,
    Sample,
    Score,
    Size,
    Skip,
    Term,
    UserError,
)

_EXCERPT = 200
_AT_ONCE = 1000

Pair = tuple[Response, Sample]
Outcomes = Mapping[str, Outcome]


class Judge:
    """Scores rollouts. Terms run in worker processes where `options.workers` says so or where they have a deadline."""

    def __init__(self, terms: Sequence[BoundTerm], options: Judging) -> None:
        """Raises UserError when the terms do not fit together."""
        check_terms(terms, options.combine)
        self._terms, self._options = tuple(terms), options
        self._by_name = {term.name: term for term in terms}
        self._isolated = {term.name for term in terms if options.workers or term.deadline_s is not None}
        self._workers: Workers | None = None

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term, without schedules."""
        return {term.name: term.weight(None) for term in self._terms}

    def names(self, sample: Sample) -> tuple[str, ...]:
        """Names of the terms that apply to a sample."""
        return tuple(term.name for term in self._terms if term.applies(sample, evaluation=False))

    def judge(
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
        called = iter(self._call([_seen(rollout) for siblings in rollouts for rollout in siblings]))
        groups = tuple(self._group([(rollout, next(called)) for rollout in siblings], step) for siblings in rollouts)
        if not probes:
            return groups
        return tuple(
            replace(group, probes={name: self.evaluate(drawn) for name, drawn in of_prompt.items()})
            for group, of_prompt in zip(groups, probes, strict=True)
        )

    def evaluate(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """One score per rollout, in order, without the terms that only shape training and without schedules.

        Nothing is skipped, so that two looks compare: where the policy is to skip, the term's fallback counts.

        Raises:
            RewardError, UserError: as `judge` does.
        """
        return self.rate([_seen(rollout) for rollout in rollouts])

    def rate(self, pairs: Sequence[Pair]) -> tuple[Score, ...]:
        """As `evaluate`, of responses with their samples. Raises as it does."""
        called = self._call(pairs, evaluation=True)
        return tuple(self._score(sample, outcomes, None) for (_, sample), outcomes in zip(pairs, called, strict=True))

    def check(self, samples: Sequence[Sample], grammar: Grammar, *, evaluation: bool = False) -> None:
        """Try every reward on every sample, with an empty response and with the target as the response.

        Meant for the start of a run: an unusable target or a reward that fails stops it before the first step.

        Raises:
            RewardError: a reward failed, whatever the policies say.
            UserError: no term applies to a sample, or its target cannot be written in the grammar.
        """
        nothing = {kind: grammar.parse("", kind) for kind in Kind}
        for start in range(0, len(samples), _AT_ONCE):
            chunk = samples[start : start + _AT_ONCE]
            pairs = [(response, sample) for sample in chunk for response in _probes(sample, grammar, nothing)]
            called = self._call(pairs, evaluation=evaluation, trial=True)
            for (_, sample), outcomes in zip(pairs, called, strict=True):
                self._score(sample, outcomes, None)

    def unused(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """Names of the terms that apply to none of the samples."""
        return tuple(
            term.name for term in self._terms if not any(term.applies(sample, evaluation=False) for sample in samples)
        )

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _call(self, pairs: Sequence[Pair], *, evaluation: bool = False, trial: bool = False) -> list[Outcomes]:
        """What each term that applies says of each response; in a trial, no failure is tolerated."""
        chosen = [self._chosen(sample, evaluation) for _, sample in pairs]
        isolated = [
            Call(term.name, *pair)
            for terms, pair in zip(chosen, pairs, strict=True)
            for term in terms
            if term.name in self._isolated
        ]
        elsewhere = iter(self._run(isolated, warm_up=isolated if trial else []))
        called: list[Outcomes] = []
        for terms, (response, sample) in zip(chosen, pairs, strict=True):
            outcomes = {
                term.name: next(elsewhere) if term.name in self._isolated else attempt(term.reward, response, sample)
                for term in terms
            }
            for name, outcome in outcomes.items():
                if isinstance(outcome, Failure) and (trial or self._policy(outcome) == "stop"):
                    raise _error(name, outcome, response, sample)
            called.append(outcomes)
        return called

    def _chosen(self, sample: Sample, evaluation: bool) -> list[BoundTerm]:
        chosen = [term for term in self._terms if term.applies(sample, evaluation=evaluation)]
        if not chosen:
            when = ", in evaluation" if evaluation else ""
            raise UserError(f"no reward term applies to sample {sample.id!r} of task {sample.task!r}{when}: see `when`")
        return chosen

    def _run(self, calls: Sequence[Call], *, warm_up: Sequence[Call]) -> list[Outcome]:
        """Outcomes from workers; should they have to be started, one call of `warm_up` for each term comes first."""
        if not calls:
            return []
        try:
            if self._workers is None:
                terms = [term for term in self._terms if term.name in self._isolated]
                self._workers = Workers(
                    {term.name: term.load for term in terms},
                    {term.name: term.deadline_s or self._options.deadline_s for term in terms},
                    max(1, self._options.workers),
                    list({call.term: call for call in warm_up}.values()),
                )
            return self._workers.run(calls)
        except BaseException:
            self.close()  # they are in the midst of calls whose outcomes nobody will read
            raise

    def _group(self, judged: Sequence[tuple[Rollout, Outcomes]], step: int) -> Group:
        prompt = judged[0][0].prompt
        skips = [Skip(rollout, self._skipping(outcomes)) for rollout, outcomes in judged]
        if any(self._policy(failure) == "skip_group" for skip in skips for failure in skip.failures.values()):
            return Group(prompt=prompt, rollouts=(), scores=(), skipped=tuple(skips))
        kept = [pair for pair, skip in zip(judged, skips, strict=True) if not skip.failures]
        return Group(
            prompt=prompt,
            rollouts=tuple(rollout for rollout, _ in kept),
            scores=tuple(self._score(prompt.sample, outcomes, step) for _, outcomes in kept),
            skipped=tuple(skip for skip in skips if skip.failures),
        )

    def _skipping(self, outcomes: Outcomes) -> dict[str, Failure]:
        """The failures that leave a rollout out."""
        return {name: failure for name, failure in _failures(outcomes) if self._policy(failure) != "fallback"}

    def _policy(self, failure: Failure) -> OnFailure:
        return self._options.on_error if failure.fault is Fault.ERROR else self._options.on_unscorable

    def _score(self, sample: Sample, outcomes: Outcomes, step: int | None) -> Score:
        """The score where every failure is answered by a fallback."""
        chosen = [term for term in self._terms if term.name in outcomes]
        terms = {term.name: _term(term, outcomes[term.name]) for term in chosen}
        values = {name: term.value for name, term in terms.items()}
        try:
            score = total(chosen, values, self._options.combine, step=step)
        except UserError as error:
            raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
        return Score(terms=terms, total=score, failures=dict(_failures(outcomes)))


def _seen(rollout: Rollout) -> Pair:
    """What a reward sees of a rollout."""
    prompt = rollout.prompt
    response = Response(
        text=rollout.text,
        answer=rollout.answer,
        finish=rollout.finish,
        num_tokens=rollout.num_tokens,
        resizes=prompt.resizes,
        frame=prompt.frame,
        shown=tuple(view.resize for view in rollout.views),
    )
    return response, prompt.sample


def _probes(sample: Sample, grammar: Grammar, nothing: Mapping[Kind, Answer]) -> tuple[Response, Response]:
    """An empty response, which reads as `nothing`, and the right one."""
    kind = sample.target.kind
    try:
        right = grammar.specimen(sample.target)
    except UserError as error:
        raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
    return _probe("", nothing[kind], sample), _probe(right, grammar.parse(right, kind), sample)


def _probe(text: str, answer: Answer, sample: Sample) -> Response:
    """A response nobody sampled. Pictures are not opened for it, so it has a nominal size and the target's frame."""
    nominal = Size(1000, 1000)
    return Response(
        text=text,
        answer=answer,
        finish=Finish.EOS,
        num_tokens=0,
        resizes=tuple(ResizeMap(nominal, nominal) for _ in sample.media),
        frame=sample.target.frame or Frame.PX_ORIGINAL,
    )


def _failures(outcomes: Outcomes) -> list[tuple[str, Failure]]:
    return [(name, outcome) for name, outcome in outcomes.items() if isinstance(outcome, Failure)]


def _term(term: BoundTerm, outcome: Outcome) -> Term:
    return Term(term.fallback, f"fallback: {outcome.reason}") if isinstance(outcome, Failure) else outcome


def _error(name: str, failure: Failure, response: Response, sample: Sample) -> RewardError:
    text = response.text if len(response.text) <= _EXCERPT else response.text[:_EXCERPT] + "..."
    return RewardError(
        f"reward {name!r} on sample {sample.id!r} (task {sample.task!r}): {failure.reason}; response: {text!r}"
    )
