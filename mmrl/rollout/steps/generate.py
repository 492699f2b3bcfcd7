"""The first step of a pipeline: sample a group of responses to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mmrl.ports import Sampler
from mmrl.types import Prompt, Rollout, RolloutBatch, SamplingParams


class ResponseGenerator(Protocol):
    """Samples first responses."""

    @property
    def sampling_params(self) -> SamplingParams:
        """The distribution of first responses."""

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]]
    ) -> RolloutBatch:
        """Return complete groups: those of `unfinished` that are complete now, then those of `prompts`.

        Groups that are not complete yet are in `unfinished` of the result, for the next training step to continue.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRollouts:
    """Samples `group_size` responses to each prompt, each until it ends."""

    sampler: Sampler
    group_size: int
    sampling_params: SamplingParams

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """Return one complete group for each prompt, in order. `unfinished` is empty here, before and after."""
        groups = self.sampler.generate(prompts, self.group_size, self.sampling_params, step=step)
        return RolloutBatch(groups=tuple(map(tuple, groups)))
