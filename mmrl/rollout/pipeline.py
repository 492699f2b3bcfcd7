"""Rollout programs: what is done with a prompt until it has its group of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mmrl.ports import Sampler
from mmrl.types import Prompt, Rollout, RolloutBatch, SamplingParams


class PipelineStep(Protocol):
    """Takes over what the steps before it left: longer rollouts, more of them, probes."""

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """The answers with what this step adds; `step` is the training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPipeline:
    """Generate, then the steps in their order."""

    generator: Generator
    steps: tuple[PipelineStep, ...] = ()

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """A group of rollouts for each prompt, in order, those `pending` from the step before first."""
        answers = self.generator.generate(prompts, step=step, unfinished=unfinished)
        for follow in self.steps:
            answers = follow(answers, step=step)
        return answers


class Generator(Protocol):
    """What a program begins with."""

    @property
    def sampling_params(self) -> SamplingParams:
        """That of first responses."""

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]]
    ) -> RolloutBatch:
        """Groups of first responses, complete ones; the others are pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRollouts:
    """So many responses to each prompt."""

    sampler: Sampler
    group_size: int
    sampling_params: SamplingParams

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """A group of rollouts for each prompt, in order; nothing is ever pending."""
        groups = self.sampler.generate(prompts, self.group_size, self.sampling_params, step=step)
        return RolloutBatch(groups=tuple(tuple(group) for group in groups))


def with_metrics(batch: RolloutBatch, metrics: Mapping[str, float]) -> RolloutBatch:
    """The answers with more to tell. Metrics of programs are counts: a step sums them over its rounds."""
    counts = Counter(batch.metrics)
    counts.update(metrics)
    return replace(batch, metrics=counts)
