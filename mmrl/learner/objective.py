"""The objective: from the log-probs of a micro-batch to its part of the step's loss, and what there is to say of it.

Letters: N learned tokens of a micro-batch, the policy's and a teacher's, response after response in the order of its
experiences; T those of them that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.algo.losses import (
    aggregation_weights,
    cispo,
    clipped_surrogate,
    estimate_kl,
    importance_ratios,
    mask_weights,
    sequence_sums,
    suffix_sums,
    truncate_weights,
)
from mmrl.algo.schedule import coefficient
from mmrl.config.schema import LossConfig
from mmrl.types import Author, Experience, FinishReason


class LossInputs(NamedTuple):
    """Nats, float32 [N]: the policy's log-probs (with gradient) and entropies (with, where there is a bonus on them);
    log-probs at the step's start, before its first update; those of the reference, where there is one.
    """

    logprobs_N: Tensor
    entropies_N: Tensor
    recomputed_logprobs_N: Tensor
    reference_logprobs_N: Tensor | None


class LossDenominators(NamedTuple):
    """What a whole optimizer step divides by: counted over all its micro-batches, and summed over ranks, beforehand.

    Tokens sampled by the policy, and those of them that are not of an earlier step; responses sampled by it; a
    teacher's tokens, and the policy's own that it imitates.
    """

    policy_tokens: int
    fresh_tokens: int
    responses: int
    demonstration_tokens: int
    sft_loss_tokens: int


class Objective:
    """The loss of a stage of `total_steps` steps."""

    def __init__(self, options: LossConfig, total_steps: int) -> None:
        self._options, self._total_steps = options, total_steps

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL penalty."""
        return self._options.kl.coef > 0.0

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether there is an entropy bonus."""
        return self._options.entropy.coef > 0.0

    def mask(self, experiences: Sequence[Experience]) -> list[Experience]:
        """The experiences that take part at all: without truncated ones, where these are masked.

        Raises:
            ValueError: an advantage is not finite.
        """
        for experience in experiences:
            if not isfinite(experience.advantage):
                rollout = experience.rollout
                raise ValueError(
                    f"sample {rollout.prompt.sample.id}, rollout {rollout.index}: advantage {experience.advantage} is "
                    "not finite"
                )
        masks = self._options.mask_truncated
        return [e for e in experiences if not (masks and e.rollout.finish_reason is FinishReason.LENGTH)]

    def count_denominators(self, experiences: Sequence[Experience]) -> LossDenominators:
        """The denominators of a step over admitted experiences, whether they are run or not."""
        tokens = [_LossTokens.from_experiences([experience], self._options) for experience in experiences]
        return LossDenominators(
            policy_tokens=sum(int(of_one.is_policy_N.sum()) for of_one in tokens),
            fresh_tokens=sum(int((of_one.is_policy_N & of_one.is_fresh_N).sum()) for of_one in tokens),
            responses=sum(any(s.author is Author.POLICY for s in e.rollout.segments) for e in experiences),
            demonstration_tokens=sum(int(of_one.is_demonstration_N.sum()) for of_one in tokens),
            sft_loss_tokens=sum(int(of_one.in_sft_loss_N.sum()) for of_one in tokens),
        )

    def has_gradient(self, experience: Experience) -> bool:
        """Whether an experience can move a weight; one that cannot need not be run, but counts."""
        written = {segment.author for segment in experience.rollout.segments if segment.token_ids}
        always = self.needs_reference or self.has_entropy_bonus
        if Author.DEMONSTRATION in written or (Author.POLICY in written and (experience.advantage != 0.0 or always)):
            return True
        return any(token.in_sft_loss for token in _loss_tokens(experience, self._options))

    def __call__(
        self, experiences: Sequence[Experience], inputs: LossInputs, denominators: LossDenominators, *, step: int
    ) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's part of the loss, and of the step's metrics: to be summed, but for `_max` and `_min`."""
        tokens = _LossTokens.from_experiences(experiences, self._options).to(inputs.logprobs_N.device)
        loss = inputs.logprobs_N.new_zeros(())
        metrics: dict[str, float] = {}
        if denominators.demonstration_tokens:
            loss = loss - inputs.logprobs_N[tokens.is_demonstration_N].sum() / denominators.demonstration_tokens
        if denominators.sft_loss_tokens:
            nll = -inputs.logprobs_N[tokens.in_sft_loss_N].sum() / denominators.sft_loss_tokens
            options = self._options.sft_loss
            loss = loss + coefficient(step, total=self._total_steps, options=options) * nll
            metrics["learner/sft_loss_nats"] = float(nll.detach())
        if tokens.is_policy_N.any():
            part, said = self._policy_loss(
                tokens.select(tokens.is_policy_N), _select_tokens(inputs, tokens.is_policy_N), denominators, step
            )
            loss, metrics = loss + part, metrics | said
        return loss, metrics

    def _policy_loss(
        self, tokens: _LossTokens, inputs: LossInputs, denominators: LossDenominators, step: int
    ) -> tuple[Tensor, dict[str, float]]:
        """The policy term with its penalty and bonus, over the policy's own tokens alone."""
        options = self._options
        old_T = torch.where(
            tokens.use_rollout_logprobs_N, tokens.rollout_logprobs_N, inputs.recomputed_logprobs_N
        ).detach()
        ratio_T = importance_ratios(
            self._clip_log_ratio(inputs.logprobs_N - old_T), tokens.sequence_index_N, options.importance_ratio_level
        )
        weight_T = self._rollout_correction(old_T - tokens.rollout_logprobs_N, tokens.sequence_index_N)
        advantage_T, loss_T = tokens.advantages_N, torch.zeros_like(ratio_T)
        metrics = self._token_metrics(tokens, inputs, ratio_T, weight_T, denominators)
        if inputs.reference_logprobs_N is not None:
            weighs = coefficient(step, total=self._total_steps, options=options.kl)
            in_reward = options.kl.apply_to == "reward"
            logps_T = inputs.recomputed_logprobs_N.detach() if in_reward else inputs.logprobs_N
            kl_T = estimate_kl(
                logps_T, inputs.reference_logprobs_N, options.kl.estimator, log_ratio_clip=options.kl.log_ratio_clip
            )
            metrics["policy/reference_kl_nats"] = float(kl_T.detach().sum()) / denominators.policy_tokens
            if in_reward:
                # What a token is charged for depends on the tokens before it: they bear it too, later ones do not.
                advantage_T = advantage_T - weighs * suffix_sums(kl_T, tokens.sequence_index_N)
            else:
                loss_T = loss_T + weighs * kl_T
        if self.has_entropy_bonus:
            loss_T = loss_T - coefficient(step, total=self._total_steps, options=options.entropy) * inputs.entropies_N
        if options.policy_loss == "cispo":
            policy_T = cispo(inputs.logprobs_N, ratio_T, advantage_T, options.clip_low, options.clip_high)
        else:
            policy_T = clipped_surrogate(ratio_T, advantage_T, options.clip_low, options.clip_high, options.dual_clip)
        share_T = aggregation_weights(
            tokens.sequence_index_N,
            options.aggregation,
            num_tokens=denominators.policy_tokens,
            num_sequences=denominators.responses,
            lengths_N=tokens.fixed_lengths_N,
        )
        return ((loss_T + weight_T * policy_T) * share_T).sum(), metrics

    def _clip_log_ratio(self, log_ratio_T: Tensor) -> Tensor:
        """StableReinforce's pre-clip (R1-Reward, arXiv:2505.02835, eq. 5): no exponential of a large number."""
        most = self._options.log_ratio_clip
        return log_ratio_T if most is None else log_ratio_T.clamp(-most, most)

    def _rollout_correction(self, log_weight_T: Tensor, sequence_T: Tensor) -> Tensor:
        """Importance weights of the learner at the step's start against the sampler, without gradient; 1 where off."""
        options = self._options.rollout_correction
        if options.method == "none":
            return torch.ones_like(log_weight_T)
        log_weight_T = log_weight_T.detach()
        if options.level == "sequence":
            log_weight_T = sequence_sums(log_weight_T, sequence_T)
        weight_T = log_weight_T.exp()
        if options.method == "tis":
            return truncate_weights(weight_T, options.high)
        return mask_weights(weight_T, options.low, options.high)

    def _token_metrics(
        self, tokens: _LossTokens, inputs: LossInputs, ratio_T: Tensor, weight_T: Tensor, denominators: LossDenominators
    ) -> dict[str, float]:
        """Means over the step's tokens, whatever the loss aggregates over."""
        ratio_T, logps_T = ratio_T.detach(), inputs.logprobs_N.detach()
        outside_T = (ratio_T < 1.0 - self._options.clip_low) | (ratio_T > 1.0 + self._options.clip_high)
        sums = {
            "policy/entropy_nats": inputs.entropies_N.detach(),
            "policy/clip_frac": outside_T,
        }
        if self._options.rollout_correction.method != "none":
            sums["policy/tis_weight_mean"] = weight_T
        means = {name: float(values_T.sum()) / denominators.policy_tokens for name, values_T in sums.items()}
        if denominators.fresh_tokens:  # rollouts of earlier steps say nothing about the sampler
            gap_T = (logps_T - tokens.rollout_logprobs_N).abs()[tokens.is_fresh_N]
            means["rollout/logprob_diff_mean"] = float(gap_T.sum()) / denominators.fresh_tokens
        extremes = {"policy/importance_ratio_max": ratio_T.max(), "policy/importance_ratio_min": ratio_T.min()}
        return means | {name: float(value) for name, value in extremes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossTokens:
    """What experiences say of their learned tokens, each [N]."""

    sequence_index_N: Tensor
    is_policy_N: Tensor
    is_demonstration_N: Tensor
    in_sft_loss_N: Tensor
    use_rollout_logprobs_N: Tensor
    is_fresh_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    fixed_lengths_N: Tensor

    @staticmethod
    def from_experiences(experiences: Sequence[Experience], options: LossConfig) -> _LossTokens:
        """From experiences, in their order; `lengths_N` is what `aggregate: fixed` divides by."""
        learned = [list(_loss_tokens(experience, options)) for experience in experiences]
        counts = torch.tensor([len(tokens) for tokens in learned])
        lengths = [float(options.fixed_length or e.rollout.sampling_params.max_new_tokens) for e in experiences]
        tokens = [token for of_one in learned for token in of_one]
        sequence_N = torch.arange(len(experiences)).repeat_interleave(counts)
        return _LossTokens(
            sequence_index_N=sequence_N,
            is_policy_N=torch.tensor([token.author is Author.POLICY for token in tokens], dtype=torch.bool),
            is_demonstration_N=torch.tensor(
                [token.author is Author.DEMONSTRATION for token in tokens], dtype=torch.bool
            ),
            in_sft_loss_N=torch.tensor([token.in_sft_loss for token in tokens], dtype=torch.bool),
            use_rollout_logprobs_N=torch.tensor(
                [(e.old_logprobs_source or options.old_logprobs) == "recorded" for e in experiences]
            )[sequence_N],
            is_fresh_N=torch.tensor([e.staleness == 0 for e in experiences])[sequence_N],
            rollout_logprobs_N=torch.tensor([token.rollout_logprob for token in tokens]),
            advantages_N=torch.tensor([e.advantage for e in experiences])[sequence_N],
            fixed_lengths_N=torch.tensor(lengths)[sequence_N],
        )

    def select(self, kept_N: Tensor) -> _LossTokens:
        """Some of the tokens."""
        return _LossTokens(**{field.name: getattr(self, field.name)[kept_N] for field in fields(self)})

    def to(self, device: torch.device) -> _LossTokens:
        """The same on another device."""
        return _LossTokens(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def _select_tokens(inputs: LossInputs, kept_N: Tensor) -> LossInputs:
    reference_N = None if inputs.reference_logprobs_N is None else inputs.reference_logprobs_N[kept_N]
    return LossInputs(
        inputs.logprobs_N[kept_N], inputs.entropies_N[kept_N], inputs.recomputed_logprobs_N[kept_N], reference_N
    )


class _LossToken(NamedTuple):
    author: Author
    rollout_logprob: float
    in_sft_loss: bool


def _loss_tokens(experience: Experience, options: LossConfig) -> Iterator[_LossToken]:
    """The learned tokens, and whether the NLL term teaches them too: VL-Rethinker (arXiv:2504.08837), where a forced
    second look ended right.
    """
    begun = options.sft_loss.on == "response"
    good = options.sft_loss.coef > 0.0 and (
        experience.advantage > 0.0 if begun else bool(experience.rollout.is_correct)
    )
    for segment in experience.rollout.segments:
        begun = begun or segment.author is Author.FORCED
        if segment.author in (Author.POLICY, Author.DEMONSTRATION):
            imitated = good and begun and segment.author is Author.POLICY
            yield from (_LossToken(segment.author, logp, imitated) for logp in segment.logprobs)
