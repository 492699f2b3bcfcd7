"""Is the shared-prefix forward right, with this model on this machine? Held against the plain one before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.learner.micro_batches import add_dummy_media
from mmrl.policy.batch import Batch, collate
from mmrl.policy.prompt_tensors import TensorProvider
from mmrl.policy.qwen_vl import Policy
from mmrl.types import Experience, UserError


class ForwardDifference(NamedTuple):
    """Between two ways to score the same tokens: the largest of log-probs (nats), and of gradients, relative."""

    logprobs: float
    gradient: float

    def within(self, bound: ForwardDifference) -> bool:
        """Whether both are; a NaN is not."""
        return self.logprobs <= bound.logprobs and self.gradient <= bound.gradient


TOLERANCES = {
    torch.float32: ForwardDifference(logprobs=1e-4, gradient=1e-3),
    torch.bfloat16: ForwardDifference(logprobs=0.1, gradient=0.1),
}


def compare_layouts(policy: Policy, batch: Batch, other: Batch, ranks: Ranks | None = None) -> ForwardDifference:
    """How far apart two layouts of the same experiences are; all `ranks` must look at the same.

    The gradient is that of a sum of log-probs with alternating weights, over all that is trained.
    """
    ranks = ranks or SingleProcess()
    (logps, gradient), (other_logps, other_gradient) = (_logprobs_and_gradient(policy, each) for each in (batch, other))
    apart = sum(float((a - b).float().square().sum()) for a, b in zip(gradient, other_gradient, strict=True))
    size = sum(float(b.float().square().sum()) for b in other_gradient)
    squares = torch.tensor([apart, size], dtype=torch.float64)
    ranks.all_reduce(
        [squares]
    )  # a divided gradient is in pieces; of a whole one both count as often as there are ranks
    furthest = max(ranks.all_gather(float((logps - other_logps).abs().max())))
    return ForwardDifference(furthest, float(squares[0] / squares[1]) ** 0.5)


def check_shared_prefix(
    policy: Policy,
    groups: Sequence[Sequence[Experience]],
    provider: TensorProvider,
    *,
    pad_id: int,
    ranks: Ranks | None = None,
) -> None:
    """Score groups packed and apart: two siblings, or two sequences that share nothing; all `ranks` the same.

    Raises:
        UserError: log-probs or gradients differ by more than rounding explains.
    """
    packed, plain = (
        add_dummy_media(
            collate(groups, provider, pad_id=pad_id, shared_prefix=shared_prefix),
            provider.placeholders,
            images=policy.is_sharded,
            videos=False,
        )
        for shared_prefix in (True, False)
    )
    with _without_dropout(policy.model):
        found, bound = compare_layouts(policy, packed, plain, ranks), TOLERANCES[policy.model.dtype]
    if not found.within(bound):
        raise UserError(
            f"shared_prefix: on sample {groups[0][0].rollout.prompt.sample.id} it differs from the plain forward by "
            f"{found.logprobs:.2g} nats and {found.gradient:.2g} of the gradient; {bound.logprobs:g} and {bound.gradient:g} "
            "would be rounding. Set shared_prefix: off, and report the model and the versions of torch and transformers"
        )


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Chance would strike the two forwards differently."""
    rates = {module: module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for module in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates.items():
            module.p = rate


def _logprobs_and_gradient(policy: Policy, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    kept = []

    def loss() -> torch.Tensor:
        logps_N = policy.compute_logprobs(batch).logprobs_N
        kept.append(logps_N.detach())
        return (logps_N * torch.cos(torch.arange(len(logps_N), device=logps_N.device))).mean()

    gradient = policy.compute_gradient(loss)
    return kept[0], gradient
