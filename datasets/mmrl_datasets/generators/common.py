"""What generators share: independent random streams, files and ids of samples, checks of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from mmrl.types import ContentPart, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.drawing import SceneObject, save_png
from mmrl_datasets.generators.mp4_writer import RenderedVideo, save_mp4
from mmrl_datasets.generators.photos import Split
from mmrl_datasets.generators.random_streams import make_rngs
from mmrl_datasets.readers.answers import LETTERS

RNG_BATCH_SIZE: Final = 256  # samples whose streams are begun together


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRngs:
    """One sample's independent random streams."""

    layout: np.random.Generator
    pixels: np.random.Generator
    label: np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSample:
    """A sample whose media are still pixels."""

    parts: tuple[str | Image.Image | RenderedVideo, ...]
    target: Target
    label: Target | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


def generate_samples(
    place: DatasetContext,
    task: str,
    split: Split,
    render: Callable[[SampleRngs], RenderedSample],
    *,
    size: int | None,
    seed: int | None,
) -> Iterator[Sample]:
    """`size` samples, or samples without end; each depends on the seed, the split and its index alone."""
    root = place.seed if seed is None else seed
    folder = place.work_dir / f"{task}-{split}"
    for index, dice in enumerate(_make_sample_rngs(root, f"{task}/{split}", count() if size is None else range(size))):
        draft = render(dice)
        yield Sample(
            id=f"{task}/{split}/{index:06d}",
            task=task,
            parts=_save_media(draft.parts, folder, f"{index:06d}"),
            target=draft.target,
            label=draft.label,
            meta=draft.meta,
        )


def objects_meta(objects: Sequence[SceneObject]) -> list[dict[str, Any]]:
    """Things as `meta` holds them: a name and a box each."""
    return [{"name": thing.name, "box": list(thing.box)} for thing in objects]


def choose_phrasing(rng: np.random.Generator, first: str, second: str) -> str:
    """One of two texts, equally often."""
    return first if rng.random() < 0.5 else second


def shuffle_options(rng: np.random.Generator, options: Sequence[str], right: str) -> tuple[list[str], str]:
    """The options in random order, and the letter of the right one: each letter equally often."""
    order = [options[int(i)] for i in rng.permutation(len(options))]
    return order, LETTERS[order.index(right)]


def check_fractions(**options: float) -> None:
    """Refuse options that do not lie between 0 and 1.

    Raises:
        UserError: one of them does not.
    """
    for name, value in options.items():
        if not 0.0 <= value <= 1.0:
            raise UserError(f"{name}={value} must lie between 0 and 1")


def check_at_least(least: int, **options: int | None) -> None:
    """Refuse options below `least`; None is no limit and passes.

    Raises:
        UserError: one of them is below it.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def check_at_most(most: int, **options: int) -> None:
    """Refuse options above `most`.

    Raises:
        UserError: one of them is above it.
    """
    for name, value in options.items():
        if value > most:
            raise UserError(f"{name}={value} must be at most {most}")


def check_one_of(words: Sequence[str], **options: str) -> None:
    """Refuse options that are none of these words.

    Raises:
        UserError: one of them is another word.
    """
    for name, value in options.items():
        if value not in words:
            raise UserError(f"{name}={value!r} is unknown; use {', '.join(map(repr, words))}")


def _make_sample_rngs(seed: int, whose: str, indices: Iterable[int]) -> Iterator[SampleRngs]:
    """The streams of samples, in order."""
    left = iter(indices)
    while names := [f"{whose}/{index:06d}" for index in islice(left, RNG_BATCH_SIZE)]:
        begun = (make_rngs(seed, [f"{name}/{use}" for name in names]) for use in ("layout", "pixels", "label"))
        for layout, pixels, label in zip(*begun, strict=True):
            yield SampleRngs(layout=layout, pixels=pixels, label=label)


def _save_media(parts: Sequence[str | Image.Image | RenderedVideo], folder: Path, stem: str) -> tuple[ContentPart, ...]:
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
