"""Bar, line and pie charts of monthly values, and questions about them.

The months are consecutive. Their values are all different and multiples of `step`, so that they can be read off
exactly. A composition is the months with their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil, cos, pi, sin
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.choices import format_choices
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Count, Pixels, Size
from mmrl_datasets.generators.photos import Split

ChartType = Literal["bar", "line", "pie"]
ChartQuestion = Literal["value", "difference", "largest", "month"]
MonthlyValues = Sequence[tuple[str, int]]  # months with their values

MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CHART_BACKGROUND: Final = (255, 255, 255)
CHART_INK: Final = (20, 20, 20)
LINE_COLOR: Final = (208, 208, 208)
MARK_COLOR: Final = (36, 84, 220)
SLICE_COLORS: Final = ((244, 150, 150), (150, 214, 160), (160, 182, 246), (250, 226, 130))
FONT_PX: Final = 10
MIN_STEP_PX: Final = 4  # least distance between two neighbouring values on the axis, in pixels
MIN_SHARE_PERCENT: Final = 10  # smallest slice of a pie; the name of a month fits into it
LABEL_PX: Final = 22  # width of the widest month's name with space around it, in pixels


class _PlotArea(NamedTuple):
    """The area inside the axes, which leaves room for labels on the left and below."""

    left: int
    top: int
    right: int
    bottom: int


def charts(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    chart: ChartType = "bar",
    ask: ChartQuestion = "value",
    months: Count = 4,
    step: Annotated[int, Field(ge=1)] = 5,
    max_value: int = 50,
    image_px: Annotated[Pixels, Field(ge=96)] = 128,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "chart_<ask>": a question about a chart. Values of a pie are per cent and add up to 100.

    Options, besides the ones of all generators (see the package):
        chart: bar, line or pie.
        ask: `value` of a month or `difference` of two months, which are numbers, each equally likely in bars and lines;
            `largest`, a choice among the months, each letter equally likely; `month` with a given value, which is text.
        months: number of months, 3 to 12; at most 4 in a pie.
        step: all values are multiples of it; for a pie it divides 100.
        max_value: largest value of bars and lines.
        image_px: side of the square image; the same values are easier to read in a larger chart.
    """
    is_pie = chart == "pie"
    levels = _allowed_shares(months, step) if is_pie else _allowed_values(months, step, max_value, image_px)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        # Shares must add up to 100, so the ones of a pie cannot be fixed before the others.
        fixed = [] if is_pie else _draw_asked_values(rngs.layout, ask, levels)
        draw = partial(_draw_values, rngs.layout, months, fixed, levels, shares=is_pie)
        drawn = drawing.draw_composition(split, draw)
        values = _sort_by_month(drawn)
        if is_pie:
            canvas = _draw_pie_chart(values, image_px)
        else:
            canvas = _draw_axes_chart(values, image_px, step, max_value, bars=chart == "bar")
        question, target = _make_question(rngs.layout, ask, drawn, unit="percentage" if is_pie else "value")
        return common.RenderedSample(
            parts=(canvas, question),
            target=target,
            meta={"chart": chart, "values": [{"month": month, "value": value} for month, value in values]},
        )

    return common.generate_samples(context, f"chart_{ask}", split, render, size=size, seed=seed)


def _allowed_values(months: int, step: int, max_value: int, image_px: int) -> list[int]:
    # The values that bars and points may have; a UserError for options that leave too few or too close ones.
    plot = _make_plot_area(image_px)
    if not 3 <= months <= len(MONTHS) or months * LABEL_PX > plot.right - plot.left:
        most = min(len(MONTHS), (plot.right - plot.left) // LABEL_PX)
        raise UserError(f"months={months} must lie between 3 and {most} in image_px={image_px}, for their names to fit")
    # With fewer levels there are too few compositions for three splits.
    if max_value % step or max_value // step < months + 2:
        raise UserError(f"max_value={max_value} must be a multiple of step={step}, and {months + 2} of them or more")
    if (plot.bottom - plot.top) * step < MIN_STEP_PX * max_value:
        raise UserError(f"step={step} of max_value={max_value} is too small to see in image_px={image_px}; raise one")
    return list(range(step, max_value + 1, step))


def _allowed_shares(months: int, step: int) -> list[int]:
    # The shares that slices may have, in per cent; a UserError for options for which none add up to 100.
    smallest = ceil(MIN_SHARE_PERCENT / step) * step
    levels = list(range(smallest, 100, step))
    if not 3 <= months <= min(len(SLICE_COLORS), len(levels)) or 100 % step or sum(levels[:months]) > 100:
        raise UserError(
            f"a pie has no months={months} different shares that are multiples of step={step} and "
            f"{MIN_SHARE_PERCENT} % or more; use 3 or 4 months and a smaller step that divides 100"
        )
    return levels


def _draw_asked_values(rng: np.random.Generator, ask: str, levels: Sequence[int]) -> list[int]:
    """Draw the values that the question is about, so that every answer is equally likely."""
    if ask != "difference":
        return [drawing.choose(rng, levels)]
    distance = 1 + int(rng.integers(len(levels) - 1))
    low = int(rng.integers(len(levels) - distance))
    return [levels[low + distance], levels[low]]


def _draw_values(
    rng: np.random.Generator, months: int, fixed: Sequence[int], levels: Sequence[int], *, shares: bool
) -> list[tuple[str, int]] | None:
    """Draw consecutive months in random order with different values, the fixed values first.

    Returns None if the values are shares and cannot add up to 100.
    """
    start = int(rng.integers(len(MONTHS)))
    names = drawing.shuffle(rng, [MONTHS[(start + offset) % len(MONTHS)] for offset in range(months)])
    free = [level for level in levels if level not in fixed]
    picked = drawing.shuffle(rng, free)[: months - len(fixed)]
    if shares:
        # The last share is what the others leave; many draws fail here, and `draw_composition` draws again.
        picked[-1] = 100 - sum(picked[:-1])
        if picked[-1] not in levels or len(set(picked)) < len(picked):
            return None
    return list(zip(names, [*fixed, *picked], strict=True))


def _sort_by_month(values: MonthlyValues) -> MonthlyValues:
    """Return consecutive months in their order, which may continue from December to January."""
    by_number = {MONTHS.index(month): (month, value) for month, value in values}
    # The first month is the one whose predecessor is missing. If all twelve are there, January is the first.
    start = next((number for number in by_number if (number - 1) % len(MONTHS) not in by_number), 0)
    return [by_number[(start + offset) % len(MONTHS)] for offset in range(len(by_number))]


def _make_question(rng: np.random.Generator, ask: str, drawn: MonthlyValues, unit: str) -> tuple[str, Target]:
    """Return the question, which is about the first months drawn, and its answer."""
    (month, value), (other_month, other_value), *_ = drawn
    match ask:
        case "value":
            return f"What is the {unit} of {month}?", Target(answer_type=AnswerType.NUMBER, value=value)
        case "difference":
            question = f"By how much do the {unit}s of {month} and {other_month} differ?"
            return question, Target(answer_type=AnswerType.NUMBER, value=abs(value - other_value))
        case "largest":
            largest = max(drawn, key=lambda entry: entry[1])[0]
            options, letter = common.shuffle_options(rng, [name for name, _ in drawn], largest)
            question = f"Which month has the largest {unit}?{format_choices(options)}"
            return question, Target(answer_type=AnswerType.CHOICE, value=letter)
        case _:
            return f"Which month has the {unit} {value}?", Target(answer_type=AnswerType.TEXT, value=month)


def _make_plot_area(image_px: int) -> _PlotArea:
    return _PlotArea(left=22, top=8, right=image_px - 4, bottom=image_px - 16)


def _draw_axes_chart(values: MonthlyValues, image_px: int, step: int, max_value: int, *, bars: bool) -> Image.Image:
    """Draw bars, or points joined by lines, over horizontal lines with their values."""
    canvas = Image.new("RGB", (image_px, image_px), CHART_BACKGROUND)
    draw, plot = ImageDraw.Draw(canvas), _make_plot_area(image_px)

    def row_of(value: int) -> int:
        return plot.bottom - round(value * (plot.bottom - plot.top) / max_value)

    font = ImageFont.load_default(size=FONT_PX)
    # At most five labelled lines above the base, and never one at every step: the model has to estimate between them.
    tick = step * max(2, -(-max_value // (5 * step)))
    for value in range(0, max_value + 1, tick):
        row = row_of(value)
        draw.line((plot.left, row, plot.right, row), fill=LINE_COLOR if value else CHART_INK)
        draw.text((plot.left - 4, row), str(value), fill=CHART_INK, font=font, anchor="rm")
    slot = (plot.right - plot.left) / len(values)
    points = []
    for position, (_, value) in enumerate(values):
        points.append((round(plot.left + (position + 0.5) * slot), row_of(value)))
    if not bars:
        draw.line(points, fill=MARK_COLOR, width=2)
    for (x, y), (month, _) in zip(points, values, strict=True):
        if bars:
            draw.rectangle((x - round(slot / 4), y, x + round(slot / 4), plot.bottom - 1), fill=MARK_COLOR)
        else:
            draw.rectangle((x - 2, y - 2, x + 2, y + 2), fill=MARK_COLOR)
        draw.text((x, plot.bottom + 3), month, fill=CHART_INK, font=font, anchor="mt")
    return canvas


def _draw_pie_chart(values: MonthlyValues, image_px: int) -> Image.Image:
    large = Image.new("RGB", (image_px * drawing.SUPERSAMPLING, image_px * drawing.SUPERSAMPLING), CHART_BACKGROUND)
    draw, margin = ImageDraw.Draw(large), 4 * drawing.SUPERSAMPLING
    circle = (margin, margin, large.width - margin - 1, large.height - margin - 1)
    # Pillow counts degrees clockwise from three o'clock; 1 per cent is 3.6 degrees.
    edges = np.cumsum([0, *(value for _, value in values)]) * 3.6 - 90.0
    for colour, start, end in zip(SLICE_COLORS, edges[:-1], edges[1:], strict=False):
        draw.pieslice(circle, start, end, fill=colour)
    # The names are written afterwards, at the final size: the font is drawn for its pixels.
    canvas = large.resize((image_px, image_px), Image.Resampling.BOX)
    font = ImageFont.load_default(size=FONT_PX)
    centre, radius = image_px / 2, 0.33 * image_px
    for (month, _), angle in zip(values, (edges[:-1] + edges[1:]) * pi / 360, strict=True):
        position = (centre + radius * cos(angle), centre + radius * sin(angle))
        ImageDraw.Draw(canvas).text(position, month, fill=CHART_INK, font=font, anchor="mm")
    return canvas
