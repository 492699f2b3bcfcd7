"""Probes: the same question without what is to be looked at. Its rollouts are judged and never train."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import BlindProbeConfig
from mmrl.config.schema.rollout_steps import step_name
from mmrl.ports import PromptBuilder, Sampler
from mmrl.rollout.pipeline import PipelineStep
from mmrl.types import (
    Corruption,
    ImageRef,
    MediaRef,
    Prompt,
    PromptTooLongError,
    ResizeMap,
    RolloutBatch,
    Sample,
    SamplingParams,
    UserError,
    VideoRef,
)

_CORRUPTIONS = {"grey": Corruption.GREY, "noise": Corruption.NOISE, "shuffled": Corruption.SHUFFLED}
_DEFAULT_CROP_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindProbe:
    """The step: more rollouts of each prompt that has something to hide. They go on by the `steps` by which all others
    do, so that what is hidden is the only difference. Media are swapped for those of `others`.
    """

    options: BlindProbeConfig
    prompt_builder: PromptBuilder
    sampler: Sampler
    sampling_params: SamplingParams
    swap_samples: Sequence[Sample] = ()
    steps: Sequence[PipelineStep] = ()

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """The answers with probes, when a probe is due."""
        if step % self.options.every:
            return batch
        name = step_name(self.options)
        hidden = {place: self._corrupt_prompt(group[0].prompt, step) for place, group in enumerate(batch.groups)}
        blind = {place: prompt for place, prompt in hidden.items() if prompt is not None}
        drawn = self.sampler.generate(
            [*blind.values()], self.options.rollouts_per_prompt, self.sampling_params, step=step
        )
        unseen = RolloutBatch(groups=tuple(map(tuple, drawn)))
        for follow in self.steps:
            unseen = follow(unseen, step=step)
        rows = dict(zip(blind, unseen.groups, strict=True))
        before = batch.probes or ({},) * len(batch.groups)
        probes = ({**probe, **({name: rows[place]} if place in rows else {})} for place, probe in enumerate(before))
        return replace(batch, probes=tuple(probes))

    def _corrupt_prompt(self, prompt: Prompt, step: int) -> Prompt | None:
        """A prompt with its media hidden; None where there is nothing to hide."""
        sample, what = prompt.sample, self.options.corruption
        if what in ("left_out", "cropped") and sample.target.coordinate_system is not None:
            raise UserError(
                f"probe {what}: sample {sample.id!r} asks for coordinates, which need a picture to be measured in, the "
                "whole of it; use `grey` or `noise`"
            )
        if not sample.media:
            return None
        if what == "swapped":
            return self._swap_media(sample, step)
        if what == "left_out":
            return self._build_prompt(
                replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str)))
            )
        if what == "cropped":
            return self._build_prompt(self._crop_media(prompt)) if sample.images else None
        if what == "shuffled" and not any(isinstance(ref, VideoRef) for ref in sample.media):
            return None
        veiled = (
            replace(ref, corruption=_CORRUPTIONS[what]) if self._is_affected(ref) else ref for ref in sample.media
        )
        return self._build_prompt(_replace_media(sample, tuple(veiled)))

    def _build_prompt(self, sample: Sample) -> Prompt:
        return self.prompt_builder.build(replace(sample, id=f"{sample.id}~{step_name(self.options)}"))

    def _is_affected(self, ref: MediaRef) -> bool:
        return self.options.corruption != "shuffled" or isinstance(ref, VideoRef)

    def _crop_media(self, prompt: Prompt) -> Sample:
        """The sample with a part of each picture, in the same place whenever it is asked."""
        chance = random.Random(derive_seed(step_name(self.options), prompt.sample.id))
        pairs = zip(prompt.sample.media, prompt.resize_maps, strict=True)
        parts = [
            _crop_randomly(ref, resize, self.options.crop_fraction or _DEFAULT_CROP_FRACTION, chance)
            for ref, resize in pairs
        ]
        return _replace_media(prompt.sample, parts)

    def _swap_media(self, sample: Sample, step: int) -> Prompt | None:
        """The prompt with other media of the same kinds that it has room for, from a place where chance begins to look:
        whoever else is asked in this step, on whichever rank. None where there are none.
        """
        kinds, count = [*map(type, sample.media)], len(self.swap_samples)
        start = derive_seed(step_name(self.options), step, sample.id) % max(count, 1)
        for other in (self.swap_samples[(start + k) % count] for k in range(count)):
            if [*map(type, other.media)] == kinds and other.media != sample.media:
                with suppress(PromptTooLongError):
                    return self._build_prompt(_replace_media(sample, other.media))
        return None


def _replace_media(sample: Sample, media: Sequence[MediaRef]) -> Sample:
    """A sample with other media in the same places."""
    waiting = iter(media)
    return replace(sample, parts=tuple(part if isinstance(part, str) else next(waiting) for part in sample.parts))


def _crop_randomly(ref: MediaRef, resize: ResizeMap, crop_fraction: float, rng: random.Random) -> MediaRef:
    """A part of a picture as wide and as high as `share` of it; a video as it is."""
    if not isinstance(ref, ImageRef):
        return ref
    width, height = (max(1, round(crop_fraction * side)) for side in resize.original)
    left = resize.offset[0] + rng.randint(0, resize.original.width - width)
    top = resize.offset[1] + rng.randint(0, resize.original.height - height)
    return replace(ref, crop=(left, top, left + width, top + height))
