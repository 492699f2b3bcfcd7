"""Section `evaluation` of a run, and the settings of `mmrl eval run MODEL key=value ...`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mmrl.config.schema.base import (
    NO_EFFECT,
    ROUNDING_EFFECT,
    BatchSize,
    FileName,
    NonNegativeInt,
    NumParallel,
    NumTokens,
    PositiveFraction,
    PositiveInt,
    Seed,
    StrictModel,
    Temperature,
    Workers,
    check_unique,
)
from mmrl.config.schema.data import MediaConfig, MediaLimitsConfig
from mmrl.config.schema.model import ModelConfig
from mmrl.config.schema.response_format import ResponseFormatConfig
from mmrl.config.schema.rollout_engine import RolloutConfig
from mmrl.config.schema.rollout_steps import (
    GENERATE_ONLY,
    RethinkConfig,
    RolloutStepConfigs,
    check_plain_generation,
    check_rollout_steps,
)
from mmrl.types import CoordinateSystem


class EvalGenerationConfig(StrictModel):
    """Generation of responses outside of training."""

    temperature: Temperature = 0.0
    """Sampling temperature of responses; 0 is greedy."""
    max_new_tokens: NumTokens = 512
    """A response that reaches this many tokens is cut."""
    batch_size: Annotated[BatchSize, ROUNDING_EFFECT] = 64
    """Prompts answered at a time."""
    rollout_steps: Annotated[RolloutStepConfigs, AfterValidator(check_rollout_steps)] = GENERATE_ONLY
    """Steps from a prompt to its response, as in training; no step may depend on whether a response is correct."""

    @field_validator("rollout_steps")
    @classmethod
    def _check_ignores_correctness(cls, steps: RolloutStepConfigs) -> RolloutStepConfigs:
        check_plain_generation(steps, "evaluation")
        for step in steps:
            if isinstance(step, RethinkConfig) and step.correctness_dependent_key:
                key = step.correctness_dependent_key
                raise ValueError(f"step {step.name!r} has `{key}`, by which evaluation would know the correct answer")
        return steps


class BenchmarkConfig(StrictModel):
    """A benchmark that is run during training, with the code of `mmrl eval`.

    It runs before the first step of training, every so many steps, and at the end of each stage that trains.
    """

    name: FileName
    """The benchmark's name in metrics, `benchmark/<name>/accuracy` (strict) and others, and in RUN/benchmarks."""
    benchmark: str | None = None
    """The benchmark, as `mmrl eval --benchmark` takes it, such as `mathvista` or `canonical`; `name` when left out."""
    fn: str | None = None
    """Function that returns your own benchmark, `./mine.py:make_benchmark`, in place of a shipped one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options that the function is called with."""
    data: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files or folders that hold its questions, relative to the config's folder."""
    responses_per_question: BatchSize = 1
    """Responses generated for each question; with several, `benchmark/<name>/pass@k` and `maj@k` are logged for k =
    1, 2, 4, ..."""
    temperature: Temperature | None = None
    """Sampling temperature of responses; `evaluation.temperature` when left out."""
    every: PositiveInt | None = None
    """The benchmark runs every so many steps of a stage; without this key, only before training and after each
    stage."""
    split: str | None = None
    """Split of a folder of questions; the benchmark's usual split when left out."""
    media_root: str | None = None
    """Folder that relative paths of images and videos start from; the folder of the questions when left out."""
    coordinates: Literal[CoordinateSystem.PX_ORIGINAL, CoordinateSystem.NORM_1, CoordinateSystem.NORM_1000] | None = (
        None
    )
    """Coordinate system of boxes in a table that does not state its own."""
    allow_missing: bool = False
    """Count malformed rows and questions without their media as incorrect; otherwise they end the run at its start."""
    subsets: tuple[str, ...] = ()
    """Columns whose values get their own metrics, `benchmark/<name>/<column>/<value>`; reports have all columns."""

    @property
    def benchmark_name(self) -> str:
        """Name or function of the benchmark whose rules score the responses."""
        return self.fn or self.benchmark or self.name

    @model_validator(mode="after")
    def _check_fn_or_name(self) -> BenchmarkConfig:
        if self.fn is not None and self.benchmark is not None:
            raise ValueError(f"both `benchmark` ({self.benchmark}) and `fn` ({self.fn}) are given; leave out one")
        if self.args and self.fn is None:
            raise ValueError("`args` are arguments of `fn`; give that, too")
        return self


class TrainingEvalConfig(EvalGenerationConfig):
    """Evaluation of a run: generation, and benchmarks."""

    benchmarks: Annotated[tuple[BenchmarkConfig, ...], NO_EFFECT] = ()
    """Benchmarks that are run during training, with the generation settings of this section."""

    def benchmark_temperature(self, benchmark: BenchmarkConfig) -> float:
        """Return the sampling temperature of a benchmark."""
        return self.temperature if benchmark.temperature is None else benchmark.temperature

    @model_validator(mode="after")
    def _check_sampling_not_greedy(self) -> TrainingEvalConfig:
        for benchmark in self.benchmarks:
            if benchmark.responses_per_question > 1 and not self.benchmark_temperature(benchmark):
                raise ValueError(
                    f"benchmark {benchmark.name!r}: all {benchmark.responses_per_question} responses to a question are "
                    "the same at temperature 0; set its temperature"
                )
        return self

    @field_validator("benchmarks")
    @classmethod
    def _check_unique_names(cls, benchmarks: tuple[BenchmarkConfig, ...]) -> tuple[BenchmarkConfig, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        check_unique(names, "benchmarks", "give one another `name`, and set its `benchmark`")
        return benchmarks


class EvalRunConfig(StrictModel):
    """Seed and threads of an evaluation."""

    seed: Seed = 0
    """Seed that every random choice derives from."""
    cpu_threads: Workers = 0
    """CPU threads that torch uses; 0 is one per core."""


class LlmJudgeConfig(StrictModel):
    """A language model that reads responses in which no rule finds an answer; it never overrules a rule."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    """URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1/chat/completions."""
    model: str
    """Name of the model on the server."""
    key_file: str | None = None
    """File that holds the bearer token."""
    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """Seconds that one request may take."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Times that a failed request is repeated, after growing pauses. A response that still has no verdict is
    counted."""
    max_tokens: NumTokens = 512
    """The judge's reply is cut at this many tokens."""
    max_concurrency: NumParallel = 8
    """Requests in flight at a time."""


class EvalConfig(StrictModel):
    """Settings of `mmrl eval run`. For a run directory they start from the run's own config."""

    run: EvalRunConfig = EvalRunConfig()
    """Seed and threads."""
    model: ModelConfig
    """The model that answers, and the size of the images it sees."""
    response_format: ResponseFormatConfig = ResponseFormatConfig()
    """Format of responses. `response_format.thinking=required` lets the model think, `none` does not."""
    rollout: RolloutConfig = RolloutConfig()
    """The engine that generates responses."""
    evaluation: EvalGenerationConfig = EvalGenerationConfig()
    """Generation: temperature, longest response, batches, and rollout steps such as forced rethinking, whose
    `correct: [correct]` names the benchmark's verdict."""
    media: MediaConfig = MediaConfig()
    """The library that reads videos."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Limits beyond which a medium is refused before it is decoded."""
    responses_per_question: BatchSize = 1
    """Responses that are generated for each question, for pass@k and maj@k."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling draws from the smallest set of tokens with this probability."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 is all."""
    corruption: Literal["grey", "noise", "left_out"] | None = None
    """Hide the images and videos: a question that is still answered correctly was guessed."""
    judge: LlmJudgeConfig | None = None
    """A language model that reads responses in which no rule finds an answer; none when left out."""

    @property
    def stages(self) -> tuple[()]:
        """The stages of an evaluation: none, as nothing is trained."""
        # Code that builds an engine reads `stages`, of a run's config or of this one.
        return ()

    @model_validator(mode="after")
    def _check_sampling_not_greedy(self) -> EvalConfig:
        if self.responses_per_question > 1 and not self.evaluation.temperature:
            raise ValueError(
                f"all {self.responses_per_question} responses to a question are the same at temperature 0; set "
                "evaluation.temperature=1"
            )
        return self
