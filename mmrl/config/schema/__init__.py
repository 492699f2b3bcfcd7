"""The one home of every setting: names, types, defaults, limits. Imports without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from mmrl.config.schema.base import (
    COMPONENTS,
    Component,
    FileName,
    NonNegativeInt,
    PositiveInt,
    SampleConditions,
    StrictModel,
)
from mmrl.config.schema.data import DataConfig, DataSourceConfig, MediaLimitsConfig, RowFilterConfig
from mmrl.config.schema.data_order import (
    CurriculumOrderConfig,
    CurriculumPhaseConfig,
    DataOrderConfig,
    MixtureOrderConfig,
    PlateauConfig,
    PriorityOrderConfig,
    ShuffledOrderConfig,
    SortedOrderConfig,
)
from mmrl.config.schema.data_stages import SampleStage, SelectStage
from mmrl.config.schema.distributed import DeepspeedConfig, DistributedConfig
from mmrl.config.schema.eval_command import EvalConfig
from mmrl.config.schema.evaluation import BenchmarkConfig, EvalGenerationConfig, TrainingEvalConfig
from mmrl.config.schema.group_filter import DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.config.schema.health import HealthConfig
from mmrl.config.schema.model import (
    FromScratchConfig,
    LanguageFromScratchConfig,
    LoraConfig,
    LoraTarget,
    ModelConfig,
    VideoConfig,
    VisionFromScratchConfig,
)
from mmrl.config.schema.objective import (
    AdvantageConfig,
    DifficultyWeightConfig,
    KlConfig,
    LossCoefficientConfig,
    LossConfig,
    ReferenceConfig,
    RolloutCorrectionConfig,
    SftLossConfig,
)
from mmrl.config.schema.presets import AlgorithmName
from mmrl.config.schema.replay import ReplayConfig
from mmrl.config.schema.response import (
    BaseRewardConfig,
    GroupRewardConfig,
    ResponseFormatConfig,
    ResponseSectionConfig,
    RewardFailurePolicy,
    RewardsConfig,
    RewardTermConfig,
    RewardTransformConfig,
    ScoringConfig,
    WeightScheduleConfig,
)
from mmrl.config.schema.rollout_engine import LogprobCheckConfig, RolloutConfig, VllmConfig, VllmServerConfig
from mmrl.config.schema.rollout_steps import (
    BlindProbeConfig,
    GenerateConfig,
    RethinkConfig,
    RethinkTriggerConfig,
    RolloutStepConfig,
    RolloutStepConfigs,
    ToolConfig,
    ToolsConfig,
)
from mmrl.config.schema.stage_checks import check_stage_dependencies
from mmrl.config.schema.stages import (
    ComponentLrConfig,
    OptimizerConfig,
    RlStage,
    SamplingConfig,
    SftStage,
    TrainingStage,
    ValidationConfig,
)

__all__ = [
    "COMPONENTS",
    "AdvantageConfig",
    "AlgorithmName",
    "BaseRewardConfig",
    "BenchmarkConfig",
    "BestCheckpointConfig",
    "BlindProbeConfig",
    "CallbackConfig",
    "CheckpointsConfig",
    "Component",
    "ComponentLrConfig",
    "Config",
    "CurriculumOrderConfig",
    "CurriculumPhaseConfig",
    "DataConfig",
    "DataOrderConfig",
    "DataSourceConfig",
    "DeepspeedConfig",
    "DifficultyWeightConfig",
    "DistributedConfig",
    "DynamicSamplingConfig",
    "EvalConfig",
    "EvalGenerationConfig",
    "FromScratchConfig",
    "GenerateConfig",
    "GroupRewardConfig",
    "GroupRewardRangeConfig",
    "HealthConfig",
    "KlConfig",
    "LanguageFromScratchConfig",
    "LogprobCheckConfig",
    "LoraConfig",
    "LoraTarget",
    "LossCoefficientConfig",
    "LossConfig",
    "MediaLimitsConfig",
    "MixtureOrderConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlateauConfig",
    "PriorityOrderConfig",
    "ReferenceConfig",
    "ReplayConfig",
    "ResponseFormatConfig",
    "ResponseSectionConfig",
    "RethinkConfig",
    "RethinkTriggerConfig",
    "RewardFailurePolicy",
    "RewardTermConfig",
    "RewardTransformConfig",
    "RewardsConfig",
    "RlStage",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutStepConfig",
    "RolloutStepConfigs",
    "RowFilterConfig",
    "RunConfig",
    "SampleConditions",
    "SampleStage",
    "SamplingConfig",
    "ScoringConfig",
    "SelectStage",
    "SftLossConfig",
    "SftStage",
    "ShuffledOrderConfig",
    "SortedOrderConfig",
    "StrictModel",
    "ToolConfig",
    "ToolsConfig",
    "TrainingEvalConfig",
    "TrainingStage",
    "ValidationConfig",
    "VideoConfig",
    "VisionFromScratchConfig",
    "VllmConfig",
    "VllmServerConfig",
    "WeightScheduleConfig",
]


class BestCheckpointConfig(StrictModel):
    """Which checkpoint is the best."""

    metric: str
    """A name in metrics.jsonl, such as `validation/mean` or `benchmark/mathvista/accuracy`. A checkpoint is judged by the
    last value before it: let `checkpoints.every` be a multiple of that metric's `every`."""
    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""


class CheckpointsConfig(StrictModel):
    """When runs are saved, and which checkpoints stay."""

    every: PositiveInt = 100
    """Steps between checkpoints; one more at each stage's end."""
    keep_last: PositiveInt = 2
    """How many of the latest stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that this divides stay for good."""
    best: BestCheckpointConfig | None = None
    """The best one so far stays, too."""
    async_save: bool = False
    """Go on training while a checkpoint is written; takes memory on the host for one more copy of what is saved."""


class RunConfig(StrictModel):
    """The run itself."""

    name: FileName
    """Name of the run."""
    dir: str = "runs/{name}"
    """Where everything of the run is written; `{name}` is the run's name."""
    seed: NonNegativeInt = 0
    """Every random choice derives from it."""
    cpu_threads: NonNegativeInt = 0
    """CPU threads; 0 takes one per core."""


class LoggingConfig(StrictModel):
    """What a run writes down for people to read."""

    save_rollouts_every: PositiveInt = 10
    """Steps between two steps whose rollouts are written to `rollouts/`; the first step's always are."""


class CallbackConfig(StrictModel):
    """Your own code that runs after each training step: see docs/extending/callback.md."""

    fn: str
    """`module:function` or `./file.py:function`. It is called once, as `fn(context, **args)` with the run's
    `RunContext`, and returns an object with the method `on_step_end(state, result)`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function."""


Stages: TypeAlias = tuple[SftStage | RlStage | SampleStage | SelectStage, ...]


class Config(StrictModel):
    """A whole experiment."""

    run: RunConfig
    """Name, place and seed."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Training and held-out samples."""
    response_format: ResponseFormatConfig = ResponseFormatConfig()
    """How responses are written."""
    rewards: RewardsConfig
    """How responses are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """What draws rollouts."""
    stages: Annotated[
        tuple[Annotated[SftStage | RlStage | SampleStage | SelectStage, Field(discriminator="kind")], ...],
        Field(min_length=1),
    ]
    """What is done, in order, each from the previous one's weights."""
    evaluation: TrainingEvalConfig = TrainingEvalConfig()
    """How held-out reward is measured, and which benchmarks are taken meanwhile."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """When the run is saved."""
    distributed: DistributedConfig = DistributedConfig()
    """How several processes of one run wait for each other."""
    deepspeed: DeepspeedConfig | None = None
    """DeepSpeed's ZeRO in place of plain torch."""
    logging: LoggingConfig = LoggingConfig()
    """What is written down for people to read."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Your own code that runs after each training step, in this order, before checkpoints are saved."""

    @property
    def training_stages(self) -> tuple[SftStage | RlStage, ...]:
        """The stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, SftStage | RlStage))

    @property
    def uses_async_rollouts(self) -> bool:
        """Whether a stage draws rollouts while it learns."""
        return any(isinstance(stage, RlStage) and stage.async_rollouts for stage in self.stages)

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: Stages, info: ValidationInfo) -> Stages:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stage names must be unique, got {', '.join(names)}")
        trainings = [stage for stage in stages if isinstance(stage, SftStage | RlStage)]
        if not trainings:
            raise ValueError("no stage trains; a run needs one of kind sft or rl")
        sharing = [stage.name for stage in trainings if stage.shared_prefix == "on"]
        if sharing and "model" in info.data and info.data["model"].attn_implementation == "eager":
            raise ValueError(f"stage {sharing[0]!r} has `shared_prefix: on`, which eager `model.attention` cannot do")
        looking = [stage.name for stage in trainings if stage.validation]
        if looking and "data" in info.data and not info.data["data"].validation:
            raise ValueError(f"stage {looking[0]!r} has `validation`, which needs `data.validation`")
        if "rewards" in info.data and (plain := _find_non_additive_reward(info.data["rewards"])):
            separate = [stage.name for stage in stages if stage.kind == "rl" and stage.advantage.combine == "per_term"]
            if separate:
                raise ValueError(f"stage {separate[0]!r}: advantage.combine per_term sums terms by weight; {plain}")
        return stages

    @field_validator("stages")
    @classmethod
    def _check_stage_dependencies(cls, stages: Stages, info: ValidationInfo) -> Stages:
        check_stage_dependencies(stages, info.data)
        return stages

    @field_validator("stages")
    @classmethod
    def _check_engine_sampling(cls, stages: Stages, info: ValidationInfo) -> Stages:
        engine = info.data["rollout"].engine if "rollout" in info.data else "hf"
        for stage in (stage for stage in stages if isinstance(stage, RlStage)):
            if engine != "hf" and (stage.sampling.top_k or stage.sampling.top_p < 1.0):
                raise ValueError(
                    f"stage {stage.name!r} has `sampling.top_p` or `top_k`, whose log-probabilities vLLM renormalises "
                    "and the learner does not; leave them out, or use `rollout.engine: hf`"
                )
        return stages

    @field_validator("stages")
    @classmethod
    def _check_async_engine(cls, stages: Stages, info: ValidationInfo) -> Stages:
        overlapping = [stage.name for stage in stages if isinstance(stage, RlStage) and stage.async_rollouts]
        if overlapping and "rollout" in info.data and info.data["rollout"].engine == "vllm":
            raise ValueError(
                f"stage {overlapping[0]!r} has `overlap`, and rollout.engine vllm takes turns with the learner; use "
                "vllm_server, or leave out `overlap`"
            )
        return stages

    @field_validator("stages")
    @classmethod
    def _check_component_lrs(cls, stages: Stages, info: ValidationInfo) -> Stages:
        trained = info.data["model"].trainable_components if "model" in info.data else COMPONENTS
        for stage in (stage for stage in stages if isinstance(stage, SftStage | RlStage)):
            if idle := sorted(stage.optimizer.lr_by_component.model_dump(exclude_none=True).keys() - set(trained)):
                raise ValueError(
                    f"stage {stage.name!r} has `optimizer.lr_by_role.{idle[0]}`, but {idle[0]} is not trained"
                )
        return stages

    @field_validator("checkpoints")
    @classmethod
    def _check_best_metric(cls, checkpoints: CheckpointsConfig, info: ValidationInfo) -> CheckpointsConfig:
        kind, _, rest = (checkpoints.best.metric if checkpoints.best else "").partition("/")
        if kind == "benchmark" and "evaluation" in info.data:
            names = [benchmark.name for benchmark in info.data["evaluation"].benchmarks]
            if rest.partition("/")[0] not in names:
                listed = ", ".join(names) or "none"
                raise ValueError(
                    f"best.metric 'benchmark/{rest}' is of no benchmark in evaluation.benchmarks ({listed})"
                )
        return checkpoints

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, deepspeed: DeepspeedConfig | None, info: ValidationInfo) -> DeepspeedConfig | None:
        if deepspeed and not deepspeed.zero_stage and "model" in info.data and info.data["model"].dtype != "float32":
            raise ValueError(
                "zero 0 makes a wrong first update of a bfloat16 model; use zero: 1, or model.dtype=float32"
            )
        copying = "rollout" in info.data and info.data["rollout"].engine == "hf"
        if (
            deepspeed
            and copying
            and any(isinstance(s, RlStage) and s.async_rollouts for s in info.data.get("stages", ()))
        ):
            raise ValueError(
                "a stage has `overlap`, for which the engine hf keeps a whole second model on every rank; use "
                "rollout.engine vllm_server, or leave out `overlap`"
            )
        return deepspeed


def _find_non_additive_reward(rewards: RewardsConfig) -> str:
    """What of the rewards is more than terms with weights."""
    if rewards.combine != "sum":
        return f"rewards.combine {rewards.combine!r} does not"
    shaped = [
        term.fn for term in rewards.terms if term.requires is not None or term.transform != RewardTransformConfig()
    ]
    shaped += [term.fn for term in (*rewards.terms, *rewards.group_rewards) if term.schedule is not None]
    return f"term {shaped[0]} has a gate, a transform or a schedule, which that would ignore" if shaped else ""
