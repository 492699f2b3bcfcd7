"""The learner's weights on their way to an engine: what is sent, and how to tell that it arrived."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from mmrl.policy.qwen_vl import Policy
from mmrl.types import UserError

_FINGERPRINT_VALUES = 1000
# Names in transformers' models, and of the same tensors in vLLM's.
_VLLM_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)


class WeightSpec(NamedTuple):
    """A weight without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream(Protocol):
    """Weights by transformers' names, whole, again and again in the same order.

    All that an engine fuses (query, key and value, say) and both names of a tied matrix are there, or none of it.
    Where weights are sharded, passing over them gathers one after the other: every rank must do so together.
    """

    def specs(self) -> Sequence[WeightSpec]:
        """What a pass will bring, without gathering anything."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""


@dataclass(frozen=True, slots=True)
class PolicyWeightStream:
    """What training changes of a policy; of an adapter, the matrices with the adapter added."""

    policy: Policy

    def specs(self) -> list[WeightSpec]:
        """What a pass will bring."""
        return [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        yield from self.policy.iter_export_weights()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFingerprint:
    """What tells a tensor from others: its shape, and a digest of about a thousand of its values."""

    shape: tuple[int, ...]
    digest: str


def fingerprint(tensor: torch.Tensor) -> TensorFingerprint:
    """The print of a tensor."""
    values = tensor.detach().flatten()[:: max(1, tensor.numel() // _FINGERPRINT_VALUES)].float().cpu().contiguous()
    return TensorFingerprint(shape=tuple(tensor.shape), digest=hashlib.sha256(values.numpy().tobytes()).hexdigest())


def check_same_model(weights: WeightStream, engine_fingerprints: Mapping[str, TensorFingerprint]) -> None:
    """Hold the norms of a model, which no engine fuses or cuts, against those that an engine holds.

    Raises:
        UserError: the engine runs another model.
    """
    for name, _, sizes in weights.specs():
        found = engine_fingerprints.get(vllm_name(name))
        if name.endswith("norm.weight") and (found is None or found.shape != sizes):
            has = "none of that name" if found is None else f"one of {list(found.shape)}"
            raise UserError(
                f"the rollout engine runs another model: {name} is {list(sizes)} here, and it has {has}; start it "
                "with the model that is trained"
            )


def check_weights_arrived(
    sent_fingerprints: Mapping[str, TensorFingerprint], engine_fingerprints: Mapping[str, TensorFingerprint]
) -> int:
    """Compare what was sent with what an engine now holds, as far as it keeps it as it came: neither fused nor packed.

    Returns how many tensors could be compared.

    Raises:
        RuntimeError: one differs.
    """
    comparable = 0
    for name, given in sent_fingerprints.items():
        found = engine_fingerprints.get(vllm_name(name))
        if found is None or found.shape != given.shape:
            continue
        comparable += 1
        if found.digest != given.digest:
            raise RuntimeError(f"after a sync of weights the rollout engine holds another {name} than the learner")
    return comparable


def vllm_name(name: str) -> str:
    """The name in vLLM of a weight of transformers."""
    for ours, theirs in _VLLM_PREFIXES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def iter_with_fingerprints(
    weights: WeightStream, fingerprints: dict[str, TensorFingerprint]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass over weights, and leave a print of each in `prints`."""
    for name, tensor in weights:
        fingerprints[name] = fingerprint(tensor)
        yield name, tensor.detach()
