"""Short videos of drawn shapes: which way one moves, how often it appears, and when it is visible.

A video has few small frames, 2 per second by default. That is the rate at which `model.video` samples by default, so
the model sees every frame. Videos are H.264 in mp4. A composition is the place of each shape in each frame.

Options that all three share, besides the ones of all generators (see the package):
    image_px: side of the square frames, an even number.
    frames: number of frames, which have at most 100 million pixels together.
    fps: frames per second.
    distractors: number of other shapes, of other colours, 0 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Final, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.choices import format_choices
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Count, Fraction, Pixels, Size
from mmrl_datasets.generators.photos import Split, load_textures
from mmrl_datasets.media_files import RenderedVideo

FramePixels = Annotated[Pixels, Field(ge=32)]
FrameCount = Annotated[Count, Field(ge=4)]
DistractorCount = Annotated[int, Field(ge=0, le=3)]  # each has a different colour

DIRECTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "up and left": (-1, -1),
    "up and right": (1, -1),
    "down and left": (-1, 1),
    "down and right": (1, 1),
}
"""Signs of the movement: to the right, and down."""
MIN_SPEED_PX: Final = 2  # least movement between two frames, in pixels


class _ShapeInFrame(NamedTuple):
    """A shape in one frame. In a composition, the shape asked about comes last in its frame."""

    frame: int
    shape: drawing.SceneObject

    def __repr__(self) -> str:
        """Return the text that `draw_composition` hashes, which is fixed: another would move videos between splits."""
        return f"_Still(frame={self.frame!r}, thing={self.shape!r})"


_Video = tuple[Sequence[_ShapeInFrame], str, Target]  # the shapes of a video, the question about them and its answer


class _VideoSettings(NamedTuple):
    """Options that all samples of a source share."""

    split: Split
    textures: Sequence[Image.Image]
    image_px: int
    frames: int
    fps: int
    distractors: int
    background: float
    sides: range  # of the shapes, in pixels


def direction(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: FramePixels = 64,
    frames: FrameCount = 8,
    fps: Count = 2,
    distractors: DistractorCount = 1,
    diagonals: bool = False,
    background: Fraction = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "direction": which way a shape moves. Each direction and each letter is equally likely.

    Options:
        diagonals: ask among 8 directions instead of 4.
    """
    settings = _check_settings(split, image_px, frames, fps=fps, distractors=distractors, background=background)
    if (image_px - image_px // 4) // (frames - 1) < MIN_SPEED_PX:
        raise UserError(f"frames={frames} are too many to move through image_px={image_px}; use larger or fewer ones")
    directions = list(DIRECTIONS)[: 8 if diagonals else 4]

    def ask(rng: np.random.Generator) -> _Video:
        asked = drawing.choose(rng, directions)
        draw = partial(_draw_moving_shapes, rng, asked, directions, settings)
        shapes = drawing.draw_composition(split, draw)
        options, letter = common.shuffle_options(rng, directions, asked)
        question = f"Which way does the {shapes[-1].shape.name} move?{format_choices(options)}"
        return shapes, question, Target(answer_type=AnswerType.CHOICE, value=letter)

    return _generate_videos(context, "direction", settings, ask, size=size, seed=seed)


def appearance_count(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: FramePixels = 64,
    frames: FrameCount = 8,
    fps: Count = 2,
    distractors: DistractorCount = 1,
    max_count: Count = 3,
    background: Fraction = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "blinks": how many times a shape appears. It is hidden in the first frame.

    Each answer from 1 to `max_count` is equally likely.

    Options:
        max_count: largest answer; each appearance needs two frames or more.
    """
    settings = _check_settings(split, image_px, frames, fps=fps, distractors=distractors, background=background)
    common.check_at_least(2 * max_count, frames=frames)

    def ask(rng: np.random.Generator) -> _Video:
        count = 1 + int(rng.integers(max_count))

        def draw() -> list[_ShapeInFrame] | None:
            # A shape appears and vanishes at `count` pairs of edges between frames; all patterns are equally likely.
            edges = sorted(int(edge) + 1 for edge in rng.permutation(frames)[: 2 * count])
            visible: list[int] = []
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                visible += range(start, end)
            return _draw_static_shapes(rng, visible, settings)

        shapes = drawing.draw_composition(settings.split, draw)
        question = f"How many times does the {shapes[-1].shape.name} appear?"
        return shapes, question, Target(answer_type=AnswerType.NUMBER, value=count)

    return _generate_videos(context, "blinks", settings, ask, size=size, seed=seed)


def visible_span(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: FramePixels = 64,
    frames: FrameCount = 8,
    fps: Count = 2,
    distractors: DistractorCount = 1,
    background: Fraction = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "presence": from when to when a shape is visible, in seconds.

    Frame i is shown from i / fps to (i + 1) / fps. Each span of whole frames is equally likely.
    """
    settings = _check_settings(split, image_px, frames, fps=fps, distractors=distractors, background=background)

    def ask(rng: np.random.Generator) -> _Video:
        first, end = sorted(map(int, rng.permutation(frames + 1)[:2]))
        draw = partial(_draw_static_shapes, rng, range(first, end), settings)
        shapes = drawing.draw_composition(settings.split, draw)
        question = f"From when to when is the {shapes[-1].shape.name} visible, in seconds?"
        return shapes, question, Target(answer_type=AnswerType.SPAN, value=(first / fps, end / fps))

    return _generate_videos(context, "presence", settings, ask, size=size, seed=seed)


def _check_settings(
    split: Split, image_px: int, frames: int, *, fps: int, distractors: int, background: float
) -> _VideoSettings:
    # All frames of a video are in memory at once: 300 MB.
    common.check_cost(frames * image_px**2, 100_000_000, "pixels a video", frames=frames, image_px=image_px)
    if image_px % 2:
        raise UserError(f"image_px={image_px} must be even: the video format stores colours by pairs of pixels")
    textures = load_textures(split, image_px)
    sides = range(image_px // 6, image_px // 4 + 1)
    return _VideoSettings(split, textures, image_px, frames, fps, distractors, background, sides)


def _generate_videos(
    context: DatasetContext,
    task: str,
    settings: _VideoSettings,
    ask: Callable[[np.random.Generator], _Video],
    *,
    size: int | None,
    seed: int | None,
) -> Iterator[Sample]:
    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        shapes, question, target = ask(rngs.layout)
        empty = drawing.make_background(
            rngs.pixels, settings.textures, settings.image_px, settings.background, drawing.SCENE_GREY
        )
        frames = [empty.copy() for _ in range(settings.frames)]
        stills = []
        for frame, shape in shapes:
            drawing.draw_shape(frames[frame], shape)
            stills.append({"frame": frame, "name": shape.name, "box": list(shape.box)})
        video = RenderedVideo(frames=frames, fps=settings.fps)
        return common.RenderedSample(parts=(video, question), target=target, meta={"stills": stills})

    return common.generate_samples(context, task, settings.split, render, size=size, seed=seed)


def _draw_moving_shapes(
    rng: np.random.Generator, asked: str, directions: Sequence[str], settings: _VideoSettings
) -> list[_ShapeInFrame]:
    """Draw shapes that move at constant speeds and may pass each other, the last of them in the asked direction."""
    chosen = [*drawing.choose_with_replacement(rng, directions, settings.distractors), asked]
    paths = [_draw_path(rng, DIRECTIONS[name], settings) for name in chosen]
    names = _draw_names(rng, len(paths))
    shapes = []
    for frame in range(settings.frames):
        for name, path in zip(names, paths, strict=True):
            shapes.append(_ShapeInFrame(frame, drawing.SceneObject(name, path[frame])))
    return shapes


def _draw_path(rng: np.random.Generator, signs: tuple[int, int], settings: _VideoSettings) -> list[drawing.Box]:
    """Draw the boxes of a shape in each frame; it stays in the image from the first frame to the last."""
    side = drawing.choose(rng, settings.sides)
    room, steps = settings.image_px - side, settings.frames - 1
    speed = int(rng.integers(MIN_SPEED_PX, room // steps + 1))
    start = []
    for sign in signs:
        travel = speed * steps * abs(sign)
        low = int(rng.integers(room - travel + 1))
        # A shape that moves left or up starts with free room to the left or above.
        start.append(low + travel if sign < 0 else low)
    path = []
    for frame in range(settings.frames):
        x, y = start[0] + frame * speed * signs[0], start[1] + frame * speed * signs[1]
        path.append((x, y, x + side, y + side))
    return path


def _draw_static_shapes(
    rng: np.random.Generator, visible: Sequence[int], settings: _VideoSettings
) -> list[_ShapeInFrame] | None:
    """Draw shapes that do not move: the last in the `visible` frames, the others in all; None if they do not fit."""
    sides = drawing.choose_with_replacement(rng, settings.sides, settings.distractors + 1)
    boxes = drawing.place_boxes(rng, [(side, side) for side in sides], image_px=settings.image_px, step=1, gap=2)
    if boxes is None:
        return None
    *others, asked = map(drawing.SceneObject, _draw_names(rng, len(boxes)), boxes)
    shapes = [_ShapeInFrame(frame, other) for frame in range(settings.frames) for other in others]
    return [*shapes, *(_ShapeInFrame(frame, asked) for frame in visible)]


def _draw_names(rng: np.random.Generator, count: int) -> list[str]:
    colours = drawing.shuffle(rng, drawing.SHAPE_COLOURS)[:count]
    forms = drawing.choose_with_replacement(rng, drawing.SHAPES, count)
    return [f"{colour} {form}" for colour, form in zip(colours, forms, strict=True)]
