"""Experiences to gradients: epochs, mini-batches with an update each, micro-batches. `objective` is what is optimised.

Letters: N learned tokens of a micro-batch, the policy's and a teacher's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mmrl.algo.schedule import learning_rate
from mmrl.config.schema import Loss, Optimizer, Role
from mmrl.distributed.ranks import Alone, Homes, Ranks
from mmrl.learner.deal import Groups, Round, by_turns, rounds
from mmrl.learner.dummy_media import attending, nothing
from mmrl.learner.micro_batches import pack
from mmrl.learner.objective import Counts, Objective, Scores
from mmrl.learner.shared_prefix_check import check_shared_prefix
from mmrl.policy.batch import Batch, Feeder, by_prompt, collate
from mmrl.policy.qwen_vl import Policy, TokenScores
from mmrl.types import Experience

_GAP = "rollout/logp_gap_nats"
_SKIPPED = "learner/skipped_updates"


class Engine(Protocol):
    """Turns losses into an update of the weights."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; `last` before a step."""

    def step(self, lr: float) -> Mapping[Role, float]:
        """Clip and update; returns the norm of each role's gradient, summed over ranks, before clipping."""


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
    mini_batches: int = 1


class Scorer(Protocol):
    """Something that tells how likely tokens are: a reference."""

    def score(self, batch: Batch) -> TokenScores:
        """Score every completion token of a batch."""


class GrpoLearner:
    """The learner port. `reference` is None when the loss has no KL penalty.

    Every rank is given all experiences and learns from its share of them, near their `homes`.
    """

    def __init__(
        self,
        policy: Policy,
        feeder: Feeder,
        engine: Engine,
        plan: LearnPlan,
        reference: Scorer | None = None,
        *,
        ranks: Ranks | None = None,
        homes: Homes | None = None,
    ) -> None:
        self._objective = Objective(plan.loss, plan.total_steps)
        if (reference is not None) != self._objective.needs_reference:
            raise ValueError(
                f"kl.coef {plan.loss.kl.coef} and a {'missing' if reference is None else 'given'} reference"
            )
        self._policy = policy
        self._feeder = feeder
        self._engine = engine
        self._plan = plan
        self._reference = reference
        self._ranks, self._homes = ranks or Alone(), homes or Homes()
        self._checked = not plan.shared_prefix

    def learn(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One optimizer step per epoch and mini-batch.

        Denominators are those of the whole mini-batch. Experiences that cannot move a weight are not run, but count.

        Raises:
            ValueError: an advantage is not finite.
        """
        admitted = self._objective.admit(experiences)
        active = [experience for experience in admitted if self._objective.teaches(experience)]
        skipped = 1.0 - len(active) / len(experiences) if experiences else 0.0
        metrics = {"learner/lr": self._lr(step), "learner/skipped_frac": skipped}
        if not active:
            return metrics
        self._check_once(active)
        parts = [part for dealt in by_turns(admitted, self._plan.mini_batches) if (part := self._part(dealt))]
        for _ in range(self._plan.epochs):
            latest = _joined([self._epoch(part, step) for part in parts])
            latest[_SKIPPED] += metrics.get(_SKIPPED, 0.0)
            # Only before the first update does the gap to the sampler say something about the sampler.
            metrics |= latest | {name: value for name, value in metrics.items() if name == _GAP}
        return metrics

    def _part(self, admitted: Sequence[Experience]) -> _Part | None:
        """A mini-batch; none where nothing of it can move a weight."""
        active = [experience for experience in admitted if self._objective.teaches(experience)]
        if not active:
            return None
        mine = rounds(active, self._homes.rank_of, self._ranks, self._packed)
        return _Part(mine=mine, counts=self._objective.count(admitted))

    def _epoch(self, part: _Part, step: int) -> dict[str, float]:
        """One pass over a mini-batch and one update. The first pass fills its `starts`, the later ones read them."""
        totals: dict[str, float] = {}
        for index, (each, batch) in enumerate(self._batches(part.mine)):
            self._ranks.note(f"learning from {', '.join(_names(each.groups)) or 'a dummy'}")
            scores = self._policy.score(batch)
            if index == len(part.starts):
                part.starts.append(_Start(scores.logps_N.detach(), self._refer(batch)))
            loss, said = scores.logps_N.sum(), dict[str, float]()  # of nothing: 0, with a gradient of 0
            if each.groups:
                loss, said = self._objective(
                    [experience for group in each.groups for experience in group],
                    Scores(scores.logps_N, scores.entropies_N, *part.starts[index]),
                    part.counts,
                    step=step,
                )
            self._engine.backward(loss, last=index + 1 == len(part.mine))
            _add(totals, {"learner/loss": float(loss.detach()), **said})
        norms = self._engine.step(self._lr(step))
        everywhere: dict[str, float] = {}
        for of_rank in self._ranks.gather(totals):
            _add(everywhere, of_rank)
        total = math.hypot(*norms.values())
        by_role = {f"learner/grad_norm/{role}": norm for role, norm in norms.items()}
        return {**everywhere, "learner/grad_norm": total, **by_role, _SKIPPED: float(not math.isfinite(total))}

    def _refer(self, batch: Batch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference.score(batch).logps_N

    def _check_once(self, active: Sequence[Experience]) -> None:
        """Before the first update: every rank checks the same groups, for under ZeRO-3 it takes all of them."""
        telling = [] if self._checked else _telling(by_prompt(active))
        if telling:
            check_shared_prefix(self._policy, telling, self._feeder, pad_id=self._plan.pad_id, ranks=self._ranks)
            self._checked = True

    def _packed(self, experiences: Sequence[Experience]) -> list[list[list[Experience]]]:
        plan = self._plan
        return pack(
            experiences, max_groups=plan.micro_batch, max_tokens=plan.token_budget, shared_prefix=plan.shared_prefix
        )

    def _batches(self, mine: Sequence[Round]) -> Iterator[tuple[Round, Batch]]:
        plan = self._plan
        for each in mine:
            if each.groups:
                batch = collate(each.groups, self._feeder, pad_id=plan.pad_id, shared_prefix=plan.shared_prefix)
            else:
                batch = nothing(
                    pad_id=plan.pad_id, patch_values=self._policy.patch_values, shared_prefix=plan.shared_prefix
                )
            # Where no gradient comes, ZeRO-3 and offloading would take that of the step before.
            images = each.images or (self._policy.is_divided and not each.videos)
            yield each, attending(batch, self._feeder.placeholders, images=images, videos=each.videos)

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


def _telling(groups: Groups) -> Groups:
    """What shows whether packing is right, where there is such: two siblings, or two sequences in one row."""
    siblings = next((group for group in groups if len(group) > 1), None)
    if siblings is not None:
        return [siblings[:2]]
    return groups[:2] if len(groups) > 1 else []


class _Start(NamedTuple):
    """Log-probs of a micro-batch's tokens before the step's first update, [N]: the policy's, and the reference's."""

    logps_N: torch.Tensor
    reference_N: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A mini-batch: this rank's micro-batches, the denominators of all ranks', and how each micro-batch started."""

    mine: Sequence[Round]
    counts: Counts
    starts: list[_Start] = field(default_factory=list)


def _joined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an epoch's updates: means, but for extremes and what is counted; of the first alone, the gap."""
    totals: dict[str, float] = {}
    for update in updates:
        _add(totals, update)
    times = Counter(name for update in updates for name in update)
    whole = {name for name in totals if name.endswith(("_max", "_min")) or name == _SKIPPED}
    means = {name: value if name in whole else value / times[name] for name, value in totals.items() if name != _GAP}
    return means | {name: value for name, value in updates[0].items() if name == _GAP}


def _add(totals: dict[str, float], parts: Mapping[str, float]) -> None:
    """More of a step's metrics: extremes by their suffix, shares of a sum otherwise."""
    for name, value in parts.items():
        if name not in totals:
            totals[name] = value
        elif name.endswith(("_max", "_min")):
            totals[name] = (max if name.endswith("_max") else min)(totals[name], value)
        else:
            totals[name] += value


def _names(groups: Groups) -> Iterator[str]:
    return (group[0].rollout.prompt.sample.id for group in groups)
