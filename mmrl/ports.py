"""The verbs: what the loop asks of its parts. Standard library only; concrete classes meet only in `build`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from mmrl.types import (
    Answers,
    Choice,
    Experience,
    Group,
    Prompt,
    Rollout,
    Sample,
    SamplingLaw,
    Score,
    State,
    Target,
)


class Source(Protocol):
    """Where samples come from: an endless, seeded order that a cursor can return to."""

    def take(self, cursor: int, count: int) -> Sequence[Sample]:
        """The samples at the `count` positions from `cursor` on; unusable ones are left out.

        Raises:
            UserError: not one is usable, or an unusable one is to stop the run.
        """


class Asker(Protocol):
    """Turns a sample into what the model reads."""

    def ask(self, sample: Sample) -> Prompt:
        """Open and measure the media once; expand placeholders. Raises UserError naming the sample."""

    def demonstrate(
        self, prompt: Prompt, lesson: Target | str, *, thinks: bool, learn: Literal["response", "answer"]
    ) -> Rollout:
        """The response a teacher would give: a right answer, or a whole response as it stands.

        Without `thinks` its thinking is left out; where the answer alone is to be learned, it alone is the teacher's.
        """


class Sampler(Protocol):
    """Draws responses from the current policy."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, law: SamplingLaw, *, step: int
    ) -> Sequence[Sequence[Rollout]]:
        """`group_size` rollouts for each prompt, in order. Seeds derive from (run, step, sample, index)."""

    def extend(self, rollouts: Sequence[Rollout], law: SamplingLaw, *, step: int) -> Sequence[Rollout]:
        """Go on behind each rollout's last token, whoever wrote it; what is drawn becomes one more segment of POLICY.

        `law.max_new_tokens` bounds what is drawn now. Seeds derive from the segments there are, too.
        """

    def sync(self, version: int) -> None:
        """Use the learner's weights from here on, and stamp segments with `version`."""

    def close(self) -> None:
        """End what was started: processes, connections, memory."""


class Program(Protocol):
    """From prompts to rollouts: sampling once, and whatever YAML adds to it (a second look, tools, probes)."""

    def answer(self, prompts: Sequence[Prompt], *, step: int, pending: Sequence[tuple[Rollout, ...]] = ()) -> Answers:
        """A group of rollouts for each prompt, in order, those `pending` from the step before first.

        A program may leave groups pending again, but not all of them.
        """


class Foresight(Protocol):
    """Answers the first round of a step while the step before it is learned."""

    def begin(self, prompts: Sequence[Prompt], *, step: int, version: int) -> Callable[[], Answers]:
        """Begin to answer for `step`, by policy `version`; what is returned waits for all ranks' answers.

        Until it has been called, nobody else may draw, and no sampler may `sync`.
        """

    def due(self, answers: Answers, *, version: int) -> Answers:
        """This rank's part of answers from all, to be learned from at policy `version`."""


class Tools(Protocol):
    """Answers the calls that demonstrations make."""

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """Demonstrations with what tools say to their calls, in order; and counts of the calls.

        Raises:
            UserError: a tool failed, or a response could not hold what a demonstration does.
        """


class Judge(Protocol):
    """Scores rollouts; the only caller of reward functions."""

    def judge(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> Sequence[Group]:
        """One group per prompt, in order; weights are those of `step`. What cannot be judged may be left out.

        `probes`, where there are any, has an entry for each prompt.
        """

    def evaluate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score per rollout, in order, without the terms that only shape training; nothing is left out."""


class Chooser(Protocol):
    """Decides what a step learns from: filters, advantages, replay."""

    def wants_more(self, groups: Sequence[Group], state: State, *, rounds: int) -> bool:
        """Whether to ask another round of prompts, after `rounds` of them gave `groups`; True for the first."""

    def choose(self, groups: Sequence[Group], state: State) -> Choice:
        """What of the groups is learned, and what of the state's memory beside it."""


class Learner(Protocol):
    """Turns experiences into new weights."""

    def learn(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One optimizer step over all experiences, empty or not; returns metrics named `learner/...`."""


class Gate(Protocol):
    """Decides whether a stage has reached its goal."""

    def passed(self, state: State) -> bool:
        """Look when a look is due; True ends the stage."""


class Keeper(Protocol):
    """Saves a run so that it can go on exactly."""

    def keep(self, state: State) -> None:
        """Called after every step: save when a checkpoint is due or the user wants to stop.

        Raises:
            Interrupted: the user wanted to stop; everything is saved.
        """


class Teller(Protocol):
    """Tells people what happens."""

    def tell(self, state: State, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Record one step. `times` are wall-clock seconds and live apart from the reproducible metrics."""

    def show(
        self, state: State, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, at_all_events: bool
    ) -> str | None:
        """Keep the step's rollouts for reading, if it is their turn or `at_all_events`; returns the file."""
