"""One training step: epochs over mini-batches, with an update for each. `mmrl.learner.objective` has the loss.

Suffixes of tensor names as in `mmrl.policy.batch`: N trained tokens, X layers with experts, T tokens of all rows, K
experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from mmrl.algo.schedules import learning_rate
from mmrl.algo.select_experiences import drop_masked
from mmrl.config.schema import COMPONENTS, LossConfig, OptimizerConfig
from mmrl.distributed.ranks import Ranks
from mmrl.learner.metrics import Metrics, merge_updates
from mmrl.learner.micro_batches import (
    MicroBatch,
    add_dummy_media,
    dummy_batch,
    own_micro_batches,
    pack_micro_batches,
    split_into_mini_batches,
)
from mmrl.learner.objective import LossResult, Objective, PolicyLossFn
from mmrl.learner.optimizer import Optimizer
from mmrl.learner.shared_prefix_check import check_shared_prefix
from mmrl.learner.tokens import LossColumns, LossDenominators, make_token_table
from mmrl.policy.batch import Batch, collate
from mmrl.policy.expert_routing import (
    check_routes,
    check_routes_recorded,
    count_differences,
    get_routes,
    sum_routing,
    summarize_routing,
)
from mmrl.policy.policy import PolicyModel, TokenLogprobs
from mmrl.policy.processor import PromptProcessor
from mmrl.types import Experience, TokenValues
from mmrl.utils.activity import Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Settings of the learner for one stage."""

    loss: LossConfig
    optimizer: OptimizerConfig
    total_steps: int  # steps of the stage, which schedules run over unless they have `decay_steps`
    micro_batch_groups: int  # most groups (prompts) of a micro-batch
    micro_batch_tokens: int  # most tokens of a micro-batch, padding included; a longer sequence runs alone
    ppo_epochs: int  # passes over the experiences of a step
    num_mini_batches: int = 1  # updates in each pass
    shared_prefix: bool  # run a prompt once for its group, rather than once for each response
    pad_id: int
    policy_loss_fn: PolicyLossFn | None = None  # function that `loss.policy_loss` names; None for a built-in one


class PolicyLearner:
    """Updates the policy by the loss of experiences, in RL and supervised stages. Implements the `Learner` protocol.

    Every rank receives all experiences and trains on its own share, preferring those whose images it already holds.
    """

    def __init__(
        self,
        policy: PolicyModel,
        processor: PromptProcessor,
        optimizer: Optimizer,
        config: LearnerConfig,
        reference: PolicyModel | None,
        *,
        ranks: Ranks,
        activity: Activity,
    ) -> None:
        """Set up the learner of a stage.

        `reference` is the reference policy of the KL penalty, if the loss has one. `activity` receives the learner's
        progress, counted in micro-batches.
        """
        self._objective = Objective(config.loss, config.total_steps, config.policy_loss_fn)
        self._policy = policy
        self._processor = processor
        self._optimizer = optimizer
        self._config = config
        self._reference = reference
        self._ranks = ranks
        self._activity = activity
        self._shared_prefix_checked = not config.shared_prefix
        # For `token_values`: index of each experience of the last step by `id`, and values of the step's last epoch.
        self._index_by_id: dict[int, int] = {}
        self._loss_columns: list[LossColumns] = []
        self._replays_engine_routes = config.loss.routing_replay == "engine"
        # A single pass over a single mini-batch has no earlier routes to replay.
        self._replays_routes = config.loss.routing_replay != "none" and config.ppo_epochs * config.num_mini_batches > 1
        self._pack = partial(
            pack_micro_batches,
            max_groups=config.micro_batch_groups,
            max_tokens=config.micro_batch_tokens,
            shared_prefix=config.shared_prefix,
        )

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """Train on the experiences of all ranks: one update for each mini-batch in each epoch.

        Returns:
            Metrics of the last epoch. Two differ: differences to the rollout engine are measured in the first update
            only, and `learner/nonfinite_updates` sums over all epochs.

        Raises:
            UserError: the first shared-prefix forward differs from the plain one, the engine's routes cannot be
                replayed, or a user's policy loss does not return a loss for each token.
        """
        config = self._config
        self._loss_columns = []
        self._index_by_id = {}
        for index, experience in enumerate(experiences):
            # Replay may draw an experience twice; both then share the values of the first.
            self._index_by_id.setdefault(id(experience), index)

        lr = learning_rate(step, total=config.total_steps, options=config.optimizer)
        in_loss = drop_masked(experiences, mask_truncated=config.loss.mask_truncated)
        with_gradient = list(filter(self._objective.has_gradient_unless_masked, in_loss))
        no_gradient_frac = 1.0 - len(with_gradient) / len(experiences) if experiences else 0.0
        metrics = {"learner/lr": lr, "learner/no_gradient_frac": no_gradient_frac}
        # Components with a rate of their own report it.
        for component in COMPONENTS:
            lr_scale = config.optimizer.component_lr(component) / config.optimizer.lr
            if lr_scale != 1.0:
                metrics[f"learner/lr/{component}"] = lr * lr_scale
        if not with_gradient:
            return metrics

        if self._replays_engine_routes:
            check_routes_recorded(with_gradient)
        if not self._shared_prefix_checked:
            # Once, before the first update; on the experiences of all ranks, since ZeRO-3 needs all ranks in a forward.
            self._shared_prefix_checked = check_shared_prefix(
                self._policy, with_gradient, self._processor, pad_id=config.pad_id, ranks=self._ranks
            )
        mini_batches = self._prepare_mini_batches(in_loss, with_gradient)
        nonfinite_updates = 0.0
        for epoch in range(config.ppo_epochs):
            self._loss_columns = []
            updates: list[Metrics] = []
            for index, mini_batch in enumerate(mini_batches):
                updates.append(self._update(mini_batch, step=step, lr=lr, is_first=epoch == index == 0))
            metrics |= merge_updates(updates).values()
            nonfinite_updates += metrics["learner/nonfinite_updates"]
        return metrics | {"learner/nonfinite_updates": nonfinite_updates}

    def has_gradient(self, experience: Experience) -> bool:
        """Return True if the loss may give the experience a gradient. A step runs no forward pass for any other."""
        in_loss = drop_masked([experience], mask_truncated=self._config.loss.mask_truncated)
        return bool(in_loss) and self._objective.has_gradient_unless_masked(experience)

    def token_values(self, indices: Sequence[int]) -> Mapping[int, TokenValues]:
        """Return values that the last epoch of the last step computed for some of its experiences, by their index.

        Experiences outside this rank's share, or without a gradient, are missing.
        """
        wanted = set(indices)
        values: dict[int, TokenValues] = {}
        for experiences, response_N, columns in self._loss_columns:
            num_tokens = torch.bincount(response_N, minlength=len(experiences)).tolist()
            numbers_N = torch.stack([column.float() for column in columns]).cpu()
            for experience, numbers in zip(experiences, torch.split(numbers_N, num_tokens, dim=1), strict=True):
                index = self._index_by_id[id(experience)]
                if index in wanted and numbers.shape[1]:
                    values[index] = TokenValues(*map(tuple, numbers.tolist()))
        return values

    def _prepare_mini_batches(
        self, in_loss: Sequence[Experience], with_gradient: Sequence[Experience]
    ) -> list[_MiniBatch]:
        """Return this rank's share of each mini-batch with a gradient, in the order of the updates.

        They are ready for the first update: micro-batches have the old log-probs and routes that the loss needs.
        """
        mini_batches = []
        for part in split_into_mini_batches(in_loss, self._config.num_mini_batches):
            part_with_gradient = list(filter(self._objective.has_gradient_unless_masked, part))
            if part_with_gradient:
                micro_batches = own_micro_batches(part_with_gradient, self._ranks, self._pack)
                # Of the whole part: experiences without a gradient still count in the mean of the loss.
                denominators = self._objective.count_denominators(part)
                mini_batches.append(_MiniBatch(micro_batches, denominators))
        # Old tokens last: the first update alone, before any weight has changed, compares the learner with the sampler,
        # and only tokens of the current weights can be compared.
        mini_batches.sort(key=_oldest_last)
        num_micro_batches = sum(len(mini_batch.micro_batches) for mini_batch in mini_batches)
        self._activity.begin_count("learn", self._config.ppo_epochs * num_micro_batches)
        if self._replays_routes or self._objective.needs_recomputed_logprobs(with_gradient):
            # Old log-probs precede any update. The first mini-batch gets them from its first pass anyway.
            for micro_batch in chain.from_iterable(mini_batch.micro_batches for mini_batch in mini_batches[1:]):
                self._ranks.set_activity("recomputing old log-probs")
                with torch.no_grad():
                    self._forward(micro_batch, self._build_batch(micro_batch))
        return mini_batches

    def _update(self, mini_batch: _MiniBatch, *, step: int, lr: float, is_first: bool) -> Metrics:
        """Make one pass over a mini-batch and one update; return its metrics over all ranks.

        Only the first update of a step reports how sampler and learner differ. Later ones would measure the updates.
        """
        micro_batches, denominators = mini_batch
        own_metrics = Metrics()
        routing_sums = []
        for micro_batch in micro_batches:
            sample_ids = ", ".join(group[0].rollout.prompt.sample.id for group in micro_batch.groups)
            self._ranks.set_activity(f"learning from {sample_ids or 'a dummy'}")
            # One at a time: the patches of a whole mini-batch would fill the memory.
            batch = self._build_batch(micro_batch)
            loss, metrics, columns = self._compute_loss(micro_batch, batch, denominators, step=step, is_first=is_first)
            if self._policy.routers:
                # Only tokens with a log-prob: the other tokens of a row depend on how micro-batches are cut.
                routing_sums.append(sum_routing(self._policy.routers, batch.predictor_index_N))
            self._optimizer.backward(loss, last=micro_batch is micro_batches[-1])
            metrics.add("learner/loss", "mean", loss.detach())
            own_metrics.merge(metrics)
            if columns is not None:
                self._loss_columns.append(columns)
            self._activity.advance("learn")
        norms = self._optimizer.update(lr)

        own_metrics.read_tensors()
        metrics = Metrics()
        for rank_metrics in self._ranks.all_gather(own_metrics):
            metrics.merge(rank_metrics)
        if routing_sums:
            metrics.merge(self._measure_routing(torch.stack(routing_sums).sum(dim=0), denominators))
        total_norm = math.hypot(*norms.values())
        metrics.add("learner/grad_norm", "mean", total_norm)
        for component, norm in norms.items():
            metrics.add(f"learner/grad_norm/{component}", "mean", norm)
        metrics.add("learner/nonfinite_updates", "sum", float(not math.isfinite(total_norm)))
        return metrics

    def _measure_routing(self, own_sums: torch.Tensor, denominators: LossDenominators) -> Metrics:
        """Return how the routers spread the tokens of all ranks, given this rank's `sum_routing`. Collective."""
        sums = own_sums.cpu()
        self._ranks.all_reduce([sums])
        routing = summarize_routing(self._policy.routers, sums)
        scored_tokens = denominators.policy_tokens_with_gradient + denominators.demonstration_tokens
        metrics = Metrics()
        metrics.add("policy/router_load_entropy", "mean", routing.load_entropy, scored_tokens)
        metrics.add("policy/router_margin", "mean", routing.margin, scored_tokens)
        return metrics

    def _compute_loss(
        self, micro_batch: MicroBatch, batch: Batch, denominators: LossDenominators, *, step: int, is_first: bool
    ) -> LossResult:
        """Return a micro-batch's share of an update's loss and metrics. Collective under ZeRO-3."""
        token_logprobs = self._forward(micro_batch, batch)
        if self._reference is not None and micro_batch.reference_logprobs_N is None:
            # Once a step: later epochs find it in the micro-batch.
            with torch.no_grad():
                micro_batch.reference_logprobs_N = self._reference.compute_logprobs(batch).logprobs_N
        if not micro_batch.groups:
            # The sum over no tokens is 0, and its backward pass still runs through every layer, as ZeRO-3 needs.
            return LossResult(token_logprobs.logprobs_N.sum(), Metrics(), None)
        assert micro_batch.recomputed_logprobs_N is not None  # set by `_forward`
        tokens = make_token_table(
            list(chain.from_iterable(micro_batch.groups)),
            self._config.loss,
            current_logprobs_N=token_logprobs.logprobs_N,
            entropies_N=token_logprobs.entropies_N,
            recomputed_logprobs_N=micro_batch.recomputed_logprobs_N,
            reference_logprobs_N=micro_batch.reference_logprobs_N,
        )
        result = self._objective.compute_loss(tokens, denominators, step=step, compare_with_sampler=is_first)
        if is_first and batch.engine_routes_XTK is not None:
            # Only tokens with a log-prob count, as for the router's load: a prompt runs once for each part that its
            # group is split into.
            counts = count_differences(self._policy.routers, batch.engine_routes_XTK, batch.predictor_index_N)
            choices = counts.differing_choices / len(self._policy.routers)
            metrics = result.metrics
            metrics.add("rollout/route_diff_tokens_frac", "ratio", float(counts.differing_tokens), counts.tokens)
            metrics.add("rollout/route_diff_choices_frac", "ratio", choices, counts.tokens)
        return result

    def _forward(self, micro_batch: MicroBatch, batch: Batch) -> TokenLogprobs:
        """Return the log-probs of a micro-batch. Its first pass stores the log-probs and routes that later ones use."""
        routes_XTK = batch.engine_routes_XTK if micro_batch.routes_XTK is None else micro_batch.routes_XTK
        token_logprobs = self._policy.compute_logprobs(batch, routes_XTK)
        if micro_batch.recomputed_logprobs_N is None:
            micro_batch.recomputed_logprobs_N = token_logprobs.logprobs_N.detach()
        if self._replays_routes and micro_batch.routes_XTK is None:
            micro_batch.routes_XTK = get_routes(self._policy.routers).short()
        return token_logprobs

    def _build_batch(self, micro_batch: MicroBatch) -> Batch:
        """Return the tensors of a micro-batch, with dummy media where other ranks have media and this one has none.

        Routes that the engine recorded are dropped unless they are replayed.

        Raises:
            UserError: the model cannot follow the routes.
        """
        config, processor = self._config, self._processor
        if micro_batch.groups:
            batch = collate(micro_batch.groups, processor, pad_id=config.pad_id, shared_prefix=config.shared_prefix)
        else:
            batch = dummy_batch(
                pad_id=config.pad_id, patch_dim=self._policy.patch_dim, shared_prefix=config.shared_prefix
            )
        if batch.engine_routes_XTK is not None:
            if self._replays_engine_routes:
                check_routes(self._policy.routers, batch.engine_routes_XTK)
            else:
                batch = replace(batch, engine_routes_XTK=None)
        # ZeRO-3 and offloading would reuse the last update's gradient for a weight that gets none. So the vision tower
        # must run even if no rank has an image or video.
        videos = micro_batch.any_rank_has_videos
        images = micro_batch.any_rank_has_images or (self._policy.runner.uses_deepspeed and not videos)
        return add_dummy_media(batch, processor.placeholders, images=images, videos=videos)


class _MiniBatch(NamedTuple):
    """The part of a step that one update trains on."""

    micro_batches: Sequence[MicroBatch]  # of this rank
    denominators: LossDenominators  # counts over all ranks


def _oldest_last(mini_batch: _MiniBatch) -> list[bool]:
    """Return a sort key: mini-batches with on-policy tokens first, then those with tokens of the version before."""
    return [count == 0 for count in mini_batch.denominators.policy_tokens_with_gradient_by_staleness]
