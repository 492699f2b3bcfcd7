"""How held-out reward, and what a benchmark asks, is measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mmrl.config.schema.base import FileName, PositiveInt, StrictModel
from mmrl.config.schema.rollout_steps import (
    GENERATE_ONLY,
    RethinkConfig,
    RolloutStepConfigs,
    check_plain_generation,
    check_rollout_steps,
)
from mmrl.types import CoordinateSystem


class EvalGenerationConfig(StrictModel):
    """How held-out reward is measured."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""
    max_new_tokens: PositiveInt = 512
    """Longest response."""
    batch_size: PositiveInt = 64
    """Prompts per generation batch."""
    rollout_steps: Annotated[RolloutStepConfigs, AfterValidator(check_rollout_steps)] = GENERATE_ONLY
    """What is done with a prompt, as in training; no step may look at whether a response is right."""

    @field_validator("rollout_steps")
    @classmethod
    def _check_ignores_correctness(cls, program: RolloutStepConfigs) -> RolloutStepConfigs:
        check_plain_generation(program, "evaluation", "is of one response")
        for step in program:
            if isinstance(step, RethinkConfig) and (key := step.correctness_dependent_key):
                raise ValueError(f"step {step.name!r} has `{key}`, by which evaluation would know the right answer")
        return program


class BenchmarkConfig(StrictModel):
    """A benchmark that the run takes by itself, with the code of `mmrl eval`: before the first step of training, every
    so many steps, and as each stage that trains ends.
    """

    name: FileName
    """Its name in metrics, `bench/<name>/accuracy` (strict) and others, and below RUN/bench."""
    benchmark: str | None = None
    """Which one it is, as `mmrl eval --bench` takes it, such as `mathvista` or `canonical`; as `name` when left out."""
    fn: str | None = None
    """Function that returns your own benchmark, `./mine.py:make_benchmark`, in place of a shipped one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `fn`."""
    data: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files or folders of its questions, from the config's folder."""
    responses_per_question: PositiveInt = 1
    """Responses to each question; of several, `bench/<name>/pass@k` and `maj@k` are told for k = 1, 2, 4, .."""
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """That of responses; `evaluation.temperature` when left out."""
    every: PositiveInt | None = None
    """Steps from one time to the next within a stage; without it there are those before and after alone."""
    split: str | None = None
    """Of a folder: the split to take; the benchmark's usual one when left out."""
    media_root: str | None = None
    """Where relative paths of pictures and videos start; where the questions lie when left out."""
    coordinates: Literal[CoordinateSystem.PX_ORIGINAL, CoordinateSystem.NORM_1, CoordinateSystem.NORM_1000] | None = (
        None
    )
    """What the boxes of a table that does not say so are measured in."""
    allow_missing: bool = False
    """Count questions that cannot be asked as wrong; otherwise they end the run before it begins."""
    subsets: tuple[str, ...] = ()
    """Columns whose values get metrics of their own, `bench/<name>/<column>/<value>`; reports have all."""

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
    """How held-out reward is measured, and which benchmarks are taken."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()
    """Benchmarks to take in training, with this section's law and program."""

    def benchmark_temperature(self, benchmark: BenchmarkConfig) -> float:
        """The temperature at which a benchmark is taken."""
        return self.temperature if benchmark.temperature is None else benchmark.temperature

    @model_validator(mode="after")
    def _check_sampling_not_greedy(self) -> TrainingEvalConfig:
        for benchmark in self.benchmarks:
            if benchmark.responses_per_question > 1 and not self.benchmark_temperature(benchmark):
                raise ValueError(
                    f"benchmark {benchmark.name!r}: samples {benchmark.responses_per_question} of a greedy law are all the same; "
                    "set its temperature"
                )
        return self

    @field_validator("benchmarks")
    @classmethod
    def _check_unique_names(cls, benchmarks: tuple[BenchmarkConfig, ...]) -> tuple[BenchmarkConfig, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two benchmarks are named {twice[0]!r}; give one another `name`, and `bench` says which")
        return benchmarks
