"""Prompts as vLLM's engine takes them ready-made: ids expanded, media resized and cut into patches.

Given raw media, vLLM resizes, cuts and expands with a processor of its own. Given these, it does nothing of the kind:
the very ids, patches and grids that the learner sees go to the engine, with word of where each medium stands.

Letters: N patches, D values a patch, M media of one modality.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from mmrl.policy.batch import BatchMedia, TokenSpan, collect_media
from mmrl.policy.families import VideoTimeEncoding
from mmrl.policy.processor import QwenProcessor
from mmrl.types import Rollout


def build_engine_input(rollout: Rollout, processor: QwenProcessor) -> EngineInput:
    """What `LLMEngine.add_request` takes for a prompt and what there is of the response: all tokens, all media.

    What the engine encodes, it keeps under the digest of the prompt, or of what a tool showed.

    Raises:
        UserError: as `QwenProcessor.tensors` and `seen`; or placeholders, grids and patches disagree.
    """
    stretches = TokenSpan.from_prompt(rollout.prompt, processor), TokenSpan.from_response(rollout, processor)
    ids = [token for stretch in stretches for token in stretch.ids]
    media = collect_media(stretches)
    keys = {name: list(found) for name, found in (("image", media.image_keys), ("video", media.video_keys)) if found}
    if not keys:
        return tokens_input(ids)
    ranges = {name: found for name, found in _placeholder_ranges(ids, media, processor).items() if found}
    seconds = [part.second_per_grid_V for stretch in stretches for part in stretch.tensors]
    timed = (
        {"second_per_grid_ts": torch.cat(seconds)}
        if processor.encoder.family.video_time is VideoTimeEncoding.SECONDS
        else {}
    )
    return mm_input(ids, _multimodal_kwargs(media, timed), keys, ranges)


def _multimodal_kwargs(media: BatchMedia, timing_tensors: Mapping[str, torch.Tensor]) -> MultiModalKwargsItems:
    """What the engine's model is called with, cut into one part per medium."""
    arguments = {
        "pixel_values": media.image_patches_MD,
        "image_grid_thw": media.image_grids_I3,
        "pixel_values_videos": media.video_patches_MD,
        "video_grid_thw": media.video_grids_V3,
        **timing_tensors,
    }
    cuts = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", media.image_grids_I3.prod(dim=1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "pixel_values_videos": MultiModalFieldConfig.flat_from_sizes("video", media.video_grids_V3.prod(dim=1)),
        "video_grid_thw": MultiModalFieldConfig.batched("video", keep_on_cpu=True),
        "second_per_grid_ts": MultiModalFieldConfig.batched("video", keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(arguments, cuts)


def _placeholder_ranges(
    ids: Sequence[int], media: BatchMedia, processor: QwenProcessor
) -> dict[str, list[PlaceholderRange]]:
    """Where the media stand in the ids."""
    known = processor.placeholders
    images, videos = (
        grids.prod(dim=1) // known.merge_size**2 for grids in (media.image_grids_I3, media.video_grids_V3)
    )
    stamped = processor.encoder.family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS
    return {
        "image": [
            PlaceholderRange(places[0], len(places)) for places in _placeholder_positions(ids, known.image_id, images)
        ],
        "video": [
            _timestamped_range(ids, places) if stamped else PlaceholderRange(places[0], len(places))
            for places in _placeholder_positions(ids, known.video_id, videos)
        ],
    }


def _placeholder_positions(ids: Sequence[int], placeholder_id: int, counts_M: torch.Tensor) -> Iterator[list[int]]:
    """The places of the placeholder `token`, medium by medium."""
    places = (place for place, found in enumerate(ids) if found == placeholder_id)
    return (list(islice(places, count)) for count in counts_M.tolist())


def _timestamped_range(ids: Sequence[int], positions: Sequence[int]) -> PlaceholderRange:
    """A video with words between its frames; it begins with the <|vision_start|> by which the engine finds frames."""
    start, end = positions[0] - 1, positions[-1] + 1
    return PlaceholderRange(start, end - start, is_embed=torch.tensor(ids[start:end]) == ids[positions[0]])
