"""Weights on their way from the learner to an engine, and fingerprints that prove their arrival."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from mmrl.policy.policy import Policy
from mmrl.types import UserError

_FINGERPRINT_VALUES = 1000
"""About as many values of a tensor go into its fingerprint: enough to notice an update, cheap on 7 billion weights."""

_VLLM_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)
"""Prefixes of weight names in transformers, and of the same tensors in vLLM."""


class WeightSpec(NamedTuple):
    """Name, dtype and shape of a weight, by the name that transformers gives it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream(Protocol):
    """Full weights under transformers' names. It can be iterated again and again, always in the same order.

    Weights that an engine fuses (query, key and value, say), and both names of a tied matrix, are all there or all
    missing. Iterating over sharded weights gathers them one after the other: every rank must do so together.
    """

    def specs(self) -> Sequence[WeightSpec]:
        """Return name, dtype and shape of what iterating will yield. Nothing is gathered."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""


@dataclass(frozen=True, slots=True)
class PolicyWeightStream:
    """The weights that training changes. An adapter is added into the matrices that it adapts."""

    policy: Policy

    def specs(self) -> list[WeightSpec]:
        """Return name, dtype and shape of each weight."""
        return [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""
        yield from self.policy.iter_export_weights()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFingerprint:
    """Shape and digest of a tensor. Two tensors that differ have different ones, up to values that are not sampled."""

    shape: tuple[int, ...]
    digest: str
    """SHA-256, in hex, of about a thousand evenly spaced values as float32."""


def fingerprint(tensor: torch.Tensor) -> TensorFingerprint:
    """Return the fingerprint of a tensor of any shape and floating dtype."""
    stride = max(1, tensor.numel() // _FINGERPRINT_VALUES)
    values = tensor.detach().flatten()[::stride].float().cpu().contiguous()
    return TensorFingerprint(shape=tuple(tensor.shape), digest=hashlib.sha256(values.numpy().tobytes()).hexdigest())


def check_same_model(weights: WeightStream, engine_fingerprints: Mapping[str, TensorFingerprint]) -> None:
    """Compare names and shapes of the norms, which no engine fuses or splits, with those that an engine holds.

    Raises:
        UserError: the engine runs another model.
    """
    for name, _, shape in weights.specs():
        if not name.endswith("norm.weight"):
            continue
        found = engine_fingerprints.get(vllm_name(name))
        if found is None or found.shape != shape:
            has = "none of that name" if found is None else f"one of {list(found.shape)}"
            raise UserError(
                f"the rollout engine runs another model: {name} is {list(shape)} here, and it has {has}; start it "
                "with the model that is trained"
            )


def check_weights_arrived(
    sent_fingerprints: Mapping[str, TensorFingerprint], engine_fingerprints: Mapping[str, TensorFingerprint]
) -> int:
    """Compare weights that were sent with those that an engine holds now.

    Weights that the engine fuses or packs have another name or shape there, and are passed over.

    Returns:
        The number of weights that could be compared.

    Raises:
        RuntimeError: one of them differs.
    """
    num_compared = 0
    for name, sent in sent_fingerprints.items():
        found = engine_fingerprints.get(vllm_name(name))
        if found is None or found.shape != sent.shape:
            continue
        num_compared += 1
        if found.digest != sent.digest:
            raise RuntimeError(f"after a sync of weights the rollout engine holds another {name} than the learner")
    return num_compared


def vllm_name(name: str) -> str:
    """Return the name in vLLM of a weight that transformers calls `name`."""
    for prefix, vllm_prefix in _VLLM_PREFIXES:
        if name.startswith(prefix):
            return vllm_prefix + name.removeprefix(prefix)
    return name


def iter_with_fingerprints(
    weights: WeightStream, fingerprints: dict[str, TensorFingerprint]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each weight, and leave its fingerprint in `fingerprints`."""
    for name, tensor in weights:
        fingerprints[name] = fingerprint(tensor)
        yield name, tensor.detach()
