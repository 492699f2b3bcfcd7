"""What the KL penalty measures from: the policy at the stage's start, or something that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from mmrl.config import schema
from mmrl.distributed.ranks import Ranks, SingleProcess, balanced_range
from mmrl.policy.batch import Batch
from mmrl.policy.qwen_vl import Policy, TokenLogprobs


class ReferencePolicy:
    """A copy of the policy as it is now. `ema` keeps its average in float32, where a small change is not lost."""

    def __init__(
        self,
        policy: Policy,
        options: schema.ReferenceConfig,
        *,
        initial_copy: Policy | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`start` is the policy as it is now, where there is one that takes no copy; it must stay as it is."""
        self._options, self._policy, self._ranks = options, policy, ranks or SingleProcess()
        self._frozen_copy = initial_copy or policy.frozen_copy()
        followed = {} if self.is_frozen else policy.trained
        self._tracked_parameters = list(followed.values())
        self._weights = [self._frozen_copy.trained[name] for name in followed]
        self._averages = [weight.float() for weight in self._weights]  # the weights themselves where they are float32

    @property
    def is_frozen(self) -> bool:
        """Whether it never changes."""
        return self._options.update == "never"

    @property
    def policy(self) -> Policy:
        """The copy."""
        return self._frozen_copy

    def compute_logprobs(self, batch: Batch) -> TokenLogprobs:
        """Score every completion token of a batch."""
        return self._frozen_copy.compute_logprobs(batch)

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """Update after step `step`, counted from 0, if an update is due; whether it was taken anew.

        ema: reference = decay x reference + (1 - decay) x policy, over the trained weights. reset: the policy itself
        (ProRL, arXiv:2505.24864, 2.3.2).
        """
        if self.is_frozen or (step + 1) % self._options.update_every:
            return False
        keep = self._options.ema_decay if self._options.update == "ema" else 0.0
        with self._policy.gather_all():
            for average, parameter in zip(self._averages, self._tracked_parameters, strict=True):
                average.mul_(keep).add_(parameter.float(), alpha=1.0 - keep)
        self._copy_averages_to_model()
        return self._options.update == "reset"

    def state(self) -> dict[str, dict[int, torch.Tensor]]:
        """What a checkpoint keeps of one that moves: this rank's part of the weights, by their places."""
        own = balanced_range([average.numel() for average in self._averages], self._ranks)
        return {} if self.is_frozen else {"reference": {place: self._averages[place] for place in own}}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        """Continue from the `state()` of all ranks."""
        for place, saved in state["reference"].items():
            self._averages[place].copy_(saved)
        self._copy_averages_to_model()

    def _copy_averages_to_model(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            weight.copy_(average)


class ResettableOptimizer(Protocol):
    """An optimizer that can begin anew."""

    def reset(self) -> None:
        """Drop the moments."""


class ReferenceUpdater:
    """Moves the reference towards the policy after each step, and resets the optimizer with it if asked to."""

    def __init__(
        self, reference: ReferencePolicy, engine: ResettableOptimizer, options: schema.ReferenceConfig
    ) -> None:
        self._reference, self._engine, self._options = reference, engine, options

    def update(self, step: int) -> dict[str, float]:
        """Update the reference after step `step`, counted from 0, if it is due.

        Returns:
            `learner/reference_resets`, 1 if the reference was replaced by the policy, where `update` is `reset`.
        """
        replaced = self._reference.update(step)
        if replaced and self._options.reset_optimizer:
            self._engine.reset()
        return {"learner/reference_resets": float(replaced)} if self._options.update == "reset" else {}
