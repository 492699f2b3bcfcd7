"""Co-Reward: the majority answer to a reworded question becomes the target of responses to the original question."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mmrl.algo.group_rewards import TYPES_WITHOUT_EQUALITY, find_majority
from mmrl.rollout.steps.base import RolloutContext, with_metrics
from mmrl.types import Prompt, RewardErrorKind, RewardFailure, RolloutBatch, UserError


@dataclass(frozen=True, slots=True)
class MajorityTargets:
    """Replaces each target's value, which is never read, by the majority answer to the reworded question.

    Source: Co-Reward (arXiv:2508.00410). Departures: responses to the rewording do not train, unless a second row has
    the two wordings swapped; without a majority the group is left out, where the code takes the first answer.
    """

    context: RolloutContext
    column: str = field(default="reworded", kw_only=True)  # of `meta`, with the reworded question

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with these targets. Raises UserError for a sample without rewording or of an unfit type."""
        prompts = [self._reword(group[0].prompt) for group in batch.groups]
        context, groups, missing = self.context, [], 0
        reworded = context.sampler.generate(prompts, context.group_size, context.sampling_params, step=step)
        for group, others in zip(batch.groups, reworded, strict=True):
            majority = find_majority(others)
            if majority is None:
                missing += 1
                failure = RewardFailure(RewardErrorKind.UNSCORABLE, "the other wording has no majority answer")
                groups.append(tuple(replace(rollout, failure=failure) for rollout in group))
                continue
            sample = group[0].prompt.sample
            sample = replace(sample, target=replace(sample.target, value=majority.answer.value))
            prompt = replace(group[0].prompt, sample=sample)
            groups.append(tuple(replace(rollout, prompt=prompt) for rollout in group))
        return with_metrics(replace(batch, groups=tuple(groups)), {"reworded/no_majority": float(missing)})

    def _reword(self, prompt: Prompt) -> Prompt:
        sample = prompt.sample
        question, kind = sample.meta.get(self.column), sample.target.answer_type
        if not isinstance(question, str):
            raise UserError(f"rewording: sample {sample.id!r} has no text in the column {self.column!r}")
        if kind in TYPES_WITHOUT_EQUALITY:
            raise UserError(f"rewording: sample {sample.id!r}: no two answers of type {kind} are exactly equal")
        # Its own id, because random numbers derive from it.
        reworded = replace(sample, id=f"{sample.id}~reworded", parts=(*sample.media, question))
        return self.context.processor.build(reworded)
