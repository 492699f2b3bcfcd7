"""The root of the schema: small sections (`run`, `checkpoints`, `deepspeed` ...) and the whole config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mmrl.config.schema.base import (
    NO_EFFECT,
    ROUNDING_EFFECT,
    FileName,
    FunctionConfig,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Seed,
    StrictModel,
    Workers,
    check_unique,
)
from mmrl.config.schema.data import DataConfig, MediaConfig
from mmrl.config.schema.data_stages import SelectStage
from mmrl.config.schema.evaluation import TrainingEvalConfig
from mmrl.config.schema.model import ModelConfig
from mmrl.config.schema.response_format import ResponseFormatConfig
from mmrl.config.schema.rewards import RewardsConfig
from mmrl.config.schema.rollout_engine import RolloutConfig
from mmrl.config.schema.stage_checks import AnyStage, check_stages
from mmrl.config.schema.stages import RlStage, SftStage
from mmrl.config.yaml_tree import KeyPath


class BestCheckpointConfig(StrictModel):
    """Choice of the best checkpoint."""

    metric: str
    """Name in metrics.jsonl, such as `validation/mean` or `benchmark/mathvista/accuracy`. Checkpoints are compared by
    the last value recorded before each, so `checkpoints.every` should be a multiple of that metric's `every`."""
    mode: Literal["max", "min"] = "max"
    """`max`: the largest value is best. `min`: the smallest value is best."""


class CheckpointsConfig(StrictModel):
    """When runs are saved, and which checkpoints are kept."""

    every: PositiveInt = 100
    """Steps from one checkpoint to the next; one more is saved at the end of each stage."""
    keep_last: PositiveInt = 2
    """Number of latest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Never delete a checkpoint whose step is a multiple of this."""
    best: BestCheckpointConfig | None = None
    """Keep the best checkpoint too."""
    async_save: bool = False
    """Continue training while a checkpoint is written. This takes host memory for one more copy of everything that
    is saved."""


class RunConfig(StrictModel):
    """The run itself."""

    name: FileName
    """Name of the run, of its directory and of its exported model."""
    dir: Annotated[str, NO_EFFECT] = "runs/{name}"  # no f-string: the run fills the name in
    """Folder for everything that the run writes; `{name}` is the run's name."""
    seed: Seed = 0
    """Seed that every random choice derives from."""
    cpu_threads: Annotated[Workers, ROUNDING_EFFECT] = 0
    """CPU threads that torch uses; 0 is one per core."""


class RolloutRecordsConfig(StrictModel):
    """Rollouts that are written to `rollouts/` for `mmrl view` and for people to read."""

    every: PositiveInt = 10
    """Write the rollouts of each step that is a multiple of this, and of the first step."""
    max_groups: PositiveInt = 64
    """At most this many groups (prompts) of a step are written, the first ones; or held-out samples, evenly spaced."""
    tokens: bool = True
    """Also write a second file with each token's log-probs, ratio, entropy and advantage."""


class LoggingConfig(StrictModel):
    """Files of a run that people read."""

    rollouts: Annotated[RolloutRecordsConfig, NO_EFFECT] = RolloutRecordsConfig()
    """Which rollouts are recorded, and how much of them."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...], NO_EFFECT] = ()
    """Trackers that the run reports to. Keys, servers and teams come from environment variables (docs/trackers.md)."""
    project: Annotated[str, Field(min_length=1), NO_EFFECT] = "mmrl"
    """Project that the run belongs to in its trackers; MLflow calls it an experiment."""

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, trackers: tuple[str, ...]) -> tuple[str, ...]:
        check_unique(trackers, "trackers", "leave one out")  # each has one file with its mark
        return trackers


class DistributedConfig(StrictModel):
    """Timeouts of the processes of one run, started by `mmrl train --nproc`, torchrun or deepspeed."""

    # A run that ended because something took too long can only continue with more time.
    timeout_s: Annotated[Seconds, NO_EFFECT] = 1800.0
    """Seconds that a process waits for another before the run ends. After a sixth of this time without progress, the
    process prints its activity and stacks, and the activity of each other process."""


class DeepspeedConfig(StrictModel):
    """DeepSpeed's ZeRO in place of plain torch, with the same gradient."""

    zero_stage: Annotated[int, Field(ge=0, le=3)]
    """ZeRO shards among processes: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and update there; needs `zero_stage` 1 to 3."""
    offload_parameters: bool = False
    """Keep weights in host memory until a layer needs them; needs `zero_stage: 3`."""
    bucket_elements: Annotated[int, Field(ge=1000, le=10**11)] = 500_000_000
    """Elements that are reduced or gathered in one message. Smaller buckets take less memory and need more messages."""
    param_persistence_elements: NonNegativeInt = 100_000
    """Under `zero_stage: 3`, weights of fewer elements stay whole on every process."""

    @model_validator(mode="after")
    def _check_offload(self) -> DeepspeedConfig:
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError("offload_optimizer needs `zero_stage` 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs `zero_stage: 3`, not {self.zero_stage}")
        return self


class CallbackConfig(FunctionConfig):
    """A user's callback, run after each training step (docs/extending/callback.md).

    `fn` is called once, with the run's `RunComponents`, and returns an object with `on_step_end(state, result)`.
    """


class Config(StrictModel):
    """A whole experiment."""

    run: RunConfig
    """Name, folder and seed of the run."""
    model: ModelConfig
    """The policy, which is trained."""
    data: DataConfig
    """Sources of training, validation and test samples."""
    media: MediaConfig = MediaConfig()
    """The library that reads videos."""
    response_format: ResponseFormatConfig = ResponseFormatConfig()
    """Format that responses are written in."""
    rewards: RewardsConfig
    """Functions that score responses."""
    rollout: RolloutConfig = RolloutConfig()
    """The engine that generates rollouts."""
    stages: Annotated[tuple[Annotated[AnyStage, Field(discriminator="kind")], ...], Field(min_length=1)]
    """Stages in order, each starting from the weights of the previous stage."""
    evaluation: TrainingEvalConfig = TrainingEvalConfig()
    """Generation of responses in validation and test, and benchmarks that are run during training."""
    checkpoints: Annotated[CheckpointsConfig, NO_EFFECT] = CheckpointsConfig()
    """Steps at which checkpoints are saved, and which of them are kept."""
    distributed: DistributedConfig = DistributedConfig()
    """Seconds that the processes of a run wait for each other."""
    deepspeed: DeepspeedConfig | None = None
    """Shard the run with DeepSpeed's ZeRO, in place of plain torch."""
    logging: LoggingConfig = LoggingConfig()
    """Files that are written for people to read."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Your functions that run after each training step, in this order, before checkpoints are saved."""

    @property
    def training_stages(self) -> tuple[SftStage | RlStage, ...]:
        """The stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, SftStage | RlStage))

    def is_selected_from(self, stage_name: str) -> bool:
        """Return True if a `select` stage reads the results of the stage of this name."""
        return any(isinstance(stage, SelectStage) and stage.results_of == stage_name for stage in self.stages)

    def list_warnings(self) -> list[tuple[KeyPath, str]]:
        """Return valid settings that are probably a mistake: the path of a key, and what to do."""
        warnings: list[tuple[KeyPath, str]] = []
        trained_kinds: set[str] = set()
        for index, stage in enumerate(self.stages):
            if isinstance(stage, SftStage | RlStage):
                optimizer = stage.optimizer
                decays = optimizer.lr_schedule != "constant" and optimizer.decay_steps is None
                # Not refused: a short trial of the same settings has fewer steps.
                if decays and optimizer.warmup_steps >= stage.steps:
                    text = f"the warm-up lasts for all {stage.steps} steps, so the rate never falls; shorten it"
                    warnings.append((("stages", index, "optimizer", "warmup_steps"), text))
            if isinstance(stage, RlStage):
                warnings += [(("stages", index, *path), text) for path, text in stage.list_warnings()]
                trained_kinds |= {step.kind for step in stage.rollout_steps}
        if "environment" in trained_kinds - {step.kind for step in self.evaluation.rollout_steps}:
            text = "no step is an environment, as in training: a response is one turn, and earns nothing there; add it"
            warnings.append((("evaluation", "rollout_steps"), text))
        has_validation = any(stage.validation for stage in self.training_stages)
        if self.data.validation and not has_validation:
            text = "no stage has `validation`, so the run never uses these samples; set it, or take them out"
            warnings.append((("data", "validation"), text))
        for index, source in enumerate(self.data.train):
            if source.validation_share and not has_validation:
                text = "no stage has `validation`, so the run never uses the rows held out; set it, or take this out"
                warnings.append((("data", "train", index, "validation_share"), text))
        return warnings

    @property
    def uses_async_rollouts(self) -> bool:
        """True if a stage generates rollouts while it trains."""
        return any(isinstance(stage, RlStage) and stage.async_rollouts for stage in self.stages)

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: tuple[AnyStage, ...], info: ValidationInfo) -> tuple[AnyStage, ...]:
        # `info.data` holds the sections declared above this field. Invalid ones are absent: pydantic reports their
        # errors itself, beside those found here.
        check_stages(stages, info.data)
        return stages

    @field_validator("checkpoints")
    @classmethod
    def _check_best_metric(cls, checkpoints: CheckpointsConfig, info: ValidationInfo) -> CheckpointsConfig:
        if checkpoints.best is None or "evaluation" not in info.data:
            return checkpoints
        group, _, rest = checkpoints.best.metric.partition("/")
        names = [benchmark.name for benchmark in info.data["evaluation"].benchmarks]
        # Other names depend on the tasks of the data, which is not read yet.
        if group == "benchmark" and rest.partition("/")[0] not in names:
            raise ValueError(
                f"best.metric 'benchmark/{rest}' names no benchmark of evaluation.benchmarks "
                f"({', '.join(names) or 'none'})"
            )
        return checkpoints

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, deepspeed: DeepspeedConfig | None, info: ValidationInfo) -> DeepspeedConfig | None:
        if deepspeed is None:
            return None
        if not deepspeed.zero_stage and "model" in info.data and info.data["model"].dtype != "float32":
            raise ValueError(
                "zero_stage 0 makes a wrong first update of a bfloat16 model; use zero_stage: 1, or model.dtype=float32"
            )
        copies_model = "rollout" in info.data and info.data["rollout"].engine == "hf"
        stages: tuple[AnyStage, ...] = info.data.get("stages", ())
        if copies_model and any(isinstance(stage, RlStage) and stage.async_rollouts for stage in stages):
            raise ValueError(
                "a stage has `async_rollouts`, for which the engine hf keeps a whole second model on every rank; use "
                "rollout.engine vllm_server, or leave out `async_rollouts`"
            )
        return deepspeed
