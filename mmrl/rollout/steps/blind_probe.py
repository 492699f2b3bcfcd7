"""Probes: the same question without what is to be looked at. Its rollouts are judged and never train."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mmrl.algo.seeds import derive
from mmrl.config.schema import Probe
from mmrl.config.schema.rollout_steps import step_name
from mmrl.ports import Asker, Sampler
from mmrl.rollout.pipeline import Step
from mmrl.types import (
    Answers,
    ImageRef,
    MediaRef,
    Prompt,
    ResizeMap,
    Sample,
    SamplingLaw,
    TooLongError,
    UserError,
    Veil,
    VideoRef,
)

_VEILS = {"grey": Veil.GREY, "noise": Veil.NOISE, "shuffled": Veil.SHUFFLED}
_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Blindfold:
    """The step: more rollouts of each prompt that has something to hide. They go on by the `steps` by which all others
    do, so that what is hidden is the only difference. Media are swapped for those of `others`.
    """

    options: Probe
    asker: Asker
    sampler: Sampler
    law: SamplingLaw
    others: Sequence[Sample] = ()
    steps: Sequence[Step] = ()

    def __call__(self, answers: Answers, *, step: int) -> Answers:
        """The answers with probes, when a probe is due."""
        if step % self.options.every:
            return answers
        name = step_name(self.options)
        hidden = {place: self._hidden(group[0].prompt, step) for place, group in enumerate(answers.groups)}
        blind = {place: prompt for place, prompt in hidden.items() if prompt is not None}
        drawn = self.sampler.generate([*blind.values()], self.options.rollouts, self.law, step=step)
        unseen = Answers(groups=tuple(map(tuple, drawn)))
        for follow in self.steps:
            unseen = follow(unseen, step=step)
        rows = dict(zip(blind, unseen.groups, strict=True))
        before = answers.probes or ({},) * len(answers.groups)
        probes = ({**probe, **({name: rows[place]} if place in rows else {})} for place, probe in enumerate(before))
        return replace(answers, probes=tuple(probes))

    def _hidden(self, prompt: Prompt, step: int) -> Prompt | None:
        """A prompt with its media hidden; None where there is nothing to hide."""
        sample, what = prompt.sample, self.options.what
        if what in ("left_out", "cropped") and sample.target.frame is not None:
            raise UserError(
                f"probe {what}: sample {sample.id!r} asks for coordinates, which need a picture to be measured in, the "
                "whole of it; use `grey` or `noise`"
            )
        if not sample.media:
            return None
        if what == "swapped":
            return self._swapped(sample, step)
        if what == "left_out":
            return self._ask(replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str))))
        if what == "cropped":
            return self._ask(self._cropped(prompt)) if sample.images else None
        if what == "shuffled" and not any(isinstance(ref, VideoRef) for ref in sample.media):
            return None
        veiled = (replace(ref, veil=_VEILS[what]) if self._veils(ref) else ref for ref in sample.media)
        return self._ask(_with_media(sample, tuple(veiled)))

    def _ask(self, sample: Sample) -> Prompt:
        return self.asker.ask(replace(sample, id=f"{sample.id}~{step_name(self.options)}"))

    def _veils(self, ref: MediaRef) -> bool:
        return self.options.what != "shuffled" or isinstance(ref, VideoRef)

    def _cropped(self, prompt: Prompt) -> Sample:
        """The sample with a part of each picture, in the same place whenever it is asked."""
        chance = random.Random(derive(step_name(self.options), prompt.sample.id))
        pairs = zip(prompt.sample.media, prompt.resizes, strict=True)
        parts = [_part(ref, resize, self.options.share or _SHARE, chance) for ref, resize in pairs]
        return _with_media(prompt.sample, parts)

    def _swapped(self, sample: Sample, step: int) -> Prompt | None:
        """The prompt with other media of the same kinds that it has room for, from a place where chance begins to look:
        whoever else is asked in this step, on whichever rank. None where there are none.
        """
        kinds, count = [*map(type, sample.media)], len(self.others)
        start = derive(step_name(self.options), step, sample.id) % max(count, 1)
        for other in (self.others[(start + k) % count] for k in range(count)):
            if [*map(type, other.media)] == kinds and other.media != sample.media:
                with suppress(TooLongError):
                    return self._ask(_with_media(sample, other.media))
        return None


def _with_media(sample: Sample, media: Sequence[MediaRef]) -> Sample:
    """A sample with other media in the same places."""
    waiting = iter(media)
    return replace(sample, parts=tuple(part if isinstance(part, str) else next(waiting) for part in sample.parts))


def _part(ref: MediaRef, resize: ResizeMap, share: float, chance: random.Random) -> MediaRef:
    """A part of a picture as wide and as high as `share` of it; a video as it is."""
    if not isinstance(ref, ImageRef):
        return ref
    width, height = (max(1, round(share * side)) for side in resize.original)
    left = resize.corner[0] + chance.randint(0, resize.original.width - width)
    top = resize.corner[1] + chance.randint(0, resize.original.height - height)
    return replace(ref, crop=(left, top, left + width, top + height))
