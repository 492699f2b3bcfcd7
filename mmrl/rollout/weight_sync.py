"""The learner's weights on their way to an engine: what is sent, and how to tell that it arrived."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from mmrl.policy.qwen_vl import Policy
from mmrl.types import UserError

_SAMPLED = 1000
# Names in transformers' models, and of the same tensors in vLLM's.
_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)


class Shape(NamedTuple):
    """A weight without its values."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]


class Weights(Protocol):
    """Weights by transformers' names, whole, again and again in the same order.

    All that an engine fuses (query, key and value, say) and both names of a tied matrix are there, or none of it.
    Where weights are sharded, passing over them gathers one after the other: every rank must do so together.
    """

    def shapes(self) -> Sequence[Shape]:
        """What a pass will bring, without gathering anything."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """What training changes of a policy; of an adapter, the matrices with the adapter added."""

    policy: Policy

    def shapes(self) -> list[Shape]:
        """What a pass will bring."""
        return [Shape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        yield from self.policy.published()


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """What tells a tensor from others: its shape, and a digest of about a thousand of its values."""

    sizes: tuple[int, ...]
    digest: str


def fingerprint(tensor: torch.Tensor) -> Print:
    """The print of a tensor."""
    values = tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLED)].float().cpu().contiguous()
    return Print(sizes=tuple(tensor.shape), digest=hashlib.sha256(values.numpy().tobytes()).hexdigest())


def check_model(weights: Weights, held: Mapping[str, Print]) -> None:
    """Hold the norms of a model, which no engine fuses or cuts, against those that an engine holds.

    Raises:
        UserError: the engine runs another model.
    """
    for name, _, sizes in weights.shapes():
        found = held.get(engine_name(name))
        if name.endswith("norm.weight") and (found is None or found.sizes != sizes):
            has = "none of that name" if found is None else f"one of {list(found.sizes)}"
            raise UserError(
                f"the rollout engine runs another model: {name} is {list(sizes)} here, and it has {has}; start it "
                "with the model that is trained"
            )


def check_arrival(sent: Mapping[str, Print], held: Mapping[str, Print]) -> int:
    """Compare what was sent with what an engine now holds, as far as it keeps it as it came: neither fused nor packed.

    Returns how many tensors could be compared.

    Raises:
        RuntimeError: one differs.
    """
    comparable = 0
    for name, given in sent.items():
        found = held.get(engine_name(name))
        if found is None or found.sizes != given.sizes:
            continue
        comparable += 1
        if found.digest != given.digest:
            raise RuntimeError(f"after a sync of weights the rollout engine holds another {name} than the learner")
    return comparable


def engine_name(name: str) -> str:
    """The name in vLLM of a weight of transformers."""
    for ours, theirs in _PREFIXES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def recorded(weights: Weights, prints: dict[str, Print]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass over weights, and leave a print of each in `prints`."""
    for name, tensor in weights:
        prints[name] = fingerprint(tensor)
        yield name, tensor.detach()
