"""One training step: epochs over mini-batches with an update each, in micro-batches. `objective` has the loss.

Suffixes of tensor names: N trained tokens of a micro-batch, X layers with experts, T all of its tokens, K experts of a
token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import nn

from mmrl.algo.losses import learning_rate
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
from mmrl.learner.objective import SAMPLER_DIFFS, LossDenominators, LossInputs, Objective, PolicyLossFn
from mmrl.policy.batch import Batch, TensorProvider, collate, group_by_prompt
from mmrl.policy.expert_routing import (
    check_routes,
    check_routes_recorded,
    count_differences,
    get_routes,
    sum_routing,
    summarize_routing,
    with_routes_of_row,
)
from mmrl.policy.policy import Policy
from mmrl.types import Experience, UserError

_NONFINITE_UPDATES = "learner/nonfinite_updates"
_ROUTE_DIFFS = ("rollout/route_diff_tokens_frac", "rollout/route_diff_choices_frac")
_ROUTER_METRICS = ("policy/router_load_entropy", "policy/router_margin")  # the fields of `RoutingSummary`
_FIRST_UPDATE_METRICS = (*SAMPLER_DIFFS, *_ROUTE_DIFFS)
"""Metrics of the first update alone: later ones tell about the update, not about the sampler."""
_ROUTED_TOKENS = "tokens with routes of the engine"
"""Key of a count that metrics of micro-batches carry until they are summed."""


class OptimizerEngine(Protocol):
    """Turns losses into an update of the weights. Implemented by `TorchEngine` and `DeepspeedEngine`."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar loss; `last` marks the last one before `step`."""

    def step(self, lr: float) -> Mapping[Component, float]:
        """Clip and update; return the norm of each component's gradient, summed over ranks, before clipping."""


class ForwardDifference(NamedTuple):
    """Difference between two ways to score the same tokens."""

    logprobs: float
    """Largest difference of a log-prob, in nats."""
    gradient: float
    """Norm of the difference of the gradients, relative to the norm of the second."""

    def within(self, bound: ForwardDifference) -> bool:
        """Return True if neither exceeds its bound; a NaN does."""
        return self.logprobs <= bound.logprobs and self.gradient <= bound.gradient


_RECURRENT_ADVICE = (
    ", with which each response runs behind a prompt of its own and the recurrent state is not forked; or, where "
    "flash-linear-attention computes that, install another version of it, or none"
)

TOLERANCES = {
    torch.float32: ForwardDifference(logprobs=1e-4, gradient=1e-3),
    torch.bfloat16: ForwardDifference(logprobs=0.1, gradient=0.1),
}
"""Differences that rounding explains, by the data type of the model."""
_RECURRENT_TOLERANCE = ForwardDifference(logprobs=0.1, gradient=0.5)
"""Differences that rounding explains for recurrent layers in bfloat16, where it changes half of the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Settings of the learner for one stage."""

    loss: LossConfig
    optimizer: OptimizerConfig
    total_steps: int
    """Steps of the stage, which schedules run over unless they have `decay_steps`."""
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
        reference: Policy | None = None,
        *,
        ranks: Ranks | None = None,
        placement: MediaPlacement | None = None,
    ) -> None:
        """Set up the learner of a stage.

        `reference` is that of the KL penalty, if the loss has one. `placement` tells which rank holds a prompt's media.
        """
        self._objective = Objective(config.loss, config.total_steps, config.policy_loss_fn)
        if (reference is not None) != self._objective.needs_reference:
            found = "missing" if reference is None else "given"
            raise ValueError(f"kl.coef {config.loss.kl.coef} and a {found} reference")
        self._policy, self._provider, self._engine = policy, provider, engine
        self._config, self._reference = config, reference
        self._ranks, self._placement = ranks or SingleProcess(), placement or MediaPlacement()
        self._shared_prefix_checked = not config.shared_prefix
        self._replays_engine_routes = config.loss.routing_replay == "engine"
        # A single pass over a single mini-batch has no earlier routes to replay.
        self._replays_routes = config.loss.routing_replay != "none" and config.epochs * config.mini_batches > 1
        check_routing_replay(config.loss, policy)
        self._pack = partial(
            pack_micro_batches,
            max_groups=config.micro_batch_groups,
            max_tokens=config.micro_batch_tokens,
            shared_prefix=config.shared_prefix,
        )

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """Train on the experiences of all ranks: one update per epoch and mini-batch.

        Returns:
            Metrics of the last epoch. The difference to the sampler's log-probs is that of the first update, and
            `learner/nonfinite_updates` counts over all epochs.

        Raises:
            ValueError: an advantage is not finite.
            UserError: the first shared-prefix forward differs from the plain one, or a policy loss of the user's own
                returns something else than a loss for each token.
        """
        config = self._config
        masked = self._objective.mask(experiences)
        active = list(filter(self._objective.has_gradient, masked))
        lr = learning_rate(
            step,
            total=config.total_steps,
            peak=config.optimizer.lr,
            warmup=config.optimizer.warmup_steps,
            decay=config.optimizer.lr_schedule,
            final_frac=config.optimizer.final_lr_frac,
            decay_steps=config.optimizer.decay_steps,
        )
        no_gradient_frac = 1.0 - len(active) / len(experiences) if experiences else 0.0
        metrics = {"learner/lr": lr, "learner/no_gradient_frac": no_gradient_frac}
        if not active:
            return metrics
        if self._replays_engine_routes:
            check_routes_recorded(active)
        self._check_shared_prefix_once(active)
        dealt = split_into_mini_batches(masked, config.mini_batches)
        # Only the first update shows how sampler and learner differ, so it is one whose tokens can show it.
        mini_batches = sorted(filter(None, map(self._make_mini_batch, dealt)), key=_MiniBatch.lacks_recent_tokens)
        needs_initial_pass = self._replays_routes or self._objective.needs_initial_logprobs(active)
        if config.mini_batches > 1 and needs_initial_pass:
            # The update of the first mini-batch comes too early for the others. Its own pass comes before any update.
            for mini_batch in mini_batches[1:]:
                self._record_initial_logprobs(mini_batch)
        for epoch in range(config.epochs):
            updates = [self._update(mini_batch, step, lr) for mini_batch in mini_batches]
            latest = _merge_update_metrics(updates, [mini_batch.denominators for mini_batch in mini_batches])
            latest[_NONFINITE_UPDATES] += metrics.get(_NONFINITE_UPDATES, 0.0)
            for name in _FIRST_UPDATE_METRICS:
                if epoch > 0 and name in metrics:
                    latest[name] = metrics[name]
            metrics |= latest
        return metrics

    def _check_shared_prefix_once(self, active: Sequence[Experience]) -> None:
        """Check the shared-prefix forward before the first update, on the first step that can reveal an error."""
        if self._shared_prefix_checked:
            return
        # The smallest input that can reveal an error: two siblings, else two groups that share a row. Taken from the
        # experiences of all ranks, for every rank must check the same: under ZeRO-3 a forward needs all of them.
        all_groups = group_by_prompt(active)
        groups = all_groups[:2]
        for group in all_groups:
            if len(group) > 1:
                groups = [group[:2]]
                break
        if sum(map(len, groups)) > 1:
            check_shared_prefix(self._policy, groups, self._provider, pad_id=self._config.pad_id, ranks=self._ranks)
            self._shared_prefix_checked = True

    def _make_mini_batch(self, experiences: Sequence[Experience]) -> _MiniBatch | None:
        """Return this rank's micro-batches of a mini-batch; None if nothing in it has a gradient."""
        active = list(filter(self._objective.has_gradient, experiences))
        if not active:
            return None
        return _MiniBatch(
            micro_batches=rank_micro_batches(active, self._placement.rank_by_digest, self._ranks, self._pack),
            # Experiences without a gradient are not run, but the loss is a mean over them too.
            denominators=self._objective.count_denominators(experiences),
        )

    @torch.no_grad()
    def _record_initial_logprobs(self, mini_batch: _MiniBatch) -> None:
        """Score a mini-batch before the first update of the step; under ZeRO-3 a collective call, as any forward."""
        for micro_batch in mini_batch.micro_batches:
            self._ranks.set_activity("recomputing old log-probs")
            batch = self._build_batch(micro_batch)
            scores = self._policy.compute_logprobs(batch, batch.engine_routes_XTK)
            mini_batch.initial_logprobs.append(scores.logprobs_N)
            if self._replays_routes:
                mini_batch.routes.append(get_routes(self._policy.routers).short())

    def _update(self, mini_batch: _MiniBatch, step: int, lr: float) -> dict[str, float]:
        """Make one pass over a mini-batch and one update; return its metrics over all ranks."""
        own_metrics: dict[str, float] = {}
        routing_sums = []
        for index, micro_batch in enumerate(mini_batch.micro_batches):
            # One at a time: the patches of a whole mini-batch would fill the memory.
            batch = self._build_batch(micro_batch)
            sample_ids = ", ".join(group[0].rollout.prompt.sample.id for group in micro_batch.groups)
            self._ranks.set_activity(f"learning from {sample_ids or 'a dummy'}")
            is_first_pass = index >= len(mini_batch.routes)
            routes_XTK = batch.engine_routes_XTK if is_first_pass else mini_batch.routes[index]
            scores = self._policy.compute_logprobs(batch, routes_XTK)
            # The first epoch records what later epochs compare with or replay, unless it is known already.
            if index == len(mini_batch.initial_logprobs):
                mini_batch.initial_logprobs.append(scores.logprobs_N.detach())
            if self._replays_routes and is_first_pass:
                mini_batch.routes.append(get_routes(self._policy.routers).short())
            if index == len(mini_batch.reference_logprobs):
                reference_N = None
                if self._reference is not None:
                    with torch.no_grad():
                        reference_N = self._reference.compute_logprobs(batch).logprobs_N
                mini_batch.reference_logprobs.append(reference_N)
            if micro_batch.groups:
                experiences = list(chain.from_iterable(micro_batch.groups))
                inputs = LossInputs(
                    logprobs_N=scores.logprobs_N,
                    entropies_N=scores.entropies_N,
                    recomputed_logprobs_N=mini_batch.initial_logprobs[index],
                    reference_logprobs_N=mini_batch.reference_logprobs[index],
                )
                loss, metrics = self._objective(experiences, inputs, mini_batch.denominators, step=step)
            else:
                # The sum over no tokens is 0, and its backward pass still runs through every layer, as ZeRO-3 needs.
                loss, metrics = scores.logprobs_N.sum(), {}
            if self._policy.routers:
                # Of tokens that are scored: which others a row holds depends on how micro-batches are cut.
                routing_sums.append(sum_routing(self._policy.routers, batch.predictor_index_N))
                metrics = {**metrics, **self._route_difference_metrics(batch.engine_routes_XTK)}
            self._engine.backward(loss, last=index + 1 == len(mini_batch.micro_batches))
            _accumulate_metrics(own_metrics, {"learner/loss": float(loss.detach()), **metrics})
        norms = self._engine.step(lr)
        # Losses divide by counts over all ranks, so that metrics of ranks are summed, not averaged.
        all_metrics: dict[str, float] = {}
        for rank_metrics in self._ranks.all_gather(own_metrics):
            _accumulate_metrics(all_metrics, rank_metrics)
        if routing_sums:
            self._finish_router_metrics(all_metrics, torch.stack(routing_sums).sum(dim=0))
        total_norm = math.hypot(*norms.values())
        all_metrics["learner/grad_norm"] = total_norm
        for component, norm in norms.items():
            all_metrics[f"learner/grad_norm/{component}"] = norm
        return all_metrics | {_NONFINITE_UPDATES: float(not math.isfinite(total_norm))}

    def _finish_router_metrics(self, all_metrics: dict[str, float], sums_XS: torch.Tensor) -> None:
        """Make shares of the counts of all ranks, and add a summary of what `sum_routing` found on this rank."""
        if _ROUTED_TOKENS in all_metrics:
            num_routed = max(1.0, all_metrics.pop(_ROUTED_TOKENS))  # 0 where the engine has read no token
            for name in _ROUTE_DIFFS:
                all_metrics[name] /= num_routed
        self._ranks.all_reduce([sums_XS])
        summary = summarize_routing(self._policy.routers, sums_XS)
        all_metrics.update(zip(_ROUTER_METRICS, summary, strict=True))

    def _route_difference_metrics(self, engine_routes_XTK: torch.Tensor | None) -> dict[str, float]:
        """Return counts of where the last pass, over a micro-batch, would have left the engine's routes."""
        if engine_routes_XTK is None:
            return {}
        routers = self._policy.routers
        counts = count_differences(routers, engine_routes_XTK)
        return {
            _ROUTED_TOKENS: float(counts.tokens),
            _ROUTE_DIFFS[0]: float(counts.differing_tokens),
            _ROUTE_DIFFS[1]: counts.differing_choices / len(routers),
        }

    def _build_batch(self, micro_batch: RankMicroBatch) -> Batch:
        """Return the tensors of a micro-batch, with dummy media where other ranks have media and this one has none.

        It has routes of the engine only if these are replayed.

        Raises:
            UserError: they are not possible in this model.
        """
        config, provider = self._config, self._provider
        if micro_batch.groups:
            batch = collate(micro_batch.groups, provider, pad_id=config.pad_id, shared_prefix=config.shared_prefix)
        else:
            batch = dummy_batch(
                pad_id=config.pad_id, patch_dim=self._policy.patch_dim, shared_prefix=config.shared_prefix
            )
        if batch.engine_routes_XTK is not None:
            if self._replays_engine_routes:
                check_routes(self._policy.routers, batch.engine_routes_XTK)
            else:
                batch = replace(batch, engine_routes_XTK=None)
        # For a weight without a gradient, ZeRO-3 and offloading would take the gradient of the step before: the vision
        # tower must run even if no rank has an image or video.
        videos = micro_batch.any_rank_has_videos
        images = micro_batch.any_rank_has_images or (self._policy.runner.is_sharded and not videos)
        return add_dummy_media(batch, provider.placeholders, images=images, videos=videos)


def check_routing_replay(loss: LossConfig, policy: Policy) -> None:
    """Check that a model whose routes are to be replayed has any.

    Raises:
        UserError: it has no experts.
    """
    if loss.routing_replay != "none" and not policy.routers:
        raise UserError(f"loss.routing_replay: this {policy.family.model_type} has no experts; leave it out")


def check_shared_prefix(
    policy: Policy, groups: ExperienceGroups, provider: TensorProvider, *, pad_id: int, ranks: Ranks | None = None
) -> None:
    """Score two experiences or more, the same on every rank, packed and as plain rows; compare the two.

    Raises:
        UserError: log-probs or gradients differ by more than rounding explains.
    """
    layout = partial(collate, provider=provider, pad_id=pad_id)
    # Under ZeRO-3 the gradient of a weight that a pass does not reach would be that of an earlier pass.
    complete = partial(add_dummy_media, placeholders=provider.placeholders, images=policy.runner.is_sharded)
    if policy.routers:
        # Along the same routes: where two experts are close, rounding would send a token elsewhere in one of the two.
        with torch.no_grad():
            policy.compute_logprobs(complete(layout(groups, shared_prefix=True), videos=False))
        groups = with_routes_of_row(policy.routers, groups)
    packed = complete(layout(groups, shared_prefix=True), videos=False)
    plain = complete(layout(groups, shared_prefix=False), videos=False)
    # Without dropout: otherwise the two forwards would drop different activations.
    rates = {module: module.p for module in policy.model.modules() if isinstance(module, nn.Dropout)}
    for module in rates:
        module.p = 0.0
    try:
        found = compare_layouts(policy, packed, plain, ranks)
    finally:
        for module, rate in rates.items():
            module.p = rate
    bound = TOLERANCES[policy.model.dtype]
    if policy.family.has_recurrent_layers and policy.model.dtype == torch.bfloat16:
        bound = _RECURRENT_TOLERANCE
    if not found.within(bound):
        advice = _RECURRENT_ADVICE if policy.family.has_recurrent_layers else ""
        raise UserError(
            f"shared_prefix: on sample {groups[0][0].rollout.prompt.sample.id} it differs from the plain forward by "
            f"{found.logprobs:.2g} nats and {found.gradient:.2g} of the gradient; {bound.logprobs:g} and "
            f"{bound.gradient:g} would be rounding. Set shared_prefix: off{advice}. Report the model and the versions "
            "of torch and transformers"
        )


def compare_layouts(policy: Policy, batch: Batch, other: Batch, ranks: Ranks | None = None) -> ForwardDifference:
    """Compare two layouts of the same experiences: log-probs, and the gradients of one scalar function of them.

    Both have the same trained tokens in the same order; every rank must give the same experiences.
    """
    ranks = ranks or SingleProcess()
    logprobs_N, gradient = _logprobs_and_gradient(policy, batch)
    other_logprobs_N, other_gradient = _logprobs_and_gradient(policy, other)
    difference_square, norm_square = 0.0, 0.0
    for own, theirs in zip(gradient, other_gradient, strict=True):
        difference_square += float((own - theirs).float().square().sum())
        norm_square += float(theirs.float().square().sum())
    squares = torch.tensor([difference_square, norm_square], dtype=torch.float64)
    # Ranks have pieces of a sharded gradient. Of an ordinary one each has the whole: both sums then count it equally
    # often, so their ratio is the same.
    ranks.all_reduce([squares])
    largest = max(ranks.all_gather(float((logprobs_N - other_logprobs_N).abs().max())))
    return ForwardDifference(largest, float(squares[0] / squares[1]) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatch:
    """The part of a step that one update trains on."""

    micro_batches: Sequence[RankMicroBatch]
    """Those of this rank."""
    denominators: LossDenominators
    """Counts over all ranks."""
    initial_logprobs: list[torch.Tensor] = field(default_factory=list)
    """Log-probs of each micro-batch under the policy before the first update of the step, float32 [N].

    `_record_initial_logprobs` fills this if an old log-prob or a penalty needs it. Otherwise the first epoch does: then
    they are of the mini-batch's own first pass, and nothing reads those that come after an update.
    """
    routes: list[torch.Tensor] = field(default_factory=list)
    """Experts of each token of each micro-batch in its first pass, int16 [X, T, K]; empty unless `loss.routing_replay`
    is on and there are more passes than one."""
    reference_logprobs: list[torch.Tensor | None] = field(default_factory=list)
    """Log-probs of each micro-batch under the reference, float32 [N]; None without a KL penalty."""

    def lacks_recent_tokens(self) -> list[bool]:
        """Return True for no token of the current policy version, and for none of the version before it."""
        return [not count for count in self.denominators.recent_run_tokens]


def _merge_update_metrics(
    updates: Sequence[Mapping[str, float]], denominators: Sequence[LossDenominators]
) -> dict[str, float]:
    """Return the metrics of an epoch: means over its updates, but extremes and counts for those that are such.

    Means over tokens weigh each update by its tokens, so they do not depend on the number of mini-batches.
    """
    totals: dict[str, float] = {}
    weights: Counter[str] = Counter()
    for update, counts in zip(updates, denominators, strict=True):
        weighted = dict(update)
        for name, value in update.items():
            weight = 1
            if name in _ROUTER_METRICS:
                weight = counts.scored_tokens  # demonstrations are routed too
            elif name.startswith("policy/"):
                weight = counts.run_tokens
            elif name == "learner/sft_loss_nats":
                weight = counts.sft_loss_tokens
            if not name.endswith(("_max", "_min")) and name != _NONFINITE_UPDATES:
                weighted[name] = value * weight
                weights[name] += weight
        _accumulate_metrics(totals, weighted)
    # Extremes are not divided: a `WorstToken` stays one.
    merged = {name: total / weights[name] if name in weights else total for name, total in totals.items()}
    for name in _FIRST_UPDATE_METRICS:
        merged.pop(name, None)
        if name in updates[0]:
            merged[name] = updates[0][name]
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


def _logprobs_and_gradient(policy: Policy, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the log-probs of a batch, float32 [N], and the gradient of their mean with varying weights."""
    computed = []

    def loss() -> torch.Tensor:
        """Return the weighted mean, a scalar, and keep the log-probs."""
        logprobs_N = policy.compute_logprobs(batch, batch.engine_routes_XTK).logprobs_N
        computed.append(logprobs_N.detach())
        # With equal weights, errors that only move gradient from one token to another would cancel.
        weights_N = torch.cos(torch.arange(len(logprobs_N), device=logprobs_N.device))
        return (logprobs_N * weights_N).mean()

    trained = [parameter for parameter in policy.trained.values() if parameter.requires_grad]
    gradient = policy.runner.compute_gradient(loss, trained)
    return computed[0], gradient
