"""The loss of a micro-batch, from the log-probs of its tokens, as its share of the loss of a whole optimizer step.

Suffixes of tensor names, response after response in the order of the experiences:

    N   trained tokens of a micro-batch, sampled by the policy or demonstrated
    T   those of them that the policy sampled
    S   those of them that the policy sampled in one response

Log-probs, log ratios and entropies are in nats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.algo.losses import (
    aggregation_weights,
    cispo,
    clipped_surrogate,
    coefficient,
    estimate_kl,
    importance_ratios,
    mask_weights,
    sequence_sums,
    suffix_sums,
    truncate_weights,
)
from mmrl.config.schema import CustomPolicyLossConfig, LossConfig
from mmrl.types import TRAINED_AUTHORS, Author, Experience, FinishReason, UserError, WorstToken
from mmrl.utils.plugins import load_plugin

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Policy loss of the user's own, called once for each response with float32 tensors [S] and a bool mask [S].

(logprobs, old_logprobs, advantages, mask) -> loss of each token, [S]. Gradients flow through logprobs alone.
"""


SAMPLER_DIFFS = ("rollout/logprob_diff_mean", "rollout/stale_logprob_diff_mean", "rollout/logprob_diff_max")
"""Differences of sampler and learner: means over tokens of this policy version and of the one before, and the largest.

Before the update, the former differ by the engine alone, the latter by what one step has changed too.
"""


class LossInputs(NamedTuple):
    """Outputs of the models for the tokens of a micro-batch, float32 [N]."""

    logprobs_N: Tensor
    """Log-probs under the policy as it is now, with gradient."""
    entropies_N: Tensor
    """Entropies of the policy's next-token distributions, with gradient."""
    recomputed_logprobs_N: Tensor
    """Log-probs under the policy before the first update of the step; not read unless `needs_initial_logprobs`."""
    reference_logprobs_N: Tensor | None
    """Log-probs under the reference; None without a KL penalty."""


class LossDenominators(NamedTuple):
    """Counts over all micro-batches of an optimizer step and all ranks, which the loss and its metrics divide by.

    They are counted before the first micro-batch runs, so the gradient of a step does not depend on how it is cut.
    """

    policy_tokens: int
    """Tokens sampled by the policy, run or not: the loss is a mean over all of them."""
    run_tokens: int
    """Those of them in responses with a gradient, which alone are run: metrics are means over these."""
    recent_run_tokens: tuple[int, int]
    """Those of the tokens that are run that the current policy version sampled, and that the one before it did."""
    responses: int
    """Responses with a segment sampled by the policy."""
    demonstration_tokens: int
    sft_loss_tokens: int
    """Tokens sampled by the policy that `loss.sft_loss` trains on."""

    @property
    def scored_tokens(self) -> int:
        """Tokens that the policy scores: those that it sampled, in responses with a gradient, and demonstrated ones."""
        return self.run_tokens + self.demonstration_tokens


class Objective:
    """The loss of a stage: policy loss, KL penalty, entropy bonus, and likelihood of demonstrations."""

    def __init__(self, options: LossConfig, total_steps: int, policy_loss_fn: PolicyLossFn | None = None) -> None:
        """Set up the loss of a stage of `total_steps`, over which schedules of coefficients run.

        `policy_loss_fn` comes from `load_policy_loss`.
        """
        if isinstance(options.policy_loss, CustomPolicyLossConfig) != (policy_loss_fn is not None):
            raise ValueError(f"loss.policy_loss is {options.policy_loss!r}, but its function is {policy_loss_fn!r}")
        self._options, self._total_steps, self._policy_loss_fn = options, total_steps, policy_loss_fn
        self.needs_reference = options.kl.coef > 0.0
        """True if there is a KL penalty."""
        self.has_entropy_bonus = options.entropy.coef > 0.0
        """True if there is an entropy bonus."""

    def mask(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the experiences that enter the loss and its denominators: all, or all but truncated ones.

        Raises:
            ValueError: an advantage is not finite.
        """
        for experience in experiences:
            if not isfinite(experience.advantage):
                rollout = experience.rollout
                owner = f"sample {rollout.prompt.sample.id}, rollout {rollout.index}"
                raise ValueError(f"{owner}: advantage {experience.advantage} is not finite")
        if not self._options.mask_truncated:
            return list(experiences)
        return [experience for experience in experiences if experience.rollout.finish_reason is not FinishReason.LENGTH]

    def has_gradient(self, experience: Experience) -> bool:
        """Return False if no term of the loss gives the experience a gradient; it is then counted but not run."""
        authors = {segment.author for segment in experience.rollout.segments if segment.token_ids}
        if Author.DEMONSTRATION in authors:
            return True
        # The built-in policy losses are proportional to the advantage; a function of the user's own need not be.
        regardless_of_advantage = self.needs_reference or self.has_entropy_bonus or self._policy_loss_fn is not None
        if Author.POLICY in authors and (experience.advantage != 0.0 or regardless_of_advantage):
            return True
        return any(token.in_sft_loss for token in _iter_loss_tokens(experience, self._options))

    def needs_initial_logprobs(self, experiences: Sequence[Experience]) -> bool:
        """Return True if the loss compares with the learner's log-probs before the first update of the step."""
        # The penalty in the reward is that of the policy which sampled, as close as the learner can tell.
        if self.needs_reference and self._options.kl.apply_to == "reward":
            return True
        sources = {experience.old_logprobs_source or self._options.old_logprobs for experience in experiences}
        return "recomputed" in sources

    def count_denominators(self, experiences: Sequence[Experience]) -> LossDenominators:
        """Count what loss and metrics of a step divide by, over experiences that `mask` returned, run or not."""
        policy_tokens = responses = demonstration_tokens = sft_loss_tokens = 0
        run_tokens: Counter[int] = Counter()  # by age
        for experience in experiences:
            authors = {segment.author for segment in experience.rollout.segments}
            responses += Author.POLICY in authors
            is_run = self.has_gradient(experience)
            for token in _iter_loss_tokens(experience, self._options):
                is_policy = token.author is Author.POLICY
                policy_tokens += is_policy
                run_tokens[token.age] += is_policy and is_run
                demonstration_tokens += token.author is Author.DEMONSTRATION
                sft_loss_tokens += token.in_sft_loss
        counts = (policy_tokens, run_tokens.total(), (run_tokens[0], run_tokens[1]))
        return LossDenominators(*counts, responses, demonstration_tokens, sft_loss_tokens)

    def __call__(
        self, experiences: Sequence[Experience], inputs: LossInputs, denominators: LossDenominators, *, step: int
    ) -> tuple[Tensor, dict[str, float]]:
        """Return this micro-batch's share of the loss, a scalar, and of the metrics; `step` counts from 0 in the stage.

        Shares of a step add up, but for metrics in `_max` and `_min`, of which the extreme is taken. `inputs` are in
        the order of the tokens of `experiences`, `denominators` those of the whole step.
        """
        tokens = _collect_loss_tokens(experiences, self._options, inputs.logprobs_N.device)
        loss = inputs.logprobs_N.new_zeros(())
        metrics: dict[str, float] = {}
        if denominators.demonstration_tokens:
            loss = loss - inputs.logprobs_N[tokens.is_demonstration_N].sum() / denominators.demonstration_tokens
        if denominators.sft_loss_tokens:
            nll = -inputs.logprobs_N[tokens.in_sft_loss_N].sum() / denominators.sft_loss_tokens
            loss = loss + coefficient(step, total=self._total_steps, options=self._options.sft_loss) * nll
            metrics["learner/sft_loss_nats"] = float(nll.detach())
        if tokens.is_policy_N.any():
            policy_tokens = _LossTokens._make(values_N[tokens.is_policy_N] for values_N in tokens)
            # None is the reference's place where there is no KL penalty.
            policy_inputs = LossInputs._make(
                None if values_N is None else values_N[tokens.is_policy_N] for values_N in inputs
            )
            rl_loss, ratio_T, rl_metrics = self._rl_loss(policy_tokens, policy_inputs, denominators, step)
            loss, metrics = loss + rl_loss, metrics | rl_metrics
            metrics["policy/importance_ratio_max"] = _worst_token(ratio_T, policy_tokens, experiences)
            metrics |= _sampler_metrics(policy_inputs.logprobs_N.detach(), policy_tokens, experiences, denominators)
        return loss, metrics

    def _rl_loss(
        self, tokens: _LossTokens, inputs: LossInputs, denominators: LossDenominators, step: int
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return policy loss, KL penalty and entropy bonus over sampled tokens, their ratios [T], and metrics."""
        options = self._options
        recorded_T, recomputed_T = tokens.rollout_logprobs_N, inputs.recomputed_logprobs_N
        old_T = torch.where(tokens.use_recorded_logprobs_N, recorded_T, recomputed_T).detach()
        log_ratio_T = inputs.logprobs_N - old_T
        if options.log_ratio_clip is not None:
            # So that no exponential is taken of a large number: StableReinforce (R1-Reward, arXiv:2505.02835, eq. 5).
            log_ratio_T = log_ratio_T.clamp(-options.log_ratio_clip, options.log_ratio_clip)
        ratio_T = importance_ratios(log_ratio_T, tokens.sequence_index_N, options.importance_ratio_level)
        correction_T = self._rollout_correction(old_T - tokens.rollout_logprobs_N, tokens.sequence_index_N)
        advantage_T, penalty_T = tokens.advantages_N, torch.zeros_like(ratio_T)
        metrics: dict[str, float] = {}
        if inputs.reference_logprobs_N is not None:
            # In the reward, the KL is a fact about the policy that sampled: that of the step's start, without gradient.
            kl_of_T = inputs.recomputed_logprobs_N.detach() if options.kl.apply_to == "reward" else inputs.logprobs_N
            kl_T = estimate_kl(
                kl_of_T, inputs.reference_logprobs_N, options.kl.estimator, log_ratio_clip=options.kl.log_ratio_clip
            )
            kl_coefficient = coefficient(step, total=self._total_steps, options=options.kl)
            metrics["policy/reference_kl_nats"] = float(kl_T.detach().sum()) / denominators.run_tokens
            if options.kl.apply_to == "reward":
                # The KL at a token depends on the tokens before it: they bear it too, and later tokens do not.
                advantage_T = advantage_T - kl_coefficient * suffix_sums(kl_T, tokens.sequence_index_N)
            else:
                penalty_T = penalty_T + kl_coefficient * kl_T
        if self.has_entropy_bonus:
            entropy_coefficient = coefficient(step, total=self._total_steps, options=options.entropy)
            penalty_T = penalty_T - entropy_coefficient * inputs.entropies_N
        metrics |= self._token_metrics(
            tokens,
            inputs,
            denominators,
            old_T=old_T,
            ratio_T=ratio_T.detach(),
            advantage_T=advantage_T.detach(),
            correction_T=correction_T,
        )
        policy_loss_T = self._policy_loss(inputs.logprobs_N, old_T, ratio_T, advantage_T, tokens.sequence_index_N)
        weight_T = aggregation_weights(
            tokens.sequence_index_N,
            options.aggregation,
            num_tokens=denominators.policy_tokens,
            num_sequences=denominators.responses,
            lengths_N=tokens.fixed_lengths_N,
        )
        return ((penalty_T + correction_T * policy_loss_T) * weight_T).sum(), ratio_T.detach(), metrics

    def _policy_loss(
        self, logprobs_T: Tensor, old_T: Tensor, ratio_T: Tensor, advantage_T: Tensor, sequence_T: Tensor
    ) -> Tensor:
        options = self._options
        if self._policy_loss_fn is not None:
            return self._custom_policy_loss(self._policy_loss_fn, logprobs_T, old_T, advantage_T, sequence_T)
        if options.policy_loss == "cispo":
            return cispo(logprobs_T, ratio_T, advantage_T, options.clip_low, options.clip_high)
        return clipped_surrogate(ratio_T, advantage_T, options.clip_low, options.clip_high, options.dual_clip)

    def _custom_policy_loss(
        self, policy_loss_fn: PolicyLossFn, logprobs_T: Tensor, old_T: Tensor, advantage_T: Tensor, sequence_T: Tensor
    ) -> Tensor:
        """Call the user's function once for each response, so that it cannot depend on micro-batches or ranks.

        Raises:
            UserError: it returns no tensor [S], or one that `logprobs` has no influence on.
        """
        # Tokens of a response are adjacent. `bincount` counts responses without tokens too: there is nothing to call.
        lengths = list(filter(None, torch.bincount(sequence_T).tolist()))
        columns = [torch.split(values_T, lengths) for values_T in (logprobs_T, old_T, advantage_T.detach())]
        name = getattr(self._options.policy_loss, "fn", "")
        losses = []
        for logprobs_S, old_S, advantages_S in zip(*columns, strict=True):
            # Losses written for padded batches expect a mask. Here nothing is padded.
            mask_S = torch.ones_like(logprobs_S, dtype=torch.bool)
            loss_S = policy_loss_fn(logprobs_S, old_S, advantages_S, mask_S)
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
            losses.append(loss_S)
        return torch.cat(losses)

    def _rollout_correction(self, log_weight_T: Tensor, sequence_T: Tensor) -> Tensor:
        """Return importance weights of the learner at the step's start against the sampler, without gradient.

        `log_weight_T` are log-probs of the learner minus those of the sampler.
        """
        options = self._options.rollout_correction
        if options.method == "none":
            return torch.ones_like(log_weight_T)
        # A weight, not a path for the gradient: it corrects for tokens that are drawn already.
        log_weight_T = log_weight_T.detach()
        if options.level == "sequence":
            log_weight_T = sequence_sums(log_weight_T, sequence_T)
        weight_T = log_weight_T.exp()
        if options.method == "tis":
            return truncate_weights(weight_T, options.high)
        return mask_weights(weight_T, options.low, options.high)

    def _token_metrics(
        self,
        tokens: _LossTokens,
        inputs: LossInputs,
        denominators: LossDenominators,
        *,
        old_T: Tensor,
        ratio_T: Tensor,
        advantage_T: Tensor,
        correction_T: Tensor,
    ) -> dict[str, float]:
        """Return means over the tokens that are run, whatever the loss aggregates over, and the least ratio.

        A token counts as clipped where the bound changes its loss, as in TRL (`clip_ratio/low_mean`, `high_mean`) and
        verl (`pg_clipfrac`; `pg_clipfrac_lower` is our `policy/clip_frac_dual`).

        Source of `policy/approx_kl`: Schulman, "Approximating KL Divergence" (2020), the estimator k3 of
        KL(old || policy) at tokens drawn from old: (r - 1) - log r with r = exp(logprob - old log-prob).
        """
        options, logprobs_T = self._options, inputs.logprobs_N.detach()
        # The minimum of the clipped policy loss takes the bound only where it makes the gain smaller. CISPO's bounds
        # replace the ratio whatever the sign of the advantage; TRL counts those with A > 0 alone.
        is_cispo = options.policy_loss == "cispo"
        low_matters_T = (advantage_T != 0.0) if is_cispo else (advantage_T < 0.0)
        high_matters_T = (advantage_T != 0.0) if is_cispo else (advantage_T > 0.0)
        is_low_T = (ratio_T < 1.0 - options.clip_low) & low_matters_T
        is_high_T = (ratio_T > 1.0 + options.clip_high) & high_matters_T
        count = denominators.run_tokens
        metrics = {
            "policy/entropy_nats": float(inputs.entropies_N.detach().sum()) / count,
            # Of each token's own ratio, whatever `importance_ratio_level` and `log_ratio_clip` make of it in the loss.
            "policy/approx_kl": float(estimate_kl(old_T, logprobs_T, "k3").sum()) / count,
            "policy/clip_frac": float((is_low_T | is_high_T).sum()) / count,
            "policy/clip_frac_low": float(is_low_T.sum()) / count,
            "policy/clip_frac_high": float(is_high_T.sum()) / count,
            "policy/importance_ratio_min": float(ratio_T.min()),
        }
        if options.dual_clip is not None:
            is_dual_T = (ratio_T > options.dual_clip) & (advantage_T < 0.0)
            metrics["policy/clip_frac_dual"] = float(is_dual_T.sum()) / count
        if options.rollout_correction.method != "none":
            metrics["policy/tis_weight_mean"] = float(correction_T.sum()) / count
        return metrics


def _sampler_metrics(
    logprobs_T: Tensor, tokens: _LossTokens, experiences: Sequence[Experience], denominators: LossDenominators
) -> dict[str, float]:
    """Return this micro-batch's share of `SAMPLER_DIFFS`."""
    difference_T = (logprobs_T - tokens.rollout_logprobs_N).abs()
    metrics: dict[str, float] = {}
    for age, count in enumerate(denominators.recent_run_tokens):
        if count:
            metrics[SAMPLER_DIFFS[age]] = float(difference_T.where(tokens.age_N == age, 0.0).sum()) / count
    if metrics:
        metrics[SAMPLER_DIFFS[-1]] = _worst_token(difference_T.where(tokens.age_N <= 1, 0.0), tokens, experiences)
    return metrics


def _worst_token(values_T: Tensor, tokens: _LossTokens, experiences: Sequence[Experience]) -> WorstToken:
    """Return the largest value, with the rollout of its token."""
    index = values_T.argmax()
    value, sequence_index = torch.stack([values_T[index], tokens.sequence_index_N[index].to(values_T)]).tolist()
    rollout = experiences[int(sequence_index)].rollout
    sample = rollout.prompt.sample
    worst = WorstToken(value)
    worst.owner = f"rollout {rollout.index} of {sample.modality} sample {sample.id}"
    return worst


def load_policy_loss(options: LossConfig, base_dir: Path) -> PolicyLossFn | None:
    """Load the function that `loss.policy_loss` names, with its options bound; None for a built-in policy loss.

    Raises:
        UserError: the file cannot be imported, or has no such function with these options.
    """
    if not isinstance(options.policy_loss, CustomPolicyLossConfig):
        return None
    return load_plugin(
        options.policy_loss.fn,
        base_dir,
        options.policy_loss.args,
        role="policy loss",
        parameters=("logprobs", "old_logprobs", "advantages", "mask"),
    )


class _LossTokens(NamedTuple):
    """Facts about the trained tokens of a micro-batch that need no model, each [N]."""

    sequence_index_N: Tensor
    """Index of the response that a token belongs to, int64."""
    is_policy_N: Tensor
    """Sampled by the policy, bool."""
    is_demonstration_N: Tensor
    """Part of a demonstration, bool."""
    in_sft_loss_N: Tensor
    """Trained by `loss.sft_loss`, bool."""
    use_recorded_logprobs_N: Tensor
    """Old log-prob of the importance ratio, bool: True for the one recorded in sampling, False for the recomputed one.

    It depends on the kind of rollout:

    - `loss.old_logprobs` for a rollout of the current policy;
    - `replay.old_logprobs` for a replayed one;
    - the recorded one for a rollout of older weights (asynchronous or partial rollouts), but the recomputed one with
      `loss.rollout_correction`, which requires `loss.old_logprobs: recomputed`;
    - the recorded one for a group that was carried over from an earlier step.

    The choice for all but the first kind arrives as `Experience.old_logprobs_source`.
    """
    age_N: Tensor
    """Policy versions between sampling and learning, int64; a partial rollout has tokens of several ages."""
    rollout_logprobs_N: Tensor
    """Log-prob recorded in sampling, float32; 0 in a demonstration."""
    advantages_N: Tensor
    """Advantage of the response, float32."""
    fixed_lengths_N: Tensor
    """Length that `aggregation: fixed` divides by, float32."""


def _collect_loss_tokens(experiences: Sequence[Experience], options: LossConfig, device: torch.device) -> _LossTokens:
    """Return the trained tokens of experiences, in their order."""
    tokens: list[_LossToken] = []
    counts, uses_recorded, advantages, fixed_lengths = [], [], [], []
    for experience in experiences:
        own = list(_iter_loss_tokens(experience, options))
        tokens += own
        counts.append(len(own))
        # Which of the two, and why: see `_LossTokens.use_recorded_logprobs_N`.
        source = experience.old_logprobs_source or options.old_logprobs
        uses_recorded.append(source == "recorded")
        advantages.append(experience.advantage)
        fixed_lengths.append(float(options.fixed_length or experience.rollout.sampling_params.max_new_tokens))
    authors = [token.author for token in tokens]
    sequence_N = torch.arange(len(experiences)).repeat_interleave(torch.tensor(counts))
    # Of an empty list torch would make float32, so bool is spelled out.
    collected = _LossTokens(
        sequence_index_N=sequence_N,
        is_policy_N=torch.tensor([author is Author.POLICY for author in authors], dtype=torch.bool),
        is_demonstration_N=torch.tensor([author is Author.DEMONSTRATION for author in authors], dtype=torch.bool),
        in_sft_loss_N=torch.tensor([token.in_sft_loss for token in tokens], dtype=torch.bool),
        use_recorded_logprobs_N=torch.tensor(uses_recorded)[sequence_N],
        age_N=torch.tensor([token.age for token in tokens], dtype=torch.int64),
        rollout_logprobs_N=torch.tensor([token.rollout_logprob for token in tokens]),
        advantages_N=torch.tensor(advantages)[sequence_N],
        fixed_lengths_N=torch.tensor(fixed_lengths)[sequence_N],
    )
    return _LossTokens._make(values_N.to(device) for values_N in collected)


class _LossToken(NamedTuple):
    author: Author
    age: int
    rollout_logprob: float
    in_sft_loss: bool


def _iter_loss_tokens(experience: Experience, options: LossConfig) -> Iterator[_LossToken]:
    """Yield the trained tokens of an experience.

    `loss.sft_loss` trains the policy's tokens after a trigger if the continuation was correct, or all of them if the
    advantage is positive. Source of the former: VL-Rethinker, arXiv:2504.08837.
    """
    whole_response = options.sft_loss.on == "response"
    is_good = experience.advantage > 0.0 if whole_response else bool(experience.rollout.is_correct)
    has_sft_loss = options.sft_loss.coef > 0.0 and is_good
    has_begun = whole_response
    versions = [segment.version for segment in experience.rollout.segments if segment.author is Author.POLICY]
    # The staleness of a rollout is that of its oldest token.
    current_version = min(versions, default=0) + experience.staleness
    for segment in experience.rollout.segments:
        # The trigger opens the imitated part but is FORCED, so it is not trained itself.
        has_begun = has_begun or segment.author is Author.FORCED
        if segment.author in TRAINED_AUTHORS:
            in_sft_loss = has_sft_loss and has_begun and segment.author is Author.POLICY
            for logprob in segment.logprobs:
                yield _LossToken(segment.author, current_version - segment.version, logprob, in_sft_loss)
