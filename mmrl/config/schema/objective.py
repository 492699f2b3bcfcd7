"""What reinforcement optimises: from rewards to advantages, from advantages to a loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import DecayRate, Fraction, PositiveInt, StrictModel

PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class DifficultyWeightConfig(StrictModel):
    """A group's advantages times 4 factor p (1 - p): what the policy gets right half of the time weighs most."""

    term: str
    """The reward term, from 0 to 1, whose mean over the group is p."""
    max_weight: PositiveFloat = 1.0
    """The weight at p = 1/2."""


class AdvantageConfig(StrictModel):
    """A_i = (R_i - baseline) / scale."""

    combine: Literal["total", "per_term"] = "total"
    """R is the total reward; or every term has its own A, and these are summed by the terms' weights (GDPO)."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """What is subtracted; leave_one_out is the mean of the other rollouts of the group (RLOO)."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What divides: the standard deviation of R in the group (GRPO) or in the step, or nothing (Dr.GRPO)."""
    eps: PositiveFloat = 1e-4
    """Added to a standard deviation."""
    batch_normalize: bool = False
    """Then bring the advantages of the whole step to mean 0 and standard deviation 1 (REINFORCE++, GDPO)."""
    outlier_std: PositiveFloat | None = None
    """Then set to 0 those further than this many standard deviations from the step's mean (StableReinforce)."""
    difficulty_weight: DifficultyWeightConfig | None = None
    """Then weigh groups by how unsure the policy is of them (Observe-R1)."""
    fn: str | None = None
    """A function in place of `combine`, `baseline` and `scale`: `package.module:function` or `./file.py:function`. It
    gets one group's total rewards and reward terms, and returns an advantage for each rollout."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of that function."""

    @model_validator(mode="after")
    def _check_fn(self) -> AdvantageConfig:
        if self.fn is None and self.args:
            raise ValueError("`args` are the options of `fn`; set `fn`, or take them out")
        replaced = {"combine": "total", "baseline": "group_mean", "scale": "group_std"}
        for name, default in replaced.items():
            if self.fn is not None and getattr(self, name) != default:
                raise ValueError(
                    f"`fn` computes the advantages, so `{name}: {getattr(self, name)}` would have no effect; take it "
                    "out, or an `algorithm` that sets it"
                )
        return self


class LossCoefficientConfig(StrictModel):
    """The weight of a term of the loss, over the steps of the stage."""

    coef: NonNegativeFloat = 0.0
    """The weight at the first step; 0 leaves the term out."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight falls to `final_frac` of it at the last step."""
    final_frac: Fraction = 0.0
    """Share of the weight left at the last step."""


class KlConfig(LossCoefficientConfig):
    """The penalty for moving away from a reference."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(policy || reference) at a token, with d = log ref - log policy: -d, d^2/2 or exp(d) - d - 1."""
    apply_to: Literal["loss", "reward"] = "loss"
    """Added to the loss of each token; or subtracted from its reward, hence from the advantage of all before it."""
    log_ratio_clip: PositiveFloat | None = None
    """d is kept within +- this many nats (10 and 11 are in use); no gradient flows where it is not."""

    @model_validator(mode="after")
    def _check_k1_gradient(self) -> KlConfig:
        if self.coef and self.estimator == "k1" and self.apply_to == "loss":
            raise ValueError(
                "the gradient of k1 in the loss is 0 on average; use estimator k2 or k3, or `place: reward`"
            )
        return self


class SftLossConfig(LossCoefficientConfig):
    """Imitation of the policy's own good responses."""

    on: Literal["after_rethink", "response"] = "after_rethink"
    """What of them: what the policy wrote after a forced trigger where that ended right, by the step's own verdict
    (VL-Rethinker), or all it wrote where the advantage is positive."""


class RolloutCorrectionConfig(StrictModel):
    """Importance weight w = policy at the step's start / sampler, where the two compute different probabilities."""

    method: Literal["none", "tis", "mask"] = "none"
    """w at most `high` (truncated importance sampling); or 0 outside [low, high] (IcePop)."""
    level: Literal["token", "sequence"] = "token"
    """w of each token, or the product over the whole response."""
    low: NonNegativeFloat = 0.5
    """Lower bound, for `mask` alone."""
    high: PositiveFloat = 2.0
    """Upper bound."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RolloutCorrectionConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class LossConfig(StrictModel):
    """The clipped surrogate and what is added to it; `mmrl explain` writes it as a formula."""

    importance_ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """New to old probability: of each token; of the response, as the geometric mean over its tokens (GSPO); or that
    value with each token's own gradient (GSPO-token)."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """min(r A, clip(r) A) (PPO); or clip(r) A log policy, r without gradient: no token loses its own (CISPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low; 1 sets no lower bound."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Where A < 0, the ratio counts at most this much (3 is usual)."""
    log_ratio_clip: PositiveFloat | None = None
    """Keep log ratios of tokens within +- this before anything else; ln 1000 = 6.9 in StableReinforce."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """Mean over the tokens of the whole step (DAPO); mean of responses' means (GRPO as published); or sum over
    tokens by `fixed_length`, mean over responses (Dr.GRPO)."""
    fixed_length: PositiveInt | None = None
    """What `fixed` divides by; `sampling.max_new_tokens` when left out. 1 sums over tokens."""
    mask_truncated: bool = False
    """Leave out responses that hit max_new_tokens, here and in what is divided by; they stay in the baseline (DAPO)."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Whose probabilities stand below the ratio: those recorded in sampling, or the learner's at the step's start."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights for a sampler that computes other probabilities than the learner; needs `old: learner`."""
    kl: KlConfig = KlConfig()
    """The penalty for moving away from a reference; without weight no reference is kept."""
    entropy: LossCoefficientConfig = LossCoefficientConfig()
    """A bonus on the entropy of the next token."""
    sft_loss: SftLossConfig = SftLossConfig()
    """Imitation of good responses beside the policy term."""

    @model_validator(mode="after")
    def _check_options(self) -> LossConfig:
        if self.rollout_correction.method != "none" and self.old_logprobs == "recorded":
            raise ValueError(
                f"correction {self.rollout_correction.method!r} needs `old: learner`: with `old: sampler` the ratio is already "
                "between learner and sampler"
            )
        if self.dual_clip is not None and self.policy_loss == "cispo":
            raise ValueError("dual_clip bounds the clipped surrogate; cispo has `clip_high` for that")
        if self.fixed_length is not None and self.aggregation != "fixed":
            raise ValueError(f"fixed_length is for `aggregate: fixed`, not for {self.aggregation!r}")
        return self


class ReferenceConfig(StrictModel):
    """What the KL penalty measures from, and how that moves."""

    init_from: Literal["stage", "base"] = "stage"
    """It begins as the policy at the stage's start; or it is the model that the run was given, `model.lora`'s adapter
    off, which takes no memory."""
    update: Literal["never", "ema", "reset"] = "never"
    """Frozen; a running average of the policy; or the policy itself, taken anew (ProRL)."""
    update_every: PositiveInt = 1
    """Steps between updates."""
    ema_decay: DecayRate = 0.99
    """`ema`: share of the old reference that stays."""
    reset_optimizer: bool = False
    """`reset`: forget the optimizer's moments too."""

    @model_validator(mode="after")
    def _check_update(self) -> ReferenceConfig:
        if self.update == "reset" and self.update_every < 2:
            raise ValueError("a reference taken anew every step is the policy itself; set `every` to 2 or more")
        if self.init_from == "base" and self.update != "never":
            raise ValueError(f"`start: base` is a model that nothing changes; take out `update: {self.update}`")
        if self.reset_optimizer and self.update != "reset":
            raise ValueError(f"reset_optimizer is for `update: reset`, not for {self.update!r}")
        return self
