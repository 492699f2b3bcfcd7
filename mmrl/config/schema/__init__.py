"""The one home of every setting: names, types, defaults, limits. Imports without torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from mmrl.config.schema.base import ROLES, Count, FileName, Positive, Role, Strict, When
from mmrl.config.schema.data import Data, Keep, Limits, Origin
from mmrl.config.schema.data_order import Curriculum, Mixture, Order, Phase, Plateau, Priority, Shuffled, Sorted
from mmrl.config.schema.data_stages import Sample, Select
from mmrl.config.schema.distributed import Deepspeed, Processes
from mmrl.config.schema.eval_command import Exam
from mmrl.config.schema.evaluation import Benchmark, Evaluation, RunEvaluation
from mmrl.config.schema.group_filter import Band, Filter
from mmrl.config.schema.health import Health
from mmrl.config.schema.model import LanguageScratch, Lora, LoraTarget, Model, Scratch, Video, VisionScratch
from mmrl.config.schema.objective import Advantage, Coefficient, Correction, Kl, Loss, Nll, Reference, Uncertainty
from mmrl.config.schema.presets import Algorithm
from mmrl.config.schema.replay import Replay
from mmrl.config.schema.response import (
    AnswerGrammar,
    Earned,
    GroupTerm,
    Judging,
    OnFailure,
    Rewards,
    Schedule,
    Section,
    Term,
    Transform,
)
from mmrl.config.schema.rollout_engine import Parity, Rollouts, Server, Vllm
from mmrl.config.schema.rollout_steps import ContinueWith, Generate, Probe, Step, Steps, Tool, Trigger, UseTools
from mmrl.config.schema.stage_checks import check_chain
from mmrl.config.schema.stages import Optimizer, Rl, RoleRates, Sampling, Sft, Stage, Validation

__all__ = [
    "ROLES",
    "Advantage",
    "Algorithm",
    "AnswerGrammar",
    "Band",
    "Benchmark",
    "Best",
    "Checkpoints",
    "Coefficient",
    "Config",
    "ContinueWith",
    "Correction",
    "Curriculum",
    "Data",
    "Deepspeed",
    "Earned",
    "Evaluation",
    "Exam",
    "Filter",
    "Generate",
    "GroupTerm",
    "Health",
    "Judging",
    "Keep",
    "Kl",
    "LanguageScratch",
    "Limits",
    "Lora",
    "LoraTarget",
    "Loss",
    "Mixture",
    "Model",
    "Nll",
    "OnFailure",
    "Optimizer",
    "Order",
    "Origin",
    "Parity",
    "Phase",
    "Plateau",
    "Priority",
    "Probe",
    "Processes",
    "Reference",
    "Replay",
    "Rewards",
    "Rl",
    "Role",
    "RoleRates",
    "Rollouts",
    "Run",
    "RunEvaluation",
    "Sample",
    "Sampling",
    "Schedule",
    "Scratch",
    "Section",
    "Select",
    "Server",
    "Sft",
    "Shuffled",
    "Sorted",
    "Stage",
    "Step",
    "Steps",
    "Strict",
    "Term",
    "Tool",
    "Transform",
    "Trigger",
    "Uncertainty",
    "UseTools",
    "Validation",
    "Video",
    "VisionScratch",
    "Vllm",
    "When",
]


class Best(Strict):
    """Which checkpoint is the best."""

    metric: str
    """A name in metrics.jsonl, such as `validation/mean` or `bench/mathvista/accuracy`. A checkpoint is judged by the
    last value before it: let `checkpoints.every` be a multiple of that metric's `every`."""
    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""


class Checkpoints(Strict):
    """When runs are saved, and which checkpoints stay."""

    every: Positive = 100
    """Steps between checkpoints; one more at each stage's end."""
    keep: Positive = 2
    """How many of the latest stay."""
    keep_every: Positive | None = None
    """Checkpoints of steps that this divides stay for good."""
    best: Best | None = None
    """The best one so far stays, too."""
    asynchronous: bool = False
    """Go on training while a checkpoint is written; takes memory on the host for one more copy of what is saved."""


class Run(Strict):
    """The run itself."""

    name: FileName
    """Name of the run."""
    dir: str = "runs/{name}"
    """Where everything of the run is written; `{name}` is the run's name."""
    seed: Count = 0
    """Every random choice derives from it."""
    threads: Count = 0
    """CPU threads; 0 takes one per core."""
    keep_rollouts_every: Positive = 10
    """Steps between the rollouts kept for reading."""


Stages: TypeAlias = tuple[Sft | Rl | Sample | Select, ...]


class Config(Strict):
    """A whole experiment."""

    run: Run
    """Name, place and seed."""
    model: Model
    """The policy."""
    data: Data
    """Training and held-out samples."""
    answer: AnswerGrammar = AnswerGrammar()
    """How responses are written."""
    rewards: Rewards
    """How responses are scored."""
    rollout: Rollouts = Rollouts()
    """What draws rollouts."""
    stages: Annotated[
        tuple[Annotated[Sft | Rl | Sample | Select, Field(discriminator="kind")], ...], Field(min_length=1)
    ]
    """What is done, in order, each from the previous one's weights."""
    evaluation: RunEvaluation = RunEvaluation()
    """How held-out reward is measured, and which benchmarks are taken meanwhile."""
    checkpoints: Checkpoints = Checkpoints()
    """When the run is saved."""
    processes: Processes = Processes()
    """How several processes of one run wait for each other."""
    deepspeed: Deepspeed | None = None
    """DeepSpeed's ZeRO in place of plain torch."""

    @property
    def trainings(self) -> tuple[Sft | Rl, ...]:
        """The stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, Sft | Rl))

    @property
    def overlaps(self) -> bool:
        """Whether a stage draws rollouts while it learns."""
        return any(isinstance(stage, Rl) and stage.overlap for stage in self.stages)

    @field_validator("stages")
    @classmethod
    def _stages_fit(cls, stages: Stages, info: ValidationInfo) -> Stages:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stage names must be unique, got {', '.join(names)}")
        trainings = [stage for stage in stages if isinstance(stage, Sft | Rl)]
        if not trainings:
            raise ValueError("no stage trains; a run needs one of kind sft or rl")
        sharing = [stage.name for stage in trainings if stage.shared_prefix == "on"]
        if sharing and "model" in info.data and info.data["model"].attention == "eager":
            raise ValueError(f"stage {sharing[0]!r} has `shared_prefix: on`, which eager `model.attention` cannot do")
        looking = [stage.name for stage in trainings if stage.validation]
        if looking and "data" in info.data and not info.data["data"].validation:
            raise ValueError(f"stage {looking[0]!r} has `validation`, which needs `data.validation`")
        if "rewards" in info.data and (plain := _not_summed(info.data["rewards"])):
            separate = [stage.name for stage in stages if stage.kind == "rl" and stage.advantage.combine == "per_term"]
            if separate:
                raise ValueError(f"stage {separate[0]!r}: advantage.combine per_term sums terms by weight; {plain}")
        return stages

    @field_validator("stages")
    @classmethod
    def _stages_follow(cls, stages: Stages, info: ValidationInfo) -> Stages:
        check_chain(stages, info.data)
        return stages

    @field_validator("stages")
    @classmethod
    def _engine_knows_the_law(cls, stages: Stages, info: ValidationInfo) -> Stages:
        engine = info.data["rollout"].engine if "rollout" in info.data else "hf"
        for stage in (stage for stage in stages if isinstance(stage, Rl)):
            if engine != "hf" and (stage.sampling.top_k or stage.sampling.top_p < 1.0):
                raise ValueError(
                    f"stage {stage.name!r} has `sampling.top_p` or `top_k`, whose log-probabilities vLLM renormalises "
                    "and the learner does not; leave them out, or use `rollout.engine: hf`"
                )
        return stages

    @field_validator("stages")
    @classmethod
    def _engine_can_overlap(cls, stages: Stages, info: ValidationInfo) -> Stages:
        overlapping = [stage.name for stage in stages if isinstance(stage, Rl) and stage.overlap]
        if overlapping and "rollout" in info.data and info.data["rollout"].engine == "vllm":
            raise ValueError(
                f"stage {overlapping[0]!r} has `overlap`, and rollout.engine vllm takes turns with the learner; use "
                "vllm_server, or leave out `overlap`"
            )
        return stages

    @field_validator("stages")
    @classmethod
    def _rates_are_of_trained_parts(cls, stages: Stages, info: ValidationInfo) -> Stages:
        trained = info.data["model"].trained if "model" in info.data else ROLES
        for stage in (stage for stage in stages if isinstance(stage, Sft | Rl)):
            if idle := sorted(stage.optimizer.lr_by_role.model_dump(exclude_none=True).keys() - set(trained)):
                raise ValueError(
                    f"stage {stage.name!r} has `optimizer.lr_by_role.{idle[0]}`, but {idle[0]} is not trained"
                )
        return stages

    @field_validator("checkpoints")
    @classmethod
    def _best_is_taken(cls, checkpoints: Checkpoints, info: ValidationInfo) -> Checkpoints:
        kind, _, rest = (checkpoints.best.metric if checkpoints.best else "").partition("/")
        if kind == "bench" and "evaluation" in info.data:
            names = [benchmark.name for benchmark in info.data["evaluation"].benchmarks]
            if rest.partition("/")[0] not in names:
                listed = ", ".join(names) or "none"
                raise ValueError(f"best.metric 'bench/{rest}' is of no benchmark in evaluation.benchmarks ({listed})")
        return checkpoints

    @field_validator("deepspeed")
    @classmethod
    def _updates_are_right(cls, deepspeed: Deepspeed | None, info: ValidationInfo) -> Deepspeed | None:
        if deepspeed and not deepspeed.zero and "model" in info.data and info.data["model"].dtype != "float32":
            raise ValueError(
                "zero 0 makes a wrong first update of a bfloat16 model; use zero: 1, or model.dtype=float32"
            )
        copying = "rollout" in info.data and info.data["rollout"].engine == "hf"
        if deepspeed and copying and any(isinstance(s, Rl) and s.overlap for s in info.data.get("stages", ())):
            raise ValueError(
                "a stage has `overlap`, for which the engine hf keeps a whole second model on every rank; use "
                "rollout.engine vllm_server, or leave out `overlap`"
            )
        return deepspeed


def _not_summed(rewards: Rewards) -> str:
    """What of the rewards is more than terms with weights."""
    if rewards.combine != "sum":
        return f"rewards.combine {rewards.combine!r} does not"
    shaped = [term.fn for term in rewards.terms if term.gate is not None or term.transform != Transform()]
    shaped += [term.fn for term in (*rewards.terms, *rewards.group_terms) if term.schedule is not None]
    return f"term {shaped[0]} has a gate, a transform or a schedule, which that would ignore" if shaped else ""
