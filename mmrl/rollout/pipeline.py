"""Rollout programs: what is done with a prompt until it has its group of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mmrl.ports import Sampler
from mmrl.types import Answers, Prompt, Rollout, SamplingLaw


class Step(Protocol):
    """Takes over what the steps before it left: longer rollouts, more of them, probes."""

    def __call__(self, answers: Answers, *, step: int) -> Answers:
        """The answers with what this step adds; `step` is the training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Generate, then the steps in their order."""

    generate: First
    steps: tuple[Step, ...] = ()

    def answer(self, prompts: Sequence[Prompt], *, step: int, pending: Sequence[tuple[Rollout, ...]] = ()) -> Answers:
        """A group of rollouts for each prompt, in order, those `pending` from the step before first."""
        answers = self.generate.answer(prompts, step=step, pending=pending)
        for follow in self.steps:
            answers = follow(answers, step=step)
        return answers


class First(Protocol):
    """What a program begins with."""

    @property
    def law(self) -> SamplingLaw:
        """That of first responses."""

    def answer(self, prompts: Sequence[Prompt], *, step: int, pending: Sequence[tuple[Rollout, ...]]) -> Answers:
        """Groups of first responses, complete ones; the others are pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """So many responses to each prompt."""

    sampler: Sampler
    group_size: int
    law: SamplingLaw

    def answer(self, prompts: Sequence[Prompt], *, step: int, pending: Sequence[tuple[Rollout, ...]] = ()) -> Answers:
        """A group of rollouts for each prompt, in order; nothing is ever pending."""
        groups = self.sampler.generate(prompts, self.group_size, self.law, step=step)
        return Answers(groups=tuple(tuple(group) for group in groups))


def told(answers: Answers, metrics: Mapping[str, float]) -> Answers:
    """The answers with more to tell. Metrics of programs are counts: a step sums them over its rounds."""
    counts = Counter(answers.metrics)
    counts.update(metrics)
    return replace(answers, metrics=counts)
