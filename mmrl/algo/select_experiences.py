"""The choosers: from the groups of a step to what is learned. They are put one around another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.algo.group_filter import rejection
from mmrl.algo.replay import Memory, age, drawn, effective_size, log_weights, refuse_unusable, remembered
from mmrl.algo.seeds import derive
from mmrl.config.schema import Filter, Replay
from mmrl.ports import Chooser
from mmrl.types import Choice, Experience, Group, Prompt, Sample, State, UserError

Advantages = Callable[[Sequence[Group]], Sequence[Sequence[float]]]
"""One advantage for each rollout of each group."""


class Everything:
    """One round of prompts, and all of it is learned."""

    def __init__(self, advantages: Advantages) -> None:
        self._advantages = advantages

    def wants_more(self, groups: Sequence[Group], state: State, *, rounds: int) -> bool:
        """One round is enough."""
        return rounds == 0

    def choose(self, groups: Sequence[Group], state: State) -> Choice:
        """Every rollout with its advantage."""
        advantages = tuple(tuple(row) for row in self._advantages(groups))
        experiences = tuple(
            Experience(rollout=rollout, advantage=advantage)
            for group, row in zip(groups, advantages, strict=True)
            for rollout, advantage in zip(group.rollouts, row, strict=True)
        )
        return Choice(groups=tuple(groups), advantages=advantages, experiences=experiences)


Look = Callable[[Sequence[Prompt]], Mapping[str, str]]
"""What is wrong with the media of prompts, by the digest of those where something is."""


def look(ask: Callable[[Sample], Prompt], prompts: Sequence[Prompt]) -> dict[str, str]:
    """Asks samples again: whose prompt cannot be made any more, or comes out otherwise."""
    problems = {}
    for prompt in prompts:
        try:
            if ask(prompt.sample).digest != prompt.digest:
                problems[prompt.digest] = "its media changed while the run was using them"
        except UserError as error:
            problems[prompt.digest] = str(error)
    return problems


class MediaCheck:
    """Finds out, before the learner does, what became of the media of prompts that were asked in earlier steps."""

    def __init__(self, look: Look, warn: Callable[[str], None]) -> None:
        self._look, self._warn = look, warn

    def changed(self, prompts: Iterable[Prompt]) -> set[str]:
        """Digests of those whose media are no longer what they were; each is named in a warning."""
        asked = {prompt.digest: prompt for prompt in prompts}
        problems = self._look(list(asked.values()))
        for digest, problem in problems.items():
            self._warn(f"sample {asked[digest].sample.id}: {problem}; its rollouts of earlier steps are forgotten")
        return set(problems)


class Sifting:
    """Groups that pass a filter go on to another chooser, at most `prompts` of them; the others show no advantage.

    Carried groups come first. Theirs are the advantages among the groups that they are learned with, and the recorded
    probabilities of when they were sampled.
    """

    def __init__(self, inner: Chooser, options: Filter, prompts: int, media: MediaCheck) -> None:
        self._inner, self._options, self._prompts, self._media = inner, options, prompts, media

    def wants_more(self, groups: Sequence[Group], state: State, *, rounds: int) -> bool:
        """Until enough groups have passed, carried ones included, or the rounds are over."""
        passed = len(state.carried) + sum(rejection(group, self._options) is None for group in groups)
        return rounds == 0 or (rounds < self._options.rounds and passed < self._prompts)

    def choose(self, groups: Sequence[Group], state: State) -> Choice:
        """What the inner chooser makes of the groups that pass."""
        changed = self._media.changed(group.prompt for group in state.carried)
        carried = [group for group in state.carried if group.prompt.digest not in changed]
        reasons = [rejection(group, self._options) for group in groups]
        passed = [i for i, reason in enumerate(reasons) if reason is None]
        room = self._prompts - len(carried)
        taken, surplus = passed[:room], passed[room:]
        choice = self._inner.choose([*carried, *(groups[i] for i in taken)], state)
        state.carried = tuple(groups[i] for i in surplus) if self._options.surplus == "carry" else ()

        advantages = [(0.0,) * len(group.rollouts) for group in groups]
        for i, row in zip(taken, choice.advantages[len(carried) :], strict=True):
            advantages[i] = row
        late = sum(len(group.rollouts) for group in carried)
        aged = (replace(e, age=age(e.rollout, state.version), old="sampler") for e in choice.experiences[:late])
        metrics = {
            **choice.metrics,
            "filter/passed_frac": len(passed) / len(groups) if groups else 0.0,
            "filter/carried": float(len(carried)),
            **{f"filter/rejected/{name}": float(count) for name, count in Counter(filter(None, reasons)).items()},
        }
        return Choice(
            groups=tuple(groups),
            advantages=tuple(advantages),
            experiences=(*aged, *choice.experiences[late:]),
            metrics=metrics,
        )


class Replaying:
    """Selective sample replay around another chooser. `size` is the rollouts of a full step."""

    def __init__(
        self, inner: Chooser, options: Replay, *, size: int, seed: Sequence[str | int], media: MediaCheck
    ) -> None:
        self._inner, self._options, self._media = inner, options, media
        self._target = max(1, round(options.share * size))
        self._capacity = options.capacity or self._target
        self._seed = tuple(seed)

    def wants_more(self, groups: Sequence[Group], state: State, *, rounds: int) -> bool:
        """As the inner chooser."""
        return self._inner.wants_more(groups, state, rounds=rounds)

    def choose(self, groups: Sequence[Group], state: State) -> Choice:
        """What the inner chooser chose, without what has no advantage, and with what is replayed.

        Raises:
            ValueError: an advantage is not finite.
        """
        options, choice = self._options, self._inner.choose(groups, state)
        refuse_unusable(choice.experiences)
        taught = [experience for experience in choice.experiences if experience.advantage]
        memory = remembered(
            state.memory, taught, capacity=self._capacity, version=state.version, max_age=options.max_age
        )
        own: Sequence[Experience] = taught if options.drop_zero else choice.experiences
        if options.resample:
            count = min(self._target, len(taught))
            picked = drawn(log_weights(taught, options), count, self._derive(state, "own"), unique=False)
            own = [taught[i] for i in picked]
        known = min(len(taught), self._capacity) if options.unique else 0
        state.memory, replayed = self._replayed(memory, known, self._missing(len(own)), state)
        learned = (*own, *replayed)
        said = {**choice.metrics, **self._tell(learned, replayed, state.memory)}
        said["replay/changed"] = float(len(memory) - len(state.memory))
        return replace(choice, experiences=learned, metrics=said)

    def _missing(self, own: int) -> int:
        share = self._options.share
        return self._target - own if self._options.refill == "size" else round(own * share / (1.0 - share))

    def _replayed(self, memory: Memory, known: int, count: int, state: State) -> tuple[Memory, list[Experience]]:
        """What is drawn of the memory but its last `known`, and the memory without what cannot be used any more.

        Each pass that finds changed media shortens the memory, so there is a last one.
        """
        while True:
            weights = log_weights(memory[: max(0, len(memory) - known)], self._options)
            indices = drawn(weights, count, self._derive(state, "memory"), unique=self._options.unique)
            picked = [memory[i] for i in indices]
            changed = self._media.changed(experience.rollout.prompt for experience in picked)
            if not changed:
                return memory, [self._aged(experience, state) for experience in picked]
            memory = tuple(e for e in memory if e.rollout.prompt.digest not in changed)

    def _aged(self, experience: Experience, state: State) -> Experience:
        passed = age(experience.rollout, state.version)
        if not passed:
            return experience
        return replace(experience, age=passed, old="sampler" if self._options.ratio == "kept" else "learner")

    def _derive(self, state: State, what: str) -> int:
        return derive(*self._seed, "replay", what, state.step)

    def _tell(self, learned: Sequence[Experience], replayed: Sequence[Experience], memory: Memory) -> dict[str, float]:
        ages = [experience.age for experience in replayed]
        return {
            "replay/memory": float(len(memory)),
            "replay/effective_size": effective_size(log_weights(memory, self._options)),
            "replay/share": len(replayed) / len(learned) if learned else 0.0,
            "replay/age_mean": fmean(ages) if ages else 0.0,
            "replay/age_max": float(max(ages, default=0)),
            "replay/unique_frac": len({id(e.rollout) for e in learned}) / len(learned) if learned else 1.0,
        }
