"""What the KL penalty measures from: the policy at the stage's start, or something that follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mmrl.config import schema
from mmrl.distributed.ranks import Alone, Ranks, even_part
from mmrl.policy.batch import Batch
from mmrl.policy.qwen_vl import Policy, TokenScores
from mmrl.ports import Learner
from mmrl.types import Experience


class Reference:
    """A copy of the policy as it is now. `ema` keeps its average in float32, where a small change is not lost."""

    def __init__(
        self, policy: Policy, options: schema.Reference, *, start: Policy | None = None, ranks: Ranks | None = None
    ) -> None:
        """`start` is the policy as it is now, where there is one that takes no copy; it must stay as it is."""
        self._options, self._policy, self._ranks = options, policy, ranks or Alone()
        self._copy = start or policy.frozen_copy()
        followed = {} if self.frozen else policy.learned
        self._followed = list(followed.values())
        self._weights = [self._copy.learned[name] for name in followed]
        self._averages = [weight.float() for weight in self._weights]  # the weights themselves where they are float32

    @property
    def frozen(self) -> bool:
        """Whether it never changes."""
        return self._options.update == "never"

    @property
    def policy(self) -> Policy:
        """The copy."""
        return self._copy

    def score(self, batch: Batch) -> TokenScores:
        """Score every completion token of a batch."""
        return self._copy.score(batch)

    @torch.no_grad()
    def follow(self, step: int) -> bool:
        """Update after step `step`, counted from 0, if an update is due; whether it was taken anew.

        ema: reference = decay x reference + (1 - decay) x policy, over the trained weights. reset: the policy itself
        (ProRL, arXiv:2505.24864, 2.3.2).
        """
        if self.frozen or (step + 1) % self._options.every:
            return False
        keep = self._options.decay if self._options.update == "ema" else 0.0
        with self._policy.whole():
            for average, parameter in zip(self._averages, self._followed, strict=True):
                average.mul_(keep).add_(parameter.float(), alpha=1.0 - keep)
        self._publish()
        return self._options.update == "reset"

    def state(self) -> dict[str, dict[int, torch.Tensor]]:
        """What a checkpoint keeps of one that moves: this rank's part of the weights, by their places."""
        own = even_part([average.numel() for average in self._averages], self._ranks)
        return {} if self.frozen else {"reference": {place: self._averages[place] for place in own}}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        """Continue from the `state()` of all ranks."""
        for place, saved in state["reference"].items():
            self._averages[place].copy_(saved)
        self._publish()

    def _publish(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            weight.copy_(average)


class Forgetful(Protocol):
    """An optimizer that can begin anew."""

    def forget(self) -> None:
        """Drop the moments."""


class Followed:
    """A learner whose reference follows the policy after every step."""

    def __init__(self, learner: Learner, reference: Reference, engine: Forgetful, options: schema.Reference) -> None:
        self._learner, self._reference, self._engine, self._options = learner, reference, engine, options

    def learn(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One step, then the reference's update; `learner/reference_resets` is 1 where it was taken anew."""
        metrics = self._learner.learn(experiences, step=step)
        anew = self._reference.follow(step)
        if anew and self._options.reset_optimizer:
            self._engine.forget()
        return {**metrics, "learner/reference_resets": float(anew)} if self._options.update == "reset" else metrics
