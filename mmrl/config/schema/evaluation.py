"""How held-out reward, and what a benchmark asks, is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mmrl.config.schema.base import FileName, Positive, Strict
from mmrl.config.schema.rollout_steps import ONCE, ContinueWith, Steps, check_answers_only, check_order
from mmrl.types import Frame


class Evaluation(Strict):
    """How held-out reward is measured."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""
    max_new_tokens: Positive = 512
    """Longest response."""
    batch_size: Positive = 64
    """Prompts per generation batch."""
    program: Annotated[Steps, AfterValidator(check_order)] = ONCE
    """What is done with a prompt, as in training; no step may look at whether a response is right."""

    @field_validator("program")
    @classmethod
    def _blind(cls, program: Steps) -> Steps:
        check_answers_only(program, "evaluation", "is of one response")
        for step in program:
            if isinstance(step, ContinueWith) and (key := step.looks_at_verdicts):
                raise ValueError(f"step {step.name!r} has `{key}`, by which evaluation would know the right answer")
        return program


class Benchmark(Strict):
    """A benchmark that the run takes by itself, with the code of `mmrl eval`: before the first step of training, every
    so many steps, and as each stage that trains ends.
    """

    name: FileName
    """Its name in metrics, `bench/<name>/accuracy` (strict) and others, and below RUN/bench."""
    bench: str | None = None
    """Which one it is, as `mmrl eval --bench` takes it, such as `mathvista` or `canonical`; as `name` when left out."""
    data: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files or folders of its questions, from the config's folder."""
    samples: Positive = 1
    """Responses to each question; of several, `bench/<name>/pass@k` and `maj@k` are told for k = 1, 2, 4, .."""
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """That of responses; `evaluation.temperature` when left out."""
    every: Positive | None = None
    """Steps from one time to the next within a stage; without it there are those before and after alone."""
    split: str | None = None
    """Of a folder: the split to take; the benchmark's usual one when left out."""
    media: str | None = None
    """Where relative paths of pictures and videos start; where the questions lie when left out."""
    frame: Literal[Frame.PX_ORIGINAL, Frame.NORM_1, Frame.NORM_1000] | None = None
    """What the boxes of a table that does not say so are measured in."""
    allow_missing: bool = False
    """Count questions that cannot be asked as wrong; otherwise they end the run before it begins."""
    subsets: tuple[str, ...] = ()
    """Columns whose values get metrics of their own, `bench/<name>/<column>/<value>`; reports have all."""

    @property
    def rules(self) -> str:
        """Whose rules score it."""
        return self.bench or self.name


class RunEvaluation(Evaluation):
    """How held-out reward is measured, and which benchmarks are taken."""

    benchmarks: tuple[Benchmark, ...] = ()
    """Benchmarks to take in training, with this section's law and program."""

    def temperature_of(self, benchmark: Benchmark) -> float:
        """The temperature at which a benchmark is taken."""
        return self.temperature if benchmark.temperature is None else benchmark.temperature

    @model_validator(mode="after")
    def _samples_differ(self) -> RunEvaluation:
        for benchmark in self.benchmarks:
            if benchmark.samples > 1 and not self.temperature_of(benchmark):
                raise ValueError(
                    f"benchmark {benchmark.name!r}: samples {benchmark.samples} of a greedy law are all the same; "
                    "set its temperature"
                )
        return self

    @field_validator("benchmarks")
    @classmethod
    def _names_differ(cls, benchmarks: tuple[Benchmark, ...]) -> tuple[Benchmark, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two benchmarks are named {twice[0]!r}; give one another `name`, and `bench` says which")
        return benchmarks
