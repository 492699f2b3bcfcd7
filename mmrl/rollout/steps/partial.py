"""Partial rollouts: a step does not wait for the longest responses; they go on in later steps, under newer weights.

Source: APRIL, arXiv:2509.18521. Departure: whole groups wait, so that every group that is learned from is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.ports import Sampler
from mmrl.types import FinishReason, Prompt, Rollout, RolloutBatch, SamplingParams

RolloutGroup = tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollouts:
    """Draws `chunk` tokens of every open response, then looks: is `wanted` groups complete, or `token_budget` spent?

    Counted over all `ranks`, which look together.
    """

    sampler: Sampler
    group_size: int
    sampling_params: SamplingParams
    chunk_tokens: int
    groups_per_step: int
    token_budget: int | None = None
    ranks: Ranks = field(default_factory=SingleProcess)

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[RolloutGroup] = ()
    ) -> RolloutBatch:
        """The complete groups, at least one on all ranks together; the others are pending."""
        first = replace(
            self.sampling_params, max_new_tokens=min(self.chunk_tokens, self.sampling_params.max_new_tokens)
        )
        begun = self.sampler.generate(prompts, self.group_size, first, step=step)
        groups: list[RolloutGroup] = [
            *unfinished,
            *(tuple(replace(r, sampling_params=self.sampling_params) for r in group) for group in begun),
        ]
        spent = sum(rollout.num_tokens for group in begun for rollout in group)
        while not self._has_enough(groups, spent):
            before = _count_tokens(groups)
            groups = self._extend_unfinished(groups, step)
            spent += _count_tokens(groups) - before
        complete = [group for group in groups if self._is_complete(group)]
        waiting = [group for group in groups if not self._is_complete(group)]
        versions = [{s.version for s in rollout.segments} for group in complete for rollout in group]
        return RolloutBatch(
            groups=tuple(complete),
            unfinished=tuple(waiting),
            metrics={
                "rollout/unfinished_groups": float(len(waiting)),
                "rollout/resumed_rollouts": float(sum(len(of) > 1 for of in versions)),
            },
        )

    def _has_enough(self, groups: Sequence[RolloutGroup], num_new_tokens: int) -> bool:
        mine = (sum(map(self._is_complete, groups)), len(groups), num_new_tokens)
        complete, begun, spent = map(sum, zip(*self.ranks.all_gather(mine), strict=True))
        over = self.token_budget is not None and spent >= self.token_budget
        return complete >= min(self.groups_per_step, begun) or (over and complete > 0)

    def _is_complete(self, group: RolloutGroup) -> bool:
        return not any(map(self._is_unfinished, group))

    def _is_unfinished(self, rollout: Rollout) -> bool:
        return rollout.finish_reason is FinishReason.LENGTH and rollout.num_tokens < self.sampling_params.max_new_tokens

    def _extend_unfinished(self, groups: Sequence[RolloutGroup], step: int) -> list[RolloutGroup]:
        """The groups with one more chunk of every open response, or what is left of its length."""
        open_ = [rollout for group in groups for rollout in group if self._is_unfinished(rollout)]
        longer: dict[int, Rollout] = {}
        lengths = {id(r): min(self.chunk_tokens, self.sampling_params.max_new_tokens - r.num_tokens) for r in open_}
        for length in sorted(set(lengths.values())):
            part = [rollout for rollout in open_ if lengths[id(rollout)] == length]
            drawn = self.sampler.extend(part, replace(self.sampling_params, max_new_tokens=length), step=step)
            longer |= {id(before): after for before, after in zip(part, drawn, strict=True)}
        return [tuple(longer.get(id(rollout), rollout) for rollout in group) for group in groups]


def _count_tokens(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.num_tokens for group in groups for rollout in group)
