"""What a frozen vision tower makes of a picture or video, computed once and kept as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import ModelOutput

from mmrl.policy.batch import BatchMedia
from mmrl.utils.picklable_lock import PicklableLock


class VisionFeatures(NamedTuple):
    """A medium's tokens [tokens, W], and what Qwen3-VL adds to them in its first layers."""

    tokens: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Memory of all."""
        return sum(tensor.nbytes for tensor in (self.tokens, *self.deepstack))


class VisionCache:
    """Features of recent media by their keys, at most `max_bytes` of them (but always the last).

    A medium is encoded alone: its features must not depend, not even in the last bit, on what else is in the batch or
    in the cache, or a resumed run would differ from an uninterrupted one. Threads take turns.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, VisionFeatures] = OrderedDict()
        self._bytes = 0
        self._output_class: type[ModelOutput] | None = None
        self._lock = PicklableLock()

    @contextmanager
    def cached_forward(self, tower: nn.Module, media: BatchMedia) -> Iterator[None]:
        """Within this block `tower` answers from the cache: called first for the pictures of `media`, then its videos.

        Only its `forward` is replaced, so whoever hooks into modules is called as ever.
        """
        encode, waiting = tower.forward, iter([keys for keys in (media.image_keys, media.video_keys) if keys])

        def forward(patches_ND: torch.Tensor, grid_thw: torch.Tensor, **options: object) -> ModelOutput:
            pieces = torch.split(patches_ND, grid_thw.prod(dim=-1).tolist())
            found = []
            for key, piece, grid in zip(next(waiting), pieces, grid_thw, strict=True):
                with self._lock:
                    if key not in self._features:
                        self._store(key, encode(piece, grid_thw=grid[None], **options))
                    self._features.move_to_end(key)
                    found.append(self._features[key])
            return self._concat_features(found)

        tower.forward = forward
        try:
            yield
        finally:
            tower.forward = encode

    def _store(self, key: str, output: ModelOutput) -> None:
        self._output_class = type(output)
        features = VisionFeatures(output.pooler_output.detach(), tuple(output.get("deepstack_features") or ()))
        self._features[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._max_bytes and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].nbytes

    def _concat_features(self, found: list[VisionFeatures]) -> ModelOutput:
        """The tower's own kind of output."""
        assert self._output_class is not None
        joined = {"pooler_output": torch.cat([features.tokens for features in found])}
        if found[0].deepstack:
            layers = zip(*(features.deepstack for features in found), strict=True)
            return self._output_class(**joined, deepstack_features=[torch.cat(layer) for layer in layers])
        return self._output_class(**joined)
