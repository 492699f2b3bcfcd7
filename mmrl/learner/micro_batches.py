"""The micro-batches of a step: mini-batches, shares of the ranks, packing, and dummy images for ranks without one.

Every rank holds all experiences, so it computes the micro-batches of all ranks by itself; nothing is communicated.
Suffixes of tensor names as in `mmrl.policy.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import torch
from torch.nn import functional as F

from mmrl.distributed.ranks import Ranks
from mmrl.policy.batch import Batch, PackedGroup, Placeholders, collect_media, group_by_prompt
from mmrl.policy.expert_routing import UNKNOWN_EXPERT
from mmrl.types import Experience, ImageRef, VideoRef

ExperienceGroups = Sequence[Sequence[Experience]]
"""Experiences of a micro-batch, in groups of one prompt each."""


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch of this rank, with results of its first pass in a step that its later passes reuse."""

    groups: ExperienceGroups  # empty where other ranks have more micro-batches than this one
    any_rank_has_images: bool  # True if any rank's micro-batch at this place in the order has an image
    any_rank_has_videos: bool
    # Log-probs of the step's first forward pass, float32: the old log-probs, if the loss needs recomputed ones.
    recomputed_logprobs_N: torch.Tensor | None = None
    # Log-probs under the reference, float32; None without a KL penalty.
    reference_logprobs_N: torch.Tensor | None = None
    # Experts of each token in the first pass, int16; None if later passes do not replay them.
    routes_XTK: torch.Tensor | None = None


def split_into_mini_batches(experiences: Sequence[Experience], count: int) -> list[list[Experience]]:
    """Deal whole groups to `count` mini-batches in turn. Replayed groups are the last, so each mini-batch gets some."""
    mini_batches: list[list[Experience]] = [[] for _ in range(count)]
    for number, group in enumerate(group_by_prompt(experiences)):
        mini_batches[number % count] += group
    return mini_batches


def own_micro_batches(
    experiences: Sequence[Experience],
    ranks: Ranks,
    pack: Callable[[Sequence[Experience]], Sequence[ExperienceGroups]],
) -> list[MicroBatch]:
    """Return this rank's micro-batches, with empty ones added until all ranks have the same number.

    `experiences` has the experiences of all ranks; `pack` cuts a rank's share into micro-batches.
    """
    # Under ZeRO-3 a forward pass gathers the weights of each layer from all ranks. So all ranks must run equally many
    # passes through the same layers, the vision tower included.
    by_rank = list(map(pack, assign_to_ranks(experiences, ranks.media_ranks, ranks.size)))
    micro_batches = []
    for concurrent in zip_longest(*by_rank, fillvalue=()):
        media_types: set[type] = set()
        for experience in chain.from_iterable(chain.from_iterable(concurrent)):
            media_types.update(map(type, experience.rollout.media))
        micro_batches.append(MicroBatch(concurrent[ranks.rank], ImageRef in media_types, VideoRef in media_types))
    return micro_batches


def assign_to_ranks(
    experiences: Sequence[Experience], media_ranks: Mapping[str, int], num_ranks: int
) -> list[list[Experience]]:
    """Distribute whole groups over ranks, the longest first. `media_ranks` is that of `Ranks`.

    A group goes to the rank that holds its images and videos. If no rank does, or that rank would exceed an even share
    of the tokens, the group goes to the rank with fewest tokens so far.
    """
    groups = group_by_prompt(experiences)
    costs = [_count_forward_tokens([group], shared_prefix=True) for group in groups]
    even_share = sum(costs) / num_ranks
    loads = [0] * num_ranks
    assigned: list[list[Experience]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(groups)), key=lambda index: -costs[index]):
        rank = media_ranks.get(groups[index][0].rollout.prompt.digest)
        if rank is None or rank >= num_ranks or loads[rank] + costs[index] > even_share:
            rank = loads.index(min(loads))
        loads[rank] += costs[index]
        assigned[rank] += groups[index]
    return assigned


def pack_micro_batches(
    experiences: Sequence[Experience], *, max_groups: int, max_tokens: int, shared_prefix: bool
) -> list[list[list[Experience]]]:
    """Cut the experiences of a rank into micro-batches, group by group, short responses first.

    A group with more than `max_tokens` tokens, padding included, is split and its prompt repeated. A single sequence
    that is longer becomes a micro-batch by itself. With `shared_prefix` a prompt counts once for its group.
    """
    # Sorted by length, because without a shared prefix rows are padded to the longest of their micro-batch.
    groups = group_by_prompt(experiences)
    groups.sort(key=lambda group: sum(experience.rollout.num_tokens for experience in group))
    parts: list[list[Experience]] = []
    for group in groups:
        part: list[Experience] = []
        for experience in group:
            if part and _count_forward_tokens([[*part, experience]], shared_prefix=shared_prefix) > max_tokens:
                parts.append(part)
                part = []
            part.append(experience)
        parts.append(part)
    micro_batches: list[list[list[Experience]]] = []
    for part in parts:
        last = micro_batches[-1] if micro_batches else []
        has_room = 0 < len(last) < max_groups
        if has_room and _count_forward_tokens([*last, part], shared_prefix=shared_prefix) <= max_tokens:
            last.append(part)
        else:
            micro_batches.append([part])
    return micro_batches


def add_dummy_media(batch: Batch, placeholders: Placeholders, *, images: bool, videos: bool) -> Batch:
    """Return the batch with a dummy image if `images` and it has none, and likewise a dummy video."""
    # Each dummy is a separate sequence of one untrained placeholder, so it changes no other sequence and, except for
    # rounding, no gradient.
    media = batch.media
    merge_size = placeholders.merge_size
    patches = torch.zeros(merge_size**2, media.image_patches_MD.shape[1])
    grid = torch.tensor([[1, merge_size, merge_size]])
    if images and not media.image_keys:
        media = replace(media, image_patches_MD=patches, image_grids_I3=grid, image_keys=("dummy:image",))
        batch = _append_dummy_token(batch, placeholders.image_id, token_type=1)
    if videos and not media.video_keys:
        media = replace(media, video_patches_MD=patches, video_grids_V3=grid, video_keys=("dummy:video",))
        batch = _append_dummy_token(batch, placeholders.video_id, token_type=2)
    return replace(batch, media=media)


def dummy_batch(*, pad_id: int, patch_dim: int, shared_prefix: bool) -> Batch:
    """Return a batch of one untrained token, for a rank without a micro-batch.

    `patch_dim` is the number of values in a patch. `shared_prefix` packs it like the batches of other ranks.
    """
    return Batch(
        input_ids_BL=torch.tensor([[pad_id]]),
        token_types_BL=torch.zeros(1, 1, dtype=torch.int64),
        position_ids_3BL=torch.zeros(3, 1, 1, dtype=torch.int64),
        packed_groups=(PackedGroup(1, ()),) if shared_prefix else None,
        media=replace(collect_media([]), image_patches_MD=torch.zeros(0, patch_dim)),
        target_ids_N=torch.zeros(0, dtype=torch.int64),
        predictor_index_N=torch.zeros(0, dtype=torch.int64),
        temperature_N=torch.zeros(0),
        banned_token_ids=(),
    )


def _count_forward_tokens(groups: ExperienceGroups, *, shared_prefix: bool) -> int:
    """Return the number of tokens in a forward pass over these groups, padding included."""
    packed_tokens, longest, num_rows = 0, 0, 0
    for group in groups:
        prompt_length = len(group[0].rollout.prompt.token_ids)
        response_lengths = [experience.rollout.num_tokens for experience in group]
        packed_tokens += prompt_length + sum(response_lengths)
        longest = max(longest, prompt_length + max(response_lengths))
        num_rows += len(group)
    return packed_tokens if shared_prefix else longest * num_rows


def _append_dummy_token(batch: Batch, token_id: int, *, token_type: int) -> Batch:
    """Append a sequence of one token at position 0: at the end of the packed row, or as another row."""
    packed_groups = batch.packed_groups
    num_rows, length = batch.input_ids_BL.shape
    if packed_groups is None:
        shape, dim = (1, length), 0
    else:
        shape, dim = (num_rows, 1), 1
        packed_groups = (*packed_groups, PackedGroup(1, ()))
    ids, types = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    ids[0, 0], types[0, 0] = token_id, token_type
    positions = torch.zeros(3, *shape, dtype=torch.int64)
    routes_XTK = batch.engine_routes_XTK
    if routes_XTK is not None:
        # Routes follow the flattened rows, which end with the new token and its padding.
        routes_XTK = F.pad(routes_XTK, (0, 0, 0, ids.numel()), value=UNKNOWN_EXPERT)
    return replace(
        batch,
        engine_routes_XTK=routes_XTK,
        input_ids_BL=torch.cat([batch.input_ids_BL, ids], dim=dim),
        token_types_BL=torch.cat([batch.token_types_BL, types], dim=dim),
        position_ids_3BL=torch.cat([batch.position_ids_3BL, positions], dim=dim + 1),
        packed_groups=packed_groups,
    )
