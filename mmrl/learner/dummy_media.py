"""Tokens that teach nothing, so that every rank runs every layer: one sequence apart for a picture, one for a video.

A sequence of its own changes no other, and nothing in it is learned: gradients are those without it, but for rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mmrl.policy.batch import Batch, Media, Placeholders, Stem


def attending(batch: Batch, placeholders: Placeholders, *, images: bool, videos: bool) -> Batch:
    """The batch with a dummy picture where it has none and `images` are wanted; a video alike."""
    media = batch.media
    if images and not media.image_keys:
        media, batch = _with_image(media, placeholders.merge), _with_token(batch, placeholders.image, 1)
    if videos and not media.video_keys:
        media, batch = _with_video(media, placeholders.merge), _with_token(batch, placeholders.video, 2)
    return replace(batch, media=media)


def nothing(*, pad_id: int, patch_values: int, shared_prefix: bool) -> Batch:
    """A batch of one token, of which none is learned; `patch_values` are the numbers of a patch."""
    no_patches, no_grids = torch.zeros(0, patch_values), torch.zeros(0, 3, dtype=torch.int64)
    return Batch(
        ids_BL=torch.tensor([[pad_id]]),
        types_BL=torch.zeros(1, 1, dtype=torch.int64),
        positions_3BL=torch.zeros(3, 1, 1, dtype=torch.int64),
        tree=(Stem(1, ()),) if shared_prefix else None,
        media=Media(
            images_ND=no_patches,
            image_grids_I3=no_grids,
            image_keys=(),
            videos_ND=no_patches,
            video_grids_V3=no_grids,
            video_keys=(),
        ),
        ids_N=torch.zeros(0, dtype=torch.int64),
        source_N=torch.zeros(0, dtype=torch.int64),
        temperature_N=torch.zeros(0),
        banned=(),
    )


def _with_token(batch: Batch, token: int, kind: int) -> Batch:
    """A sequence of one placeholder, at position 0: behind the packed row, or as a row of its own."""
    tree, (rows, length) = batch.tree, batch.ids_BL.shape
    shape = (1, length) if tree is None else (rows, 1)
    along = 0 if tree is None else 1
    ids, types = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    ids[0, 0], types[0, 0] = token, kind
    return replace(
        batch,
        ids_BL=torch.cat([batch.ids_BL, ids], dim=along),
        types_BL=torch.cat([batch.types_BL, types], dim=along),
        positions_3BL=torch.cat([batch.positions_3BL, torch.zeros(3, *shape, dtype=torch.int64)], dim=along + 1),
        tree=None if tree is None else (*tree, Stem(1, ())),
    )


def _with_image(media: Media, merge: int) -> Media:
    patches, grid = torch.zeros(merge**2, media.images_ND.shape[1]), torch.tensor([[1, merge, merge]])
    return replace(media, images_ND=patches, image_grids_I3=grid, image_keys=("dummy:image",))


def _with_video(media: Media, merge: int) -> Media:
    patches, grid = torch.zeros(merge**2, media.videos_ND.shape[1]), torch.tensor([[1, merge, merge]])
    return replace(media, videos_ND=patches, video_grids_V3=grid, video_keys=("dummy:video",))
