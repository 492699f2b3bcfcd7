"""A check of the shared-prefix forward against the plain one, with this model on this machine, before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.learner.micro_batches import add_dummy_media
from mmrl.policy.batch import Batch, TensorProvider, collate
from mmrl.policy.policy import Policy
from mmrl.types import Experience, UserError


class ForwardDifference(NamedTuple):
    """Difference between two ways to score the same tokens."""

    logprobs: float
    """Largest difference of a log-prob, in nats."""
    gradient: float
    """Norm of the difference of the gradients, relative to the norm of the second."""

    def within(self, bound: ForwardDifference) -> bool:
        """Return True if neither exceeds its bound; a NaN does."""
        return self.logprobs <= bound.logprobs and self.gradient <= bound.gradient


TOLERANCES = {
    torch.float32: ForwardDifference(logprobs=1e-4, gradient=1e-3),
    torch.bfloat16: ForwardDifference(logprobs=0.1, gradient=0.1),
}
"""Differences that rounding explains, by the data type of the model."""


def check_shared_prefix(
    policy: Policy,
    groups: Sequence[Sequence[Experience]],
    provider: TensorProvider,
    *,
    pad_id: int,
    ranks: Ranks | None = None,
) -> None:
    """Score groups packed and as plain rows, and compare log-probs and gradients.

    Args:
        policy: the policy.
        groups: two experiences at least, in one group or two; every rank must give the same.
        provider: provides patches and position ids.
        pad_id: token id of padding.
        ranks: the processes of the run; None for one alone.

    Raises:
        UserError: log-probs or gradients differ by more than rounding explains.
    """
    packed = collate(groups, provider, pad_id=pad_id, shared_prefix=True)
    plain = collate(groups, provider, pad_id=pad_id, shared_prefix=False)
    # Under ZeRO-3 the gradient of a weight that a pass does not reach would be that of an earlier pass.
    packed = add_dummy_media(packed, provider.placeholders, images=policy.is_sharded, videos=False)
    plain = add_dummy_media(plain, provider.placeholders, images=policy.is_sharded, videos=False)
    with _disable_dropout(policy.model):
        found, bound = compare_layouts(policy, packed, plain, ranks), TOLERANCES[policy.model.dtype]
    if not found.within(bound):
        raise UserError(
            f"shared_prefix: on sample {groups[0][0].rollout.prompt.sample.id} it differs from the plain forward by "
            f"{found.logprobs:.2g} nats and {found.gradient:.2g} of the gradient; {bound.logprobs:g} and "
            f"{bound.gradient:g} would be rounding. Set shared_prefix: off, and report the model and the versions of "
            "torch and transformers"
        )


def compare_layouts(policy: Policy, batch: Batch, other: Batch, ranks: Ranks | None = None) -> ForwardDifference:
    """Compare the log-probs of two layouts of the same experiences, and the gradients of one scalar function of them.

    Args:
        policy: the policy.
        batch: one layout; every rank must give the same experiences.
        other: the other layout, with the same trained tokens in the same order.
        ranks: the processes of the run; None for one alone.
    """
    ranks = ranks or SingleProcess()
    logprobs_N, gradient = _logprobs_and_gradient(policy, batch)
    other_logprobs_N, other_gradient = _logprobs_and_gradient(policy, other)
    difference_square, norm_square = 0.0, 0.0
    for own, theirs in zip(gradient, other_gradient, strict=True):
        difference_square += float((own - theirs).float().square().sum())
        norm_square += float(theirs.float().square().sum())
    squares = torch.tensor([difference_square, norm_square], dtype=torch.float64)
    # Ranks have pieces of a sharded gradient. Of an ordinary one each has the whole: both sums then count it equally
    # often, so their ratio is the same.
    ranks.all_reduce([squares])
    largest = max(ranks.all_gather(float((logprobs_N - other_logprobs_N).abs().max())))
    return ForwardDifference(largest, float(squares[0] / squares[1]) ** 0.5)


@contextmanager
def _disable_dropout(model: nn.Module) -> Iterator[None]:
    """Set all dropout to 0 inside this block: otherwise the two forwards drop different activations."""
    rates = {module: module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for module in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates.items():
            module.p = rate


def _logprobs_and_gradient(policy: Policy, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the log-probs of a batch, float32 [N], and the gradient of their mean with varying weights."""
    computed = []

    def loss() -> torch.Tensor:
        """Return the weighted mean, a scalar, and keep the log-probs."""
        logprobs_N = policy.compute_logprobs(batch).logprobs_N
        computed.append(logprobs_N.detach())
        # With equal weights, errors that only move gradient from one token to another would cancel.
        weights_N = torch.cos(torch.arange(len(logprobs_N), device=logprobs_N.device))
        return (logprobs_N * weights_N).mean()

    gradient = policy.compute_gradient(loss)
    return computed[0], gradient
