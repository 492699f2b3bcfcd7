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
from mmrl.config.schema import Component, LossConfig, OptimizerConfig
from mmrl.distributed.ranks import MediaPlacement, Ranks, SingleProcess
from mmrl.learner.micro_batches import (
    ExperienceGroups,
    RankMicroBatch,
    add_dummy_media,
    dummy_batch,
    pack_micro_batches,
    rank_micro_batches,
    split_into_mini_batches,
)
from mmrl.learner.objective import LossDenominators, LossInputs, Objective
from mmrl.learner.shared_prefix_check import check_shared_prefix
from mmrl.policy.batch import Batch, collate, group_by_prompt
from mmrl.policy.prompt_tensors import TensorProvider
from mmrl.policy.qwen_vl import Policy, TokenLogprobs
from mmrl.types import Experience

_LOGPROB_DIFF = "rollout/logprob_diff_mean"
_NONFINITE_UPDATES = "learner/nonfinite_updates"


class OptimizerEngine(Protocol):
    """Turns losses into an update of the weights."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; `last` before a step."""

    def step(self, lr: float) -> Mapping[Component, float]:
        """Clip and update; returns the norm of each role's gradient, summed over ranks, before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The numbers of learning in one stage; a micro-batch has at most so many prompts and so many tokens."""

    loss: LossConfig
    optimizer: OptimizerConfig
    total_steps: int
    micro_batch_groups: int
    micro_batch_tokens: int
    epochs: int
    shared_prefix: bool
    pad_id: int
    mini_batches: int = 1


class LogprobModel(Protocol):
    """Something that tells how likely tokens are: a reference."""

    def compute_logprobs(self, batch: Batch) -> TokenLogprobs:
        """Score every completion token of a batch."""


class GrpoLearner:
    """The learner port. `reference` is None when the loss has no KL penalty.

    Every rank is given all experiences and learns from its share of them, near their `homes`.
    """

    def __init__(
        self,
        policy: Policy,
        provider: TensorProvider,
        engine: OptimizerEngine,
        config: LearnerConfig,
        reference: LogprobModel | None = None,
        *,
        ranks: Ranks | None = None,
        placement: MediaPlacement | None = None,
    ) -> None:
        self._objective = Objective(config.loss, config.total_steps)
        if (reference is not None) != self._objective.needs_reference:
            raise ValueError(
                f"kl.coef {config.loss.kl.coef} and a {'missing' if reference is None else 'given'} reference"
            )
        self._policy = policy
        self._provider = provider
        self._engine = engine
        self._config = config
        self._reference = reference
        self._ranks, self._placement = ranks or SingleProcess(), placement or MediaPlacement()
        self._shared_prefix_checked = not config.shared_prefix

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One optimizer step per epoch and mini-batch.

        Denominators are those of the whole mini-batch. Experiences that cannot move a weight are not run, but count.

        Raises:
            ValueError: an advantage is not finite.
        """
        admitted = self._objective.mask(experiences)
        active = [experience for experience in admitted if self._objective.has_gradient(experience)]
        skipped = 1.0 - len(active) / len(experiences) if experiences else 0.0
        metrics = {"learner/lr": self._learning_rate(step), "learner/no_gradient_frac": skipped}
        if not active:
            return metrics
        self._check_shared_prefix_once(active)
        parts = [
            part
            for dealt in split_into_mini_batches(admitted, self._config.mini_batches)
            if (part := self._make_mini_batch(dealt))
        ]
        for _ in range(self._config.epochs):
            latest = _merge_update_metrics([self._update(part, step) for part in parts])
            latest[_NONFINITE_UPDATES] += metrics.get(_NONFINITE_UPDATES, 0.0)
            # Only before the first update does the gap to the sampler say something about the sampler.
            metrics |= latest | {name: value for name, value in metrics.items() if name == _LOGPROB_DIFF}
        return metrics

    def _make_mini_batch(self, experiences: Sequence[Experience]) -> _MiniBatch | None:
        """A mini-batch; none where nothing of it can move a weight."""
        active = [experience for experience in experiences if self._objective.has_gradient(experience)]
        if not active:
            return None
        mine = rank_micro_batches(active, self._placement.rank_by_digest, self._ranks, self._pack)
        return _MiniBatch(micro_batches=mine, denominators=self._objective.count_denominators(experiences))

    def _update(self, mini_batch: _MiniBatch, step: int) -> dict[str, float]:
        """One pass over a mini-batch and one update. The first pass fills its `starts`, the later ones read them."""
        totals: dict[str, float] = {}
        for index, (each, batch) in enumerate(self._iter_batches(mini_batch.micro_batches)):
            self._ranks.set_activity(f"learning from {', '.join(_sample_ids(each.groups)) or 'a dummy'}")
            scores = self._policy.compute_logprobs(batch)
            if index == len(mini_batch.initial_logprobs):
                mini_batch.initial_logprobs.append(
                    _InitialLogprobs(scores.logprobs_N.detach(), self._reference_logprobs(batch))
                )
            loss, said = scores.logprobs_N.sum(), dict[str, float]()  # of nothing: 0, with a gradient of 0
            if each.groups:
                loss, said = self._objective(
                    [experience for group in each.groups for experience in group],
                    LossInputs(scores.logprobs_N, scores.entropies_N, *mini_batch.initial_logprobs[index]),
                    mini_batch.denominators,
                    step=step,
                )
            self._engine.backward(loss, last=index + 1 == len(mini_batch.micro_batches))
            _accumulate_metrics(totals, {"learner/loss": float(loss.detach()), **said})
        norms = self._engine.step(self._learning_rate(step))
        everywhere: dict[str, float] = {}
        for of_rank in self._ranks.all_gather(totals):
            _accumulate_metrics(everywhere, of_rank)
        total = math.hypot(*norms.values())
        by_role = {f"learner/grad_norm/{role}": norm for role, norm in norms.items()}
        return {
            **everywhere,
            "learner/grad_norm": total,
            **by_role,
            _NONFINITE_UPDATES: float(not math.isfinite(total)),
        }

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference.compute_logprobs(batch).logprobs_N

    def _check_shared_prefix_once(self, active: Sequence[Experience]) -> None:
        """Before the first update: every rank checks the same groups, for under ZeRO-3 it takes all of them."""
        telling = [] if self._shared_prefix_checked else _pick_check_groups(group_by_prompt(active))
        if telling:
            check_shared_prefix(self._policy, telling, self._provider, pad_id=self._config.pad_id, ranks=self._ranks)
            self._shared_prefix_checked = True

    def _pack(self, experiences: Sequence[Experience]) -> list[list[list[Experience]]]:
        plan = self._config
        return pack_micro_batches(
            experiences,
            max_groups=plan.micro_batch_groups,
            max_tokens=plan.micro_batch_tokens,
            shared_prefix=plan.shared_prefix,
        )

    def _iter_batches(self, micro_batches: Sequence[RankMicroBatch]) -> Iterator[tuple[RankMicroBatch, Batch]]:
        plan = self._config
        for each in micro_batches:
            if each.groups:
                batch = collate(each.groups, self._provider, pad_id=plan.pad_id, shared_prefix=plan.shared_prefix)
            else:
                batch = dummy_batch(
                    pad_id=plan.pad_id, patch_dim=self._policy.patch_dim, shared_prefix=plan.shared_prefix
                )
            # Where no gradient comes, ZeRO-3 and offloading would take that of the step before.
            images = each.any_rank_has_images or (self._policy.is_sharded and not each.any_rank_has_videos)
            yield (
                each,
                add_dummy_media(batch, self._provider.placeholders, images=images, videos=each.any_rank_has_videos),
            )

    def _learning_rate(self, step: int) -> float:
        options = self._config.optimizer
        return learning_rate(
            step,
            total=self._config.total_steps,
            peak=options.lr,
            warmup=options.warmup_steps,
            decay=options.lr_schedule,
            final_frac=options.final_lr_frac,
        )


def _pick_check_groups(groups: ExperienceGroups) -> ExperienceGroups:
    """What shows whether packing is right, where there is such: two siblings, or two sequences in one row."""
    siblings = next((group for group in groups if len(group) > 1), None)
    if siblings is not None:
        return [siblings[:2]]
    return groups[:2] if len(groups) > 1 else []


class _InitialLogprobs(NamedTuple):
    """Log-probs of a micro-batch's tokens before the step's first update, [N]: the policy's, and the reference's."""

    policy_N: torch.Tensor
    reference_N: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatch:
    """A mini-batch: this rank's micro-batches, the denominators of all ranks', and how each micro-batch started."""

    micro_batches: Sequence[RankMicroBatch]
    denominators: LossDenominators
    initial_logprobs: list[_InitialLogprobs] = field(default_factory=list)


def _merge_update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an epoch's updates: means, but for extremes and what is counted; of the first alone, the gap."""
    totals: dict[str, float] = {}
    for update in updates:
        _accumulate_metrics(totals, update)
    times = Counter(name for update in updates for name in update)
    whole = {name for name in totals if name.endswith(("_max", "_min")) or name == _NONFINITE_UPDATES}
    means = {
        name: value if name in whole else value / times[name] for name, value in totals.items() if name != _LOGPROB_DIFF
    }
    return means | {name: value for name, value in updates[0].items() if name == _LOGPROB_DIFF}


def _accumulate_metrics(totals: dict[str, float], parts: Mapping[str, float]) -> None:
    """More of a step's metrics: extremes by their suffix, shares of a sum otherwise."""
    for name, value in parts.items():
        if name not in totals:
            totals[name] = value
        elif name.endswith(("_max", "_min")):
            totals[name] = (max if name.endswith("_max") else min)(totals[name], value)
        else:
            totals[name] += value


def _sample_ids(groups: ExperienceGroups) -> Iterator[str]:
    return (group[0].rollout.prompt.sample.id for group in groups)
