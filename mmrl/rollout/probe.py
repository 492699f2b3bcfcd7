"""Probes: the same question without what is to be looked at. Its rollouts are judged and never train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmrl.config.schema import Probe
from mmrl.config.schema.program import step_name
from mmrl.ports import Asker, Sampler
from mmrl.types import Answers, MediaRef, Sample, SamplingLaw, UserError, Veil, VideoRef

_VEILS = {"grey": Veil.GREY, "noise": Veil.NOISE, "shuffled": Veil.SHUFFLED}


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
        samples = [group[0].prompt.sample for group in answers.groups]
        name = step_name(self.options)
        hidden = {place: self._hidden(samples, place) for place in range(len(samples))}
        blind = {place: replace(s, id=f"{s.id}~{name}") for place, s in hidden.items() if s is not None}
        prompts = [self.asker.ask(sample) for sample in blind.values()]
        drawn = self.sampler.generate(prompts, self.options.rollouts, self.law, step=step)
        rows = dict(zip(blind, map(tuple, drawn), strict=True))
        before = answers.probes or ({},) * len(samples)
        probes = ({**probe, **({name: rows[place]} if place in rows else {})} for place, probe in enumerate(before))
        return replace(answers, probes=tuple(probes))

    def _hidden(self, samples: Sequence[Sample], place: int) -> Sample | None:
        """A sample with its media hidden; None where there is nothing to hide."""
        sample, what = samples[place], self.options.what
        if what == "left_out" and sample.target.frame is not None:
            raise UserError(
                f"probe {what}: sample {sample.id!r} asks for coordinates, which need a picture to be measured in; use "
                "`grey` or `noise`"
            )
        if not sample.media:
            return None
        if what == "left_out":
            return replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str)))
        if what == "swapped":
            return next(self._swapped(samples, place), None)
        if what == "shuffled" and not any(isinstance(ref, VideoRef) for ref in sample.media):
            return None
        veiled = (replace(ref, veil=_VEILS[what]) if self._veils(ref) else ref for ref in sample.media)
        return _with_media(sample, tuple(veiled))

    def _veils(self, ref: MediaRef) -> bool:
        return self.options.what != "shuffled" or isinstance(ref, VideoRef)

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
