"""Builds inputs for vLLM from expanded token ids and media that are already cut into patches.

From raw media, vLLM would resize them, cut them into patches and expand placeholders with its own processor. With the
inputs built here it does none of this, so the engine reads the same token ids, patches and grids as the learner. A grid
is the number of patches that a medium was cut into: over time, down and across.

Suffixes of tensors: T tokens, M patches, D values of a patch, I images, V videos; 3 is a grid (t, h, w, in patches).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from mmrl.policy.batch import BatchMedia, TokenSpan, collect_media
from mmrl.policy.families import VideoTimeEncoding
from mmrl.policy.processor import PromptProcessor
from mmrl.types import Rollout


def build_engine_input(rollout: Rollout, processor: PromptProcessor) -> EngineInput:
    """Return the input of `LLMEngine.add_request` for a prompt and the response so far: all tokens and all media.

    vLLM caches what it encodes by the keys given here: the digest of the prompt, or of the media that a tool showed.

    Raises:
        UserError: a file has changed since the run started, or placeholders do not fit the media.
    """
    spans = (TokenSpan.from_prompt(rollout.prompt, processor), TokenSpan.from_response(rollout, processor))
    token_ids = [*spans[0].ids, *spans[1].ids]
    media = collect_media(spans)
    keys_by_modality = {"image": list(media.image_keys), "video": list(media.video_keys)}
    cache_keys = {modality: keys for modality, keys in keys_by_modality.items() if keys}
    if not cache_keys:
        return tokens_input(token_ids)
    arguments = {
        "pixel_values": media.image_patches_MD,
        "image_grid_thw": media.image_grids_I3,
        "pixel_values_videos": media.video_patches_MD,
        "video_grid_thw": media.video_grids_V3,
    }
    if processor.encoder.family.video_time is VideoTimeEncoding.SECONDS:
        seconds_per_grid = [tensors.second_per_grid_V for span in spans for tensors in span.tensors]
        arguments["second_per_grid_ts"] = torch.cat(seconds_per_grid)
    # `fields` says how vLLM splits each argument into one item per image or video.
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", media.image_grids_I3.prod(dim=1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "pixel_values_videos": MultiModalFieldConfig.flat_from_sizes("video", media.video_grids_V3.prod(dim=1)),
        "video_grid_thw": MultiModalFieldConfig.batched("video", keep_on_cpu=True),
        "second_per_grid_ts": MultiModalFieldConfig.batched("video", keep_on_cpu=True),
    }
    ranges = _placeholder_ranges(token_ids, media, processor)
    return mm_input(token_ids, MultiModalKwargsItems.from_hf_inputs(arguments, fields), cache_keys, ranges)


def _placeholder_ranges(
    token_ids: Sequence[int], media: BatchMedia, processor: PromptProcessor
) -> dict[str, list[PlaceholderRange]]:
    """Return the range of each medium's placeholders in the token ids. A modality without media has no entry."""
    placeholders, ids_T = processor.placeholders, torch.tensor(token_ids)
    has_timestamps = processor.encoder.family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS
    ranges: dict[str, list[PlaceholderRange]] = {}
    for modality, placeholder_id, grids in (
        ("image", placeholders.image_id, media.image_grids_I3),
        ("video", placeholders.video_id, media.video_grids_V3),
    ):
        positions = (ids_T == placeholder_id).nonzero().squeeze(1)
        # A merged square of patches is one token, hence one placeholder.
        counts = (grids.prod(dim=1) // placeholders.merge_size**2).tolist()
        for own_positions in torch.split(positions, counts):
            first, last = int(own_positions[0]), int(own_positions[-1])
            medium_range = PlaceholderRange(first, len(own_positions))
            if modality == "video" and has_timestamps:
                # There is text between the frames, so the range needs a mask of its own tokens. vLLM finds the frames
                # by their <|vision_start|>, and the range begins at the first of these, one before the placeholders.
                is_embed = ids_T[first - 1 : last + 1] == placeholder_id
                medium_range = PlaceholderRange(first - 1, len(is_embed), is_embed=is_embed)
            ranges.setdefault(modality, []).append(medium_range)
    return ranges
