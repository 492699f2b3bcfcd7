"""Outputs of a frozen vision tower, computed once for each image or video and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from mmrl.policy.batch import BatchMedia
from mmrl.utils.picklable_lock import PicklableLock

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


class VisionFeatures(NamedTuple):
    """The vision tower's output for one image or video: [tokens, W], with W the language model's hidden size."""

    tokens: torch.Tensor
    """Features in place of the placeholders' embeddings, [tokens, W]."""
    deepstack: tuple[torch.Tensor, ...]
    """Features that Qwen3-VL adds in its first language layers, a [tokens, W] each; empty in other families."""

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in (self.tokens, *self.deepstack))


class VisionCache:
    """Vision features by the key of their image or video; the least recently used leave when it is full."""

    def __init__(self, max_bytes: int) -> None:
        """Keep at most `max_bytes` of features, but always the last one."""
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, VisionFeatures] = OrderedDict()
        self._bytes = 0
        # The tower's own type of output, which the model reads fields of; known from its first output on.
        self._output_class: type[ModelOutput] | None = None
        # Asynchronous rollouts encode in a thread of their own.
        self._lock = PicklableLock()

    @contextmanager
    def cached_forward(self, tower: nn.Module, media: BatchMedia) -> Iterator[None]:
        """Let the tower answer from the cache inside this block.

        A Qwen-VL forward calls it first for the images of a batch, then for its videos; a kind that `media` has none of
        is not asked for.
        """
        # Only `forward` is replaced, so hooks on the module still run.
        encode = tower.forward
        key_lists = iter([keys for keys in (media.image_keys, media.video_keys) if keys])

        def forward(patches_MD: torch.Tensor, grid_thw: torch.Tensor, **options: object) -> ModelOutput:
            """Return the features of patches [M, D], float32, cut by grids [media, 3], int64."""
            patches_by_medium = torch.split(patches_MD, grid_thw.prod(dim=-1).tolist())
            found = []
            # Each is encoded alone: its features must not depend, not even in the last bit, on what else is in the
            # batch or the cache, or a resumed run would differ from an uninterrupted one.
            for key, patches, grid in zip(next(key_lists), patches_by_medium, grid_thw, strict=True):
                with self._lock:
                    if key not in self._features:
                        self._store(key, encode(patches, grid_thw=grid[None], **options))
                    self._features.move_to_end(key)
                    found.append(self._features[key])
            assert self._output_class is not None
            tokens = torch.cat([features.tokens for features in found])
            if not found[0].deepstack:
                return self._output_class(pooler_output=tokens)
            layers = zip(*(features.deepstack for features in found), strict=True)
            return self._output_class(pooler_output=tokens, deepstack_features=list(map(torch.cat, layers)))

        tower.forward = forward
        try:
            yield
        finally:
            tower.forward = encode

    def _store(self, key: str, output: ModelOutput) -> None:
        self._output_class = type(output)
        # Gradients are enabled while the language model trains; the cache must not keep the tower's activations.
        features = VisionFeatures(output.pooler_output.detach(), tuple(output.get("deepstack_features") or ()))
        self._features[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._max_bytes and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].nbytes
