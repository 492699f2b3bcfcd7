"""Experiences to a gradient: the clipped surrogate on the policy's own tokens, likelihood on a teacher's.

Letters: B rows, C completion columns.
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
from mmrl.batch import Batch, Feeder, collate, rows
from mmrl.config.schema import Loss, Optimizer, Role
from mmrl.policy.qwen_vl import Policy
from mmrl.types import Author, Experience

_GAP = "rollout/logp_gap_nats"
_SKIPPED = "learner/skipped_updates"


class Engine(Protocol):
    """Turns losses into an update of the weights."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`."""

    def step(self, lr: float) -> Mapping[Role, float]:
        """Clip and update; returns the norm of each role's gradient before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnPlan:
    """The numbers of learning in one stage; `micro_batch` counts prompts."""

    loss: Loss
    optimizer: Optimizer
    total_steps: int
    micro_batch: int
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
        norms = self._engine.step(lr)
        total = math.hypot(*norms.values())
        by_role = {f"learner/grad_norm/{role}": norm for role, norm in norms.items()}
        return {**totals, "learner/grad_norm": total, **by_role, _SKIPPED: float(not math.isfinite(total))}

    def _loss(self, batch: Batch, tokens: Counter[Author]) -> tuple[torch.Tensor, dict[str, float]]:
        scores = self._policy.score(batch)
        batch = batch.to(self._policy.device)
        loss = scores.logps_BC.new_zeros(())
        parts: dict[str, float] = {}
        if tokens[Author.TEACHER]:
            share = batch.teacher_BC / tokens[Author.TEACHER]
            loss = loss - (scores.logps_BC * share).sum()
        if tokens[Author.POLICY]:
            share = batch.policy_BC / tokens[Author.POLICY]
            options = self._plan.loss
            surrogate = clipped_surrogate(
                scores.logps_BC, batch.old_logps_BC, batch.advantages_BC, options.clip_low, options.clip_high
            )
            loss = loss + (surrogate * share).sum()
            parts = self._watch(batch, scores.logps_BC.detach(), scores.entropies_BC, share)
            if self._reference is not None:
                with torch.no_grad():
                    reference_BC = self._reference.score(batch).logps_BC
                kl = (k3(scores.logps_BC, reference_BC) * share).sum()
                loss = loss + options.kl_coef * kl
                parts["learner/kl_nats"] = float(kl.detach())
        return loss, parts

    def _watch(
        self, batch: Batch, logps_BC: torch.Tensor, entropies_BC: torch.Tensor, share_BC: torch.Tensor
    ) -> dict[str, float]:
        gap = torch.where(batch.policy_BC, logps_BC - batch.old_logps_BC, 0.0)
        ratio = gap.exp()
        low, high = 1.0 - self._plan.loss.clip_low, 1.0 + self._plan.loss.clip_high
        return {
            "learner/entropy_nats": float((entropies_BC * share_BC).sum()),
            "learner/clipped_frac": float((((ratio < low) | (ratio > high)) * share_BC).sum()),
            "learner/ratio_max": float((ratio * batch.policy_BC).max()),
            _GAP: float((gap.abs() * share_BC).sum()),
        }

    def _micro_batches(self, active: Sequence[Experience]) -> Iterator[Batch]:
        """Prompts with completions of like length go together, so that little is padded."""
        groups = sorted(rows(active, shared_prefix=True), key=lambda row: sum(e.rollout.num_tokens for e in row))
        for start in range(0, len(groups), self._plan.micro_batch):
            chunk = [experience for group in groups[start : start + self._plan.micro_batch] for experience in group]
            packed = rows(chunk, shared_prefix=self._plan.shared_prefix)
            yield collate(packed, self._feeder, pad_id=self._plan.pad_id)

    def _teaches(self, experience: Experience) -> bool:
        authors = {segment.author for segment in experience.rollout.segments}
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
