"""Who learns what: groups dealt to ranks, and every rank's micro-batches side by side.

All ranks hold all experiences, so each works out what every other will do, and nothing has to be agreed upon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmrl.distributed.ranks import Ranks
from mmrl.policy.batch import group_by_prompt
from mmrl.types import Experience, ImageRef, VideoRef

ExperienceGroups = Sequence[Sequence[Experience]]
"""A micro-batch's experiences, by prompt."""
PackFn = Callable[[Sequence[Experience]], Sequence[ExperienceGroups]]
"""Cuts experiences into micro-batches."""


@dataclass(frozen=True, slots=True)
class RankMicroBatch:
    """One micro-batch of this rank, empty where others have more of them, and which media some rank has in it."""

    groups: ExperienceGroups
    any_rank_has_images: bool
    any_rank_has_videos: bool


def rank_micro_batches(
    experiences: Sequence[Experience], rank_by_digest: Mapping[str, int], ranks: Ranks, pack: PackFn
) -> list[RankMicroBatch]:
    """This rank's micro-batches, as many as any rank has.

    Under ZeRO-3 a forward pass gathers each layer's weights from all ranks: all must make as many, and through the
    same layers, the vision tower's among them.
    """
    of_ranks = [pack(dealt) for dealt in assign_to_ranks(experiences, rank_by_digest, ranks.size)]
    count = max(map(len, of_ranks))
    padded = [[*own, *([()] * (count - len(own)))] for own in of_ranks]
    return [
        RankMicroBatch(
            groups=side_by_side[ranks.rank],
            any_rank_has_images=any(_has_media(groups, ImageRef) for groups in side_by_side),
            any_rank_has_videos=any(_has_media(groups, VideoRef) for groups in side_by_side),
        )
        for side_by_side in zip(*padded, strict=True)
    ]


def split_into_mini_batches(experiences: Sequence[Experience], count: int) -> list[list[Experience]]:
    """Whole groups dealt to `count` mini-batches, one after another: replayed ones, which come last, go to all."""
    turns = {group[0].rollout.prompt.digest: turn % count for turn, group in enumerate(group_by_prompt(experiences))}
    return [[each for each in experiences if turns[each.rollout.prompt.digest] == turn] for turn in range(count)]


def assign_to_ranks(
    experiences: Sequence[Experience], rank_by_digest: Mapping[str, int], num_ranks: int
) -> list[list[Experience]]:
    """Whole groups, dearest first: each to its home while that has less than an even share, else to whom has least."""
    groups = group_by_prompt(experiences)
    costs = [len(group[0].rollout.prompt.token_ids) + sum(e.rollout.num_tokens for e in group) for group in groups]
    even = sum(costs) / num_ranks
    loads, dealt = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: tuple[list[int], list[list[Experience]]]
    for index in sorted(range(len(groups)), key=lambda i: -costs[i]):
        home = rank_by_digest.get(groups[index][0].rollout.prompt.digest)
        if home is None or home >= num_ranks or loads[home] + costs[index] > even:
            home = loads.index(min(loads))
        loads[home] += costs[index]
        dealt[home] += groups[index]
    return dealt


def _has_media(groups: ExperienceGroups, ref_type: type[ImageRef] | type[VideoRef]) -> bool:
    return any(isinstance(ref, ref_type) for group in groups for each in group for ref in each.rollout.media)
