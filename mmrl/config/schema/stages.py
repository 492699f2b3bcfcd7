"""Stages that train: `sft` on demonstrations, `rl` on groups of rollouts."""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from mmrl.config.schema.base import (
    NO_EFFECT,
    ROUNDING_EFFECT,
    BatchSize,
    Coefficient,
    Component,
    DecayRate,
    Fraction,
    Identifier,
    LearningRate,
    NonNegativeInt,
    Number,
    NumTokens,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    SampleConditions,
    StrictModel,
    Temperature,
)
from mmrl.config.schema.data import (
    CurriculumOrderConfig,
    DataOrderConfig,
    MixtureOrderConfig,
    PriorityOrderConfig,
    ShuffledOrderConfig,
)
from mmrl.config.schema.health import HealthConfig
from mmrl.config.schema.objective import AdvantageConfig, LossConfig, ReferenceConfig
from mmrl.config.schema.presets import ALGORITHM_PRESETS, AlgorithmName, check_preset_applied
from mmrl.config.schema.rollout_steps import (
    GENERATE_ONLY,
    DemonstrationStepConfig,
    EnvironmentConfig,
    GenerateConfig,
    RolloutStepConfigs,
    check_free_tokens,
    check_rollout_steps,
)
from mmrl.config.schema.selection import DynamicSamplingConfig, ReplayConfig
from mmrl.config.yaml_tree import KeyPath

# Rounding of a bfloat16 engine moved the log of a response's ratio by 1.0e-3 (standard deviation, 6 tokens), 5e-4 (32
# tokens) and 4e-4 (128) in a tiny model. Narrower bounds clip responses before the policy has changed.
_MIN_RECORDED_CLIP = 1e-3


class SamplingConfig(StrictModel):
    """Sampling parameters of rollouts."""

    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy, allowed only in a `sample` stage with `group_size: 1`."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling draws from the smallest set of tokens with this probability."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 is all."""
    max_new_tokens: NumTokens = 512
    """A rollout that reaches this many tokens is cut and counted as truncated."""


class ComponentLrConfig(StrictModel):
    """Peak learning rates of model components; components without a rate use the stage's `lr`."""

    vision: LearningRate | None = None
    """Peak learning rate of the vision tower."""
    projector: LearningRate | None = None
    """Peak learning rate of the projector."""
    language: LearningRate | None = None
    """Peak learning rate of the language model."""


class OptimizerConfig(StrictModel):
    """AdamW with warm-up and decay."""

    lr: LearningRate = 1e-6
    """Learning rate at its peak, after warm-up."""
    lr_by_component: ComponentLrConfig = ComponentLrConfig()
    """Peak learning rates of model components; warm-up and decay are the same for all."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Shares of the old first and second moment that each update keeps."""
    weight_decay: Coefficient = 0.0
    """Each update shrinks weights by this times the learning rate (decoupled)."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Parameters that decay: all, or all but biases, norms and other vectors."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, `constant` keeps the peak rate; other schedules lower the rate to `final_lr_frac` of the peak."""
    final_lr_frac: Fraction = 0.0
    """Share of the peak rate that is left at the last step."""
    decay_steps: PositiveInt | None = None
    """Steps of the stage, warm-up included, after which the rate has fallen and stays constant; the stage's `steps`
    when left out. Set it if the run may be lengthened later (docs/reliability.md)."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm above which gradients are scaled down."""

    @model_validator(mode="after")
    def _check_decay_steps(self) -> OptimizerConfig:
        for name in ("decay_steps", "final_lr_frac"):
            if getattr(self, name) and self.lr_schedule == "constant":
                raise ValueError(f"{name} has no effect on a constant rate; set `lr_schedule`, or take it out")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} must exceed warmup_steps {self.warmup_steps}")
        return self

    def component_lr(self, component: Component) -> float:
        """Return the peak learning rate of a component."""
        own: float | None = getattr(self.lr_by_component, component)
        return self.lr if own is None else own


class ValidationConfig(StrictModel):
    """Evaluation on `data.validation` during a stage, which may end the stage early."""

    every: PositiveInt = 50
    """Steps from one evaluation to the next."""
    stop_at_mean_reward: Number | None = None
    """The stage ends once the mean reward, averaged over tasks, reaches this value."""


class TrainingStage(StrictModel):
    """Keys of every stage that trains."""

    name: Identifier
    """The stage's name in metrics, file names and on the console; it is unique in the run."""
    steps: PositiveInt
    """The stage ends after this many training steps at most."""
    samples_of: Identifier | None = None
    """An earlier `select` stage whose samples are trained on; when left out, the samples of `data.train`."""
    when: SampleConditions = Field(default_factory=dict)
    """Samples that are trained on: allowed values of `task` or of a column of `meta`. All samples when empty."""
    repeat_samples_to: PositiveInt | None = None
    """Repeat samples until there are this many (one-example RLVR), each with its own id and random numbers."""
    data_order: DataOrderConfig = ShuffledOrderConfig(kind="shuffled")
    """The order in which samples are drawn."""
    freeze: tuple[Component, ...] | None = None
    """Components that this stage does not train; null takes `model.freeze`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW; each stage starts with a new optimizer."""
    micro_batch_groups: Annotated[PositiveInt, ROUNDING_EFFECT] = 8
    """At most this many groups share a forward pass; in an sft stage, each demonstration is a group. The gradient does
    not depend on this key."""
    micro_batch_tokens: Annotated[PositiveInt, ROUNDING_EFFECT] = 16384
    """At most this many tokens share a forward pass: a larger group is split, and its prompt repeated. A longer
    single sequence gets its own pass. The gradient does not depend on this key."""
    validation: ValidationConfig | None = None
    """Evaluation during the stage, on `data.validation` and each `validation_share`, which may end the stage early."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Pack sequences into one row without padding, and in an rl stage encode media and prompt once per group.
    Sharing does not change the gradient; the first gradients are computed both ways and compared. `auto` is `on`
    unless `model.attn_implementation` is `eager`."""
    max_nonfinite_steps: Annotated[PositiveInt, NO_EFFECT] = 5
    """The run ends after this many steps in a row with an update whose gradient is not finite. Such an update changes
    no weight; the samples of the step are kept."""

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        if self.repeat_samples_to is not None and isinstance(self.data_order, MixtureOrderConfig):
            raise ValueError("repeat_samples_to has no effect on a mixture, which draws from each source; take out one")
        return self

    @property
    def order_depends_on_rewards(self) -> bool:
        """True if the order of samples depends on the rewards of earlier ones."""
        if isinstance(self.data_order, CurriculumOrderConfig):
            return any(phase.plateau for phase in self.data_order.phases)
        return isinstance(self.data_order, PriorityOrderConfig)


class SftStage(TrainingStage):
    """Supervised training on demonstrations (a cold start)."""

    kind: Literal["sft"]
    """Selects this kind of stage."""
    prompts_per_step: BatchSize = 32
    """Samples that a step trains on, in one update."""
    target_field: Literal["label", "target", "response", "expert"] = "label"
    """Text that is trained on. `label` and `target`: the annotator's label or the exact target, written as a response.
    `response`: the sample's own response (from a `select` stage, for example). `expert`: an episode played by the
    environment's expert."""
    drop_thinking_prob: Fraction = 0.0
    """Probability of leaving out a demonstration's thinking, drawn anew each time it is used (TON); needs
    `response_format.thinking: optional`."""
    loss_on: Literal["response", "answer"] = "response"
    """Tokens that are trained on: the whole demonstration, or only its answer, given the text before it."""
    rollout_steps: Annotated[tuple[DemonstrationStepConfig, ...], Field(max_length=1)] = ()
    """A step of kind `tools`, as in an rl stage: the tools answer the calls in the sample's response, and only the
    response is trained on. Or a step of kind `environment`, whose expert acts (`target_field: expert`)."""

    # To the learner, a demonstration is a group of one response, and a step has one update.
    group_size: ClassVar[int] = 1
    num_mini_batches: ClassVar[int] = 1
    ppo_epochs: ClassVar[int] = 1

    @property
    def prompts_per_round(self) -> int:
        """Samples that are read at a time: those of a step."""
        return self.prompts_per_step

    @model_validator(mode="after")
    def _check_options(self) -> SftStage:
        acts = any(isinstance(step, EnvironmentConfig) for step in self.rollout_steps)
        if acts != (self.target_field == "expert"):
            raise ValueError(
                "`target_field: expert` and a step of kind environment belong together: the environment's method "
                "`expert` acts in it"
            )
        if acts and (self.loss_on == "answer" or self.drop_thinking_prob):
            raise ValueError("an expert writes actions and nothing else: leave out loss_on and drop_thinking_prob")
        if self.rollout_steps and not acts and self.target_field != "response":
            raise ValueError(
                f"only a whole response can call a tool, and target_field is {self.target_field!r}; set "
                "`target_field: response`, or leave out `rollout_steps`"
            )
        if self.order_depends_on_rewards:
            raise ValueError(f"data_order {self.data_order.kind!r} follows rewards here, and an sft stage has none")
        return self


class RlStage(TrainingStage):
    """Policy optimisation on groups of rollouts: GRPO and its relatives."""

    kind: Literal["rl"]
    """Selects this kind of stage."""
    prompts_per_step: BatchSize = 16
    """Groups that a step trains on."""
    group_size: BatchSize = 8
    """Rollouts generated for each prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the rollouts."""
    rollout_steps: Annotated[RolloutStepConfigs, AfterValidator(check_rollout_steps)] = GENERATE_ONLY
    """Steps from a prompt to its rollouts: generate, then rethinking, tools or probes."""
    async_rollouts: bool = False
    """Generate the next step's rollouts while this step trains: one step off-policy. This saves time if the engine
    has its own devices (`vllm_server`). With `hf` it takes a second copy of the model; `vllm` does not support it."""
    algorithm: AlgorithmName = "grpo"
    """A published objective: it changes defaults of `advantage`, `loss` and `replay`, whose keys may still be set."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Computation of advantages from rewards."""
    loss: LossConfig = LossConfig()
    """Computation of the loss from advantages."""
    reference: ReferenceConfig = ReferenceConfig()
    """The model that the KL penalty measures from."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Conditions that a group must meet to be trained on; without this section, all groups are trained on."""
    replay: ReplayConfig | None = None
    """Training again on rollouts of earlier steps; without this section, nothing is replayed."""
    ppo_epochs: BatchSize = 1
    """Passes that a step makes over its rollouts."""
    num_mini_batches: BatchSize = 1
    """Updates of a pass: the step's groups are divided into this many batches, each with its own gradient and
    denominators (PPO; verl's rollout and mini-batch sizes). Old log-probabilities that the learner computes, and a
    KL penalty in the reward, then cost one more forward pass over all batches but the first."""
    track_rewards: tuple[str, ...] = ()
    """Reward terms whose group mean is recorded each time a sample is drawn. `data_order` uses the records, and so do
    later `select` stages, for which they are written to RUN/outputs/NAME.jsonl."""
    health: Annotated[HealthConfig, NO_EFFECT] = HealthConfig()
    """Thresholds beyond which a warning is printed."""
    max_steps_without_signal: Annotated[PositiveInt, NO_EFFECT] = 20
    """The run ends after this many steps in a row in which no rollout of the current step has a nonzero advantage."""

    @property
    def prompts_per_round(self) -> int:
        """Prompts in flight at a time, including those that an earlier round left unfinished."""
        return ceil(self.prompts_per_step * self._generate_step.oversampling)

    @property
    def has_partial_rollouts(self) -> bool:
        """True if unfinished groups may wait for later rounds."""
        return self._generate_step.partial_rollout_tokens is not None

    @property
    def carries_groups(self) -> bool:
        """True if groups beyond `prompts_per_step` wait for later steps; False if they are dropped, or cannot exist."""
        if self.dynamic_sampling is not None:
            return self.dynamic_sampling.extra == "carry"
        return self.prompts_per_round > self.prompts_per_step

    @property
    def _generate_step(self) -> GenerateConfig:
        # `check_rollout_steps` guarantees that there is exactly one.
        return next(step for step in self.rollout_steps if isinstance(step, GenerateConfig))

    @model_validator(mode="after")
    def _check_options(self) -> RlStage:
        if self.order_depends_on_rewards and not self.track_rewards:
            raise ValueError(
                f"data_order {self.data_order.kind!r} follows rewards: name the terms to follow in `track_rewards`"
            )
        # With the batch's mean or no baseline a group of one is fine: REINFORCE.
        if self.group_size < 2 and self.advantage.compares_within_group:
            raise ValueError(
                f"group_size {self.group_size} leaves a group nothing to compare: every advantage would be 0; "
                "use 2 or more"
            )
        if self.reference.plateau is not None and not self.track_rewards:
            raise ValueError("reference.plateau follows rewards: name the terms to follow in `track_rewards`")
        if self.reference.update != "never" and not self.loss.kl.coef:
            raise ValueError(f"reference.update {self.reference.update!r} has no effect without `loss.kl.coef`")
        sampling = self.dynamic_sampling
        in_flight = self.prompts_per_round
        if sampling and sampling.extra == "carry" and sampling.max_rounds == 1 and in_flight == self.prompts_per_step:
            raise ValueError(
                "dynamic_sampling: `extra: carry` needs `max_rounds` of 2 or more, or `oversampling`: one round of "
                f"{in_flight} prompts leaves no extra groups"
            )
        if self.sampling.temperature == 0.0:
            raise ValueError("temperature 0 makes all rollouts of a group equal; use a value above 0 to train")
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches {self.num_mini_batches} leaves some without a group of prompts_per_step "
                f"{self.prompts_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _check_rollouts_and_preset(self) -> RlStage:
        check_free_tokens(self.rollout_steps, self.sampling.max_new_tokens)
        acts = any(isinstance(step, EnvironmentConfig) for step in self.rollout_steps)
        if self.advantage.credit != "broadcast" and not acts:
            raise ValueError(
                f"`advantage.credit: {self.advantage.credit}` is for turns in an environment, and no step is of kind "
                "environment; leave it out"
            )
        kinds = {step.kind for step in self.rollout_steps}
        if self.loss.sft_loss.coef and self.loss.sft_loss.on == "after_rethink" and not kinds & {"rethink", "custom"}:
            raise ValueError(
                "`loss.sft_loss` with `on: after_rethink` trains on tokens after a trigger, which no step of "
                "rollout_steps forces; add a step of kind rethink, or set `on: response`"
            )
        if self.async_rollouts and self.has_partial_rollouts:
            raise ValueError(
                "`partial_rollout_tokens` lets groups wait for any number of steps, and `async_rollouts` promises "
                "rollouts that are one step old at most; take out one of them"
            )
        for part, settings in ALGORITHM_PRESETS[self.algorithm].items():
            section = getattr(self, part)
            if section is not None:
                given = section.model_fields_set
                check_preset_applied(f"algorithm {self.algorithm!r}", settings, given, f"{part}.")
        return self

    def list_warnings(self) -> list[tuple[KeyPath, str]]:
        """Return valid settings that are probably a mistake: the path of a key in the stage, and what to do."""
        loss = self.loss
        distance = min(loss.clip_low, loss.clip_high)
        if loss.importance_ratio_level == "token" or distance >= _MIN_RECORDED_CLIP:
            return []
        # Which rollouts keep recorded log-probs: `TokenTable.old_is_recorded_N` in mmrl/learner/tokens.py.
        remedies: list[tuple[KeyPath, str]] = []
        if loss.old_logprobs == "recorded":
            remedies.append((("loss", "old_logprobs"), "set `old_logprobs: recomputed`"))
        if self.replay is not None and self.replay.old_logprobs == "recorded":
            remedies.append((("replay", "old_logprobs"), "set `replay.old_logprobs: recomputed`"))
        generate_path = ("rollout_steps", self.rollout_steps.index(self._generate_step))
        carried = "groups carried over keep theirs"
        if self.carries_groups and self.dynamic_sampling is not None:
            remedies.append((("dynamic_sampling", "extra"), f"{carried}: set `extra: drop`"))
        elif self.carries_groups:
            remedies.append(((*generate_path, "oversampling"), f"{carried}: leave `oversampling` out"))
        correct = "rollouts of an older policy keep theirs: set `loss.rollout_correction`"
        is_corrected = loss.rollout_correction.method != "none"
        if self.async_rollouts and not is_corrected:
            remedies.append((("async_rollouts",), correct))
        if self.has_partial_rollouts and not is_corrected:
            remedies.append(((*generate_path, "partial_rollout_tokens"), correct))
        clipping = (
            f"the ratio of a whole response is clipped {distance:g} away from 1, and the rounding of a bfloat16 engine "
            "alone moves it by more: with log-probabilities recorded while sampling, responses are clipped before the "
            "policy has changed"
        )
        return [
            (path, f"{clipping}; {remedy}, or widen `loss.clip_low` and `loss.clip_high`") for path, remedy in remedies
        ]
