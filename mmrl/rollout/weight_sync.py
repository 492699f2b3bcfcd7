"""Streams of weights from the learner to an engine, and fingerprints that show whether the weights arrived.

A pass is one iteration over all weights, from the first to the last.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.policy.policy import PolicyModel
from mmrl.types import UserError
from mmrl.utils.torch_digests import sample_bytes


class WeightSpec(NamedTuple):
    """Name, dtype and shape of a weight, by the name that transformers gives it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream(ABC):
    """Full weights under transformers' names. It can be iterated repeatedly, always in the same order.

    Parts of a fused weight (query, key and value, say), and both names of a tied matrix, are either all present or all
    absent. Iterating over sharded weights gathers them one after the other: every rank must do so together.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""

    def specs(self) -> list[WeightSpec]:
        """Return name, dtype and shape of each weight, which takes one iteration over all of them."""
        return [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]


@dataclass(frozen=True)
class PolicyWeightStream(WeightStream):
    """The weights that training changes. An adapter is added into the matrices that it adapts."""

    policy: PolicyModel

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""
        return self.policy.iter_export_weights()


@dataclass(eq=False)
class ShardedWeightStream(WeightStream):
    """Weights that may be sharded over ranks, as an engine of rank 0 reads them.

    Iterating over sharded weights is collective, and only the engine knows how often it iterates. So rank 0
    announces each pass to the other ranks, and the end of the last one. No rank ever holds all of them.
    """

    weights: WeightStream
    ranks: Ranks
    _specs: list[WeightSpec] = field(default_factory=list)
    _current_pass: Iterator[tuple[str, torch.Tensor]] = field(default_factory=lambda: iter(()))

    def load_on_rank0(self, load: Callable[[WeightStream], None]) -> None:
        """Call `load` on rank 0. Every rank must call this, and takes part in each pass over the weights.

        Raises:
            UserError: `load` raised it on rank 0; it is raised on every rank.
        """
        if self.ranks.rank:
            while self.ranks.on_rank0(lambda: True):
                for _ in self.weights:
                    pass
            return
        failure: UserError | None = None
        try:
            load(self)
        except UserError as error:
            failure = error
        self._finish_pass()

        def report_end() -> bool:
            if failure is not None:
                raise failure
            return False

        # The other ranks wait in the loop above for rank 0 to say whether one more pass follows. False ends their loop;
        # an error that rank 0 raises here is raised on every rank.
        self.ranks.on_rank0(report_end)

    def specs(self) -> list[WeightSpec]:
        """Return name, dtype and shape of each weight. The first call costs a pass."""
        self._specs = self._specs or super().specs()
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a pass on all ranks and yield name and tensor of each weight. Only rank 0 calls this."""
        self._finish_pass()
        self.ranks.on_rank0(lambda: True)
        self._current_pass = iter(self.weights)
        return self._current_pass

    def _finish_pass(self) -> None:
        # The engine may have stopped in the middle of a pass, which the other ranks gather to the end.
        for _ in self._current_pass:
            pass


class TensorFingerprint(NamedTuple):
    """Shape and digest of a tensor. Tensors that differ in a sampled value have different fingerprints."""

    shape: tuple[int, ...]
    digest: str  # SHA-256, in hex, of about a thousand evenly spaced values as float32


def fingerprint(tensor: torch.Tensor) -> TensorFingerprint:
    """Return the fingerprint of a tensor of any shape and floating dtype."""
    return TensorFingerprint(tuple(tensor.shape), hashlib.sha256(sample_bytes(tensor)).hexdigest())


def iter_with_fingerprints(
    weights: WeightStream, fingerprints: dict[str, TensorFingerprint]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each weight, and store its fingerprint in `fingerprints`."""
    for name, tensor in weights:
        fingerprints[name] = fingerprint(tensor)
        yield name, tensor.detach()
