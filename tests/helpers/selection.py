"""Groups of rollouts by their rewards, and selectors, for tests of what a step trains on."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from factories import make_group, make_prompt, make_rollout, make_sample, make_score

from mmrl.algo.replay import ChangedMediaFinder
from mmrl.algo.select_experiences import AdvantageFunction, ExperienceSelector
from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.training.media_recheck import find_changed_media
from mmrl.types import Experience, FinishReason, Group, Rollout


def make_media_finder(
    check_media: Callable[[Rollout], None],
    warn: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
) -> ChangedMediaFinder:
    """Return a finder of changed media by `check_media`, which raises UserError for one that changed."""
    processor: Any = SimpleNamespace(check_media=check_media)
    return partial(find_changed_media, processor=processor, ranks=ranks or SingleProcess(), warn=warn)


NO_CHANGED_MEDIA = make_media_finder(lambda rollout: None)


def select_all(compute_advantages: AdvantageFunction, **settings: Any) -> ExperienceSelector:
    """A selector that trains on every rollout of one round, unless `settings` say otherwise."""
    defaults = {"prompts_per_step": 1, "find_changed_media": NO_CHANGED_MEDIA}
    return ExperienceSelector(compute_advantages=compute_advantages, **{**defaults, **settings})


def centered(groups: Sequence[Group]) -> list[list[float]]:
    """Advantages without a scale: rewards minus their mean in the group."""
    return [[total - sum(group.totals) / len(group.totals) for total in group.totals] for group in groups]


def make_experiences(group: Group, *advantages: float) -> tuple[Experience, ...]:
    """The rollouts of a group with these advantages."""
    pairs = zip(group.rollouts, advantages, strict=True)
    return tuple(Experience(rollout=rollout, advantage=advantage) for rollout, advantage in pairs)


def at_version(rollout: Rollout, *versions: int) -> Rollout:
    """The rollout with a segment for each of these policy versions."""
    segments = tuple(replace(rollout.segments[0], version=version) for version in versions)
    return replace(rollout, segments=segments)


def group(name: str, *rewards: float, version: int = 0, cut: int = 0, term: str = "right") -> Group:
    """A group of one term; the first `cut` rollouts are truncated."""
    prompt = make_prompt(make_sample(id=name))
    rollouts = []
    for index in range(len(rewards)):
        finish = FinishReason.LENGTH if index < cut else FinishReason.EOS
        rollouts.append(replace(at_version(make_rollout(prompt, index), version), finish_reason=finish))
    return make_group(prompt, rollouts, [make_score(**{term: reward}) for reward in rewards])


class Simulator:
    """Steps of groups; the first `with_signal` of a step differ in reward, half and half or, `graded`, at random.

    Partial rollouts have waited for up to `longest` policy versions.
    """

    def __init__(
        self, *, groups: int, with_signal: int, size: int = 4, seed: int = 0, graded: bool = False, longest: int = 0
    ) -> None:
        self.groups, self.num_with_signal, self.size, self.graded = groups, with_signal, size, graded
        self._rng, self._longest = random.Random(seed), longest

    def step(self, version: int) -> list[Group]:
        made = [group(f"{version}-{g}", *self._rewards(g), version=version) for g in range(self.groups)]
        return [self._age(each, version) for each in made] if self._longest else made

    def _rewards(self, g: int) -> list[float]:
        if g >= self.num_with_signal:
            return [1.0] * self.size
        right = self._rng.randrange(1, self.size) if self.graded else self.size // 2
        return [1.0] * right + [0.0] * (self.size - right)

    def _age(self, each: Group, version: int) -> Group:
        oldest = max(0, version - self._rng.randrange(self._longest + 1))
        rollouts = tuple(at_version(rollout, version, oldest, version) for rollout in each.rollouts)
        return replace(each, rollouts=rollouts)
