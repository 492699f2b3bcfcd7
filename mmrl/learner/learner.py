"""One training step: epochs over mini-batches with an update each, in micro-batches. `objective` has the loss.

Suffix of tensor names: N trained tokens of a micro-batch.
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
from mmrl.learner.learner import check_shared_prefix
from mmrl.learner.micro_batches import (
    ExperienceGroups,
    RankMicroBatch,
    add_dummy_media,
    dummy_batch,
    pack_micro_batches,
    rank_micro_batches,
    split_into_mini_batches,
)
from mmrl.learner.objective import LossDenominators, LossInputs, Objective, PolicyLossFn
from mmrl.policy.batch import Batch, TensorProvider, collate, group_by_prompt
from mmrl.policy.policy import Policy, TokenLogprobs
from mmrl.types import Experience

_LOGPROB_DIFF = "rollout/logprob_diff_mean"
_NONFINITE_UPDATES = "learner/nonfinite_updates"


class OptimizerEngine(Protocol):
    """Turns losses into an update of the weights. Implemented by `TorchEngine` and `DeepspeedEngine`."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss; `last` marks the last one before `step`."""

    def step(self, lr: float) -> Mapping[Component, float]:
        """Clip and update; return the norm of each component's gradient, summed over ranks, before clipping."""


class LogprobModel(Protocol):
    """A model that scores tokens: the reference. Implemented by `Policy` and `ReferencePolicy`."""

    def compute_logprobs(self, batch: Batch) -> TokenLogprobs:
        """Score every trained token of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Settings of the learner for one stage."""

    loss: LossConfig
    optimizer: OptimizerConfig
    total_steps: int
    """Steps of the stage, which schedules run over."""
    micro_batch_groups: int
    """Most groups (prompts) of a micro-batch."""
    micro_batch_tokens: int
    """Most tokens of a micro-batch, padding included; a longer sequence runs alone."""
    epochs: int
    """Passes over the experiences of a step."""
    mini_batches: int = 1
    """Updates in each pass."""
    shared_prefix: bool
    """Run a prompt once for its group, rather than once for each completion."""
    pad_id: int
    """Token id of padding."""
    policy_loss_fn: PolicyLossFn | None = None
    """The function that `loss.policy_loss` names; None for a built-in policy loss."""


class GrpoLearner:
    """Computes the loss of experiences and updates the policy. Implements the `Learner` port.

    Every rank receives all experiences and trains on its own share, preferring those whose images it already holds.
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
        """Set up the learner of a stage.

        Args:
            policy: the policy in training.
            provider: provides patches and position ids.
            engine: the optimizer of the stage.
            config: settings of the stage.
            reference: the reference of the KL penalty; None if the loss has none.
            ranks: the processes of the run; None for one alone.
            placement: the rank that holds the images of each prompt; None for no preference.
        """
        self._objective = Objective(config.loss, config.total_steps, config.policy_loss_fn)
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
        """Train on the experiences of a step: one update per epoch and mini-batch.

        The loss of an update divides by counts over its whole mini-batch. Experiences without gradient are counted but
        not run.

        Args:
            experiences: experiences of all ranks.
            step: steps of the stage that are done.

        Returns:
            Metrics of the last epoch. The difference to the sampler's log-probs is that of the first update, and
            `learner/nonfinite_updates` counts over all epochs.

        Raises:
            ValueError: an advantage is not finite.
            UserError: the first shared-prefix forward differs from the plain one, or a policy loss of the user's own
                returns something else than a loss for each token.
        """
        masked = self._objective.mask(experiences)
        active = []
        for experience in masked:
            if self._objective.has_gradient(experience):
                active.append(experience)
        no_gradient_frac = 1.0 - len(active) / len(experiences) if experiences else 0.0
        metrics = {"learner/lr": self._learning_rate(step), "learner/no_gradient_frac": no_gradient_frac}
        if not active:
            return metrics
        self._check_shared_prefix_once(active)
        mini_batches = []
        for dealt in split_into_mini_batches(masked, self._config.mini_batches):
            mini_batch = self._make_mini_batch(dealt)
            if mini_batch is not None:
                mini_batches.append(mini_batch)
        for epoch in range(self._config.epochs):
            latest = _merge_update_metrics([self._update(mini_batch, step) for mini_batch in mini_batches])
            latest[_NONFINITE_UPDATES] += metrics.get(_NONFINITE_UPDATES, 0.0)
            # After the first update, the difference to the sampler tells about the update, not about the sampler.
            if epoch > 0 and _LOGPROB_DIFF in metrics:
                latest[_LOGPROB_DIFF] = metrics[_LOGPROB_DIFF]
            metrics |= latest
        return metrics

    def _check_shared_prefix_once(self, active: Sequence[Experience]) -> None:
        """Check the shared-prefix forward before the first update, on the first step that can reveal an error.

        Every rank checks the same groups, because under ZeRO-3 a forward needs all ranks.
        """
        groups = [] if self._shared_prefix_checked else _pick_check_groups(group_by_prompt(active))
        if groups:
            check_shared_prefix(self._policy, groups, self._provider, pad_id=self._config.pad_id, ranks=self._ranks)
            self._shared_prefix_checked = True

    def _make_mini_batch(self, experiences: Sequence[Experience]) -> _MiniBatch | None:
        """Return this rank's micro-batches of a mini-batch; None if nothing in it has a gradient."""
        active = []
        for experience in experiences:
            if self._objective.has_gradient(experience):
                active.append(experience)
        if not active:
            return None
        micro_batches = rank_micro_batches(active, self._placement.rank_by_digest, self._ranks, self._pack)
        denominators = self._objective.count_denominators(experiences)
        return _MiniBatch(micro_batches=micro_batches, denominators=denominators)

    def _update(self, mini_batch: _MiniBatch, step: int) -> dict[str, float]:
        """Make one pass over a mini-batch and one update; return its metrics over all ranks."""
        own_metrics: dict[str, float] = {}
        for index, (micro_batch, batch) in enumerate(self._iter_batches(mini_batch.micro_batches)):
            self._ranks.set_activity(f"learning from {', '.join(_sample_ids(micro_batch.groups)) or 'a dummy'}")
            scores = self._policy.compute_logprobs(batch)
            # The first epoch records the log-probs that later epochs compare with.
            if index == len(mini_batch.initial_logprobs):
                mini_batch.initial_logprobs.append(
                    _InitialLogprobs(scores.logprobs_N.detach(), self._reference_logprobs(batch))
                )
            if micro_batch.groups:
                experiences: list[Experience] = []
                for group in micro_batch.groups:
                    experiences += group
                inputs = LossInputs(scores.logprobs_N, scores.entropies_N, *mini_batch.initial_logprobs[index])
                loss, metrics = self._objective(experiences, inputs, mini_batch.denominators, step=step)
            else:
                # The sum over no tokens is 0, and its backward pass still runs through every layer, as ZeRO-3 needs.
                loss, metrics = scores.logprobs_N.sum(), {}
            self._engine.backward(loss, last=index + 1 == len(mini_batch.micro_batches))
            _accumulate_metrics(own_metrics, {"learner/loss": float(loss.detach()), **metrics})
        norms = self._engine.step(self._learning_rate(step))
        all_metrics: dict[str, float] = {}
        for rank_metrics in self._ranks.all_gather(own_metrics):
            _accumulate_metrics(all_metrics, rank_metrics)
        return all_metrics | _gradient_metrics(norms)

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """Return log-probs of a batch under the reference, float32 [N]; None without one."""
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference.compute_logprobs(batch).logprobs_N

    def _pack(self, experiences: Sequence[Experience]) -> list[list[list[Experience]]]:
        return pack_micro_batches(
            experiences,
            max_groups=self._config.micro_batch_groups,
            max_tokens=self._config.micro_batch_tokens,
            shared_prefix=self._config.shared_prefix,
        )

    def _iter_batches(self, micro_batches: Sequence[RankMicroBatch]) -> Iterator[tuple[RankMicroBatch, Batch]]:
        """Yield micro-batches with their tensors, which are made one at a time to save memory."""
        config = self._config
        for micro_batch in micro_batches:
            if micro_batch.groups:
                batch = collate(
                    micro_batch.groups, self._provider, pad_id=config.pad_id, shared_prefix=config.shared_prefix
                )
            else:
                batch = dummy_batch(
                    pad_id=config.pad_id, patch_dim=self._policy.patch_dim, shared_prefix=config.shared_prefix
                )
            # For a weight without a gradient, ZeRO-3 and offloading would take the gradient of the step before: the
            # vision tower must run even if no rank has an image or video.
            videos = micro_batch.any_rank_has_videos
            images = micro_batch.any_rank_has_images or (self._policy.is_sharded and not videos)
            yield micro_batch, add_dummy_media(batch, self._provider.placeholders, images=images, videos=videos)

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


class _InitialLogprobs(NamedTuple):
    """Log-probs of a micro-batch's tokens before the first update of the step, float32 [N].

    The order of the fields is that of `LossInputs`.
    """

    policy_N: torch.Tensor
    reference_N: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatch:
    """The part of a step that one update trains on."""

    micro_batches: Sequence[RankMicroBatch]
    """Those of this rank."""
    denominators: LossDenominators
    """Counts over all ranks."""
    initial_logprobs: list[_InitialLogprobs] = field(default_factory=list)
    """One for each micro-batch, recorded by the first epoch."""


def _pick_check_groups(groups: ExperienceGroups) -> ExperienceGroups:
    """Return the smallest input that can reveal a packing error: two siblings, or two groups that share a row.

    Empty if the batch has neither.
    """
    for group in groups:
        if len(group) > 1:
            return [group[:2]]
    return groups[:2] if len(groups) > 1 else []


def _gradient_metrics(norms: Mapping[Component, float]) -> dict[str, float]:
    """Return the norm of the whole gradient and of each component's."""
    total = math.hypot(*norms.values())
    metrics = {"learner/grad_norm": total}
    for component, norm in norms.items():
        metrics[f"learner/grad_norm/{component}"] = norm
    metrics[_NONFINITE_UPDATES] = float(not math.isfinite(total))
    return metrics


def _merge_update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of an epoch: means over its updates, but extremes and counts for those that are such.

    The difference to the sampler's log-probs is that of the first update alone, before any weight has changed.
    """
    totals: dict[str, float] = {}
    for update in updates:
        _accumulate_metrics(totals, update)
    num_updates: Counter[str] = Counter()
    for update in updates:
        num_updates.update(update.keys())
    merged = {}
    for name, total in totals.items():
        if name == _LOGPROB_DIFF:
            continue
        is_mean = not name.endswith(("_max", "_min")) and name != _NONFINITE_UPDATES
        merged[name] = total / num_updates[name] if is_mean else total
    if _LOGPROB_DIFF in updates[0]:
        merged[_LOGPROB_DIFF] = updates[0][_LOGPROB_DIFF]
    return merged


def _accumulate_metrics(totals: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add metrics to totals: extremes by the suffix of their names, everything else as a share of a sum."""
    for name, value in metrics.items():
        if name not in totals:
            totals[name] = value
        elif name.endswith("_max"):
            totals[name] = max(totals[name], value)
        elif name.endswith("_min"):
            totals[name] = min(totals[name], value)
        else:
            totals[name] += value


def _sample_ids(groups: ExperienceGroups) -> Iterator[str]:
    return (group[0].rollout.prompt.sample.id for group in groups)
