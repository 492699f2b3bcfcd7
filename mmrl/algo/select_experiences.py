"""The choosers: from the groups of a step to what is learned. They are put one around another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.algo.group_filter import rejection_reason
from mmrl.algo.replay import (
    ReplayBuffer,
    check_finite_advantages,
    compute_staleness,
    effective_sample_size,
    log_weights,
    sample_indices,
    update_buffer,
)
from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import DynamicSamplingConfig, ReplayConfig
from mmrl.ports import ExperienceSelector
from mmrl.types import Experience, Group, Prompt, Sample, SelectedExperiences, TrainingState, UserError

AdvantageFunction = Callable[[Sequence[Group]], Sequence[Sequence[float]]]
"""One advantage for each rollout of each group."""


class Everything:
    """One round of prompts, and all of it is learned."""

    def __init__(self, advantages: AdvantageFunction) -> None:
        self._advantages = advantages

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """One round is enough."""
        return rounds == 0

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """Every rollout with its advantage."""
        advantages = tuple(tuple(row) for row in self._advantages(groups))
        experiences = tuple(
            Experience(rollout=rollout, advantage=advantage)
            for group, row in zip(groups, advantages, strict=True)
            for rollout, advantage in zip(group.rollouts, row, strict=True)
        )
        return SelectedExperiences(groups=tuple(groups), advantages=advantages, experiences=experiences)


MediaProblemFinder = Callable[[Sequence[Prompt]], Mapping[str, str]]
"""What is wrong with the media of prompts, by the digest of those where something is."""


def find_media_problems(build_prompt: Callable[[Sample], Prompt], prompts: Sequence[Prompt]) -> dict[str, str]:
    """Asks samples again: whose prompt cannot be made any more, or comes out otherwise."""
    problems = {}
    for prompt in prompts:
        try:
            if build_prompt(prompt.sample).digest != prompt.digest:
                problems[prompt.digest] = "its media changed while the run was using them"
        except UserError as error:
            problems[prompt.digest] = str(error)
    return problems


class ChangedMediaDetector:
    """Finds out, before the learner does, what became of the media of prompts that were asked in earlier steps."""

    def __init__(self, find_problems: MediaProblemFinder, warn: Callable[[str], None]) -> None:
        self._find_problems, self._warn = find_problems, warn

    def find_changed_digests(self, prompts: Iterable[Prompt]) -> set[str]:
        """Digests of those whose media are no longer what they were; each is named in a warning."""
        asked = {prompt.digest: prompt for prompt in prompts}
        problems = self._find_problems(list(asked.values()))
        for digest, problem in problems.items():
            self._warn(f"sample {asked[digest].sample.id}: {problem}; its rollouts of earlier steps are forgotten")
        return set(problems)


class Sifting:
    """Groups that pass a filter go on to another chooser, at most `prompts` of them; the others show no advantage.

    Carried groups come first. Theirs are the advantages among the groups that they are learned with, and the recorded
    probabilities of when they were sampled.
    """

    def __init__(
        self, inner: ExperienceSelector, options: DynamicSamplingConfig, prompts: int, media: ChangedMediaDetector
    ) -> None:
        self._inner, self._options, self._prompts, self._media = inner, options, prompts, media

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """Until enough groups have passed, carried ones included, or the rounds are over."""
        passed = len(state.carried_over) + sum(rejection_reason(group, self._options) is None for group in groups)
        return rounds == 0 or (rounds < self._options.max_rounds and passed < self._prompts)

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """What the inner chooser makes of the groups that pass."""
        changed = self._media.find_changed_digests(group.prompt for group in state.carried_over)
        carried = [group for group in state.carried_over if group.prompt.digest not in changed]
        reasons = [rejection_reason(group, self._options) for group in groups]
        passed = [i for i, reason in enumerate(reasons) if reason is None]
        room = self._prompts - len(carried)
        taken, surplus = passed[:room], passed[room:]
        choice = self._inner.select([*carried, *(groups[i] for i in taken)], state)
        state.carried_over = tuple(groups[i] for i in surplus) if self._options.extra == "carry" else ()

        advantages = [(0.0,) * len(group.rollouts) for group in groups]
        for i, row in zip(taken, choice.advantages[len(carried) :], strict=True):
            advantages[i] = row
        late = sum(len(group.rollouts) for group in carried)
        aged = (
            replace(e, staleness=compute_staleness(e.rollout, state.version), old_logprobs_source="recorded")
            for e in choice.experiences[:late]
        )
        metrics = {
            **choice.metrics,
            "dynamic_sampling/passed_frac": len(passed) / len(groups) if groups else 0.0,
            "dynamic_sampling/carried_over": float(len(carried)),
            **{
                f"dynamic_sampling/rejected/{name}": float(count)
                for name, count in Counter(filter(None, reasons)).items()
            },
        }
        return SelectedExperiences(
            groups=tuple(groups),
            advantages=tuple(advantages),
            experiences=(*aged, *choice.experiences[late:]),
            metrics=metrics,
        )


class Replaying:
    """Selective sample replay around another chooser. `size` is the rollouts of a full step."""

    def __init__(
        self,
        inner: ExperienceSelector,
        options: ReplayConfig,
        *,
        size: int,
        seed: Sequence[str | int],
        media: ChangedMediaDetector,
    ) -> None:
        self._inner, self._options, self._media = inner, options, media
        self._target = max(1, round(options.target_fraction * size))
        self._capacity = options.capacity or self._target
        self._seed = tuple(seed)

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """As the inner chooser."""
        return self._inner.needs_another_round(groups, state, rounds=rounds)

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """What the inner chooser chose, without what has no advantage, and with what is replayed.

        Raises:
            ValueError: an advantage is not finite.
        """
        options, choice = self._options, self._inner.select(groups, state)
        check_finite_advantages(choice.experiences)
        taught = [experience for experience in choice.experiences if experience.advantage]
        memory = update_buffer(
            state.replay_buffer,
            taught,
            capacity=self._capacity,
            version=state.version,
            max_staleness=options.max_staleness,
        )
        own: Sequence[Experience] = taught if options.drop_zero_advantage else choice.experiences
        if options.resample_fresh:
            count = min(self._target, len(taught))
            picked = sample_indices(
                log_weights(taught, options), count, self._derive_seed(state, "own"), without_replacement=False
            )
            own = [taught[i] for i in picked]
        known = min(len(taught), self._capacity) if options.without_replacement else 0
        state.replay_buffer, replayed = self._sample_buffer(memory, known, self._replay_count(len(own)), state)
        learned = (*own, *replayed)
        said = {**choice.metrics, **self._replay_metrics(learned, replayed, state.replay_buffer)}
        said["replay/dropped_changed_media"] = float(len(memory) - len(state.replay_buffer))
        return replace(choice, experiences=learned, metrics=said)

    def _replay_count(self, num_fresh: int) -> int:
        share = self._options.target_fraction
        return self._target - num_fresh if self._options.fill == "size" else round(num_fresh * share / (1.0 - share))

    def _sample_buffer(
        self, buffer: ReplayBuffer, num_excluded: int, count: int, state: TrainingState
    ) -> tuple[ReplayBuffer, list[Experience]]:
        """What is drawn of the memory but its last `known`, and the memory without what cannot be used any more.

        Each pass that finds changed media shortens the memory, so there is a last one.
        """
        while True:
            weights = log_weights(buffer[: max(0, len(buffer) - num_excluded)], self._options)
            indices = sample_indices(
                weights,
                count,
                self._derive_seed(state, "memory"),
                without_replacement=self._options.without_replacement,
            )
            picked = [buffer[i] for i in indices]
            changed = self._media.find_changed_digests(experience.rollout.prompt for experience in picked)
            if not changed:
                return buffer, [self._with_staleness(experience, state) for experience in picked]
            buffer = tuple(e for e in buffer if e.rollout.prompt.digest not in changed)

    def _with_staleness(self, experience: Experience, state: TrainingState) -> Experience:
        passed = compute_staleness(experience.rollout, state.version)
        if not passed:
            return experience
        return replace(
            experience,
            staleness=passed,
            old_logprobs_source=self._options.old_logprobs,
        )

    def _derive_seed(self, state: TrainingState, purpose: str) -> int:
        return derive_seed(*self._seed, "replay", purpose, state.step)

    def _replay_metrics(
        self, learned: Sequence[Experience], replayed: Sequence[Experience], buffer: ReplayBuffer
    ) -> dict[str, float]:
        ages = [experience.staleness for experience in replayed]
        return {
            "replay/buffer_size": float(len(buffer)),
            "replay/effective_size": effective_sample_size(log_weights(buffer, self._options)),
            "replay/frac": len(replayed) / len(learned) if learned else 0.0,
            "replay/staleness_mean": fmean(ages) if ages else 0.0,
            "replay/staleness_max": float(max(ages, default=0)),
            "replay/unique_frac": len({id(e.rollout) for e in learned}) / len(learned) if learned else 1.0,
        }
