"""The steps that all generators share: random streams for each sample, saved media, ids, and checks of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from mmrl.types import ContentPart, DatasetContext, Sample, Target, UserError
from mmrl_datasets.choices import LETTERS
from mmrl_datasets.generators.drawing import SceneObject, shuffle
from mmrl_datasets.generators.photos import Split
from mmrl_datasets.generators.random_streams import make_rngs
from mmrl_datasets.media_files import RenderedVideo, save_mp4, save_png

RNG_BATCH_SIZE: Final = 256  # samples whose random generators are seeded together, which is faster than one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRngs:
    """The random generators of one sample. They are independent, so that noisier labels leave the images unchanged."""

    layout: np.random.Generator  # decides the objects, their places, the question and the order of its options
    pixels: np.random.Generator  # decides the background, the crops of photographs and the noise
    label: np.random.Generator  # decides the mistakes of the simulated annotator


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSample:
    """A sample whose images and videos are not saved yet."""

    parts: tuple[str | Image.Image | RenderedVideo, ...]  # text, images and videos in reading order
    target: Target  # the correct answer
    # The answer of the simulated annotator, who may be wrong; None if there is no annotator.
    label: Target | None = None
    # Facts about the sample that rewards and readers of the data may use, JSON only.
    meta: Mapping[str, Any] = field(default_factory=dict)


def generate_samples(
    context: DatasetContext,
    task: str,
    split: Split,
    render: Callable[[SampleRngs], RenderedSample],
    *,
    size: int | None,
    seed: int | None,
) -> Iterator[Sample]:
    """Render samples, save their media and yield them.

    Args:
        context: the folder for the media, and the seed of the run.
        task: first part of each sample's id, `task/split/000007`.
        split: second part of each id.
        render: draws one sample from its random generators.
        size: number of samples; None never ends.
        seed: replaces the seed of the run unless None.
    """
    root_seed = context.seed if seed is None else seed
    folder = context.work_dir / f"{task}-{split}"
    indices = count() if size is None else range(size)
    # Streams are named by id, so a sample depends on the seed and its id alone: not on `size`, nor on earlier samples.
    for index, rngs in enumerate(_make_sample_rngs(root_seed, f"{task}/{split}", indices)):
        rendered = render(rngs)
        yield Sample(
            id=f"{task}/{split}/{index:06d}",
            task=task,
            parts=_save_media(rendered.parts, folder, f"{index:06d}"),
            target=rendered.target,
            label=rendered.label,
            meta=rendered.meta,
        )


def objects_meta(objects: Sequence[SceneObject]) -> list[dict[str, Any]]:
    """Return objects in the form that `meta["things"]` holds: a name and a box each."""
    return [{"name": scene_object.name, "box": list(scene_object.box)} for scene_object in objects]


def choose_phrasing(rng: np.random.Generator, first: str, second: str) -> str:
    """Return one of two texts, each equally likely."""
    return first if rng.random() < 0.5 else second


def shuffle_options(rng: np.random.Generator, options: Sequence[str], correct: str) -> tuple[list[str], str]:
    """Return the options in random order and the letter of the correct one; every letter is equally likely."""
    shuffled = shuffle(rng, options)
    return shuffled, LETTERS[shuffled.index(correct)]


def check_fractions(**options: float) -> None:
    """Raise a UserError if an option does not lie between 0 and 1."""
    for name, value in options.items():
        if not 0.0 <= value <= 1.0:
            raise UserError(f"{name}={value} must lie between 0 and 1")


def check_at_least(least: int, **options: int | None) -> None:
    """Raise a UserError if an option is below `least`. None means "no limit" and passes."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def check_one_of(words: Sequence[str], **options: str) -> None:
    """Raise a UserError if an option is none of these words."""
    for name, value in options.items():
        if value not in words:
            raise UserError(f"{name}={value!r} is unknown; use {', '.join(map(repr, words))}")


def _make_sample_rngs(seed: int, prefix: str, indices: Iterable[int]) -> Iterator[SampleRngs]:
    """Yield the random generators of samples `prefix`/000000, `prefix`/000001, ... in order."""
    remaining = iter(indices)
    names = [f"{prefix}/{index:06d}" for index in islice(remaining, RNG_BATCH_SIZE)]
    while names:
        layout_rngs = make_rngs(seed, [f"{name}/layout" for name in names])
        pixel_rngs = make_rngs(seed, [f"{name}/pixels" for name in names])
        label_rngs = make_rngs(seed, [f"{name}/label" for name in names])
        for layout, pixels, label in zip(layout_rngs, pixel_rngs, label_rngs, strict=True):
            yield SampleRngs(layout=layout, pixels=pixels, label=label)
        names = [f"{prefix}/{index:06d}" for index in islice(remaining, RNG_BATCH_SIZE)]


def _save_media(parts: Sequence[str | Image.Image | RenderedVideo], folder: Path, stem: str) -> tuple[ContentPart, ...]:
    """Save images and videos and replace them by references. Several in one sample are numbered by their position."""
    several = sum(not isinstance(part, str) for part in parts) > 1
    saved: list[ContentPart] = []
    for part in parts:
        name = f"{stem}-{len(saved) + 1}" if several else stem
        match part:
            case str():
                saved.append(part)
            case RenderedVideo():
                saved.append(save_mp4(part, folder, name))
            case _:
                saved.append(save_png(part, folder, name))
    return tuple(saved)
