"""Groups of rollouts by their rewards, for tests of what is chosen of them."""

import random
from functools import partial

from mmrl.algo.replay import find_changed_media
from mmrl.algo.select_experiences import ExperienceSelector
from mmrl.types import (
    Answer,
    AnswerType,
    Author,
    CoordinateSystem,
    FinishReason,
    Group,
    Prompt,
    RewardValue,
    Rollout,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Target,
)

SAMPLING_PARAMS = SamplingParams(max_new_tokens=4)


def make_prompt(name):
    sample = Sample(id=name, task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=1))
    return Prompt(
        sample=sample,
        token_ids=(1,),
        grids=(),
        resize_maps=(),
        coordinate_system=CoordinateSystem.NORM_1,
        digest=f"digest of {name}",
    )


NO_CHANGED_MEDIA = partial(find_changed_media, find_problems=lambda prompts: {}, warn=lambda text: None)
"""A finder for media that never change."""


def select_all(compute_advantages, **settings):
    """A pipeline that trains on every rollout of one round, unless `settings` say otherwise."""
    return ExperienceSelector(
        compute_advantages=compute_advantages, **{"find_changed_media": NO_CHANGED_MEDIA, **settings}
    )


def rollout(prompt, index, *, version=0, finish=FinishReason.EOS):
    segment = Segment(token_ids=(5, 6), logprobs=(-1.0, -1.0), author=Author.POLICY, version=version)
    nothing = Answer(text=None, thinking=None, value=None)
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(segment,),
        text="",
        answer=nothing,
        finish_reason=finish,
        sampling_params=SAMPLING_PARAMS,
    )


def group(name, *rewards, version=0, cut=0, term="right"):
    """A group of one term; the first `cut` rollouts are truncated."""
    prompt = make_prompt(name)
    finishes = [FinishReason.LENGTH] * cut + [FinishReason.EOS] * (len(rewards) - cut)
    return Group(
        prompt=prompt,
        rollouts=tuple(rollout(prompt, i, version=version, finish=finish) for i, finish in enumerate(finishes)),
        scores=tuple(Score(terms={term: RewardValue(reward, "")}, total=reward) for reward in rewards),
    )


class Bank:
    """Steps of groups; the first `informative` of a step differ in reward, half and half or, `graded`, at random."""

    def __init__(self, *, groups, informative, size=4, seed=0, graded=False):
        self.groups, self.num_informative, self.size, self.graded = groups, informative, size, graded
        self._rng = random.Random(seed)

    def step(self, version):
        return [group(f"{version}-{g}", *self._rewards(g), version=version) for g in range(self.groups)]

    def _rewards(self, g):
        if g >= self.num_informative:
            return [1.0] * self.size
        right = self._rng.randrange(1, self.size) if self.graded else self.size // 2
        return [1.0] * right + [0.0] * (self.size - right)

    def advantages(self, groups):
        return [[reward - sum(g.totals) / len(g.totals) for reward in g.totals] for g in groups]
