"""How held-out reward, and what a benchmark asks, is measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from mmrl.config.schema.base import FileName, Positive, Strict
from mmrl.config.schema.program import ONCE, ContinueWith, Steps, check_answers_only, check_order


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
    every: Positive | None = None
    """Steps from one time to the next within a stage; without it there are those before and after alone."""
    split: str | None = None
    """Of a folder: the split to take; the benchmark's usual one when left out."""
    media: str | None = None
    """Where relative paths of pictures and videos start; where the questions lie when left out."""
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

    @field_validator("benchmarks")
    @classmethod
    def _names_differ(cls, benchmarks: tuple[Benchmark, ...]) -> tuple[Benchmark, ...]:
        names = [benchmark.name for benchmark in benchmarks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two benchmarks are named {twice[0]!r}; give one another `name`, and `bench` says which")
        return benchmarks
