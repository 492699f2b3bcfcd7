"""The interfaces between the training loop and its parts. Each says who calls it and who implements it.

Imports only the standard library and `mmrl.types`. `mmrl.training.build`, and the files of the stages beside it,
connect the classes that implement them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from mmrl.types import (
    Experience,
    Group,
    Prompt,
    Rollout,
    RolloutBatch,
    Sample,
    SamplingParams,
    Score,
    SelectedExperiences,
    Target,
    TokenValues,
    TrainingState,
)


class SampleSource(Protocol):
    """An endless, seeded order of samples that can be read from any position.

    Called by the loops; implemented by `mmrl.data.prefetch.Prefetcher`.
    """

    def take(self, start_position: int, count: int) -> Sequence[Sample]:
        """Return this rank's share of the `count` samples from `start_position` on, without unusable ones.

        Raises:
            UserError: a sample is unusable and `data.on_bad_sample` is `stop`.
        """


class Processor(Protocol):
    """Turns samples into token ids with expanded media placeholders.

    Called by the loops, evaluation and blind probes; implemented by `mmrl.policy.processor.PromptProcessor`.
    """

    def build(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample. Its encoded media stay in a cache for the sampler and the learner.

        Raises:
            UserError: a medium cannot be opened or the prompt is too long; the message names the sample.
        """

    def build_demonstration(
        self,
        prompt: Prompt,
        demonstration: Target | str,
        *,
        with_thinking: bool,
        loss_on: Literal["response", "answer"],
    ) -> Rollout:
        """Return a rollout to imitate: a Target written in the response format, or the text of a full response.

        Thinking is removed unless `with_thinking`. `loss_on` trains on the whole response or only on its answer.
        """


class Sampler(Protocol):
    """Generates tokens from the policy.

    Called by the steps of a rollout pipeline, and by the RL loop at the end of a step. Implemented by
    `mmrl.rollout.engine_sampler.EngineSampler`, on top of any engine of `mmrl.rollout.engines`.
    """

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> Sequence[Sequence[Rollout]]:
        """Return `group_size` rollouts for each prompt, in order.

        Random choices derive from the run's seed, `step`, the sample and the rollout's index.
        """

    def extend(
        self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int, repeat: int = 0
    ) -> Sequence[Rollout]:
        """Append one segment by POLICY to each rollout. The last token before it may be by any author.

        `sampling_params.max_new_tokens` bounds only the added tokens. Random choices also derive from the number of
        segments, so a rollout that is continued twice draws new numbers, and from `repeat`, which must differ if an
        earlier continuation of the same segments was dropped.
        """

    def sync(self, version: int) -> None:
        """Have the engine load the learner's current weights. Segments generated after this call carry `version`."""


class RolloutPipeline(Protocol):
    """Makes groups of rollouts from prompts: generates, then runs the steps of `rollout_steps`.

    Called by the RL loop and by evaluation; implemented in `mmrl.rollout.pipeline`.
    """

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """Return the groups of `unfinished`, continued, and then a group for each prompt, in order.

        With partial rollouts some of them may stay unfinished, but over all ranks at least one is complete.
        """


class DemonstrationCompleter(Protocol):
    """Runs the tool calls that demonstrations contain, or lets the expert of an environment play them.

    Called by the supervised loop; implemented in `mmrl.rollout.tools.executor` and `mmrl.rollout.steps.environment`.
    """

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """Return the demonstrations with tool results or turns inserted, in order, and counts of them.

        Raises:
            UserError: a tool failed, or the completed response would be too long.
        """


class EvalScorer(Protocol):
    """Scores responses for `rethink` steps and held-out data. Benchmarks implement it with their own rules."""

    def score_eval(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return one score for each rollout, in order, without training-only terms. No rollout is dropped."""


class RewardScorer(EvalScorer, Protocol):
    """Calls the reward functions of `rewards.terms`.

    Called by the RL loop; implemented by `mmrl.scoring.scorer.RewardFunctionScorer`.
    """

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> Sequence[Group]:
        """Return one scored group for each prompt, in order, with the reward weights of `step`.

        Rollouts that cannot be scored move to `Group.dropped`. `probes` has, for each prompt, the rollouts of each
        blind probe and the greedy response; it is empty when the pipeline has neither.
        """


class Selector(Protocol):
    """Decides what a step trains on: it filters groups, computes advantages, and adds rollouts of earlier steps.

    Called by the RL loop; implemented in `mmrl.algo.select_experiences`.
    """

    def recheck_carried_over(self, state: TrainingState) -> Mapping[str, float]:
        """Drop from `state` groups of earlier steps whose media have changed; return metrics. Collective."""

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """Return True while a step has to sample more, after `rounds` batches of prompts gave `groups`.

        After 0 rounds it is True unless groups carried over from earlier steps already fill the step.
        """

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """Return the experiences of a step, from its groups and the replay buffer.

        It keeps in `state` what later steps need. Collective with replay.
        """


class Learner(Protocol):
    """Updates the weights.

    Called by the loops; implemented by `mmrl.learner.learner.PolicyLearner`.
    """

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """Train on the experiences of a step, if there are any, and return metrics. Collective.

        Every rank passes the same experiences and trains on its own share of them.
        """

    def has_gradient(self, experience: Experience) -> bool:
        """Return True if the loss may give the experience a gradient. A step runs no forward pass for any other."""

    def token_values(self, indices: Sequence[int]) -> Mapping[int, TokenValues]:
        """Return the last step's token values of the experiences `indices`, by index, if this rank trained on them."""
