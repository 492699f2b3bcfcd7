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
    Nats,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    StrictModel,
    format_interval,
)


class DifficultyWeightConfig(StrictModel):
    """A factor 4 max_weight p (1 - p) on a group's advantages: largest where half of the rollouts succeed."""

    term: str
    """The reward term, from 0 to 1, whose mean over the group is p."""
    max_weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """The factor at p = 1/2."""


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
    """A small number that is added to a standard deviation before dividing by it."""
    batch_normalize: bool = False
    """Then bring the advantages of the whole step to mean 0 and standard deviation 1 (REINFORCE++, GDPO)."""
    outlier_std: PositiveFloat | None = None
    """Then set to 0 those more than this many standard deviations from the step's mean (StableReinforce)."""
    difficulty_weight: DifficultyWeightConfig | None = None
    """Then weight groups by the policy's uncertainty about them (Observe-R1)."""
    fn: str | None = None
    """A function in place of `combine`, `baseline` and `scale`: `package.module:function` or `./file.py:function`. It
    gets one group's total rewards and reward terms, and returns an advantage for each rollout."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options that the function is called with."""

    @model_validator(mode="after")
    def _check_fn(self) -> AdvantageConfig:
        if self.fn is None and self.args:
            raise ValueError("`args` are the options of `fn`; set `fn`, or take them out")
        # Compared with the defaults: a preset may have set them, and not the user.
        replaced = {"combine": "total", "baseline": "group_mean", "scale": "group_std"}
        for name, default in replaced.items():
            if self.fn is not None and getattr(self, name) != default:
                raise ValueError(
                    f"`fn` computes the advantages, so `{name}: {getattr(self, name)}` would have no effect; take it "
                    "out, or an `algorithm` that sets it"
                )
        return self

    @property
    def compares_within_group(self) -> bool:
        """True if an advantage depends on the other rollouts of its group. A function of the user's may."""
        return self.fn is None and (self.baseline in ("group_mean", "leave_one_out") or self.scale == "group_std")

    def describe(self, group_size: int) -> str:
        """Return the steps from rewards to advantages, a line each."""
        if self.fn is not None:
            options = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
            formula = f"A = {self.fn}({options}), of the total rewards and reward terms over the {group_size} rollouts"
        else:
            formula = self._describe_formula(f"over the {group_size} rollouts of one prompt")
        lines = [formula]
        if self.combine == "per_term":
            lines.append("for each reward term by itself, its value as R; then A_i is their sum by weight")
        if self.batch_normalize:
            lines.append(f"then A_i becomes (A_i - mean(A)) / (std(A) + {self.eps:g}) over all rollouts of the step")
        if self.outlier_std is not None:
            lines.append(f"then A_i becomes 0 where it is more than {self.outlier_std:g} std(A) from mean(A)")
        if self.difficulty_weight is not None:
            weight = self.difficulty_weight
            lines.append(f"then times 4 · {weight.max_weight:g} · p (1 - p), p the group's mean of {weight.term}")
        return "\n".join(lines)

    def _describe_formula(self, over_group: str) -> str:
        match self.baseline:
            case "group_mean":
                centred, over = "R_i - mean(R)", over_group
            case "leave_one_out":
                centred, over = "R_i - mean(R but R_i)", over_group
            case "batch_mean":
                centred, over = "R_i - mean(R of the step)", "over all rollouts of the step"
            case "none":
                centred, over = "R_i", over_group if self.scale == "group_std" else "no baseline"
        match self.scale:
            case "none":
                return f"A_i = {centred}, {over}; nothing scales it"
            case "group_std":
                deviation = "std(R)"
            case "batch_std":
                deviation = "std(R of the step)"
        return f"A_i = ({centred}) / ({deviation} + {self.eps:g}), {over}"


class LossCoefficientConfig(StrictModel):
    """The weight of a term of the loss over the steps of the stage."""

    coef: Coefficient = 0.0
    """Weight that the term has at the first step; 0 leaves the term out."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The weight stays, or falls to `final_frac` of it at the last step."""
    final_frac: Fraction = 0.0
    """Share of the weight that is left at the last step."""
    decay_steps: PositiveInt | None = None
    """The weight has fallen after this many steps of the stage, and stays there; the stage's `steps` when left out."""

    @model_validator(mode="after")
    def _check_decay_steps(self) -> Self:
        if self.decay_steps is not None and self.schedule == "constant":
            raise ValueError("decay_steps has no effect on a constant weight; set `schedule`, or take it out")
        return self

    def describe_schedule(self) -> str:
        """Return the fall of the weight as a clause, empty for a constant weight."""
        if self.schedule == "constant":
            return ""
        within = f" within {self.decay_steps} steps" if self.decay_steps else ""
        return f"; its weight falls to {self.coef * self.final_frac:g}{within} ({self.schedule})"


class KlConfig(LossCoefficientConfig):
    """The penalty for moving away from a reference."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of KL(policy || reference) at a token, with d = log ref - log policy: -d, d²/2 or exp(d) - d - 1."""
    apply_to: Literal["loss", "reward"] = "loss"
    """`loss` adds it to the loss of each token; `reward` subtracts it from the token's reward, hence from the
    advantage of that token and all before it."""
    log_ratio_clip: Nats | None = None
    """|d| is bounded by this many nats (10 and 11 are in use); no gradient flows where the bound binds."""

    @model_validator(mode="after")
    def _check_k1_gradient(self) -> KlConfig:
        # The gradient of -d is that of log policy, whose mean under the policy is 0.
        if self.coef and self.estimator == "k1" and self.apply_to == "loss":
            raise ValueError(
                "the gradient of k1 in the loss is 0 on average; use estimator k2 or k3, or `apply_to: reward`"
            )
        return self

    def describe(self, reference: ReferenceConfig) -> str:
        """Return the penalty as a formula, and the reference that it is measured from."""
        if not self.coef:
            return "none; no reference model is kept"
        match self.estimator:
            case "k1":
                formula = "-d"
            case "k2":
                formula = "d²/2"
            case "k3":
                formula = "exp(d) - d - 1"
        estimate = f"{formula}, d = log π_ref(y_t) - log π(y_t)"
        if self.log_ratio_clip is not None:
            estimate += f" within ±{self.log_ratio_clip:g}"
        match self.apply_to:
            case "reward":
                line = f"A_t = A_i - {self.coef:g} · the sum over t and later tokens of {estimate}, π as the step began"
            case "loss":
                line = f"{estimate}, summed like the rest of L"
        return f"{line}{self.describe_schedule()}\nπ_ref is {reference.describe()}"


class SftLossConfig(LossCoefficientConfig):
    """A supervised loss on the policy's own good responses, beside the policy loss."""

    on: Literal["after_rethink", "response"] = "after_rethink"
    """`after_rethink`: the policy's tokens after a forced trigger, where the rethinking step found the continuation
    correct (VL-Rethinker). `response`: all of its tokens where the advantage is positive."""

    def describe(self) -> str:
        """Return the loss as a formula."""
        match self.on:
            case "after_rethink":
                tokens = "the policy's tokens after a trigger, in responses that then ended correct"
            case "response":
                tokens = "every token of responses with A > 0"
        return f"NLL = mean of -log π(y_t) over {tokens}{self.describe_schedule()}"


class RolloutCorrectionConfig(StrictModel):
    """Importance weight w = policy at the step's start / sampler, where the two compute different probabilities."""

    method: Literal["none", "tis", "mask"] = "none"
    """`tis` bounds w by `high` (truncated importance sampling); `mask` sets it to 0 outside [low, high] (IcePop)."""
    level: Literal["token", "sequence"] = "token"
    """w is computed for each token, or as the product over the whole response."""
    low: NonNegativeFloat = 0.5
    """w below this is set to 0; `mask` alone uses it."""
    high: PositiveFloat = 2.0
    """w above this is set to it by `tis`, and to 0 by `mask`."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RolloutCorrectionConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self

    def describe(self) -> list[str]:
        """Return the weight as one line, or no line without correction."""
        ratio = "π_old(y_t) / π_sampler(y_t)"
        if self.level == "sequence":
            ratio = f"product over the response of {ratio}"
        match self.method:
            case "none":
                return []
            case "tis":
                return [f"w_t = {ratio}, at most {self.high:g}"]
            case "mask":
                return [f"w_t = {ratio}, 0 where it is outside {format_interval((self.low, self.high))}"]


class CustomPolicyLossConfig(StrictModel):
    """A policy loss of the user's (docs/extending/policy_loss.md)."""

    fn: str
    """`module:function` or `./file.py:function`; called with (logprobs, old_logprobs, advantages, mask) of a response,
    it returns the loss of each token."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function."""


def _find_policy_loss_form(value: object) -> str:
    """Return the tag by which pydantic reads `policy_loss`: the `name` of a loss, or a `function`."""
    return "function" if isinstance(value, dict | CustomPolicyLossConfig) else "name"


# Tagged, so that an error is about the form that was written, not about every form in turn.
PolicyLossChoice = Annotated[
    Annotated[Literal["clip", "cispo"], Tag("name")] | Annotated[CustomPolicyLossConfig, Tag("function")],
    Discriminator(_find_policy_loss_form),
]


class LossConfig(StrictModel):
    """The policy loss and the terms added to it; `mmrl explain` writes it as a formula."""

    importance_ratio_level: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability: of each token, or of the response, as the geometric mean over its tokens
    (GSPO)."""
    policy_loss: PolicyLossChoice = "clip"
    """`clip`: min(r A, clip(r) A) (PPO). `cispo`: clip(r) A log policy, r without gradient, so that no token loses its
    own (CISPO). `{fn, args}`: a function that returns the loss of each token."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low; 1 sets no lower bound."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e9)] | None = None
    """The ratio counts as this at most where A < 0 (3 is usual)."""
    log_ratio_clip: Nats | None = None
    """|log ratio| of a token is bounded by this many nats before anything else; ln 1000 = 6.9 in StableReinforce."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """`token`: mean over the tokens of the whole step (DAPO). `sequence`: mean of the responses' means (GRPO as
    published). `fixed`: sum over tokens / `fixed_length`, mean over responses (Dr.GRPO)."""
    fixed_length: PositiveInt | None = None
    """Divisor of `fixed`, in tokens; `sampling.max_new_tokens` when left out. 1 sums over tokens."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss and its denominators; they stay in the baseline (DAPO)."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Denominator of the ratio: the log-probabilities recorded while sampling, or those of the learner at the start of
    the step."""
    routing_replay: Literal["none", "learner", "engine"] = "none"
    """For models with experts. `learner`: in all updates of a step, tokens go to the experts that the policy chose at
    the step's start (R2, arXiv:2512.01374). `engine`: to those that the rollout engine chose (R3, arXiv:2510.11370);
    tokens that it has not read go to those of the step's start."""
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
        if is_custom and self.importance_ratio_level != "token":
            raise ValueError(
                f"`policy_loss.fn` computes its own ratio, so `importance_ratio_level: {self.importance_ratio_level}` "
                "would have no effect; take it out, or an `algorithm` that sets it"
            )
        for name in ("dual_clip", "log_ratio_clip"):
            if is_custom and getattr(self, name) is not None:
                raise ValueError(
                    f"`policy_loss.fn` computes its own ratio, so `{name}` would have no effect; make it an option of "
                    "the function, in `policy_loss.args`"
                )
        if self.fixed_length is not None and self.aggregation != "fixed":
            raise ValueError(f"fixed_length is for `aggregation: fixed`, not for {self.aggregation!r}")
        return self

    def describe_formula(self, max_new_tokens: int) -> str:
        """Return the loss as one line: L = ..."""
        length = self.fixed_length or max_new_tokens
        match self.aggregation:
            case "token":
                sums = "(1/N) Σ_i Σ_t"
            case "sequence":
                sums = "(1/S) Σ_i (1/n_i) Σ_t"
            case "fixed":
                sums = f"(1/({length} S)) Σ_i Σ_t" if length > 1 else "(1/S) Σ_i Σ_t"
        weight = "" if self.rollout_correction.method == "none" else "w_t "
        # A function returns a loss; the built-in formulas are objectives, to be maximised.
        sign = "" if isinstance(self.policy_loss, CustomPolicyLossConfig) else "-"
        formula = f"L = {sign}{sums} {weight}{self._describe_policy_loss()}"
        if self.kl.coef and self.kl.apply_to == "loss":
            formula += f" + {self.kl.coef:g} · KL"
        if self.entropy.coef:
            formula += f" - {self.entropy.coef:g} · H"
        if self.sft_loss.coef:
            formula += f" + {self.sft_loss.coef:g} · NLL"
        return formula

    def describe_ratio(self) -> str:
        """Return the importance ratio as a formula."""
        match self.importance_ratio_level:
            case "token":
                return "r_t = π(y_t) / π_old(y_t)"
            case "sequence":
                return "r_i = geometric mean over t of π(y_t) / π_old(y_t)"

    def describe_clips(self) -> list[str]:
        """Return what else bounds the ratio, a line each."""
        lines = []
        if isinstance(self.policy_loss, CustomPolicyLossConfig):
            bounds = f"[{1 - self.clip_low:g}, {1 + self.clip_high:g}]"
            lines.append(f"l_t comes from the function; policy/clip_frac counts what {bounds} would clip")
        if self.policy_loss == "cispo":
            lines.append("no gradient flows through the clipped ratio, so every token keeps that of its log π")
        if self.dual_clip is not None:
            lines.append(f"where A < 0 the ratio counts {self.dual_clip:g} at most")
        if self.log_ratio_clip is not None:
            lines.append(f"log π(y_t) - log π_old(y_t) is kept within ±{self.log_ratio_clip:.4g} before that")
        return lines

    def describe_denominator(self, *, num_mini_batches: int) -> str:
        """Return what the divisors of the loss count."""
        counted = "the whole step" if num_mini_batches == 1 else "a mini-batch"
        match self.aggregation:
            case "token":
                text = f"N counts every sampled token of {counted}"
            case "sequence":
                text = f"S counts the responses of {counted}, n_i the tokens of one"
            case "fixed":
                text = f"S counts the responses of {counted}"
        return f"{text}, truncated ones left out" if self.mask_truncated else text

    def describe_added_terms(self) -> list[str]:
        """Return a line for each term added to the policy loss, and one for the routes that are replayed."""
        lines = []
        if self.sft_loss.coef:
            lines.append(self.sft_loss.describe())
        if self.entropy.coef:
            lines.append(f"H = entropy of the next token, summed like the rest of L{self.entropy.describe_schedule()}")
        match self.routing_replay:
            case "learner":
                lines.append("π sends tokens to the experts that it chose as the step began")
            case "engine":
                lines.append("π sends tokens to the experts that the rollout engine chose")
        return lines

    def _describe_policy_loss(self) -> str:
        ratio = "r_i" if self.importance_ratio_level == "sequence" else "r_t"
        advantage = "A_t" if self.kl.coef and self.kl.apply_to == "reward" else "A_i"
        clipped = f"clip({ratio}, {1 - self.clip_low:g}, {1 + self.clip_high:g}) {advantage}"
        match self.policy_loss:
            case "clip":
                return f"min({ratio} {advantage}, {clipped})"
            case "cispo":
                return f"{clipped} log π(y_t)"
            case CustomPolicyLossConfig(fn=fn, args=args):
                options = "".join(f", {name}={value!r}" for name, value in args.items())
                return f"l_t, l = {fn}(log π, log π_old, {advantage}{options})"


class ReferenceConfig(StrictModel):
    """The model that the KL penalty measures from, and its updates."""

    init_from: Literal["stage", "base"] = "stage"
    """`stage`: the policy at the start of the stage. `base`: the model of the run with `model.lora`'s adapter off,
    which takes no memory."""
    update: Literal["never", "ema", "reset"] = "never"
    """`never` keeps it frozen; `ema` makes it a running average of the policy; `reset` copies the policy (ProRL)."""
    update_every: PositiveInt = 1
    """The reference is updated every so many steps."""
    ema_decay: DecayRate = 0.99
    """Share of the old reference that stays in an `ema` update."""
    reset_optimizer: bool = False
    """A `reset` also clears the optimizer's moments."""

    @model_validator(mode="after")
    def _check_update(self) -> ReferenceConfig:
        if self.update == "reset" and self.update_every < 2:
            raise ValueError("a reference reset every step is the policy itself; set `update_every` to 2 or more")
        if self.init_from == "base" and self.update != "never":
            raise ValueError(f"`init_from: base` is a model that nothing changes; take out `update: {self.update}`")
        if self.reset_optimizer and self.update != "reset":
            raise ValueError(f"reset_optimizer is for `update: reset`, not for {self.update!r}")
        return self

    def describe(self) -> str:
        """Return what the reference is, as a phrase."""
        if self.init_from == "base":
            return "the model without its adapter"
        often = "every step" if self.update_every == 1 else f"every {self.update_every} steps"
        match self.update:
            case "never":
                return "the policy at the stage's start, frozen"
            case "ema":
                return f"a running average of π: {self.ema_decay:g} of it stays {often}"
            case "reset":
                cleared = ", the optimizer's moments cleared" if self.reset_optimizer else ""
                return f"π itself, copied {often}{cleared}"
