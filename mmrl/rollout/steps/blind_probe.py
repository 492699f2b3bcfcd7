"""Blind probes: extra rollouts of prompts whose images and videos are hidden. They are scored and never trained.

A probe is a measurement, not a classifier on hidden states: comparing its mean reward with the mean of ordinary
rollouts shows whether the policy looks at its input.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter

from mmrl.config.schema import BlindProbeConfig
from mmrl.config.schema.rollout_steps import LOOKED_PROBE, step_name
from mmrl.rollout.steps.base import RolloutContext, RolloutStep, with_probe
from mmrl.types import (
    Corruption,
    ImageRef,
    MediaRef,
    Prompt,
    PromptTooLongError,
    Rollout,
    RolloutBatch,
    Sample,
    UserError,
    VideoRef,
)
from mmrl.utils.seeds import derive_seed

_CROP_FRACTION = 0.5  # of width and height


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindProbe:
    """Adds rollouts of corrupted prompts to the probes of a batch, every `options.every` steps."""

    options: BlindProbeConfig
    context: RolloutContext
    steps: Sequence[RolloutStep] = ()  # the same as for ordinary rollouts, so that only the media differ

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with this probe's rollouts under its name, for each prompt that has media to hide.

        Rollouts of `looked` follow the index order of the rollouts that they were made from.
        """
        if step % self.options.every:
            return batch
        prompts: list[Prompt] = []
        group_of_prompt: list[int] = []  # index of the group that each of `prompts` was made from
        for group_index, group in enumerate(batch.groups):
            if self.options.corruption == LOOKED_PROBE:
                corrupted = list(map(self._keep_shown_parts, sorted(group, key=attrgetter("index"))))
            else:
                prompt = self._corrupt_prompt(group[0].prompt, step)
                corrupted = [] if prompt is None else [prompt]
            prompts += corrupted
            group_of_prompt += [group_index] * len(corrupted)
        count, sampling_params = self.options.rollouts_per_prompt, self.context.sampling_params
        generated = self.context.sampler.generate(prompts, count, sampling_params, step=step)
        rollouts_of: dict[int, tuple[Rollout, ...]] = {}  # by index of the group
        for group_index, rollouts in zip(group_of_prompt, generated, strict=True):
            rollouts_of[group_index] = (*rollouts_of.get(group_index, ()), *rollouts)
        probe_batch = RolloutBatch(groups=tuple(rollouts_of.values()))
        for rollout_step in self.steps:
            probe_batch = rollout_step(probe_batch, step=step)
        # The metrics of `probe_batch` are dropped: the metrics of a batch count only rollouts that train.
        return with_probe(batch, step_name(self.options), dict(zip(rollouts_of, probe_batch.groups, strict=True)))

    def _corrupt_prompt(self, prompt: Prompt, step: int) -> Prompt | None:
        """Return the prompt with its media hidden, or None if it has none that this corruption applies to.

        Raises:
            UserError: the answer has coordinates, and this corruption removes the image that they are measured in.
        """
        sample, corruption = prompt.sample, self.options.corruption
        if corruption in ("left_out", "cropped"):
            self._check_no_coordinates(sample)
        if not sample.media:
            return None
        match corruption:
            case "swapped":
                return self._swap_media(sample, step)
            case "left_out":
                text_parts = tuple(part for part in sample.parts if isinstance(part, str))
                return self._build_prompt(replace(sample, parts=text_parts))
            case "cropped":
                return self._crop_media(prompt) if sample.images else None
            case _:
                return self._corrupt_media(sample, Corruption(corruption))

    def _check_no_coordinates(self, sample: Sample) -> None:
        if sample.target.coordinate_system is not None:
            raise UserError(
                f"probe {self.options.corruption}: sample {sample.id!r} asks for coordinates, which need a picture to "
                "be measured in, the whole of it; use `grey` or `noise`"
            )

    def _keep_shown_parts(self, rollout: Rollout) -> Prompt:
        """Return the question with its media replaced by the parts that tools showed in a rollout, if there are any.

        If the parts do not fit into a prompt, the earliest are left out.
        """
        sample = rollout.prompt.sample
        self._check_no_coordinates(sample)
        text = tuple(part for part in sample.parts if isinstance(part, str))
        shown = [observation.ref for observation in rollout.observations]
        # An id for each response: two that looked at the same part must not draw the same random numbers.
        sample = replace(sample, id=f"{sample.id}~{rollout.index}")
        while shown:
            with suppress(PromptTooLongError):
                return self._build_prompt(replace(sample, parts=(*shown, *text)))
            del shown[0]
        return self._build_prompt(replace(sample, parts=text))

    def _build_prompt(self, sample: Sample) -> Prompt:
        # Random numbers derive from the sample's id, so a probe needs another id than the ordinary rollouts.
        return self.context.processor.build(replace(sample, id=f"{sample.id}~{step_name(self.options)}"))

    def _corrupt_media(self, sample: Sample, corruption: Corruption) -> Prompt | None:
        """Return the prompt with its media marked as corrupted, or None if there are none to corrupt.

        The loader of media paints, replaces or shuffles their pixels. Only videos have frames to shuffle.
        """
        affected = VideoRef if corruption is Corruption.SHUFFLED else (ImageRef, VideoRef)
        if not any(isinstance(ref, affected) for ref in sample.media):
            return None
        media: list[MediaRef] = []
        for ref in sample.media:
            media.append(replace(ref, corruption=corruption) if isinstance(ref, affected) else ref)
        return self._build_prompt(_replace_media(sample, media))

    def _crop_media(self, prompt: Prompt) -> Prompt:
        """Return the prompt with a random part of each image, the same part at every step. Videos stay whole."""
        rng = random.Random(derive_seed(step_name(self.options), prompt.sample.id))
        media = list(prompt.sample.media)
        for index, (ref, resize_map) in enumerate(zip(media, prompt.resize_maps, strict=True)):
            if isinstance(ref, ImageRef):
                width, height = (max(1, round(_CROP_FRACTION * side)) for side in resize_map.original)
                # The image may itself be a part of its file, and a crop is in pixels of the file.
                left = resize_map.offset[0] + rng.randint(0, resize_map.original.width - width)
                top = resize_map.offset[1] + rng.randint(0, resize_map.original.height - height)
                media[index] = replace(ref, crop=(left, top, left + width, top + height))
        return self._build_prompt(_replace_media(prompt.sample, media))

    def _swap_media(self, sample: Sample, step: int) -> Prompt | None:
        """Return the prompt with the media of another sample that has as many of each type, in the same order.

        The search starts at a place that derives from step and sample, so the result does not depend on the other
        prompts of the round or on the number of ranks. None if no sample fits.
        """
        media_types = list(map(type, sample.media))
        count = len(self.context.swap_samples)
        start = derive_seed(step_name(self.options), step, sample.id) % max(count, 1)
        for offset in range(count):
            media = self.context.swap_samples[(start + offset) % count].media
            if list(map(type, media)) == media_types and media != sample.media:
                # Media of another size may take more tokens than a prompt has room for; then the next sample is tried.
                with suppress(PromptTooLongError):
                    return self._build_prompt(_replace_media(sample, media))
        return None


def _replace_media(sample: Sample, media: Sequence[MediaRef]) -> Sample:
    """Return a sample with its media replaced by `media`, in order."""
    remaining = iter(media)
    parts = tuple(part if isinstance(part, str) else next(remaining) for part in sample.parts)
    return replace(sample, parts=parts)
