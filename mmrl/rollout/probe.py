"""Probes: the same question without what is to be looked at. Its rollouts are judged and never train."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmrl.algo.seeds import derive
from mmrl.config.schema import Probe
from mmrl.config.schema.program import step_name
from mmrl.ports import Asker, Sampler
from mmrl.types import Answers, ImageRef, MediaRef, Prompt, ResizeMap, Sample, SamplingLaw, UserError, Veil, VideoRef

_VEILS = {"grey": Veil.GREY, "noise": Veil.NOISE, "shuffled": Veil.SHUFFLED}
_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Blindfold:
    """The step: more rollouts of each prompt that has something to hide."""

    options: Probe
    asker: Asker
    sampler: Sampler
    law: SamplingLaw

    def __call__(self, answers: Answers, *, step: int) -> Answers:
        """The answers with probes, when a probe is due."""
        if step % self.options.every:
            return answers
        shown = [group[0].prompt for group in answers.groups]
        name = step_name(self.options)
        hidden = {place: self._hidden(shown, place) for place in range(len(shown))}
        blind = {place: replace(s, id=f"{s.id}~{name}") for place, s in hidden.items() if s is not None}
        prompts = [self.asker.ask(sample) for sample in blind.values()]
        drawn = self.sampler.generate(prompts, self.options.rollouts, self.law, step=step)
        rows = dict(zip(blind, map(tuple, drawn), strict=True))
        before = answers.probes or ({},) * len(shown)
        probes = ({**probe, **({name: rows[place]} if place in rows else {})} for place, probe in enumerate(before))
        return replace(answers, probes=tuple(probes))

    def _hidden(self, prompts: Sequence[Prompt], place: int) -> Sample | None:
        """A sample with its media hidden; None where there is nothing to hide."""
        sample, what = prompts[place].sample, self.options.what
        if what in ("left_out", "cropped") and sample.target.frame is not None:
            raise UserError(
                f"probe {what}: sample {sample.id!r} asks for coordinates, which need a picture to be measured in, the "
                "whole of it; use `grey` or `noise`"
            )
        if not sample.media:
            return None
        if what == "left_out":
            return replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str)))
        if what == "swapped":
            return next(self._swapped([prompt.sample for prompt in prompts], place), None)
        if what == "cropped":
            return self._cropped(prompts[place]) if sample.images else None
        if what == "shuffled" and not any(isinstance(ref, VideoRef) for ref in sample.media):
            return None
        veiled = (replace(ref, veil=_VEILS[what]) if self._veils(ref) else ref for ref in sample.media)
        return _with_media(sample, tuple(veiled))

    def _veils(self, ref: MediaRef) -> bool:
        return self.options.what != "shuffled" or isinstance(ref, VideoRef)

    def _cropped(self, prompt: Prompt) -> Sample:
        """The sample with a part of each picture, in the same place whenever it is asked."""
        chance = random.Random(derive(step_name(self.options), prompt.sample.id))
        pairs = zip(prompt.sample.media, prompt.resizes, strict=True)
        parts = [_part(ref, resize, self.options.share or _SHARE, chance) for ref, resize in pairs]
        return _with_media(prompt.sample, parts)

    def _swapped(self, samples: Sequence[Sample], place: int) -> Iterator[Sample]:
        """The sample with the media of another of the step, those that come next first."""
        own = samples[place].media
        for other in (*samples[place + 1 :], *samples[:place]):
            if list(map(type, other.media)) == list(map(type, own)) and other.media != own:
                yield _with_media(samples[place], other.media)


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
