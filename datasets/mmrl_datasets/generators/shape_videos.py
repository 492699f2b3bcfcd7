"""Short videos of drawn shapes on a real texture: which way one moves, how often it appears, when it is visible.

A clip has few small frames, at 2 a second unless asked otherwise, which is the rate at which `model.video` looks by
default: the model sees every frame. Clips are H.264 in mp4. What stands where in which frame occurs in one split alone,
and textures share no pixel between splits. A sample depends on the seed, the split and its index alone.

Options all three share:
    split: train, validation or test.
    size: number of samples; null never ends.
    image_px: side of the square frames, even.
    frames: how many.
    fps: frames a second.
    distractors: other shapes, of other colours, 0 to 3.
    background: how strongly a real texture shows behind, 0 to 1.
    seed: fixes the samples whatever the run's seed, which is taken when None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_fractions,
    generate_samples,
    shuffle_options,
)
from mmrl_datasets.generators.drawing import (
    SHAPES,
    Box,
    SceneObject,
    choose_with_replacement,
    draw_composition,
    draw_shape,
    make_background,
    place_boxes,
)
from mmrl_datasets.generators.mp4_writer import RenderedVideo
from mmrl_datasets.generators.photos import Split, load_textures, parse_split
from mmrl_datasets.readers.row_to_sample import format_choices

GREY: Final = 128
COLOURS: Final = ("red", "green", "blue", "yellow")
DIRECTIONS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(  # pixels to the right, pixels down
    {
        "left": (-1, 0),
        "right": (1, 0),
        "up": (0, -1),
        "down": (0, 1),
        "up and left": (-1, -1),
        "up and right": (1, -1),
        "down and left": (-1, 1),
        "down and right": (1, 1),
    }
)
MIN_SPEED_PX: Final = 2  # per frame


class _ShapeInFrame(NamedTuple):
    """A thing in one frame; a composition is a list of these, those of the thing asked about last in their frame."""

    frame: int
    shape: SceneObject


class _VideoSettings(NamedTuple):
    """What all clips of a source share."""

    textures: Sequence[Image.Image]
    image_px: int
    frames: int
    fps: int
    background: float


def direction(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 64,
    frames: int = 8,
    fps: int = 2,
    distractors: int = 1,
    diagonals: bool = False,
    background: float = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "direction": which way a shape moves, as an option; every way and every letter equally often.

    Options:
        diagonals: 8 ways instead of 4.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_at_least(1, size=size)
    screen = _make_settings(part, image_px, frames, fps, background)
    _check_distractors(distractors)
    if (image_px - image_px // 4) // (frames - 1) < MIN_SPEED_PX:
        raise UserError(f"frames={frames} are too many to move through image_px={image_px}; use larger or fewer ones")
    ways = list(DIRECTIONS)[: 8 if diagonals else 4]

    def draw(dice: SampleRngs) -> RenderedSample:
        asked = ways[int(dice.layout.integers(len(ways)))]
        stills = draw_composition(part, lambda: _draw_moving_shapes(dice.layout, asked, ways, distractors, screen))
        options, letter = shuffle_options(dice.layout, ways, asked)
        question = f"Which way does the {stills[-1].shape.name} move?{format_choices(options)}"
        return _render_video(dice, screen, stills, question, Target(answer_type=AnswerType.CHOICE, value=letter))

    return generate_samples(place, "direction", part, draw, size=size, seed=seed)


def blinks(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 64,
    frames: int = 8,
    fps: int = 2,
    distractors: int = 1,
    max_count: int = 3,
    background: float = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "blinks": how many times a shape appears, 1 to `max_count` equally often. At first it is hidden.

    Options:
        max_count: largest answer; each time takes two frames or more.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_at_least(1, size=size, max_count=max_count)
    screen = _make_settings(part, image_px, frames, fps, background)
    _check_distractors(distractors)
    check_at_least(2 * max_count, frames=frames)

    def draw(dice: SampleRngs) -> RenderedSample:
        count = 1 + int(dice.layout.integers(max_count))
        stills = draw_composition(
            part,
            lambda: _draw_static_shapes(
                dice.layout, _draw_visible_frames(dice.layout, count, frames), distractors, screen
            ),
        )
        question = f"How many times does the {stills[-1].shape.name} appear?"
        return _render_video(dice, screen, stills, question, Target(answer_type=AnswerType.NUMBER, value=count))

    return generate_samples(place, "blinks", part, draw, size=size, seed=seed)


def presence(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 64,
    frames: int = 8,
    fps: int = 2,
    distractors: int = 1,
    background: float = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "presence": from when to when a shape is visible, in seconds; every span of whole frames equally often.

    Frame i is shown from i / fps to (i + 1) / fps, so a shape in frames 2 and 3 at 2 frames a second has (1.0, 2.0).

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_at_least(1, size=size)
    screen = _make_settings(part, image_px, frames, fps, background)
    _check_distractors(distractors)

    def draw(dice: SampleRngs) -> RenderedSample:
        first, end = sorted(int(edge) for edge in dice.layout.permutation(frames + 1)[:2])
        stills = draw_composition(
            part, lambda: _draw_static_shapes(dice.layout, range(first, end), distractors, screen)
        )
        question = f"From when to when is the {stills[-1].shape.name} visible, in seconds?"
        return _render_video(
            dice, screen, stills, question, Target(answer_type=AnswerType.SPAN, value=(first / fps, end / fps))
        )

    return generate_samples(place, "presence", part, draw, size=size, seed=seed)


def _make_settings(split: Split, image_px: int, frames: int, fps: int, background: float) -> _VideoSettings:
    check_fractions(background=background)
    check_at_least(32, image_px=image_px)
    check_at_least(4, frames=frames)
    check_at_least(1, fps=fps)
    if image_px % 2:
        raise UserError(f"image_px={image_px} must be even: the video format stores colours by pairs of pixels")
    return _VideoSettings(load_textures(split, image_px), image_px, frames, fps, background)


def _check_distractors(count: int) -> None:
    if not 0 <= count < len(COLOURS):
        raise UserError(f"distractors={count} must lie between 0 and {len(COLOURS) - 1}: each has a colour of its own")


def _draw_moving_shapes(
    rng: np.random.Generator, asked: str, ways: Sequence[str], distractors: int, screen: _VideoSettings
) -> list[_ShapeInFrame]:
    """Things that move at constant speeds, the last one the asked way; they may pass each other."""
    chosen = [*choose_with_replacement(rng, ways, distractors), asked]
    paths = [_draw_path(rng, DIRECTIONS[way], screen) for way in chosen]
    names = _draw_names(rng, len(paths))
    return [
        _ShapeInFrame(frame, SceneObject(name, path[frame]))
        for frame in range(screen.frames)
        for name, path in zip(names, paths, strict=True)
    ]


def _draw_path(rng: np.random.Generator, way: tuple[int, int], screen: _VideoSettings) -> list[Box]:
    """The boxes of a thing that stays in the picture from the first frame to the last."""
    side = _draw_side(rng, screen.image_px)
    room, steps = screen.image_px - side, screen.frames - 1
    speed = int(rng.integers(MIN_SPEED_PX, room // steps + 1))
    start = []
    for sign in way:
        travel = speed * steps * abs(sign)
        low = int(rng.integers(room - travel + 1))
        start.append(low + travel if sign < 0 else low)
    corners = [(start[0] + i * speed * way[0], start[1] + i * speed * way[1]) for i in range(screen.frames)]
    return [(x, y, x + side, y + side) for x, y in corners]


def _draw_static_shapes(
    rng: np.random.Generator, visible: Sequence[int], distractors: int, screen: _VideoSettings
) -> list[_ShapeInFrame] | None:
    """Things that stand still, all but the last in every frame; None where they find no room."""
    sides = [_draw_side(rng, screen.image_px) for _ in range(distractors + 1)]
    boxes = place_boxes(rng, [(side, side) for side in sides], image_px=screen.image_px, step=1, gap=2)
    if boxes is None:
        return None
    *others, asked = (SceneObject(name, box) for name, box in zip(_draw_names(rng, len(boxes)), boxes, strict=True))
    stills = [_ShapeInFrame(frame, other) for frame in range(screen.frames) for other in others]
    return [*stills, *(_ShapeInFrame(frame, asked) for frame in visible)]


def _draw_visible_frames(rng: np.random.Generator, count: int, frames: int) -> list[int]:
    """The frames in which a thing is visible that appears `count` times: all patterns equally often."""
    edges = sorted(int(edge) + 1 for edge in rng.permutation(frames)[: 2 * count])
    return [frame for start, end in zip(edges[::2], edges[1::2], strict=True) for frame in range(start, end)]


def _draw_side(rng: np.random.Generator, image_px: int) -> int:
    return int(rng.integers(image_px // 6, image_px // 4 + 1))


def _draw_names(rng: np.random.Generator, count: int) -> list[str]:
    """Names of different colours."""
    colours = [COLOURS[int(i)] for i in rng.permutation(len(COLOURS))[:count]]
    return [
        f"{colour} {shape}" for colour, shape in zip(colours, choose_with_replacement(rng, SHAPES, count), strict=True)
    ]


def _render_video(
    dice: SampleRngs, screen: _VideoSettings, stills: Sequence[_ShapeInFrame], question: str, target: Target
) -> RenderedSample:
    empty = make_background(
        dice.pixels, screen.textures, image_px=screen.image_px, strength=screen.background, grey=GREY
    )
    pictures = [empty.copy() for _ in range(screen.frames)]
    for still in stills:
        draw_shape(pictures[still.frame], still.shape)
    meta: list[dict[str, Any]] = [
        {"frame": still.frame, "name": still.shape.name, "box": list(still.shape.box)} for still in stills
    ]
    return RenderedSample(
        parts=(RenderedVideo(frames=pictures, fps=screen.fps), question), target=target, meta={"stills": meta}
    )
