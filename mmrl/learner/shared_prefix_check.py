"""Compares the shared-prefix forward with the plain one, on a policy's own weights.

Suffixes of tensor names as in `mmrl.policy.batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.learner.micro_batches import add_dummy_media
from mmrl.policy.batch import Batch, collate, group_by_prompt
from mmrl.policy.expert_routing import with_routes_of_row
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.types import Experience, UserError


class ForwardDifference(NamedTuple):
    """Difference between two ways to compute log-probs of the same tokens."""

    logprobs: float  # largest difference of a log-prob, in nats
    gradient: float  # norm of the difference of the gradients, relative to the norm of the second

    def within(self, bound: ForwardDifference) -> bool:
        """Return True if neither difference exceeds its bound. A NaN exceeds any bound."""
        return self.logprobs <= bound.logprobs and self.gradient <= bound.gradient


TOLERANCES = {
    torch.float32: ForwardDifference(logprobs=1e-4, gradient=1e-3),
    torch.bfloat16: ForwardDifference(logprobs=0.1, gradient=0.1),
}
"""Largest differences that rounding explains, by the data type of the model."""

_RECURRENT_ADVICE = (
    ", which runs each response after its own copy of the prompt and does not fork the recurrent state; or, if "
    "flash-linear-attention computes the recurrent layers, uninstall it or install another version"
)


def check_shared_prefix(
    policy: PolicyModel,
    experiences: Sequence[Experience],
    processor: PromptProcessor,
    *,
    pad_id: int,
    ranks: Ranks | None = None,
) -> bool:
    """Run a few experiences packed and as plain rows, and compare. Every rank must pass the same experiences.

    Returns:
        True if they were compared, False if they have neither siblings nor two groups.

    Raises:
        UserError: log-probs or gradients differ by more than rounding explains.
    """
    groups = _pick_check_groups(experiences)
    if not groups:
        return False

    def build_batch(groups: Sequence[Sequence[Experience]], *, shared_prefix: bool) -> Batch:
        """Return the tensors of the groups, packed into one row with `shared_prefix`, else as plain rows."""
        batch = collate(groups, processor, pad_id=pad_id, shared_prefix=shared_prefix)
        # Under ZeRO-3 a weight unused in a pass keeps an earlier gradient, so a dummy image runs the vision tower.
        return add_dummy_media(batch, processor.placeholders, images=policy.runner.uses_deepspeed, videos=False)

    if policy.routers:
        # Both follow the same routes: where two experts are close, rounding could send a token to a different one.
        with torch.no_grad():
            policy.compute_logprobs(build_batch(groups, shared_prefix=True))
        groups = with_routes_of_row(policy.routers, groups)
    packed, plain = build_batch(groups, shared_prefix=True), build_batch(groups, shared_prefix=False)
    with _no_dropout(policy.model):
        found = compare_layouts(policy, packed, plain, ranks)
    bound = TOLERANCES[policy.model.dtype]
    if policy.family.has_recurrent_layers and policy.model.dtype == torch.bfloat16:
        # Rounding changes half of the gradient of recurrent layers in bfloat16.
        bound = bound._replace(gradient=0.5)
    if not found.within(bound):
        advice = _RECURRENT_ADVICE if policy.family.has_recurrent_layers else ""
        raise UserError(
            f"shared_prefix: on sample {groups[0][0].rollout.prompt.sample.id} it differs from the plain forward by "
            f"{found.logprobs:.2g} nats and {found.gradient:.2g} of the gradient; {bound.logprobs:g} and "
            f"{bound.gradient:g} would be rounding. Set shared_prefix: off{advice}. Report the model and the versions "
            "of torch and transformers"
        )
    return True


def _pick_check_groups(experiences: Sequence[Experience]) -> list[list[Experience]]:
    """Return the smallest input that can reveal an error: two siblings of one group, else two groups.

    Empty if there are neither siblings nor two groups.
    """
    groups = group_by_prompt(experiences)
    for group in groups:
        if len(group) > 1:
            return [group[:2]]
    return groups[:2] if len(groups) > 1 else []


@contextmanager
def _no_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside this block: two passes would drop different activations."""
    rates = {module: module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for module in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates.items():
            module.p = rate


def compare_layouts(policy: PolicyModel, batch: Batch, other: Batch, ranks: Ranks | None = None) -> ForwardDifference:
    """Compare log-probs, and the gradients of a scalar function of them, between two layouts of the same experiences.

    Both have the same trained tokens in the same order. Every rank must pass the same experiences.
    """
    ranks = ranks or SingleProcess()
    trained = [parameter for parameter in policy.trainable.values() if parameter.requires_grad]
    scored: list[torch.Tensor] = []

    def weighted_mean(layout: Batch) -> torch.Tensor:
        """Return a weighted mean of the log-probs of a layout, a scalar, and keep the log-probs."""
        logprobs_N = policy.compute_logprobs(layout, layout.engine_routes_XTK).logprobs_N
        scored.append(logprobs_N.detach())
        # With equal weights, errors that move gradient from one token to another would cancel out.
        weights_N = torch.cos(torch.arange(len(logprobs_N), device=logprobs_N.device))
        return (logprobs_N * weights_N).mean()

    gradients = [policy.runner.compute_gradient(partial(weighted_mean, layout), trained) for layout in (batch, other)]
    difference_square, norm_square = 0.0, 0.0
    for gradient, other_gradient in zip(*gradients, strict=True):
        difference_square += float((gradient - other_gradient).float().square().sum())
        norm_square += float(other_gradient.float().square().sum())
    squares = torch.tensor([difference_square, norm_square], dtype=torch.float64)
    # If the gradient is sharded, ranks hold different pieces. Otherwise each rank adds the whole gradient to both sums,
    # and their ratio stays the same.
    ranks.all_reduce([squares])
    worst_of_ranks = ranks.all_gather(float((scored[0] - scored[1]).abs().max()))
    largest = float(torch.tensor(worst_of_ranks).amax())  # unlike `max`, it keeps a NaN
    return ForwardDifference(largest, float(squares[0] / squares[1]) ** 0.5)
