"""Bar, line and pie charts of monthly values, and questions about them.

The months are consecutive, the values all different and multiples of `step`, so that they can be read off exactly. A
composition (which month has which value) occurs in one split alone. A sample depends on the seed, the split and its
index alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import cos, pi, sin
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_one_of,
    generate_samples,
    shuffle_options,
)
from mmrl_datasets.generators.drawing import SUPERSAMPLING, draw_composition
from mmrl_datasets.generators.photos import parse_split
from mmrl_datasets.readers.row_to_sample import format_choices

ChartType = Literal["bar", "line", "pie"]
ChartQuestion = Literal["value", "difference", "largest", "month"]
MonthlyValues = Sequence[tuple[str, int]]

MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
PAPER_COLOR: Final = (255, 255, 255)
INK_COLOR: Final = (20, 20, 20)
GRID_COLOR: Final = (208, 208, 208)
MARK_COLOR: Final = (36, 84, 220)
SLICE_COLORS: Final = ((244, 150, 150), (150, 214, 160), (160, 182, 246), (250, 226, 130))
FONT_PX: Final = 10
MIN_STEP_PX: Final = 4  # two neighbouring values stand at least this far apart
MIN_SHARE_PERCENT: Final = 10  # per cent; a label fits into it
LABEL_PX: Final = 22  # the widest month with air around it


class _PlotArea(NamedTuple):
    """The area inside the axes: its edges in pixels, and the value at its upper one."""

    left: int
    top: int
    right: int
    bottom: int
    max_value: int

    def row_of(self, value: int) -> int:
        """The row at which a value stands."""
        return self.bottom - round(value * (self.bottom - self.top) / self.max_value)


def charts(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    chart: ChartType = "bar",
    ask: ChartQuestion = "value",
    months: int = 4,
    step: int = 5,
    max_value: int = 50,
    image_px: int = 128,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "chart_<ask>": what a chart says; of a pie, values are per cent and add up to 100.

    Options:
        split: train, validation or test.
        size: number of samples; null never ends.
        chart: bar, line or pie.
        ask: `value` of a month and `difference` of two months are numbers, each equally often in bars and lines;
            `largest` is a choice among the months, each letter equally often; `month` with a given value is text.
        months: how many there are, 3 to 12; in a pie 4 at most.
        step: what all values are multiples of; of a pie it divides 100.
        max_value: largest value of bars and lines.
        image_px: side of the square picture; larger charts of the same values are easier to read.
        seed: fixes the samples whatever the run's seed, which is taken when None.

    Raises:
        UserError: an option is out of range, or the values could not be told apart at this size.
    """
    part = parse_split(split)
    check_one_of(get_args(ChartType), chart=chart)
    check_one_of(get_args(ChartQuestion), ask=ask)
    check_at_least(1, size=size, step=step)
    check_at_least(96, image_px=image_px)
    levels = _allowed_shares(months, step) if chart == "pie" else _allowed_values(months, step, max_value, image_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        fixed = _draw_asked_values(dice.layout, ask, levels) if chart != "pie" else []
        drawn = draw_composition(part, lambda: _draw_values(dice.layout, months, fixed, levels, shares=chart == "pie"))
        values = _sort_by_month(drawn)
        canvas = (
            _draw_pie_chart(values, image_px)
            if chart == "pie"
            else _draw_axes_chart(values, image_px, step, max_value, bars=chart == "bar")
        )
        question, target = _make_question(dice.layout, ask, drawn, unit="percentage" if chart == "pie" else "value")
        return RenderedSample(
            parts=(canvas, question),
            target=target,
            meta={"chart": chart, "values": [{"month": name, "value": value} for name, value in values]},
        )

    return generate_samples(place, f"chart_{ask}", part, draw, size=size, seed=seed)


def _allowed_values(months: int, step: int, max_value: int, image_px: int) -> list[int]:
    """The values that bars and points may have."""
    levels = list(range(step, max_value + 1, step))
    plot = _make_plot_area(image_px, max_value)
    if not 3 <= months <= len(MONTHS) or months * LABEL_PX > plot.right - plot.left:
        most = min(len(MONTHS), (plot.right - plot.left) // LABEL_PX)
        raise UserError(f"months={months} must lie between 3 and {most} in image_px={image_px}, for their names to fit")
    if max_value % step or len(levels) < months + 2:  # with fewer, there are too few charts for three splits
        raise UserError(f"max_value={max_value} must be a multiple of step={step}, and {months + 2} of them or more")
    if (plot.bottom - plot.top) * step < MIN_STEP_PX * max_value:
        raise UserError(f"step={step} of max_value={max_value} cannot be seen in image_px={image_px}; enlarge one")
    return levels


def _allowed_shares(months: int, step: int) -> list[int]:
    """The shares that slices may have."""
    levels = list(range(-(-MIN_SHARE_PERCENT // step) * step, 100, step))
    if not 3 <= months <= min(len(SLICE_COLORS), len(levels)) or 100 % step or sum(levels[:months]) > 100:
        raise UserError(
            f"a pie has no months={months} different shares that are multiples of step={step} and {MIN_SHARE_PERCENT} % or "
            "more; use 3 or 4 months and a smaller step that divides 100"
        )
    return levels


def _draw_asked_values(rng: np.random.Generator, ask: str, levels: Sequence[int]) -> list[int]:
    """The values that are asked for, so drawn that every answer comes equally often."""
    if ask != "difference":
        return [levels[int(rng.integers(len(levels)))]]
    apart = 1 + int(rng.integers(len(levels) - 1))
    low = int(rng.integers(len(levels) - apart))
    return [levels[low + apart], levels[low]]


def _draw_values(
    rng: np.random.Generator, months: int, fixed: Sequence[int], levels: Sequence[int], *, shares: bool
) -> list[tuple[str, int]] | None:
    """Different values of consecutive months in random order, the fixed ones first; None if shares do not add up."""
    start = int(rng.integers(len(MONTHS)))
    names = [MONTHS[(start + int(i)) % len(MONTHS)] for i in rng.permutation(months)]
    free = [level for level in levels if level not in fixed]
    picked = [free[int(i)] for i in rng.permutation(len(free))[: months - len(fixed)]]
    if shares:
        picked[-1] = 100 - sum(picked[:-1])
        if picked[-1] not in levels or len(set(picked)) < len(picked):
            return None
    return list(zip(names, [*fixed, *picked], strict=True))


def _sort_by_month(values: MonthlyValues) -> MonthlyValues:
    """Consecutive months in their order: the first is the one whose predecessor is missing."""
    places = {MONTHS.index(name): (name, value) for name, value in values}
    start = next((place for place in places if (place - 1) % len(MONTHS) not in places), 0)
    return [places[(start + i) % len(MONTHS)] for i in range(len(places))]


def _make_question(rng: np.random.Generator, ask: str, drawn: MonthlyValues, unit: str) -> tuple[str, Target]:
    """The question about the first months drawn, and its answer."""
    (name, value), (other, less), *_ = drawn
    match ask:
        case "value":
            return f"What is the {unit} of {name}?", Target(answer_type=AnswerType.NUMBER, value=value)
        case "difference":
            question = f"By how much do the {unit}s of {name} and {other} differ?"
            return question, Target(answer_type=AnswerType.NUMBER, value=abs(value - less))
        case "largest":
            largest = max(drawn, key=lambda entry: entry[1])[0]
            options, letter = shuffle_options(rng, [month for month, _ in drawn], largest)
            return f"Which month has the largest {unit}?{format_choices(options)}", Target(
                answer_type=AnswerType.CHOICE, value=letter
            )
        case _:
            return f"Which month has the {unit} {value}?", Target(answer_type=AnswerType.TEXT, value=name)


def _make_plot_area(image_px: int, max_value: int) -> _PlotArea:
    return _PlotArea(left=22, top=8, right=image_px - 4, bottom=image_px - 16, max_value=max_value)


def _draw_axes_chart(values: MonthlyValues, image_px: int, step: int, max_value: int, *, bars: bool) -> Image.Image:
    """Bars, or points joined by lines, over a grid with a labelled line at every second or further step."""
    canvas = Image.new("RGB", (image_px, image_px), PAPER_COLOR)
    draw, plot = ImageDraw.Draw(canvas), _make_plot_area(image_px, max_value)
    font = ImageFont.load_default(size=FONT_PX)
    tick = step * max(2, -(-max_value // (5 * step)))
    for value in range(0, max_value + 1, tick):
        draw.line(
            (plot.left, plot.row_of(value), plot.right, plot.row_of(value)), fill=GRID_COLOR if value else INK_COLOR
        )
        draw.text((plot.left - 4, plot.row_of(value)), str(value), fill=INK_COLOR, font=font, anchor="rm")
    slot = (plot.right - plot.left) / len(values)
    centres = [round(plot.left + (i + 0.5) * slot) for i in range(len(values))]
    points = [(x, plot.row_of(value)) for x, (_, value) in zip(centres, values, strict=True)]
    if not bars:
        draw.line(points, fill=MARK_COLOR, width=2)
    for (x, y), (name, _) in zip(points, values, strict=True):
        mark = (x - round(slot / 4), y, x + round(slot / 4), plot.bottom - 1) if bars else (x - 2, y - 2, x + 2, y + 2)
        draw.rectangle(mark, fill=MARK_COLOR)
        draw.text((x, plot.bottom + 3), name, fill=INK_COLOR, font=font, anchor="mt")
    return canvas


def _draw_pie_chart(values: MonthlyValues, image_px: int) -> Image.Image:
    """Slices clockwise from the top, each with its month's name."""
    large = Image.new("RGB", (image_px * SUPERSAMPLING, image_px * SUPERSAMPLING), PAPER_COLOR)
    draw, rim = ImageDraw.Draw(large), 4 * SUPERSAMPLING
    edges = np.cumsum([0, *(value for _, value in values)]) * 3.6 - 90.0
    for colour, start, end in zip(SLICE_COLORS, edges[:-1], edges[1:], strict=False):
        draw.pieslice((rim, rim, large.width - rim - 1, large.height - rim - 1), start, end, fill=colour)
    canvas = large.resize((image_px, image_px), Image.Resampling.BOX)
    centre, reach = image_px / 2, 0.33 * image_px
    for (name, _), angle in zip(values, (edges[:-1] + edges[1:]) * pi / 360, strict=True):
        where = (centre + reach * cos(angle), centre + reach * sin(angle))
        font = ImageFont.load_default(size=FONT_PX)
        ImageDraw.Draw(canvas).text(where, name, fill=INK_COLOR, font=font, anchor="mm")
    return canvas
