"""What is done: imitation and reinforcement, stage by stage."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from mmrl.config.schema.base import (
    Component,
    DecayRate,
    Fraction,
    Identifier,
    NonNegativeInt,
    PositiveInt,
    SampleConditions,
    StrictModel,
    matches_conditions,
)
from mmrl.config.schema.data_order import (
    CurriculumOrderConfig,
    DataOrderConfig,
    PriorityOrderConfig,
    ShuffledOrderConfig,
)
from mmrl.config.schema.group_filter import DynamicSamplingConfig
from mmrl.config.schema.health import HealthConfig
from mmrl.config.schema.objective import AdvantageConfig, LossConfig, ReferenceConfig
from mmrl.config.schema.presets import ALGORITHM_PRESETS, AlgorithmName, check_preset_applied
from mmrl.config.schema.replay import ReplayConfig
from mmrl.config.schema.rollout_steps import (
    GENERATE_ONLY,
    GenerateConfig,
    RolloutStepConfigs,
    ToolsConfig,
    check_free_tokens,
    check_rollout_steps,
)
from mmrl.types import Sample

LearningRate = Annotated[float, Field(gt=0.0)]


class SamplingConfig(StrictModel):
    """The law that rollouts are drawn from."""

    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """0 is greedy; allowed in evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass."""
    top_k: NonNegativeInt = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    max_new_tokens: PositiveInt = 512
    """A rollout that reaches this many tokens is cut and counted as truncated."""


class ComponentLrConfig(StrictModel):
    """Peak learning rates of parts of the model; the stage's `lr` where there is none."""

    vision: LearningRate | None = None
    """Of the vision tower."""
    projector: LearningRate | None = None
    """Of the projector."""
    language: LearningRate | None = None
    """Of the language model."""


class OptimizerConfig(StrictModel):
    """AdamW with warm-up and decay."""

    lr: LearningRate = 1e-6
    """Peak learning rate."""
    lr_by_component: ComponentLrConfig = ComponentLrConfig()
    """Peak learning rates of parts of the model; warm-up and decay are the same for all."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay of the moment estimates."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """What decays: every parameter, or all but biases, norms and other vectors."""
    warmup_steps: NonNegativeInt = 0
    """Linear rise from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Fall from the peak to `final_lr_frac` over the steps after warm-up."""
    final_lr_frac: Fraction = 0.0
    """Share of the peak rate left at the last step."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""

    def component_lr(self, role: Component) -> float:
        """Peak learning rate of a part of the model."""
        own: float | None = getattr(self.lr_by_component, role)
        return self.lr if own is None else own


class ValidationConfig(StrictModel):
    """Looks at the validation sources during a stage; a stage may end by what they show rather than by its steps."""

    every: PositiveInt = 50
    """Steps between looks."""
    stop_at_mean_reward: float | None = None
    """Mean reward, averaged over tasks, that ends the stage."""
    stop_at_task_reward: float | None = None
    """What every task's reward must also reach to end it, when set."""

    @model_validator(mode="after")
    def _check_task_reward(self) -> ValidationConfig:
        if self.stop_at_task_reward is not None and self.stop_at_mean_reward is None:
            raise ValueError("`until_each` adds a condition to `until`: set that too")
        return self


class TrainingStage(StrictModel):
    """What every stage that trains has."""

    name: Identifier
    """Name in metrics, file names and on the console; unique in the run."""
    steps: PositiveInt
    """Optimizer steps at most."""
    from_stage: Identifier | None = None
    """An earlier `select` stage whose samples are trained on; those of `data.train` when left out."""
    when: SampleConditions = Field(default_factory=dict)
    """Those of them that are taken, all when empty: allowed values of `task` or of a column of the sample's `meta`."""
    repeat_samples_to: PositiveInt | None = None
    """Samples are repeated, each time under an id and with random numbers of its own, until there are so many
    (one-example RLVR)."""
    data_order: DataOrderConfig = ShuffledOrderConfig(kind="shuffled")
    """The order in which samples come."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """A stage starts with a fresh optimizer."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens per forward pass, at most: a larger group is split, and its prompt repeated. A sequence that is longer
    alone goes alone. The gradient does not depend on it."""
    validation: ValidationConfig | None = None
    """Looks at held-out reward, and an early end by it; needs `data.validation`."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Pack sequences into one row without padding, and in an rl stage encode media and prompt once per group; the
    gradient is the same without, and the first ones are computed both ways to make sure. `auto` does so wherever
    `model.attention` is not `eager`."""
    max_nonfinite_steps: PositiveInt = 5
    """A step whose gradient is not finite changes no weight; this many in a row end the run, their samples kept."""

    def accepts(self, sample: Sample) -> bool:
        """Whether the stage trains on a sample of its source."""
        return matches_conditions(self.when, sample)

    @property
    def order_depends_on_rewards(self) -> bool:
        """Whether the order of samples depends on how earlier ones fared."""
        phases = self.data_order.phases if isinstance(self.data_order, CurriculumOrderConfig) else ()
        return isinstance(self.data_order, PriorityOrderConfig) or any(phase.plateau for phase in phases)


class SftStage(TrainingStage):
    """Imitation of demonstrations (a cold start)."""

    kind: Literal["sft"]
    """Selects this kind of stage."""
    batch_size: PositiveInt = 32
    """Samples per optimizer step."""
    micro_batch_sequences: PositiveInt = 8
    """Demonstrations per forward pass, at most. The gradient does not depend on it."""
    target_field: Literal["label", "target", "response"] = "label"
    """Learn the annotator's label, the exact target, or the sample's whole response as it stands (one that a `select`
    stage kept, say)."""
    drop_thinking_prob: Fraction = 0.0
    """Share of demonstrations without their thinking, drawn anew each time (TON); needs `answer.think: optional`."""
    loss_on: Literal["response", "answer"] = "response"
    """What of a demonstration is learned: all of it, or only the answer, given what comes before it."""
    rollout_steps: Annotated[tuple[ToolsConfig, ...], Field(max_length=1)] = ()
    """A step of kind `tools`, as an rl stage has it: calls in the sample's response are answered by the tools
    themselves, and only the response is learned."""

    @property
    def samples_per_step(self) -> int:
        """Samples that a step draws."""
        return self.batch_size

    @property
    def max_prompts_in_flight(self) -> int:
        """Samples that a round has room for."""
        return self.batch_size

    @model_validator(mode="after")
    def _check_tools_target(self) -> SftStage:
        if self.rollout_steps and self.target_field != "response":
            raise ValueError(
                f"only a whole response can call a tool, and imitate is {self.target_field!r}; set `imitate: response`, or "
                "leave out `program`"
            )
        return self

    @model_validator(mode="after")
    def _check_data_order(self) -> SftStage:
        if self.order_depends_on_rewards:
            raise ValueError(f"order {self.data_order.kind!r} goes by rewards here, and an sft stage has none")
        return self


class RlStage(TrainingStage):
    """Policy optimisation on groups of rollouts: GRPO and its relatives."""

    kind: Literal["rl"]
    """Selects this kind of stage."""
    prompts_per_step: PositiveInt = 16
    """Groups per optimizer step."""
    group_size: PositiveInt = 8
    """Rollouts per prompt."""
    micro_batch_groups: PositiveInt = 8
    """Groups per forward pass, at most. The gradient does not depend on it."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are drawn."""
    rollout_steps: Annotated[RolloutStepConfigs, AfterValidator(check_rollout_steps)] = GENERATE_ONLY
    """What is done with a prompt: generate, and what follows."""
    async_rollouts: bool = False
    """Draw the next step's rollouts while this step is learned: one step off-policy. It saves time where the engine has
    devices of its own (`vllm_server`); with `hf` it takes a second copy of the model, and `vllm` cannot."""
    algorithm: AlgorithmName = "grpo"
    """A published objective: other defaults for `advantage` and `loss`, which may still be set one by one."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    loss: LossConfig = LossConfig()
    """From advantages to gradients."""
    reference: ReferenceConfig = ReferenceConfig()
    """What the KL penalty measures from."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Which groups are learned; all where there is none."""
    replay: ReplayConfig | None = None
    """What of earlier steps is learned again; nothing where there is none."""
    ppo_epochs: PositiveInt = 1
    """Passes over the same rollouts."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps of a pass: the step's groups are dealt into so many batches, each with a gradient and
    denominators of its own (PPO; verl's rollout and mini-batch sizes)."""
    track_rewards: tuple[str, ...] = ()
    """Reward terms whose mean over a group is noted for its sample each time it is drawn, for `order`, and for later
    `select` stages in RUN/outputs/NAME.jsonl."""
    health: HealthConfig = HealthConfig()
    """When to warn."""
    max_steps_without_signal: PositiveInt = 20
    """This many steps in a row without a single informative group end the run with an explanation."""

    @property
    def samples_per_step(self) -> int:
        """Samples that a round of prompts draws."""
        return self.prompts_per_step

    @model_validator(mode="after")
    def _check_data_order(self) -> RlStage:
        if self.order_depends_on_rewards and not self.track_rewards:
            raise ValueError(
                f"order {self.data_order.kind!r} goes by rewards: name the terms it is to go by in `history`"
            )
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> RlStage:
        within = {self.advantage.baseline, self.advantage.scale} & {"group_mean", "leave_one_out", "group_std"}
        if self.group_size < 2 and within and self.advantage.fn is None:
            raise ValueError(
                f"group_size {self.group_size} leaves a group nothing to compare: every advantage would be 0; "
                "use 2 or more"
            )
        if self.reference.update != "never" and not self.loss.kl.coef:
            raise ValueError(f"reference.update {self.reference.update!r} has no effect without `loss.kl.coef`")
        if self.sampling.temperature == 0.0:
            raise ValueError("temperature 0 makes all rollouts of a group equal; use a value above 0 to train")
        return self

    @model_validator(mode="after")
    def _check_mini_batches(self) -> RlStage:
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"mini_batches {self.num_mini_batches} leaves some without a group of prompts_per_step "
                f"{self.prompts_per_step}"
            )
        from_start = {
            "loss.old_logprobs: recomputed": self.loss.old_logprobs == "recomputed",
            "loss.kl.place: reward": self.loss.kl.coef > 0.0 and self.loss.kl.apply_to == "reward",
            "replay.ratio: recomputed": self.replay is not None and self.replay.old_logprobs == "recomputed",
        }
        if self.num_mini_batches > 1 and (taken := [key for key, is_so in from_start.items() if is_so]):
            raise ValueError(
                f"mini_batches with `{taken[0]}`: that needs the learner's probabilities as the step began, which the "
                "first mini-batch changes; take one of them out"
            )
        return self

    @property
    def max_prompts_in_flight(self) -> int:
        """Prompts that a round works on, those that wait from the step before included."""
        (first,) = (step for step in self.rollout_steps if isinstance(step, GenerateConfig))
        return ceil(self.prompts_per_step * first.oversampling)

    @model_validator(mode="after")
    def _check_free_tokens(self) -> RlStage:
        check_free_tokens(self.rollout_steps, self.sampling.max_new_tokens)
        return self

    @property
    def has_partial_rollouts(self) -> bool:
        """Whether groups may wait for later steps, half-drawn."""
        return any(isinstance(step, GenerateConfig) and step.partial_rollout_tokens for step in self.rollout_steps)

    @model_validator(mode="after")
    def _check_async_rollouts(self) -> RlStage:
        if self.async_rollouts and self.has_partial_rollouts:
            raise ValueError(
                "`chunk` lets groups wait for any number of steps, and `overlap` promises rollouts that are one step "
                "old at most; take out one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> RlStage:
        for part, settings in ALGORITHM_PRESETS[self.algorithm].items():
            check_preset_applied(
                f"algorithm {self.algorithm!r}", settings, getattr(self, part).model_fields_set, f"{part}."
            )
        return self
