"""Tokens that teach nothing, so that every rank runs every layer: one sequence apart for a picture, one for a video.

A sequence of its own changes no other, and nothing in it is learned: gradients are those without it, but for rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mmrl.policy.batch import Batch, BatchMedia, Placeholders, PrefixGroup


def add_dummy_media(batch: Batch, placeholders: Placeholders, *, images: bool, videos: bool) -> Batch:
    """The batch with a dummy picture where it has none and `images` are wanted; a video alike."""
    media = batch.media
    if images and not media.image_keys:
        media, batch = (
            _add_dummy_image(media, placeholders.merge_size),
            _append_dummy_token(batch, placeholders.image_id, 1),
        )
    if videos and not media.video_keys:
        media, batch = (
            _add_dummy_video(media, placeholders.merge_size),
            _append_dummy_token(batch, placeholders.video_id, 2),
        )
    return replace(batch, media=media)


def dummy_batch(*, pad_id: int, patch_dim: int, shared_prefix: bool) -> Batch:
    """A batch of one token, of which none is learned; `patch_values` are the numbers of a patch."""
    no_patches, no_grids = torch.zeros(0, patch_dim), torch.zeros(0, 3, dtype=torch.int64)
    return Batch(
        input_ids_BL=torch.tensor([[pad_id]]),
        token_types_BL=torch.zeros(1, 1, dtype=torch.int64),
        position_ids_3BL=torch.zeros(3, 1, 1, dtype=torch.int64),
        prefix_tree=(PrefixGroup(1, ()),) if shared_prefix else None,
        media=BatchMedia(
            image_patches_MD=no_patches,
            image_grids_I3=no_grids,
            image_keys=(),
            video_patches_MD=no_patches,
            video_grids_V3=no_grids,
            video_keys=(),
        ),
        target_ids_N=torch.zeros(0, dtype=torch.int64),
        predictor_index_N=torch.zeros(0, dtype=torch.int64),
        temperature_N=torch.zeros(0),
        banned_token_ids=(),
    )


def _append_dummy_token(batch: Batch, token_id: int, token_type: int) -> Batch:
    """A sequence of one placeholder, at position 0: behind the packed row, or as a row of its own."""
    tree, (rows, length) = batch.prefix_tree, batch.input_ids_BL.shape
    shape = (1, length) if tree is None else (rows, 1)
    along = 0 if tree is None else 1
    ids, types = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    ids[0, 0], types[0, 0] = token_id, token_type
    return replace(
        batch,
        input_ids_BL=torch.cat([batch.input_ids_BL, ids], dim=along),
        token_types_BL=torch.cat([batch.token_types_BL, types], dim=along),
        position_ids_3BL=torch.cat([batch.position_ids_3BL, torch.zeros(3, *shape, dtype=torch.int64)], dim=along + 1),
        prefix_tree=None if tree is None else (*tree, PrefixGroup(1, ())),
    )


def _add_dummy_image(media: BatchMedia, merge_size: int) -> BatchMedia:
    patches, grid = (
        torch.zeros(merge_size**2, media.image_patches_MD.shape[1]),
        torch.tensor([[1, merge_size, merge_size]]),
    )
    return replace(media, image_patches_MD=patches, image_grids_I3=grid, image_keys=("dummy:image",))


def _add_dummy_video(media: BatchMedia, merge_size: int) -> BatchMedia:
    patches, grid = (
        torch.zeros(merge_size**2, media.video_patches_MD.shape[1]),
        torch.tensor([[1, merge_size, merge_size]]),
    )
    return replace(media, video_patches_MD=patches, video_grids_V3=grid, video_keys=("dummy:video",))
