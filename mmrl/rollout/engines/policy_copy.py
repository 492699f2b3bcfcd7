"""Rollouts by transformers while the learner learns: from a second copy of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mmrl.policy.qwen_vl import Policy
from mmrl.ports import Sampler
from mmrl.types import Prompt, Rollout, SamplingParams


class PolicyCopySampler:
    """A sampler of a copy, which takes over the policy's weights at each sync; frozen ones are shared."""

    def __init__(self, policy: Policy, make_sampler: Callable[[Policy], Sampler]) -> None:
        """Copy the policy as it is now; `draws_by` makes the sampler of the copy."""
        self._policy, self._copy = policy, policy.frozen_copy()
        for weight in self._copy.trained.values():
            weight.requires_grad_()  # no gradient comes, but torch rounds products otherwise where none can come
        self._sampler = make_sampler(self._copy)

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> Sequence[Sequence[Rollout]]:
        """As the sampler."""
        return self._sampler.generate(prompts, group_size, sampling_params, step=step)

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> Sequence[Rollout]:
        """As the sampler."""
        return self._sampler.extend(rollouts, sampling_params, step=step)

    @torch.no_grad()
    def sync(self, version: int) -> None:
        """Take over the policy's weights, bit for bit."""
        learned = self._policy.trained
        for name, weight in self._copy.trained.items():
            weight.copy_(learned[name])
        self._sampler.sync(version)

    def close(self) -> None:
        """As the sampler."""
        self._sampler.close()
