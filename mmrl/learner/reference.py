"""The reference of the KL penalty: a frozen copy of the policy, a running average of it, or a copy taken anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from mmrl.config import schema
from mmrl.distributed.ranks import Ranks, SingleProcess, balanced_range
from mmrl.policy.batch import Batch
from mmrl.policy.policy import Policy, TokenLogprobs


class ReferencePolicy:
    """A copy of the policy, with updates as `reference.update` says.

    `ema` averages in float32, whatever the data type of the model: a change of 0.01 of the difference would often
    vanish in bfloat16.
    """

    def __init__(
        self,
        policy: Policy,
        options: schema.ReferenceConfig,
        *,
        initial_copy: Policy | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Copy the policy as it is now.

        Args:
            policy: the policy in training.
            options: the `reference` section.
            initial_copy: a policy that equals it now and never changes, such as one without its adapter; None for a
                new copy.
            ranks: the processes of the run; None for one alone.
        """
        self._options, self._policy, self._ranks = options, policy, ranks or SingleProcess()
        self._frozen_copy = initial_copy or policy.frozen_copy()
        tracked = {} if self.is_frozen else policy.trained
        self._tracked_parameters = list(tracked.values())
        self._weights = [self._frozen_copy.trained[name] for name in tracked]
        # `float` copies nothing where a weight is float32: the average is then the reference's own weight.
        self._averages = [weight.float() for weight in self._weights]

    @property
    def is_frozen(self) -> bool:
        """True if it never changes."""
        return self._options.update == "never"

    @property
    def policy(self) -> Policy:
        """The copy of the policy."""
        return self._frozen_copy

    def compute_logprobs(self, batch: Batch) -> TokenLogprobs:
        """Score every trained token of a batch under the reference."""
        return self._frozen_copy.compute_logprobs(batch)

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """Update the reference after step `step`, counted from 0, if an update is due.

        `ema`: reference = decay x reference + (1 - decay) x policy, over the trained weights. `reset`: the reference
        becomes the policy. Source of the latter: ProRL, arXiv:2505.24864, section 2.3.2.

        Returns:
            True if the reference was replaced by the policy.
        """
        if self.is_frozen or (step + 1) % self._options.update_every:
            return False
        decay = self._options.ema_decay if self._options.update == "ema" else 0.0
        with self._policy.gather_all():
            for average, parameter in zip(self._averages, self._tracked_parameters, strict=True):
                average.mul_(decay).add_(parameter.float(), alpha=1.0 - decay)
        self._copy_averages_to_model()
        return self._options.update == "reset"

    def state(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return this rank's share of the averages by index, float32 in the shape of their weights.

        Empty for a reference that never changes.
        """
        if self.is_frozen:
            return {}
        own = balanced_range([average.numel() for average in self._averages], self._ranks)
        return {"reference": {index: self._averages[index] for index in own}}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        """Continue from the joined `state()` of all ranks: averages by index, in the shape of their weights."""
        for index, saved in state["reference"].items():
            self._averages[index].copy_(saved)
        self._copy_averages_to_model()

    def _copy_averages_to_model(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            weight.copy_(average)


class ResettableOptimizer(Protocol):
    """An optimizer whose moments can be dropped. Implemented by `TorchEngine` and `DeepspeedEngine`."""

    def reset(self) -> None:
        """Drop the moments, as if the stage began here."""


class ReferenceUpdater:
    """Updates the reference after each step, and resets the optimizer with it if `reference.reset_optimizer` is set."""

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
