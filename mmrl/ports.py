"""The verbs: what the loop asks of its parts. Standard library only; concrete classes meet only in `build`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    TrainingState,
)


class SampleSource(Protocol):
    """Where samples come from: an endless, seeded order that a cursor can return to."""

    def take(self, start_position: int, count: int) -> Sequence[Sample]:
        """The samples at the `count` positions from `cursor` on; unusable ones are left out.

        Raises:
            UserError: not one is usable, or an unusable one is to stop the run.
        """


class PromptBuilder(Protocol):
    """Turns a sample into what the model reads."""

    def build(self, sample: Sample) -> Prompt:
        """Open and measure the media once; expand placeholders. Raises UserError naming the sample."""

    def build_demonstration(
        self,
        prompt: Prompt,
        demonstration: Target | str,
        *,
        with_thinking: bool,
        loss_on: Literal["response", "answer"],
    ) -> Rollout:
        """The response a teacher would give: a right answer, or a whole response as it stands.

        Without `thinks` its thinking is left out; where the answer alone is to be learned, it alone is the teacher's.
        """


class Sampler(Protocol):
    """Draws responses from the current policy."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> Sequence[Sequence[Rollout]]:
        """`group_size` rollouts for each prompt, in order. Seeds derive from (run, step, sample, index)."""

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> Sequence[Rollout]:
        """Go on behind each rollout's last token, whoever wrote it; what is drawn becomes one more segment of POLICY.

        `law.max_new_tokens` bounds what is drawn now. Seeds derive from the segments there are, too.
        """

    def sync(self, version: int) -> None:
        """Use the learner's weights from here on, and stamp segments with `version`."""

    def close(self) -> None:
        """End what was started: processes, connections, memory."""


class RolloutPipeline(Protocol):
    """From prompts to rollouts: sampling once, and whatever YAML adds to it (a second look, tools, probes)."""

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """A group of rollouts for each prompt, in order, those `pending` from the step before first.

        A program may leave groups pending again, but not all of them.
        """


class AsyncRollouts(Protocol):
    """Answers the first round of a step while the step before it is learned."""

    def start(self, prompts: Sequence[Prompt], *, step: int, version: int) -> Callable[[], RolloutBatch]:
        """Begin to answer for `step`, by policy `version`; what is returned waits for all ranks' answers.

        Until it has been called, nobody else may draw, and no sampler may `sync`.
        """

    def take(self, batch: RolloutBatch, *, version: int) -> RolloutBatch:
        """This rank's part of answers from all, to be learned from at policy `version`."""


class DemonstrationCompleter(Protocol):
    """Answers the calls that demonstrations make."""

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """Demonstrations with what tools say to their calls, in order; and counts of the calls.

        Raises:
            UserError: a tool failed, or a response could not hold what a demonstration does.
        """


class RewardScorer(Protocol):
    """Scores rollouts; the only caller of reward functions."""

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> Sequence[Group]:
        """One group per prompt, in order; weights are those of `step`. What cannot be judged may be left out.

        `probes`, where there are any, has an entry for each prompt.
        """

    def score_eval(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score per rollout, in order, without the terms that only shape training; nothing is left out."""


class ExperienceSelector(Protocol):
    """Decides what a step learns from: filters, advantages, replay."""

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """Whether to ask another round of prompts, after `rounds` of them gave `groups`; True for the first."""

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """What of the groups is learned, and what of the state's memory beside it."""


class Learner(Protocol):
    """Turns experiences into new weights."""

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One optimizer step over all experiences, empty or not; returns metrics named `learner/...`."""


class StopCriterion(Protocol):
    """Decides whether a stage has reached its goal."""

    def should_stop(self, state: TrainingState) -> bool:
        """Look when a look is due; True ends the stage."""


class Checkpointer(Protocol):
    """Saves a run so that it can go on exactly."""

    def save(self, state: TrainingState) -> None:
        """Called after every step: save when a checkpoint is due or the user wants to stop.

        Raises:
            Interrupted: the user wanted to stop; everything is saved.
        """


class MetricsLogger(Protocol):
    """Tells people what happens."""

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Record one step. `times` are wall-clock seconds and live apart from the reproducible metrics."""

    def log_rollouts(
        self, state: TrainingState, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, force: bool
    ) -> str | None:
        """Keep the step's rollouts for reading, if it is their turn or `at_all_events`; returns the file."""
