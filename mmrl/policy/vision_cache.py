"""Outputs of a frozen vision tower, computed once for each image or video, while there is room.

Letters in shapes: M patches, D values of a patch, W hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from mmrl.policy.batch import BatchMedia
from mmrl.policy.picklable_lock import PicklableLock
from mmrl.utils.byte_cache import ByteCache

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

VISION_CACHE_BYTES = 2**30


class VisionFeatures(NamedTuple):
    """The vision tower's output for one image or video, [tokens, W] with W the language model's hidden size."""

    tokens: torch.Tensor  # features that replace the embeddings of the placeholders, [tokens, W]
    # Features that Qwen3-VL adds in its first language layers, a [tokens, W] each; empty in other families.
    deepstack: tuple[torch.Tensor, ...]
    output_class: type[ModelOutput]  # class of the tower's output, whose fields the model reads

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in (self.tokens, *self.deepstack))


class VisionCache:
    """Vision features by the key of their image or video; the least recently used leave when it is full."""

    def __init__(self) -> None:
        self._features: ByteCache[str, VisionFeatures] = ByteCache(VISION_CACHE_BYTES)
        # Asynchronous rollouts encode in a separate thread.
        self._lock = PicklableLock()

    @contextmanager
    def cached_forward(self, tower: nn.Module, media: BatchMedia) -> Iterator[None]:
        """Replace the tower's forward inside this block by one that looks its images and videos up in this cache."""
        encode = tower.forward
        # A Qwen-VL forward calls the tower first for a batch's images, then for its videos, and not for a kind of which
        # `media` has none.
        keys_of_calls = iter([keys for keys in (media.image_keys, media.video_keys) if keys])

        def forward(patches_MD: torch.Tensor, grid_thw: torch.Tensor, **options: object) -> ModelOutput:
            """Return the features of patches [M, D], float32, cut by grids [media, 3], int64."""
            keys = next(keys_of_calls)
            return _join_features(self._get_or_encode(keys, patches_MD, grid_thw, partial(encode, **options)))

        # Only `forward` is replaced, so hooks on the module still run.
        tower.forward = forward
        try:
            yield
        finally:
            tower.forward = encode

    def _get_or_encode(
        self, keys: Sequence[str], patches_MD: torch.Tensor, grids: torch.Tensor, encode: Callable[..., ModelOutput]
    ) -> list[VisionFeatures]:
        """Return the features of these images or videos; encode and cache the missing ones."""
        patches_by_medium = torch.split(patches_MD, grids.prod(dim=-1).tolist())
        found = []
        for key, patches, grid in zip(keys, patches_by_medium, grids, strict=True):
            with self._lock:
                features = self._features.get(key)
                if features is None:
                    # Each is encoded alone: its features must not depend, not even in the last bit, on what else is in
                    # the batch or the cache, or a resumed run would differ from an uninterrupted one.
                    output = encode(patches, grid_thw=grid[None])
                    deepstack = tuple(layer.detach() for layer in output.get("deepstack_features") or ())
                    features = VisionFeatures(output.pooler_output.detach(), deepstack, type(output))
                    self._features.put(key, features, features.nbytes)
            found.append(features)
        return found


def _join_features(features: Sequence[VisionFeatures]) -> ModelOutput:
    """Return the features of several images or videos as one output of the tower."""
    output_class = features[0].output_class
    tokens = torch.cat([item.tokens for item in features])
    if not features[0].deepstack:
        return output_class(pooler_output=tokens)
    layers = zip(*(item.deepstack for item in features), strict=True)
    return output_class(pooler_output=tokens, deepstack_features=list(map(torch.cat, layers)))
