"""Greedy responses: one more response to each prompt, at temperature 0, which is scored and never trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.config.schema.rollout_steps import GREEDY_PROBE
from mmrl.rollout.steps.base import RolloutContext, RolloutStep, with_probe
from mmrl.rollout.steps.environment import EnvironmentStep
from mmrl.rollout.steps.rethink import ForcedRethink
from mmrl.rollout.steps.tools import ToolStep
from mmrl.types import RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyResponses:
    """Adds the greedy response to each prompt to the probes of a batch."""

    context: RolloutContext
    steps: Sequence[RolloutStep] = ()  # that ordinary rollouts go through too

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with a greedy response to each prompt, under the name `GREEDY_PROBE`."""
        prompts = []
        for group in batch.groups:
            prompt = group[0].prompt
            # Its own sample id, because ordinary rollouts use the original one for their episodes.
            sample = replace(prompt.sample, id=f"{prompt.sample.id}~{GREEDY_PROBE}")
            prompts.append(replace(prompt, sample=sample))
        context = replace(self.context, sampling_params=replace(self.context.sampling_params, temperature=0.0))
        groups = context.sampler.generate(prompts, 1, context.sampling_params, step=step)
        greedy_batch = RolloutBatch(groups=tuple(map(tuple, groups)))
        for rollout_step in self.steps:
            greedy_batch = _make_greedy(rollout_step, context)(greedy_batch, step=step)
        # The metrics of `greedy_batch` are dropped: the metrics of a batch count only rollouts that train.
        return with_probe(batch, GREEDY_PROBE, dict(enumerate(greedy_batch.groups)))


def _make_greedy(step: RolloutStep, context: RolloutContext) -> RolloutStep:
    """Return a built-in step with the temperature of `context`. A user's step is returned as it is."""
    match step:
        case ForcedRethink():
            return replace(step, context=context, options=step.options.model_copy(update={"temperature": None}))
        case ToolStep() | EnvironmentStep():
            return replace(step, context=context)
    return step
