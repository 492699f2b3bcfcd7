"""Partial rollouts: a step does not wait for the longest responses, which continue in later steps under newer weights.

Source: APRIL, arXiv:2509.18521. Departure: a group waits as a whole, so that every group that trains is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.protocols import Sampler
from mmrl.types import FinishReason, Prompt, Rollout, RolloutBatch, SamplingParams

RolloutGroup = tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollouts:
    """Generates chunk by chunk until enough groups are complete or the token budget is spent.

    Groups and tokens are counted over all ranks, so every rank generates the same number of chunks.
    """

    sampler: Sampler
    group_size: int  # responses to each prompt
    # The distribution of whole responses; `max_new_tokens` bounds a response, not a chunk.
    sampling_params: SamplingParams
    chunk_tokens: int  # tokens that every unfinished response is extended by between two counts
    prompts_per_step: int  # complete groups, over all ranks, that end the round
    token_budget: int | None = None  # new tokens, over all ranks, that end the round once a group is complete
    ranks: Ranks = field(default_factory=SingleProcess)

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[RolloutGroup] = ()
    ) -> RolloutBatch:
        """Return the complete groups, at least one over all ranks; the others are in `unfinished` of the result."""
        chunk = min(self.chunk_tokens, self.sampling_params.max_new_tokens)
        chunk_params = replace(self.sampling_params, max_new_tokens=chunk)
        # A rollout carries the parameters of the whole response. With the chunk's, records and checkpoints would
        # name the length of a chunk as the limit of the response.
        started: list[RolloutGroup] = []
        for group in self.sampler.generate(prompts, self.group_size, chunk_params, step=step):
            started.append(tuple(replace(rollout, sampling_params=self.sampling_params) for rollout in group))
        groups = [*unfinished, *started]
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
        counts_by_rank = self.ranks.all_gather((num_complete, len(groups), num_new_tokens))
        num_complete, num_groups, num_new_tokens = map(sum, zip(*counts_by_rank, strict=True))
        over_budget = self.token_budget is not None and num_new_tokens >= self.token_budget
        return num_complete >= min(self.prompts_per_step, num_groups) or (over_budget and num_complete > 0)

    def _is_unfinished(self, rollout: Rollout) -> bool:
        return rollout.finish_reason is FinishReason.LENGTH and rollout.num_tokens < self.sampling_params.max_new_tokens

    def _extend_unfinished(self, groups: Sequence[RolloutGroup], step: int) -> list[RolloutGroup]:
        """Extend every unfinished response by a chunk, or by as much of one as its length limit leaves."""
        # By index, not by identity: if a sample is in flight twice, equal rollouts are one object after a resume.
        indices_by_chunk: dict[int, list[tuple[int, int]]] = {}
        extended = list(map(list, groups))
        for group_index, group in enumerate(groups):
            for index, rollout in enumerate(group):
                if self._is_unfinished(rollout):
                    chunk = min(self.chunk_tokens, self.sampling_params.max_new_tokens - rollout.num_tokens)
                    indices_by_chunk.setdefault(chunk, []).append((group_index, index))
        for chunk, indices in sorted(indices_by_chunk.items()):
            rollouts = [groups[group_index][index] for group_index, index in indices]
            longer = self.sampler.extend(rollouts, replace(self.sampling_params, max_new_tokens=chunk), step=step)
            for (group_index, index), rollout in zip(indices, longer, strict=True):
                extended[group_index][index] = rollout
        return list(map(tuple, extended))


def _count_tokens(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.num_tokens for group in groups for rollout in group)
