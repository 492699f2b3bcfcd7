"""The reference of the KL penalty: a frozen copy of the policy, a moving average of it, or a copy that is renewed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mmrl.algo.reward_history import has_plateaued
from mmrl.config.schema import ReferenceConfig
from mmrl.distributed.ranks import Ranks, SingleProcess, balanced_range
from mmrl.policy.policy import PolicyModel
from mmrl.types import TrainingState


class ReferencePolicy:
    """A copy of the policy that follows it as `reference.update` says."""

    def __init__(
        self,
        policy: PolicyModel,
        options: ReferenceConfig,
        *,
        initial_copy: PolicyModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Copy the policy as it is now.

        `initial_copy` is used in place of a new copy. It must equal the policy now and never change, as a policy
        without its adapter does.
        """
        self._options = options
        self._trained_policy = policy
        self._ranks = ranks or SingleProcess()
        self.policy = initial_copy or policy.frozen_copy()
        """The copy of the policy, whose log-probs the KL penalty compares with."""
        self.is_frozen = options.update == "never"
        tracked = {} if self.is_frozen else policy.trainable
        self._tracked_parameters = list(tracked.values())
        self._weights = [self.policy.trainable[name] for name in tracked]
        # Averages are float32, because in bfloat16 a change of 0.01 of the difference would often round to nothing.
        # `float` does not copy a weight that is float32: the average is then the reference's own weight.
        self._averages = [weight.float() for weight in self._weights]

    @torch.no_grad()
    def update(self, state: TrainingState, *, reset_optimizer: Callable[[], None]) -> dict[str, float]:
        """Update the reference after the step `state.step`, counted from 0, if an update is due.

        `ema`: reference = decay x reference + (1 - decay) x policy, over the trained weights. `reset`: the reference
        becomes a copy of the policy and, if `reference.reset_optimizer` is set, `reset_optimizer` is called.
        `reference.plateau` decides by `state.reset_rewards` if a reset is due, which empties them.
        Source of resets: ProRL, arXiv:2505.24864, section 2.3.2. Departure: training rewards must stagnate, where the
        paper looks at validation.

        Returns:
            `learner/reference_resets`, 1 after a reset, else 0; only if `reference.update` is `reset`.
        """
        options = self._options
        is_due = not self.is_frozen and (state.step + 1) % options.update_every == 0
        if options.plateau is not None:
            is_due = has_plateaued(state.reset_rewards, options.plateau.window, options.plateau.min_improvement)
        if is_due:
            decay = options.ema_decay if options.update == "ema" else 0.0
            with self._trained_policy.runner.gather_all():
                triples = zip(self._weights, self._averages, self._tracked_parameters, strict=True)
                for weight, average, parameter in triples:
                    average.mul_(decay).add_(parameter.float(), alpha=1.0 - decay)
                    weight.copy_(average)
        if options.update != "reset":
            return {}
        if is_due:
            state.reset_rewards.clear()
        if is_due and options.reset_optimizer:
            reset_optimizer()
        return {"learner/reference_resets": float(is_due)}

    def state(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return this rank's share of the averages by index, float32 in the shape of their weights.

        Empty for a reference that never changes.
        """
        if self.is_frozen:
            return {}
        share = balanced_range(list(map(torch.numel, self._averages)), self._ranks)
        return {"reference": {index: self._averages[index] for index in share}}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        """Continue from the merged `state()` of all ranks: averages by index, in the shape of their weights."""
        for index, saved in state["reference"].items():
            self._averages[index].copy_(saved)
            self._weights[index].copy_(saved)
