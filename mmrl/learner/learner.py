"""Experiences to a gradient: the clipped surrogate on the policy's own tokens, likelihood on a teacher's.

Letters: N learned tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mmrl.algo.kl import k3
from mmrl.algo.loss import clipped_surrogate
from mmrl.algo.schedule import learning_rate
from mmrl.batch import Batch, Feeder, collate, pack
from mmrl.config.schema import Loss, Optimizer
from mmrl.learner.self_check import check_shared_prefix
from mmrl.policy.qwen_vl import Policy
from mmrl.types import Author, Experience

_GAP = "rollout/logp_gap_nats"
_SKIPPED = "learner/skipped_updates"


class Engine(Protocol):
    """Turns losses into an update of the weights."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`."""

    def step(self, lr: float) -> float:
        """Clip and update; returns the gradient norm before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnPlan:
    """The numbers of learning in one stage; a micro-batch has at most so many prompts and so many tokens."""

    loss: Loss
    optimizer: Optimizer
    total_steps: int
    micro_batch: int
    token_budget: int
    epochs: int
    shared_prefix: bool
    pad_id: int


class GrpoLearner:
    """The learner port. `reference` is None when the loss has no KL penalty."""

    def __init__(
        self, policy: Policy, feeder: Feeder, engine: Engine, plan: LearnPlan, reference: Policy | None = None
    ) -> None:
        if (reference is None) != (plan.loss.kl_coef == 0.0):
            raise ValueError(
                f"kl_coef {plan.loss.kl_coef} and a {'missing' if reference is None else 'given'} reference"
            )
        self._policy = policy
        self._feeder = feeder
        self._engine = engine
        self._plan = plan
        self._reference = reference
        self._checked = not plan.shared_prefix

    def learn(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One optimizer step per epoch over all experiences.

        Denominators are the policy tokens and the teacher tokens of the whole step. Experiences that cannot move a
        weight (no advantage, no KL, no teacher) are not run, but their tokens count.
        """
        tokens: Counter[Author] = Counter()
        for segment in (segment for experience in experiences for segment in experience.rollout.segments):
            tokens[segment.author] += len(segment.ids)
        active = [experience for experience in experiences if self._teaches(experience)]
        skipped = 1.0 - len(active) / len(experiences) if experiences else 0.0
        metrics = {"learner/lr": self._lr(step), "learner/skipped_frac": skipped}
        if not active:
            return metrics
        for _ in range(self._plan.epochs):
            latest = self._epoch(active, tokens, metrics["learner/lr"])
            latest[_SKIPPED] += metrics.get(_SKIPPED, 0.0)
            # Only before the first update does the gap to the sampler say something about the sampler.
            metrics |= latest | {name: value for name, value in metrics.items() if name == _GAP}
        return metrics

    def _epoch(self, active: Sequence[Experience], tokens: Counter[Author], lr: float) -> dict[str, float]:
        """One pass over the experiences and one update."""
        totals: dict[str, float] = {}
        for batch in self._micro_batches(active):
            loss, parts = self._loss(batch, tokens)
            self._engine.backward(loss)
            for name, value in {"learner/loss": float(loss.detach()), **parts}.items():
                before = totals.get(name, 0.0)
                totals[name] = max(before, value) if name.endswith("_max") else before + value
        norm = self._engine.step(lr)
        return {**totals, "learner/grad_norm": norm, _SKIPPED: float(not math.isfinite(norm))}

    def _loss(self, batch: Batch, tokens: Counter[Author]) -> tuple[torch.Tensor, dict[str, float]]:
        scores = self._policy.score(batch)
        batch = batch.to(self._policy.device)
        loss = scores.logps_N.new_zeros(())
        parts: dict[str, float] = {}
        if tokens[Author.TEACHER]:
            share = batch.teacher_N / tokens[Author.TEACHER]
            loss = loss - (scores.logps_N * share).sum()
        if tokens[Author.POLICY]:
            share = batch.policy_N / tokens[Author.POLICY]
            options = self._plan.loss
            surrogate = clipped_surrogate(
                scores.logps_N, batch.old_logps_N, batch.advantages_N, options.clip_low, options.clip_high
            )
            loss = loss + (surrogate * share).sum()
            parts = self._watch(batch, scores.logps_N.detach(), scores.entropies_N.detach(), share)
            if self._reference is not None:
                with torch.no_grad():
                    reference_N = self._reference.score(batch).logps_N
                kl = (k3(scores.logps_N, reference_N) * share).sum()
                loss = loss + options.kl_coef * kl
                parts["learner/kl_nats"] = float(kl.detach())
        return loss, parts

    def _watch(
        self, batch: Batch, logps_N: torch.Tensor, entropies_N: torch.Tensor, share_N: torch.Tensor
    ) -> dict[str, float]:
        gap = torch.where(batch.policy_N, logps_N - batch.old_logps_N, 0.0)
        ratio = gap.exp()
        low, high = 1.0 - self._plan.loss.clip_low, 1.0 + self._plan.loss.clip_high
        return {
            "learner/entropy_nats": float((entropies_N * share_N).sum()),
            "learner/clipped_frac": float((((ratio < low) | (ratio > high)) * share_N).sum()),
            "learner/ratio_max": float((ratio * batch.policy_N).max()),
            _GAP: float((gap.abs() * share_N).sum()),
        }

    def _micro_batches(self, active: Sequence[Experience]) -> Iterator[Batch]:
        plan = self._plan
        micro_batches = pack(
            active, max_groups=plan.micro_batch, max_tokens=plan.token_budget, shared_prefix=plan.shared_prefix
        )
        if not self._checked:
            siblings = next((group for groups in micro_batches for group in groups if len(group) > 1), None)
            if siblings is not None:
                check_shared_prefix(self._policy, siblings, self._feeder, pad_id=plan.pad_id)
                self._checked = True
        for groups in micro_batches:
            yield collate(groups, self._feeder, pad_id=plan.pad_id, shared_prefix=plan.shared_prefix)

    def _teaches(self, experience: Experience) -> bool:
        authors = {segment.author for segment in experience.rollout.segments if segment.ids}
        by_policy = Author.POLICY in authors and (experience.advantage != 0.0 or self._reference is not None)
        return by_policy or Author.TEACHER in authors

    def _lr(self, step: int) -> float:
        options = self._plan.optimizer
        return learning_rate(
            step,
            total=self._plan.total_steps,
            peak=options.lr,
            warmup=options.warmup_steps,
            decay=options.decay,
            final_frac=options.final_lr_frac,
        )
