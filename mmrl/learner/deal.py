"""Who learns what: groups dealt to ranks, and every rank's micro-batches side by side.

All ranks hold all experiences, so each works out what every other will do, and nothing has to be agreed upon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmrl.distributed.ranks import Ranks
from mmrl.policy.batch import by_prompt
from mmrl.types import Experience, ImageRef, VideoRef

Groups = Sequence[Sequence[Experience]]
"""A micro-batch's experiences, by prompt."""
Packer = Callable[[Sequence[Experience]], Sequence[Groups]]
"""Cuts experiences into micro-batches."""


@dataclass(frozen=True, slots=True)
class Round:
    """One micro-batch of this rank, empty where others have more of them, and which media some rank has in it."""

    groups: Groups
    images: bool
    videos: bool


def rounds(experiences: Sequence[Experience], homes: Mapping[str, int], ranks: Ranks, packed: Packer) -> list[Round]:
    """This rank's micro-batches, as many as any rank has.

    Under ZeRO-3 a forward pass gathers each layer's weights from all ranks: all must make as many, and through the
    same layers, the vision tower's among them.
    """
    of_ranks = [packed(dealt) for dealt in deal(experiences, homes, ranks.size)]
    count = max(map(len, of_ranks))
    padded = [[*own, *([()] * (count - len(own)))] for own in of_ranks]
    return [
        Round(
            groups=side_by_side[ranks.rank],
            images=any(_has(groups, ImageRef) for groups in side_by_side),
            videos=any(_has(groups, VideoRef) for groups in side_by_side),
        )
        for side_by_side in zip(*padded, strict=True)
    ]


def by_turns(experiences: Sequence[Experience], count: int) -> list[list[Experience]]:
    """Whole groups dealt to `count` mini-batches, one after another: replayed ones, which come last, go to all."""
    turns = {group[0].rollout.prompt.digest: turn % count for turn, group in enumerate(by_prompt(experiences))}
    return [[each for each in experiences if turns[each.rollout.prompt.digest] == turn] for turn in range(count)]


def deal(experiences: Sequence[Experience], homes: Mapping[str, int], size: int) -> list[list[Experience]]:
    """Whole groups, dearest first: each to its home while that has less than an even share, else to whom has least."""
    groups = by_prompt(experiences)
    costs = [len(group[0].rollout.prompt.ids) + sum(e.rollout.num_tokens for e in group) for group in groups]
    even = sum(costs) / size
    loads, dealt = [0] * size, [[] for _ in range(size)]  # type: tuple[list[int], list[list[Experience]]]
    for index in sorted(range(len(groups)), key=lambda i: -costs[i]):
        home = homes.get(groups[index][0].rollout.prompt.digest)
        if home is None or home >= size or loads[home] + costs[index] > even:
            home = loads.index(min(loads))
        loads[home] += costs[index]
        dealt[home] += groups[index]
    return dealt


def _has(groups: Groups, kind: type[ImageRef] | type[VideoRef]) -> bool:
    return any(isinstance(ref, kind) for group in groups for each in group for ref in each.rollout.media)
