"""Sections `advantage`, `loss` and `reference` of an rl stage: what it optimises, with the formulas in words.

In formulas i counts the responses of a step, t the tokens of one response.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from mmrl.config.schema.base import (
    Coefficient,
    DecayRate,
    Fraction,
    FunctionConfig,
    Nats,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    StrictModel,
    find_choice_form,
)
from mmrl.config.schema.data import PlateauConfig


class DifficultyWeightConfig(StrictModel):
    """A factor on a group's advantages that depends on p, the fraction of its rollouts that succeed."""

    term: str
    """The reward term, from 0 to 1, whose mean over the group is p. A group to which the term does not apply keeps
    its advantages."""
    max_weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """The factor at p = 1/2."""
    curve: Literal["uncertain", "easy", "medium", "hard"] = "uncertain"
    """Factor / `max_weight`. `uncertain`: 4 p (1 - p) (Observe-R1). `medium`: sin(pi p). `easy`: 1 from p = 1/2
    on, below as `medium`. `hard`: 1 up to 1/2, above as `medium`, and 1/4 at p = 0 (VL-Cogito)."""


class AdvantageConfig(StrictModel):
    """A_i = (R_i - baseline) / scale."""

    combine: Literal["total", "per_term"] = "total"
    """`total`: R is the total reward. `per_term`: every reward term has its own A, summed by the terms' weights
    (GDPO)."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """The value subtracted from R; `leave_one_out` is the mean of the group's other rollouts (RLOO)."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """R - baseline is divided by this: the standard deviation of R in the group (GRPO) or in the step, or nothing
    (Dr.GRPO)."""
    eps: PositiveFraction = 1e-4  # as in TRL
    """Small number added to a standard deviation before dividing by it."""
    batch_normalize: bool = False
    """Then bring the advantages of the whole step to mean 0 and standard deviation 1 (REINFORCE++, GDPO)."""
    outlier_std: PositiveFloat | None = None
    """Advantages further from the step's mean than this many standard deviations become 0, after `batch_normalize` if
    that is on (StableReinforce)."""
    difficulty_weight: DifficultyWeightConfig | None = None
    """Then weight groups by the policy's uncertainty about them (Observe-R1)."""
    credit: Literal["broadcast", "to_go", "gigpo"] = "broadcast"
    """Advantages of single turns in an environment. `broadcast`: each turn has its rollout's advantage. `to_go`: a
    turn's advantage comes from the rewards from that turn on. `gigpo`: the rollout's advantage, plus `step_weight`
    times the advantage of the turn over the group's turns at an equal state (GiGPO)."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95  # as in GiGPO's scripts
    """Discount factor per turn on later rewards; `to_go` and `gigpo` use it."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn's own advantage in `gigpo`."""
    compare: Literal["turn", "group"] = "turn"
    """Turns that `to_go` compares. `turn`: a turn with the same turn of its siblings. `group`: all turns of a group."""
    fn: str | None = None
    """A function in place of `combine`, `baseline` and `scale`: `package.module:function` or `./file.py:function`. It
    gets one group's total rewards and reward terms, and returns an advantage for each rollout."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options that the function is called with."""

    @model_validator(mode="after")
    def _check_fn(self) -> AdvantageConfig:
        if self.fn is None and self.args:
            raise ValueError("`args` are the options of `fn`; set `fn`, or take them out")
        for name in ("combine", "baseline", "scale"):
            if self.fn is not None and not self.has_default(name):
                raise ValueError(
                    f"`fn` computes the advantages, so `{name}: {getattr(self, name)}` would have no effect; take it "
                    "out, or an `algorithm` that sets it"
                )
        return self

    @model_validator(mode="after")
    def _check_credit(self) -> AdvantageConfig:
        readers = {"discount": ("to_go", "gigpo"), "step_weight": ("gigpo",), "compare": ("to_go",)}
        for name, credits in readers.items():
            if self.credit not in credits and not self.has_default(name):
                raise ValueError(
                    f"`{name}: {getattr(self, name)}` has no effect with `credit: {self.credit}`; take it out, or set "
                    f"`credit` to {' or '.join(credits)}"
                )
        if self.credit == "broadcast":
            return self
        # These keys compare or change one advantage per rollout, and here each turn has its own.
        for name in ("scale", "batch_normalize", "combine", "baseline", "fn", "outlier_std", "difficulty_weight"):
            if not self.has_default(name) and (name, self.scale) != ("scale", "none"):
                raise ValueError(
                    f"`credit: {self.credit}` gives each turn its own advantage, which `{name}` is not defined "
                    f"for; leave `{name}` at its default, or use `credit: broadcast`"
                )
        return self

    @property
    def compares_within_group(self) -> bool:
        """True if an advantage depends on the other rollouts of its group; always False with a user's `fn`."""
        return self.fn is None and (self.baseline in ("group_mean", "leave_one_out") or self.scale == "group_std")


class LossCoefficientConfig(StrictModel):
    """The weight of a term of the loss over the steps of the stage."""

    coef: Coefficient = 0.0
    """Weight of the term at the first step; 0 leaves the term out."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """`constant` keeps the weight; other schedules lower it to `final_frac` of it by the last step."""
    final_frac: Fraction = 0.0
    """Share of the weight that is left at the last step."""
    decay_steps: PositiveInt | None = None
    """Steps of the stage after which the weight has fallen and stays constant; the stage's `steps` when left out."""

    @model_validator(mode="after")
    def _check_decay_steps(self) -> Self:
        for name in ("decay_steps", "final_frac"):
            if getattr(self, name) and self.schedule == "constant":
                raise ValueError(f"{name} has no effect on a constant weight; set `schedule`, or take it out")
        return self


class KlConfig(LossCoefficientConfig):
    """The penalty for moving away from a reference."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of KL(policy || reference) at a token, with d = log ref - log policy: -d, d²/2 or exp(d) - d - 1."""
    apply_to: Literal["loss", "reward"] = "loss"
    """`loss` adds it to the loss of each token; `reward` subtracts it from the token's reward, hence from the
    advantage of that token and all before it."""
    log_ratio_clip: Nats | None = None
    """Bound on |d|, in nats (10 and 11 are common). A token whose |d| exceeds it gets no gradient from this term."""

    @model_validator(mode="after")
    def _check_k1_gradient(self) -> KlConfig:
        # The gradient of -d is the gradient of log policy, whose mean under the policy is 0.
        if self.coef and self.estimator == "k1" and self.apply_to == "loss":
            raise ValueError(
                "the gradient of k1 in the loss is 0 on average; use estimator k2 or k3, or `apply_to: reward`"
            )
        return self


class SftLossConfig(LossCoefficientConfig):
    """A supervised loss on the policy's own good responses, beside the policy loss."""

    on: Literal["after_rethink", "response"] = "after_rethink"
    """`after_rethink`: the policy's tokens after a forced trigger, where the rethinking step found the continuation
    correct (VL-Rethinker). `response`: all tokens of the policy in responses with a positive advantage."""


class RolloutCorrectionConfig(StrictModel):
    """Importance weight w = policy at the step's start / sampler, for a sampler that computes other probabilities."""

    method: Literal["none", "tis", "mask"] = "none"
    """`tis` bounds w by `high` (truncated importance sampling); `mask` sets it to 0 outside [low, high] (IcePop)."""
    level: Literal["token", "sequence"] = "token"
    """w is computed for each token, or as the product over the whole response."""
    low: NonNegativeFloat = 0.5
    """w below this is set to 0; only `mask` uses it."""
    high: PositiveFloat = 2.0
    """`tis` sets w above this bound to the bound, `mask` sets it to 0."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RolloutCorrectionConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class CustomPolicyLossConfig(FunctionConfig):
    """A user's policy loss: `fn` returns the loss of each token (docs/extending/policy_loss.md).

    It is called with (logprobs, old_logprobs, advantages, mask) of a response.
    """


PolicyLossChoice = Annotated[
    Annotated[Literal["clip", "cispo"], Tag("name")] | Annotated[CustomPolicyLossConfig, Tag("function")],
    Discriminator(find_choice_form),
]


class LossConfig(StrictModel):
    """The policy loss and the terms added to it; `mmrl explain` writes it as a formula."""

    importance_ratio_level: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability: of each token, or of the response, as the geometric mean over its tokens
    (GSPO); with `advantage.credit` for turns, over the turn's tokens."""
    policy_loss: PolicyLossChoice = "clip"
    """`clip`: min(r A, clip(r) A) (PPO). `cispo`: clip(r) A log policy, without a gradient through r, so that
    clipped tokens keep their gradient (CISPO). `{fn, args}`: a function that returns the loss of each token."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low; 1 sets no lower bound."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e9)] | None = None
    """Upper bound of the ratio where A < 0 (3 is usual)."""
    log_ratio_clip: Nats | None = None
    """Bound on a token's |log ratio|, in nats, applied before anything else; ln 1000 = 6.9 in StableReinforce."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """`token`: mean over the tokens of the step, or of a mini-batch (DAPO). `sequence`: mean of the responses' means
    (GRPO as published). `fixed`: sum over tokens / `fixed_length`, mean over responses (Dr.GRPO)."""
    fixed_length: PositiveInt | None = None
    """Divisor of `fixed`, in tokens; `sampling.max_new_tokens` when left out. 1 sums over tokens."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss and its denominators; they stay in the baseline (DAPO)."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Denominator of the ratio: the log-probabilities recorded while sampling, or the learner's at the start of the
    step."""
    routing_replay: Literal["none", "learner", "engine"] = "none"
    """For models with experts. `learner`: in all updates of a step, tokens go to the experts that the policy chose
    at the step's start (R2, arXiv:2512.01374). `engine`: to the experts that the rollout engine chose (R3,
    arXiv:2510.11370); tokens that the engine did not process go to the experts chosen at the step's start."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Importance weights for a sampler whose probabilities differ from the learner's; needs
    `old_logprobs: recomputed`."""
    kl: KlConfig = KlConfig()
    """The penalty for moving away from a reference; with `coef: 0` no reference is kept."""
    entropy: LossCoefficientConfig = LossCoefficientConfig()
    """A bonus that rewards entropy of the next token."""
    sft_loss: SftLossConfig = SftLossConfig()
    """A supervised loss on good responses, added to the policy loss."""

    @model_validator(mode="after")
    def _check_options(self) -> LossConfig:
        if self.rollout_correction.method != "none" and self.old_logprobs == "recorded":
            raise ValueError(
                f"rollout_correction {self.rollout_correction.method!r} needs `old_logprobs: recomputed`: with "
                "`old_logprobs: recorded` the ratio is already between learner and sampler"
            )
        if self.dual_clip is not None and self.policy_loss == "cispo":
            raise ValueError("dual_clip bounds the clipped policy loss; cispo has `clip_high` for that")
        # A function gets no option of the built-in losses.
        is_custom = isinstance(self.policy_loss, CustomPolicyLossConfig)
        for name in ("importance_ratio_level", "clip_low", "clip_high", "dual_clip", "log_ratio_clip"):
            if is_custom and not self.has_default(name):
                raise ValueError(
                    f"`policy_loss.fn` computes its own ratio, so `{name}: {getattr(self, name)}` would have no "
                    "effect; take it out, or an `algorithm` that sets it; options of the function belong in "
                    "`policy_loss.args`"
                )
        if self.fixed_length is not None and self.aggregation != "fixed":
            raise ValueError(f"fixed_length is for `aggregation: fixed`, not for {self.aggregation!r}")
        return self


class ReferenceConfig(StrictModel):
    """The model that the KL penalty measures from, and its updates."""

    init_from: Literal["stage", "base"] = "stage"
    """`stage`: the policy at the start of the stage. `base`: the model of the run with `model.lora`'s adapter off,
    which takes no memory."""
    update: Literal["never", "ema", "reset"] = "never"
    """`never` keeps it frozen; `ema` makes it a running average of the policy; `reset` copies the policy (ProRL)."""
    update_every: PositiveInt = 1
    """Steps from one update of the reference to the next."""
    ema_decay: DecayRate = 0.99
    """Share of the old reference that stays in an `ema` update."""
    plateau: PlateauConfig | None = None
    """Reset when the mean of the `track_rewards` terms stops rising, instead of every `update_every` steps. The windows
    that are compared begin anew after each reset."""
    reset_optimizer: bool = False
    """A `reset` also clears the optimizer's moments."""

    @model_validator(mode="after")
    def _check_update(self) -> ReferenceConfig:
        if self.update == "never" and self.update_every != 1:
            raise ValueError("update_every has no effect on a frozen reference; set `update: ema` or `update: reset`")
        if self.update != "ema" and not self.has_default("ema_decay"):
            raise ValueError(f"ema_decay is for `update: ema`, not for {self.update!r}")
        if self.plateau is not None and (self.update != "reset" or self.update_every != 1):
            raise ValueError("`plateau` is for `update: reset`, without `update_every`")
        if self.update == "reset" and self.update_every < 2 and self.plateau is None:
            raise ValueError(
                "a reference reset every step is the policy itself; set `update_every` to 2 or more, or `plateau`"
            )
        if self.init_from == "base" and self.update != "never":
            raise ValueError(f"`init_from: base` is a model that nothing changes; take out `update: {self.update}`")
        if self.reset_optimizer and self.update != "reset":
            raise ValueError(f"reset_optimizer is for `update: reset`, not for {self.update!r}")
        return self
