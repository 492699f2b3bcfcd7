"""The tensors that the model's forward needs of a prompt besides token ids, and the check that they fit the prompt.

Suffixes of tensor names: P tokens of the prompt, M patches, D values of a patch, V videos. Position ids have 3 axes:
time, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import NamedTuple, Protocol

import torch

from mmrl.types import ImageRef, MediaObservation, MediaRef, Prompt, Segment, UserError, VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """The tokens that stand for images and videos in a prompt."""

    image_id: int
    """Token id of an image's placeholder."""
    video_id: int
    """Token id of a video's placeholder."""
    merge_size: int
    """Patches per side that one placeholder stands for: 2 in Qwen-VL, so a token is 2 x 2 patches."""

    def token_types(self, ids: torch.Tensor) -> torch.Tensor:
        """Return 0 for text, 1 for an image and 2 for a video, for each token id; int64 in the shape of `ids`."""
        return (ids == self.image_id).long() + 2 * (ids == self.video_id).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTensors:
    """The tensors that the model's forward needs of a prompt or of a tool's image or video, besides token ids.

    M and V are 0 where there is no image or no video.
    """

    image_patches_MD: torch.Tensor
    """Normalised patches of all images in reading order, float32."""
    video_patches_MD: torch.Tensor
    """Normalised patches of all videos in reading order, float32."""
    position_ids_3P: torch.Tensor
    """Position ids of the tokens, int64."""
    second_per_grid_V: torch.Tensor
    """Seconds from one pair of frames to the next, float32; for vLLM, which derives position ids by itself."""

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        return sum(getattr(self, tensor_field.name).nbytes for tensor_field in fields(self))


class TensorProvider(Protocol):
    """Provides the tensors of prompts and of images and videos that tools showed.

    Called by the collate functions; implemented by `mmrl.policy.processor.QwenProcessor`.
    """

    placeholders: Placeholders

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        """Return the tensors of a prompt."""

    def tool_media_tensors(self, observation: MediaObservation) -> PromptTensors:
        """Return the tensors of an image or video that a tool showed; positions count from its first token."""


class MediaItem(NamedTuple):
    """An image or video of a prompt or response."""

    ref: MediaRef
    grid: tuple[int, int, int]
    """Time, height and width in patches."""
    key: str
    """Name of its content, for a cache."""


def check_prompt_media(prompt: Prompt, tensors: PromptTensors, placeholders: Placeholders) -> None:
    """Check that placeholders, grids and patches of a prompt agree; done at encoding and again at every use.

    Raises:
        UserError: they disagree. The message names the sample.
    """
    _check_placeholders(
        prompt.token_ids, prompt_media_items(prompt), tensors, placeholders, owner=f"sample {prompt.sample.id}"
    )


def check_observation(
    segment: Segment, observation: MediaObservation, tensors: PromptTensors, placeholders: Placeholders, *, owner: str
) -> None:
    """Check that placeholders, grid and patches of what a tool showed agree.

    Raises:
        UserError: they disagree. The message begins with `owner`.
    """
    item = MediaItem(observation.ref, observation.grid, observation.digest)
    _check_placeholders(segment.token_ids, [item], tensors, placeholders, owner=owner)


def prompt_media_items(prompt: Prompt) -> list[MediaItem]:
    """Return the images and videos of a prompt, in reading order."""
    items = []
    for index, (ref, grid) in enumerate(zip(prompt.sample.media, prompt.grids, strict=True)):
        items.append(MediaItem(ref, grid, f"{prompt.digest}:{index}"))
    return items


def _check_placeholders(
    ids: Sequence[int],
    media_items: Sequence[MediaItem],
    tensors: PromptTensors,
    placeholders: Placeholders,
    *,
    owner: str,
) -> None:
    for name, ref_type, patches, placeholder in (
        ("image", ImageRef, len(tensors.image_patches_MD), placeholders.image_id),
        ("video", VideoRef, len(tensors.video_patches_MD), placeholders.video_id),
    ):
        expected = sum(prod(item.grid) for item in media_items if isinstance(item.ref, ref_type))
        tokens = ids.count(placeholder)
        if not expected == patches == tokens * placeholders.merge_size**2:
            raise UserError(
                f"{owner}: the {name} grids call for {expected} patches, there are {patches}, "
                f"and {tokens} placeholders stand for {tokens * placeholders.merge_size**2}"
            )
    if tensors.position_ids_3P.shape != (3, len(ids)):
        raise UserError(f"{owner}: {len(ids)} tokens, positions {list(tensors.position_ids_3P.shape)}")
