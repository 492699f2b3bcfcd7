"""Rollouts and rewards to scored groups; the only caller of reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from types import TracebackType

from mmrl.answer import Grammar
from mmrl.types import (
    Finish,
    Frame,
    Group,
    ResizeMap,
    Response,
    Rollout,
    Sample,
    Score,
    Size,
    Term,
    Unscorable,
    UserError,
)
from mmrl_rewards.contract import BoundReward

_EXCERPT = 200


class RewardError(UserError):
    """A reward returned something that is no score, or could not judge a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """One term of the total: `weight` times the reward's value, for samples of `tasks` (all, when empty)."""

    name: str
    reward: BoundReward
    weight: float = 1.0
    tasks: tuple[str, ...] = ()
    train_only: bool = False

    def applies(self, sample: Sample, *, evaluation: bool) -> bool:
        """Whether the term has a say about this sample."""
        return (not self.tasks or sample.task in self.tasks) and not (evaluation and self.train_only)


class Judge:
    """Scores rollouts: total = sum of weight x value over the terms that apply to the sample's task."""

    def __init__(self, terms: Sequence[BoundTerm]) -> None:
        """Raises UserError when two terms share a name."""
        names = [term.name for term in terms]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"two reward terms are named {repeated[0]!r}; give one another `name`")
        self._terms = tuple(terms)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term."""
        return {term.name: term.weight for term in self._terms}

    def judge(self, rollouts: Sequence[Sequence[Rollout]]) -> tuple[Group, ...]:
        """One group per prompt, in order. Raises as `score` does."""
        return tuple(
            Group(
                prompt=siblings[0].prompt,
                rollouts=tuple(siblings),
                scores=tuple(self.score(rollout) for rollout in siblings),
            )
            for siblings in rollouts
        )

    def score(self, rollout: Rollout, *, evaluation: bool = False) -> Score:
        """The score of one rollout; `evaluation` leaves out the terms that only shape training.

        Raises:
            RewardError: a reward returned no number in its range, or could not judge the sample.
            UserError: no term applies to the sample's task.
        """
        prompt = rollout.prompt
        response = Response(
            text=rollout.text,
            answer=rollout.answer,
            finish=rollout.finish,
            num_tokens=rollout.num_tokens,
            resizes=prompt.resizes,
            frame=prompt.frame,
        )
        return self._score(response, prompt.sample, evaluation=evaluation)

    def check(self, samples: Sequence[Sample], grammar: Grammar, *, evaluation: bool = False) -> None:
        """Try every reward on every sample, with an empty response and with the target as the response.

        Meant for the start of a run: an unusable target or a reward that fails stops it before the first step.

        Raises:
            RewardError, UserError: as `score` does; also when a target cannot be written in the grammar.
        """
        for sample in samples:
            self._score(_probe("", sample, grammar), sample, evaluation=evaluation)
            try:
                text = grammar.specimen(sample.target)
            except UserError as error:
                raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
            self._score(_probe(text, sample, grammar), sample, evaluation=evaluation)

    def _score(self, response: Response, sample: Sample, *, evaluation: bool = False) -> Score:
        chosen = [term for term in self._terms if term.applies(sample, evaluation=evaluation)]
        if not chosen:
            when = ", in evaluation" if evaluation else ""
            raise UserError(
                f"no reward term applies to sample {sample.id!r} of task {sample.task!r}{when}: see `tasks`"
            )
        terms = {term.name: _call(term, response, sample) for term in chosen}
        return Score(terms=terms, total=sum(term.weight * terms[term.name].value for term in chosen))


def _call(term: BoundTerm, response: Response, sample: Sample) -> Term:
    """Call one reward and hold it to its contract."""
    who = f"reward {term.name!r} on sample {sample.id!r}"
    try:
        with _Noting(f"in {who}"):
            result = term.reward(response, sample)
    except Unscorable as error:
        raise RewardError(f"{who} (task {sample.task!r}): {error}") from error
    value, reason = result if isinstance(result, Term) else (result, "")
    low, high = term.reward.reward.low, term.reward.reward.high
    if not isinstance(value, Real) or not isfinite(value) or not low <= value <= high:
        excerpt = response.text if len(response.text) <= _EXCERPT else response.text[:_EXCERPT] + "..."
        raise RewardError(f"{who} returned {value!r}, not a number from {low:g} to {high:g}; response: {excerpt!r}")
    return Term(float(value), reason)


def _probe(text: str, sample: Sample, grammar: Grammar) -> Response:
    """A response nobody sampled. Pictures are not opened for it, so it has a nominal size and the target's frame."""
    nominal = Size(1000, 1000)
    return Response(
        text=text,
        answer=grammar.parse(text, sample.target.kind),
        finish=Finish.EOS,
        num_tokens=0,
        resizes=tuple(ResizeMap(nominal, nominal) for _ in sample.media),
        frame=sample.target.frame or Frame.PX_ORIGINAL,
    )


class _Noting:
    """Adds a note to whatever error passes through, and lets it pass."""

    def __init__(self, note: str) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self._note)
