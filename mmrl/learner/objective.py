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

from mmrl.algo import kl
from mmrl.algo.importance import masked, ratios, remaining_sums, sequence_sums, truncated
from mmrl.algo.loss import cispo, clipped_surrogate
from mmrl.algo.loss_aggregation import shares
from mmrl.algo.schedule import coefficient
from mmrl.config.schema import Loss
from mmrl.types import Author, Experience, Finish


class Scores(NamedTuple):
    """Nats, float32 [N]: the policy's log-probs (with gradient) and entropies (with, where there is a bonus on them);
    log-probs at the step's start, before its first update; those of the reference, where there is one.
    """

    logps_N: Tensor
    entropies_N: Tensor
    start_N: Tensor
    reference_N: Tensor | None


class Counts(NamedTuple):
    """What a whole optimizer step divides by: counted over all its micro-batches, and summed over ranks, beforehand.

    Tokens sampled by the policy, and those of them that are not of an earlier step; responses sampled by it; a
    teacher's tokens, and the policy's own that it imitates.
    """

    tokens: int
    fresh: int
    responses: int
    taught: int
    imitated: int


class Objective:
    """The loss of a stage of `total_steps` steps."""

    def __init__(self, options: Loss, total_steps: int) -> None:
        self._options, self._total_steps = options, total_steps

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL penalty."""
        return self._options.kl.coef > 0.0

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether there is an entropy bonus."""
        return self._options.entropy.coef > 0.0

    def admit(self, experiences: Sequence[Experience]) -> list[Experience]:
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
        return [e for e in experiences if not (masks and e.rollout.finish is Finish.LENGTH)]

    def count(self, experiences: Sequence[Experience]) -> Counts:
        """The denominators of a step over admitted experiences, whether they are run or not."""
        tokens = [_Tokens.of([experience], self._options) for experience in experiences]
        return Counts(
            tokens=sum(int(of_one.policy_N.sum()) for of_one in tokens),
            fresh=sum(int((of_one.policy_N & of_one.fresh_N).sum()) for of_one in tokens),
            responses=sum(any(s.author is Author.POLICY for s in e.rollout.segments) for e in experiences),
            taught=sum(int(of_one.teacher_N.sum()) for of_one in tokens),
            imitated=sum(int(of_one.imitated_N.sum()) for of_one in tokens),
        )

    def teaches(self, experience: Experience) -> bool:
        """Whether an experience can move a weight; one that cannot need not be run, but counts."""
        written = {segment.author for segment in experience.rollout.segments if segment.ids}
        always = self.needs_reference or self.has_entropy_bonus
        if Author.TEACHER in written or (Author.POLICY in written and (experience.advantage != 0.0 or always)):
            return True
        return any(token.imitated for token in _learned(experience, self._options))

    def __call__(
        self, experiences: Sequence[Experience], scores: Scores, counts: Counts, *, step: int
    ) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's part of the loss, and of the step's metrics: to be summed, but for `_max` and `_min`."""
        tokens = _Tokens.of(experiences, self._options).to(scores.logps_N.device)
        loss = scores.logps_N.new_zeros(())
        metrics: dict[str, float] = {}
        if counts.taught:
            loss = loss - scores.logps_N[tokens.teacher_N].sum() / counts.taught
        if counts.imitated:
            nll = -scores.logps_N[tokens.imitated_N].sum() / counts.imitated
            options = self._options.nll
            loss = loss + coefficient(step, total=self._total_steps, options=options) * nll
            metrics["learner/nll_nats"] = float(nll.detach())
        if tokens.policy_N.any():
            part, said = self._reinforce(tokens.only(tokens.policy_N), _only(scores, tokens.policy_N), counts, step)
            loss, metrics = loss + part, metrics | said
        return loss, metrics

    def _reinforce(self, tokens: _Tokens, scores: Scores, counts: Counts, step: int) -> tuple[Tensor, dict[str, float]]:
        """The policy term with its penalty and bonus, over the policy's own tokens alone."""
        options = self._options
        old_T = torch.where(tokens.from_sampler_N, tokens.behaviour_N, scores.start_N).detach()
        ratio_T = ratios(self._log_ratio(scores.logps_N - old_T), tokens.sequence_N, options.ratio)
        weight_T = self._weight(old_T - tokens.behaviour_N, tokens.sequence_N)
        advantage_T, loss_T = tokens.advantages_N, torch.zeros_like(ratio_T)
        metrics = self._watch(tokens, scores, ratio_T, weight_T, counts)
        if scores.reference_N is not None:
            weighs = coefficient(step, total=self._total_steps, options=options.kl)
            in_reward = options.kl.place == "reward"
            logps_T = scores.start_N.detach() if in_reward else scores.logps_N
            kl_T = kl.estimate(logps_T, scores.reference_N, options.kl.estimator, clamp=options.kl.clamp)
            metrics["learner/kl_nats"] = float(kl_T.detach().sum()) / counts.tokens
            if in_reward:
                # What a token is charged for depends on the tokens before it: they bear it too, later ones do not.
                advantage_T = advantage_T - weighs * remaining_sums(kl_T, tokens.sequence_N)
            else:
                loss_T = loss_T + weighs * kl_T
        if self.has_entropy_bonus:
            loss_T = loss_T - coefficient(step, total=self._total_steps, options=options.entropy) * scores.entropies_N
        if options.surrogate == "cispo":
            policy_T = cispo(scores.logps_N, ratio_T, advantage_T, options.clip_low, options.clip_high)
        else:
            policy_T = clipped_surrogate(ratio_T, advantage_T, options.clip_low, options.clip_high, options.dual_clip)
        share_T = shares(
            tokens.sequence_N,
            options.aggregate,
            tokens=counts.tokens,
            sequences=counts.responses,
            lengths_N=tokens.lengths_N,
        )
        return ((loss_T + weight_T * policy_T) * share_T).sum(), metrics

    def _log_ratio(self, log_ratio_T: Tensor) -> Tensor:
        """StableReinforce's pre-clip (R1-Reward, arXiv:2505.02835, eq. 5): no exponential of a large number."""
        most = self._options.log_ratio_clamp
        return log_ratio_T if most is None else log_ratio_T.clamp(-most, most)

    def _weight(self, log_weight_T: Tensor, sequence_T: Tensor) -> Tensor:
        """Importance weights of the learner at the step's start against the sampler, without gradient; 1 where off."""
        options = self._options.correction
        if options.kind == "none":
            return torch.ones_like(log_weight_T)
        log_weight_T = log_weight_T.detach()
        if options.level == "sequence":
            log_weight_T = sequence_sums(log_weight_T, sequence_T)
        weight_T = log_weight_T.exp()
        if options.kind == "truncate":
            return truncated(weight_T, options.high)
        return masked(weight_T, options.low, options.high)

    def _watch(
        self, tokens: _Tokens, scores: Scores, ratio_T: Tensor, weight_T: Tensor, counts: Counts
    ) -> dict[str, float]:
        """Means over the step's tokens, whatever the loss aggregates over."""
        ratio_T, logps_T = ratio_T.detach(), scores.logps_N.detach()
        outside_T = (ratio_T < 1.0 - self._options.clip_low) | (ratio_T > 1.0 + self._options.clip_high)
        sums = {
            "learner/entropy_nats": scores.entropies_N.detach(),
            "learner/clipped_frac": outside_T,
        }
        if self._options.correction.kind != "none":
            sums["learner/correction_mean"] = weight_T
        means = {name: float(values_T.sum()) / counts.tokens for name, values_T in sums.items()}
        if counts.fresh:  # rollouts of earlier steps say nothing about the sampler
            gap_T = (logps_T - tokens.behaviour_N).abs()[tokens.fresh_N]
            means["rollout/logp_gap_nats"] = float(gap_T.sum()) / counts.fresh
        extremes = {"learner/ratio_max": ratio_T.max(), "learner/ratio_min": ratio_T.min()}
        return means | {name: float(value) for name, value in extremes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """What experiences say of their learned tokens, each [N]."""

    sequence_N: Tensor
    policy_N: Tensor
    teacher_N: Tensor
    imitated_N: Tensor
    from_sampler_N: Tensor
    fresh_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    lengths_N: Tensor

    @staticmethod
    def of(experiences: Sequence[Experience], options: Loss) -> _Tokens:
        """From experiences, in their order; `lengths_N` is what `aggregate: fixed` divides by."""
        learned = [list(_learned(experience, options)) for experience in experiences]
        counts = torch.tensor([len(tokens) for tokens in learned])
        lengths = [float(options.fixed_length or e.rollout.law.max_new_tokens) for e in experiences]
        tokens = [token for of_one in learned for token in of_one]
        sequence_N = torch.arange(len(experiences)).repeat_interleave(counts)
        return _Tokens(
            sequence_N=sequence_N,
            policy_N=torch.tensor([token.author is Author.POLICY for token in tokens], dtype=torch.bool),
            teacher_N=torch.tensor([token.author is Author.TEACHER for token in tokens], dtype=torch.bool),
            imitated_N=torch.tensor([token.imitated for token in tokens], dtype=torch.bool),
            from_sampler_N=torch.tensor([(e.old or options.old) == "sampler" for e in experiences])[sequence_N],
            fresh_N=torch.tensor([e.age == 0 for e in experiences])[sequence_N],
            behaviour_N=torch.tensor([token.logp for token in tokens]),
            advantages_N=torch.tensor([e.advantage for e in experiences])[sequence_N],
            lengths_N=torch.tensor(lengths)[sequence_N],
        )

    def only(self, kept_N: Tensor) -> _Tokens:
        """Some of the tokens."""
        return _Tokens(**{field.name: getattr(self, field.name)[kept_N] for field in fields(self)})

    def to(self, device: torch.device) -> _Tokens:
        """The same on another device."""
        return _Tokens(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def _only(scores: Scores, kept_N: Tensor) -> Scores:
    reference_N = None if scores.reference_N is None else scores.reference_N[kept_N]
    return Scores(scores.logps_N[kept_N], scores.entropies_N[kept_N], scores.start_N[kept_N], reference_N)


class _Learned(NamedTuple):
    author: Author
    logp: float
    imitated: bool


def _learned(experience: Experience, options: Loss) -> Iterator[_Learned]:
    """The learned tokens, and whether the NLL term teaches them too: VL-Rethinker (arXiv:2504.08837), where a forced
    second look ended right.
    """
    begun = options.nll.on == "response"
    good = options.nll.coef > 0.0 and (experience.advantage > 0.0 if begun else bool(experience.rollout.right))
    for segment in experience.rollout.segments:
        begun = begun or segment.author is Author.TRIGGER
        if segment.author in (Author.POLICY, Author.TEACHER):
            imitated = good and begun and segment.author is Author.POLICY
            yield from (_Learned(segment.author, logp, imitated) for logp in segment.logps)
