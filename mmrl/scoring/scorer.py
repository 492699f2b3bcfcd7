"""Scores rollouts: calls the rewards that apply, applies the config's failure policies, and adds up the terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from mmrl.config.schema import ScoringConfig
from mmrl.config.schema.rewards import RewardTransformConfig
from mmrl.scoring.reward_calls import NOT_FOR_ROLLOUT, OutcomesByTerm, RewardCaller, ScoringPair
from mmrl.scoring.reward_workers import RewardWorkers
from mmrl.scoring.terms import BoundTerm, combine_terms, divide_by_turn
from mmrl.types import (
    Author,
    Dropped,
    Failure,
    Group,
    MediaOpener,
    Response,
    RewardValue,
    Rollout,
    Sample,
    Score,
    UserError,
)
from mmrl_rewards.contract import TurnRewards

ROLLOUT_STEP_PREFIX = "step/"
"""Failures of rollout steps are counted under this and the step's name, next to the names of reward terms."""


class RewardFunctionScorer:
    """Scores rollouts by reward terms that fit together (`check_terms`)."""

    def __init__(
        self, terms: Sequence[BoundTerm], options: ScoringConfig, media_opener: MediaOpener | None = None
    ) -> None:
        """Store the terms. Rewards see pictures through `media_opener`; worker processes receive a pickled copy."""
        self.caller = RewardCaller(terms, options, media_opener, RewardWorkers(terms, options, media_opener))
        self._options = options

    def close(self) -> None:
        """End the worker processes of rewards, if any were started."""
        self.caller.workers.close()

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each term that counts by itself, by its name, without schedules."""
        return {term.name: term.options.weight for term in self.caller.counted_terms}

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> tuple[Group, ...]:
        """Return a scored group for each prompt, in order.

        Args:
            rollouts: the rollouts of each prompt.
            step: the step of the stage, for scheduled weights.
            probes: for each prompt, extra rollouts by the name of their probe; they are scored as in evaluation.

        Raises:
            RewardError: a reward failed, and the config says to stop.
            UserError: no term applies to a sample.
        """
        all_rollouts = [rollout for siblings in rollouts for rollout in siblings]
        scorable = [index for index, rollout in enumerate(all_rollouts) if rollout.failure is None]
        pairs = [(make_response(all_rollouts[index]), all_rollouts[index].prompt.sample) for index in scorable]
        outcomes_by_index = dict(zip(scorable, self.caller.call(pairs), strict=True))
        groups: list[Group] = []
        start = 0  # index in `all_rollouts` of the group's first rollout
        for siblings in rollouts:
            outcomes = [outcomes_by_index.get(start + position, {}) for position in range(len(siblings))]
            groups.append(self._build_group(siblings, outcomes, step))
            start += len(siblings)
        for index, rollouts_by_probe in enumerate(probes):
            scores = {name: self.score_eval(answers) for name, answers in rollouts_by_probe.items()}
            groups[index] = replace(groups[index], probes=scores)
        return tuple(groups)

    def score_eval(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """Return one score for each rollout, in order, without schedules and without `training_only` terms.

        No rollout is dropped, so that two evaluations cover the same samples. Where training would drop a rollout, the
        failed term counts its fallback; if a rollout step failed, every term does. Raises the same errors as
        `score_groups`.
        """
        pairs = [(make_response(rollout), rollout.prompt.sample) for rollout in rollouts]
        return self.score(pairs, [rollout.failure for rollout in rollouts])

    def score(self, pairs: Sequence[ScoringPair], failures: Sequence[Failure | None]) -> tuple[Score, ...]:
        """Score responses as `score_eval` scores rollouts; `failures` are of rollout steps. Raises the same errors."""
        scorable = [index for index, failure in enumerate(failures) if failure is None]
        called = self.caller.call([pairs[index] for index in scorable], evaluation=True)
        outcomes_by_index = dict(zip(scorable, called, strict=True))
        scores = []
        for index, ((response, sample), failure) in enumerate(zip(pairs, failures, strict=True)):
            if failure is None:
                outcomes = outcomes_by_index[index]
            else:
                outcomes = {term.name: failure for term in self.caller.applicable_terms(sample, evaluation=True)}
            scores.append(self.combine_outcomes(sample, outcomes, num_turns=len(response.turns)))
        return tuple(scores)

    def combine_outcomes(
        self, sample: Sample, outcomes: OutcomesByTerm, *, step: int | None = None, num_turns: int = 0
    ) -> Score:
        """Return the score of a response: each term's value, the fallback's for a term that failed, and their total.

        Without a `step`, weights follow no schedule; without `num_turns`, the total is not divided among turns.

        Raises:
            UserError: a term requires another that does not apply to the sample.
        """
        method = self._options.combine
        terms = [term for term in self.caller.counted_terms if term.name in outcomes]
        reward_values: dict[str, RewardValue] = {}
        rewards_by_turn: dict[str, tuple[float, ...]] = {}
        decided_by: dict[str, str] = {}
        for term in terms:
            outcome = outcomes[term.name]
            if isinstance(outcome, Failure):
                outcome, deciders = self._find_replacement(term, outcomes)
                decided_by |= deciders
            elif isinstance(outcome, TurnRewards):
                # A transform may be nonlinear, so the turns' rewards would not add up to the term's value.
                if method == "sum" and term.options.transform == RewardTransformConfig():
                    rewards_by_turn[term.name] = outcome.by_turn
                outcome = RewardValue(outcome.value, outcome.reason)
            reward_values[term.name] = outcome

        values = {name: reward_value.value for name, reward_value in reward_values.items()}
        left_out = [name for name, outcome in outcomes.items() if outcome is NOT_FOR_ROLLOUT]
        try:
            total, contributions = combine_terms(terms, values, method, step=step, left_out=left_out)
        except UserError as error:
            raise UserError(f"sample {sample.id!r} (task {sample.task!r}): {error}") from error
        return Score(
            terms=reward_values,
            total=total,
            failures={name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)},
            contributions=contributions,
            decided_by=decided_by,
            by_turn=divide_by_turn(rewards_by_turn, contributions, total, num_turns) if num_turns else (),
        )

    def _build_group(self, rollouts: Sequence[Rollout], all_outcomes: Sequence[OutcomesByTerm], step: int) -> Group:
        """Return the scored group of one prompt, without the rollouts that the config drops for a failed reward."""
        prompt = rollouts[0].prompt
        kept: list[Rollout] = []
        scores: list[Score] = []
        judged: list[tuple[Rollout, dict[str, Failure]]] = []  # each rollout with the failures that count
        skip_group = False
        for rollout, outcomes in zip(rollouts, all_outcomes, strict=True):
            failures = {} if rollout.failure is None else {ROLLOUT_STEP_PREFIX + rollout.failure.step: rollout.failure}
            failed_terms = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
            for term in self.caller.counted_terms:
                if term.name not in failed_terms:
                    continue
                # The term, then the fallback terms called in its place: each failed, except perhaps the last.
                names = [decider.name for decider in self.caller.list_deciding_terms(term, outcomes)]
                if names[-1] not in failed_terms:
                    continue
                policy = self.caller.failure_action(failed_terms[names[-1]])
                if policy != "fallback":  # else the term's fallback value counts: see `_find_replacement`
                    failures |= {name: failed_terms[name] for name in names}
                skip_group |= policy == "skip_group"
            judged.append((rollout, failures))
            if not failures:
                kept.append(rollout)
                scores.append(self.combine_outcomes(prompt.sample, outcomes, step=step, num_turns=len(rollout.turns)))
        if skip_group:
            kept, scores = [], []
        dropped = [Dropped(rollout, failures) for rollout, failures in judged if failures or skip_group]
        return Group(prompt=prompt, rollouts=tuple(kept), scores=tuple(scores), dropped=tuple(dropped))

    def _find_replacement(self, term: BoundTerm, outcomes: OutcomesByTerm) -> tuple[RewardValue, dict[str, str]]:
        """Return the value that stands for a failed term, and its entries in `Score.decided_by`.

        If a fallback gave the value, they are that fallback's name for each term that failed before it; else none.
        """
        chain = self.caller.list_deciding_terms(term, outcomes)
        *failed, last = chain
        deciders: dict[str, str] = {}
        decision = outcomes[last.name]
        if isinstance(decision, Failure):
            value, reason = last.fallback, f"fallback: {decision.reason}"
        else:
            value, reason = decision.value, f"{last.name} decides: {decision.reason}"
            deciders = {failed_term.name: last.name for failed_term in failed}
        # A fallback's transformed value is the raw value of the term that it replaces.
        for fallback in reversed(chain[1:]):
            value = fallback.transform(value)
        return RewardValue(value, reason), deciders


def make_response(rollout: Rollout) -> Response:
    """Return the response that rewards receive for a rollout."""
    prompt = rollout.prompt
    # Segments in a row are one turn: a reply with media has several, and so has a response with a forced rethink.
    is_reply = [segment.author is Author.ENVIRONMENT for segment in rollout.segments]
    return Response(
        text=rollout.text,
        answer=rollout.answer,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_tokens,
        resize_maps=prompt.resize_maps,
        coordinate_system=prompt.coordinate_system,
        tool_resize_maps=tuple(observation.resize_map for observation in rollout.observations),
        num_turns=[reply for reply, _ in groupby(is_reply)].count(False),
        used_tool=True in is_reply,
        rethought=rollout.parent_index is not None,
        turns=rollout.turns,
    )
