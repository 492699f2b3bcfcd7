"""The steps that all generators share: types of options, random streams for each sample, saved media and ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field

from mmrl.types import ContentPart, DatasetContext, ImageRef, Sample, Target, UserError
from mmrl.types import Size as ImageSize
from mmrl_datasets.choices import LETTERS
from mmrl_datasets.generators.drawing import SceneObject, shuffle
from mmrl_datasets.generators.photos import Split
from mmrl_datasets.media_files import RenderedVideo, save_mp4, save_png

# Types of options: a value out of range is refused before anything is drawn.
Size = Annotated[int, Field(ge=1)] | None
Count = Annotated[int, Field(ge=1, le=10_000)]
Pixels = Annotated[int, Field(ge=1, le=10_000)]  # a square of this side has the 100 million of `data.media_limits`
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


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
    response: str | None = None  # a whole response to imitate
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
    """Yield samples with ids such as `task/split/000007`, their media saved in a folder of `context.work_dir`.

    `render` draws one sample from its random generators. A `size` of None never ends; a `seed` of None takes the run's.
    """
    root_seed = context.seed if seed is None else seed
    folder = context.work_dir / f"{task}-{split}"
    for index in count() if size is None else range(size):
        name = f"{index:06d}"
        sample_id = f"{task}/{split}/{name}"
        # Streams are named by id, so a sample depends only on the seed and its id, not on `size` or earlier samples.
        rngs = SampleRngs(
            layout=_make_rng(root_seed, f"{sample_id}/layout"),
            pixels=_make_rng(root_seed, f"{sample_id}/pixels"),
            label=_make_rng(root_seed, f"{sample_id}/label"),
        )
        rendered = render(rngs)
        yield Sample(
            id=sample_id,
            task=task,
            parts=_save_media(rendered.parts, folder, name, context.drawn_images),
            target=rendered.target,
            label=rendered.label,
            response=rendered.response,
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


def check_at_least(least: int, **options: int) -> None:
    """Raise a UserError if an option is below `least`, which depends on other options."""
    for name, value in options.items():
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def check_cost(cost: int, most: int, unit: str, **options: int) -> None:
    """Raise a UserError if options, each in its own range, together take more than `most` of a unit."""
    if cost > most:
        named = " and ".join(f"{name}={value}" for name, value in options.items())
        raise UserError(f"{named} take {cost:,} {unit} together, more than {most:,}; lower one of them")


def _make_rng(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the first 128 bits of sha256("seed/name"), read as a big-endian number."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # As `default_rng` seeds from the number, but it takes half the time to read the number's words, lowest first.
    return np.random.Generator(np.random.PCG64(np.frombuffer(digest[15::-1], "<u4")))


def _save_media(
    parts: Sequence[str | Image.Image | RenderedVideo],
    folder: Path,
    stem: str,
    drawn_images: dict[ImageRef, ImageSize] | None,
) -> tuple[ContentPart, ...]:
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
                ref = save_png(part, folder, name)
                saved.append(ref)
                if drawn_images is not None and part.mode == "RGB":
                    drawn_images[ref] = ImageSize(*part.size)
    return tuple(saved)
