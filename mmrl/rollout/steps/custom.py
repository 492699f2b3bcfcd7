"""The user's own rollout steps, as in `rollout_steps: [{kind: generate}, {fn: ./mine.py:make_step}]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.rollout.steps.base import RolloutStep
from mmrl.types import Author, Rollout, RolloutBatch, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomStep:
    """Calls the user's step, and checks that its result can be trained on."""

    name: str
    function: RolloutStep

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch as the user's step changes it; raise UserError if it breaks a rule of `RolloutStep`."""
        result = self.function(batch, step=step)
        if not isinstance(result, RolloutBatch):
            raise UserError(f"rollout step {self.name} must return a RolloutBatch; it returned {result!r:.80}")
        if len(result.groups) != len(batch.groups):
            raise UserError(
                f"rollout step {self.name} was given {len(batch.groups)} groups and returned {len(result.groups)}; it "
                "must return one for each prompt, in order"
            )
        for before, after in zip(batch.groups, result.groups, strict=True):
            self._check_group(before, after)
        return replace(result, groups=tuple(tuple(map(self._name_failure, group)) for group in result.groups))

    def _name_failure(self, rollout: Rollout) -> Rollout:
        """Write this step's name into a failure that names no step."""
        if rollout.failure is None or rollout.failure.step:
            return rollout
        return replace(rollout, failure=rollout.failure._replace(step=self.name))

    def _check_group(self, before: Sequence[Rollout], after: Sequence[Rollout]) -> None:
        if before and not after:
            sample_id = before[0].prompt.sample.id
            raise UserError(f"rollout step {self.name} left no rollout of sample {sample_id}; it must keep one")
        known = {rollout.index: rollout for rollout in before}
        indices = [rollout.index for rollout in after]
        if len(set(indices)) < len(indices):
            raise UserError(f"rollout step {self.name} returned two rollouts of one group with one index: {indices}")
        for rollout in after:
            place = f"rollout step {self.name}, sample {rollout.prompt.sample.id}, rollout {rollout.index}"
            if before and rollout.prompt.digest != before[0].prompt.digest:
                raise UserError(f"{place}: its prompt differs from the prompt of its group")
            if all(segment.author is not Author.POLICY for segment in rollout.segments):
                raise UserError(f"{place}: none of its segments is by POLICY; a rollout keeps its first response")
            for segment in rollout.segments:
                if len(segment.token_ids) != len(segment.logprobs) or not segment.token_ids:
                    raise UserError(
                        f"{place}: a segment has {len(segment.token_ids)} tokens and {len(segment.logprobs)} "
                        "log-probabilities; write one for each token, 0.0 where the policy did not sample it"
                    )
            if rollout.index not in known:
                continue
            for old, new in zip(known[rollout.index].segments, rollout.segments, strict=False):
                count = len(new.token_ids)
                if new.token_ids != old.token_ids[:count]:
                    break  # the step replaced the rollout from here on
                # The learner computes importance ratios from this record. A step may only cut tokens off its end.
                recorded = (old.author, old.version, old.logprobs[:count])
                if new.author is Author.POLICY and (new.author, new.version, new.logprobs) != recorded:
                    raise UserError(
                        f"{place}: a segment by POLICY has another author, version or log-probabilities than before "
                        "the step; leave recorded segments as they are, and let `sampler.extend` append new ones"
                    )
