"""A micro-batch's share of the loss of an update, computed from the log-probs of its tokens.

A token has up to four log-probs: `recorded` by the sampler, `recomputed` by the learner before the first update of the
step, `current`, and under the `reference` of the KL penalty. Old log-probs, by which the importance ratio divides, are
the recorded or the recomputed ones: see `TokenTable.old_is_recorded_N`. All are in nats, as log ratios and entropies.

Suffixes of tensor names as in `mmrl.policy.batch`: N trained tokens, rows of a `TokenTable`; S of them in one response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.algo.losses import (
    aggregation_weights,
    cispo,
    clipped_surrogate,
    correction_weights,
    estimate_kl,
    importance_ratios,
    suffix_sums,
)
from mmrl.algo.schedules import coefficient
from mmrl.config.schema import LossConfig
from mmrl.learner.metrics import Metrics, measure_sampler, measure_tokens
from mmrl.learner.tokens import LossColumns, LossDenominators, TokenTable, iter_trained_tokens
from mmrl.types import Author, Experience, UserError

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A user's policy loss, called once for each response with float32 tensors [S] and a bool mask [S].

(logprobs, old_logprobs, advantages, mask) -> loss of each token, [S]. Gradients flow through logprobs alone.
"""


class LossResult(NamedTuple):
    """A micro-batch's share of an update."""

    loss: Tensor  # a scalar, with gradient
    metrics: Metrics
    columns: LossColumns | None  # values of the tokens that the policy sampled; None if it sampled none


class Objective:
    """The loss of a stage: policy loss, KL penalty, entropy bonus, and likelihood of demonstrations."""

    def __init__(self, options: LossConfig, total_steps: int, policy_loss_fn: PolicyLossFn | None = None) -> None:
        """Set up the loss of a stage of `total_steps`, over which schedules of coefficients run.

        `policy_loss_fn` is the function that `options.policy_loss` names.
        """
        self._options = options
        self._policy_loss_fn = policy_loss_fn
        self._coefficient = partial(coefficient, total=total_steps)
        self.needs_reference = options.kl.coef > 0.0  # there is a KL penalty
        self.has_entropy_bonus = options.entropy.coef > 0.0

    def has_gradient_unless_masked(self, experience: Experience) -> bool:
        """Return True if some term of the loss can give the experience a gradient.

        `drop_masked` may have taken it from the loss, which is not checked here. An experience for which this is False
        is left out of the forward pass, but the denominators count it.
        """
        authors = {segment.author for segment in experience.rollout.segments if segment.token_ids}
        if Author.DEMONSTRATION in authors:
            return True
        # The built-in policy losses are proportional to the advantage; a user's function need not be.
        regardless_of_advantage = self.needs_reference or self.has_entropy_bonus or self._policy_loss_fn is not None
        if Author.POLICY in authors and (experience.has_signal or regardless_of_advantage):
            return True
        return any(token.in_sft_loss for token in iter_trained_tokens(experience, self._options))

    def needs_recomputed_logprobs(self, experiences: Sequence[Experience]) -> bool:
        """Return True if the loss of any of the experiences uses recomputed log-probs."""
        # A KL in the reward is measured at the sampling policy; recomputed log-probs are the closest estimate of it.
        if self.needs_reference and self._options.kl.apply_to == "reward":
            return True
        sources = {experience.old_logprobs_source or self._options.old_logprobs for experience in experiences}
        return "recomputed" in sources

    def count_denominators(self, experiences: Sequence[Experience]) -> LossDenominators:
        """Return the counts by which an update over these experiences divides its loss and metrics."""
        policy_tokens = responses = demonstration_tokens = sft_loss_tokens = 0
        policy_tokens_with_gradient: Counter[int] = Counter()  # by staleness
        for experience in experiences:
            # An empty response counts as one, though nothing in it has a gradient.
            responses += any(segment.author is Author.POLICY for segment in experience.rollout.segments)
            has_gradient = self.has_gradient_unless_masked(experience)
            for token in iter_trained_tokens(experience, self._options):
                is_policy = token.author is Author.POLICY
                policy_tokens += is_policy
                policy_tokens_with_gradient[token.staleness] += is_policy and has_gradient
                demonstration_tokens += token.author is Author.DEMONSTRATION
                sft_loss_tokens += token.in_sft_loss
        return LossDenominators(
            policy_tokens=policy_tokens,
            policy_tokens_with_gradient=policy_tokens_with_gradient.total(),
            policy_tokens_with_gradient_by_staleness=(policy_tokens_with_gradient[0], policy_tokens_with_gradient[1]),
            responses=responses,
            demonstration_tokens=demonstration_tokens,
            sft_loss_tokens=sft_loss_tokens,
        )

    def compute_loss(
        self, tokens: TokenTable, denominators: LossDenominators, *, step: int, compare_with_sampler: bool = True
    ) -> LossResult:
        """Return a micro-batch's share of an update's loss and of its metrics.

        Args:
            tokens: trained tokens of the micro-batch.
            denominators: counts of the whole update, so that the shares of its micro-batches add up.
            step: training step, counted from 0 in the stage.
            compare_with_sampler: measure how far current log-probs are from recorded ones.
        """
        loss, metrics, columns = tokens.current_logprobs_N.new_zeros(()), Metrics(), None
        if denominators.demonstration_tokens:
            demonstrated = tokens.select(tokens.is_demonstration_N)
            loss = loss - demonstrated.current_logprobs_N.sum() / denominators.demonstration_tokens
        if denominators.sft_loss_tokens:
            imitated = tokens.select(tokens.in_sft_loss_N)
            nll = -imitated.current_logprobs_N.sum() / denominators.sft_loss_tokens
            loss = loss + self._coefficient(step, options=self._options.sft_loss) * nll
            metrics.add("learner/sft_loss_nats", "mean", nll.detach(), denominators.sft_loss_tokens)
        if tokens.is_policy_N.any():
            sampled = tokens.select(tokens.is_policy_N)
            rl_loss, rl_metrics, columns = self._rl_loss(sampled, denominators, step)
            loss = loss + rl_loss
            metrics.merge(rl_metrics)
            if compare_with_sampler:
                metrics.merge(measure_sampler(sampled, denominators))
        return LossResult(loss, metrics, columns)

    def _rl_loss(self, sampled: TokenTable, denominators: LossDenominators, step: int) -> LossResult:
        """Return Σ weight x (correction x policy loss + penalties) over the policy's tokens, and its metrics."""
        options = self._options
        old_N = torch.where(sampled.old_is_recorded_N, sampled.recorded_logprobs_N, sampled.recomputed_logprobs_N)
        old_N = old_N.detach()
        log_ratio_N = sampled.current_logprobs_N - old_N
        if options.log_ratio_clip is not None:
            # Avoids the exponential of a large number: StableReinforce (R1-Reward, arXiv:2505.02835, eq. 5).
            log_ratio_N = log_ratio_N.clamp(-options.log_ratio_clip, options.log_ratio_clip)
        ratio_N = importance_ratios(log_ratio_N, sampled.turn_N, options.importance_ratio_level)

        advantage_N, penalty_N, kl_N = sampled.advantages_N, torch.zeros_like(ratio_N), None
        if self.needs_reference:
            kl_N = self._reference_kl(sampled)
            kl_coefficient = self._coefficient(step, options=options.kl)
            if options.kl.apply_to == "reward":
                # Ziegler et al. (arXiv:1909.08593, eq. 2), as a reward to go: a token is charged for the KL at itself
                # and at the later tokens that depend on it.
                advantage_N = advantage_N - kl_coefficient * suffix_sums(kl_N, sampled.response_N)
            else:
                # GRPO (arXiv:2402.03300 v3, eq. 3).
                penalty_N = penalty_N + kl_coefficient * kl_N
        if self.has_entropy_bonus:
            # PPO (arXiv:1707.06347, eq. 9).
            penalty_N = penalty_N - self._coefficient(step, options=options.entropy) * sampled.entropies_N

        policy_loss_N = self._policy_loss(sampled, old_N, ratio_N, advantage_N)
        # Where the sampling policy is not the old one, a weight corrects for the difference: the decoupled objective of
        # Hilton et al. (arXiv:2110.00641).
        log_weight_N = old_N - sampled.recorded_logprobs_N
        correction_N = correction_weights(log_weight_N, sampled.response_N, options.rollout_correction)

        # With these factors, the sum over the tokens of the whole update is a mean: `loss.aggregation`.
        weight_N = aggregation_weights(
            sampled.response_N,
            options.aggregation,
            num_tokens=denominators.policy_tokens,
            num_responses=denominators.responses,
            lengths_N=sampled.fixed_lengths_N,
        )
        loss = (weight_N * (correction_N * policy_loss_N + penalty_N)).sum()
        metrics, columns = measure_tokens(
            sampled,
            options,
            denominators,
            old_N=old_N,
            ratio_N=ratio_N.detach(),
            advantage_N=advantage_N.detach(),
            correction_N=correction_N,
            kl_N=None if kl_N is None else kl_N.detach(),
        )
        return LossResult(loss, metrics, columns)

    def _reference_kl(self, sampled: TokenTable) -> Tensor:
        """Return the KL divergence from the reference at each token, [N]."""
        options = self._options.kl
        assert sampled.reference_logprobs_N is not None
        policy_N = sampled.current_logprobs_N
        if options.apply_to == "reward":
            # In the reward, the KL is a constant, measured at the sampling policy, without a gradient.
            policy_N = sampled.recomputed_logprobs_N.detach()
        bound = options.log_ratio_clip
        return estimate_kl(policy_N, sampled.reference_logprobs_N, options.estimator, log_ratio_clip=bound)

    def _policy_loss(self, sampled: TokenTable, old_N: Tensor, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        """Return the policy loss of each token, [N].

        A user's function is called once for each response, so its result does not depend on micro-batches or ranks.

        Raises:
            UserError: the function does not return a tensor [S] that depends on `logprobs`.
        """
        options = self._options
        match options.policy_loss:
            case "clip":
                return clipped_surrogate(ratio_N, advantage_N, options.clip_low, options.clip_high, options.dual_clip)
            case "cispo":
                return cispo(sampled.current_logprobs_N, ratio_N, advantage_N, options.clip_low, options.clip_high)
        name = options.policy_loss.fn
        if self._policy_loss_fn is None:
            raise ValueError(f"no function was loaded for the policy loss {name!r}")
        # `bincount` gives 0 for responses without tokens; the function is not called for them.
        lengths = list(filter(None, torch.bincount(sampled.response_N).tolist()))
        columns_N = (sampled.current_logprobs_N, old_N, advantage_N.detach())
        split_columns = [torch.split(values_N, lengths) for values_N in columns_N]
        losses = []
        for logprobs_S, old_S, advantages_S in zip(*split_columns, strict=True):
            # Losses written for padded batches expect a mask. Here nothing is padded.
            mask_S = torch.ones_like(logprobs_S, dtype=torch.bool)
            loss_S = self._policy_loss_fn(logprobs_S, old_S, advantages_S, mask_S)
            _check_custom_loss(loss_S, logprobs_S, name)
            losses.append(loss_S)
        return torch.cat(losses)


def _check_custom_loss(loss_S: object, logprobs_S: Tensor, name: str) -> None:
    """Raise a UserError unless the function `name` returned a loss for each token, with a gradient."""
    if not isinstance(loss_S, Tensor) or loss_S.shape != logprobs_S.shape:
        returned = f"a tensor {list(loss_S.shape)}" if isinstance(loss_S, Tensor) else type(loss_S).__name__
        raise UserError(
            f"loss.policy_loss {name!r} returned {returned}; it must return the loss of each token, a tensor "
            f"{list(logprobs_S.shape)}, and leave sums and means to loss.aggregation"
        )
    if logprobs_S.requires_grad and not loss_S.requires_grad:
        raise UserError(
            f"loss.policy_loss {name!r} returned a tensor without gradient; compute it from `logprobs`, "
            "without `detach` or `torch.no_grad`"
        )
