"""Draws a row of a case table that names a picture: the boxes and points of target and answer, and the value below."""

from __future__ import annotations

import textwrap
from contextlib import suppress
from typing import Final

from PIL import Image, ImageDraw

from mmrl.answer import list_coordinates, validate_value
from mmrl.types import CoordinateSystem, Response, Sample, Size, UserError, VideoRef
from mmrl_rewards.cases import Case
from mmrl_rewards.contract import BoundReward

_SIDE_PX: Final = 640
_LINE_PX: Final = 14
_LINE_CHARS: Final = 96
_RADIUS_PX: Final = 5
# Two colours that people with any colour vision tell apart.
_TARGET_COLOR, _ANSWER_COLOR = (0, 158, 115), (230, 97, 0)


def draw_case(case: Case, reward: BoundReward) -> Image.Image:
    """Return the picture of a case with the target in green and the answer in orange, and its value, reason and source.

    Raises:
        Unscorable: the picture cannot be opened.
        UserError: the row names no picture.
    """
    index, media = case.sample.media_index, case.sample.all_media()
    if index >= len(media) or media[index].file is None:
        raise UserError('the row names no picture; in its sample, write "image": "picture.png"')
    response, sample = case.build()
    ref = sample.media[index]
    if isinstance(ref, VideoRef):
        picture = Image.fromarray(sample.video_frames(index, [ref.start or 0.0])[0])
    else:
        picture = Image.fromarray(sample.image(index))
    factor = _SIDE_PX / max(picture.size)
    size = Size(max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
    _draw_marks(picture, response, sample)
    result = case.score(reward)
    lines = []
    for text in (
        f"value {result.value}, expected {case.expected}: {result.reason}",
        f"source: {case.source}",
        f"{case.response!r:.300}",
    ):
        lines += textwrap.wrap(text, _LINE_CHARS)
    page = Image.new("RGB", (_SIDE_PX, size.height + (len(lines) + 1) * _LINE_PX), "white")
    page.paste(picture, (0, 0))
    # Pillow's own font, which every machine has.
    ImageDraw.Draw(page).multiline_text((4, size.height + 4), "\n".join(lines), "black", spacing=2)
    return page


def _draw_marks(picture: Image.Image, response: Response, sample: Sample) -> None:
    target, draw = sample.target, ImageDraw.Draw(picture)
    shown = response.resize_maps[target.media_index]
    marks = [(target.value, target.coordinate_system, _TARGET_COLOR)]
    if response.answer.value is not None:
        marks.append((response.answer.value, response.coordinate_system, _ANSWER_COLOR))
    for value, system, color in marks:
        # A target may be broken on purpose.
        with suppress(ValueError):
            for values in list_coordinates(target.answer_type, validate_value(target.answer_type, value)):
                shares = shown.convert(values, system or CoordinateSystem.PX_ORIGINAL, CoordinateSystem.NORM_1)
                places = [share * picture.size[axis % 2] for axis, share in enumerate(shares)]
                if len(places) == 2:
                    draw.circle(places, _RADIUS_PX, fill=color, outline="white")
                else:
                    draw.rectangle(places, outline=color, width=3)
