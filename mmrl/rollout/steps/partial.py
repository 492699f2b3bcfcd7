"""Partial rollouts: a step does not wait for the longest responses, which continue in later steps under newer weights.

Source: APRIL, arXiv:2509.18521. Departure: a group waits as a whole, so that every group that trains is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.rollout.steps.base import Place, RolloutContext, with_rollouts
from mmrl.types import FinishReason, Prompt, Rollout, RolloutBatch

RolloutGroup = tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollouts:
    """Generates chunk by chunk until enough groups are complete or the token budget is spent.

    Groups and tokens are counted over all ranks, so every rank generates the same number of chunks.
    """

    context: RolloutContext  # `max_new_tokens` of its sampling parameters bounds a whole response, not a chunk
    chunk_tokens: int  # tokens that every unfinished response is extended by between two counts
    token_budget: int | None = None  # new tokens, over all ranks, that end the round once a group is complete

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[RolloutGroup] = ()
    ) -> RolloutBatch:
        """Return the complete groups, at least one over all ranks; the others are in `unfinished` of the result."""
        context, whole = self.context, self.context.sampling_params
        chunk_params = replace(whole, max_new_tokens=min(self.chunk_tokens, whole.max_new_tokens))
        # A rollout carries the parameters of the whole response. With the chunk's, records and checkpoints would
        # name the length of a chunk as the limit of the response.
        started: list[RolloutGroup] = []
        for group in context.sampler.generate(prompts, context.group_size, chunk_params, step=step):
            started.append(tuple(replace(rollout, sampling_params=whole) for rollout in group))
        groups: Sequence[RolloutGroup] = [*unfinished, *started]
        num_new_tokens = _count_tokens(started)
        while not self._has_enough(groups, num_new_tokens):
            tokens_before = _count_tokens(groups)
            groups = self._extend_unfinished(groups, step)
            num_new_tokens += _count_tokens(groups) - tokens_before
        complete: list[RolloutGroup] = []
        waiting: list[RolloutGroup] = []
        num_resumed = 0
        for group in groups:
            if any(map(self._is_unfinished, group)):
                waiting.append(group)
                continue
            complete.append(group)
            for rollout in group:
                # More than one policy version means that the response began in an earlier step.
                num_resumed += len({segment.version for segment in rollout.segments}) > 1
        metrics = {"rollout/unfinished_groups": float(len(waiting)), "rollout/resumed_rollouts": float(num_resumed)}
        return RolloutBatch(groups=tuple(complete), unfinished=tuple(waiting), metrics=metrics)

    def _has_enough(self, groups: Sequence[RolloutGroup], num_new_tokens: int) -> bool:
        num_complete = sum(not any(map(self._is_unfinished, group)) for group in groups)
        # Every rank compares the same sums, so all stop after the same chunk. Else the next `all_gather` would hang.
        counts_by_rank = self.context.ranks.all_gather((num_complete, len(groups), num_new_tokens))
        num_complete, num_groups, num_new_tokens = map(sum, zip(*counts_by_rank, strict=True))
        over_budget = self.token_budget is not None and num_new_tokens >= self.token_budget
        return num_complete >= min(self.context.prompts_per_step, num_groups) or (over_budget and num_complete > 0)

    def _is_unfinished(self, rollout: Rollout) -> bool:
        max_tokens = self.context.sampling_params.max_new_tokens
        return rollout.finish_reason is FinishReason.LENGTH and rollout.num_tokens < max_tokens

    def _extend_unfinished(self, groups: Sequence[RolloutGroup], step: int) -> Sequence[RolloutGroup]:
        """Extend every unfinished response by a chunk, or by as much of one as its length limit leaves."""
        whole = self.context.sampling_params
        # By place, not by identity: if a sample is in flight twice, equal rollouts are one object after a resume.
        places_by_chunk: dict[int, list[Place]] = {}
        for group_index, group in enumerate(groups):
            for position, rollout in enumerate(group):
                if self._is_unfinished(rollout):
                    chunk = min(self.chunk_tokens, whole.max_new_tokens - rollout.num_tokens)
                    places_by_chunk.setdefault(chunk, []).append((group_index, position))
        extended: dict[Place, Rollout] = {}
        for chunk, places in sorted(places_by_chunk.items()):
            rollouts = [groups[group_index][position] for group_index, position in places]
            longer = self.context.sampler.extend(rollouts, replace(whole, max_new_tokens=chunk), step=step)
            extended.update(zip(places, longer, strict=True))
        return with_rollouts(groups, extended)


def _count_tokens(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.num_tokens for group in groups for rollout in group)
