"""Summarize the lengths of prompts: numbers, a histogram in text, and a histogram as an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median_low
from typing import Any, Final, NamedTuple

from PIL import Image, ImageDraw, ImageFont

_NUM_BINS: Final = 12
# Characters of the longest bar.
_BAR_CHARS: Final = 40
_PANEL_SIZE: Final = (460, 260)
_MARGIN_PX: Final = 48
_TEXT_COLOR, _MUTED_COLOR, _BAR_COLOR, _LIMIT_COLOR = "#1f2933", "#7b8794", "#3b82c4", "#d64545"


class HistogramBin(NamedTuple):
    """The number of values from `low` to `high`, both included."""

    low: int
    high: int
    num_values: int


def make_bins(values: Sequence[int]) -> list[HistogramBin]:
    """Return up to 12 bins of equal width that cover all values."""
    low, high = min(values), max(values)
    width = ceil((high - low + 1) / _NUM_BINS)
    starts = range(low, high + 1, width)
    counts = [0] * len(starts)
    for value in values:
        counts[(value - low) // width] += 1
    return [HistogramBin(start, start + width - 1, count) for start, count in zip(starts, counts, strict=True)]


def summarize_lengths(values: Sequence[int]) -> dict[str, Any]:
    """Return the smallest value, median, 95th percentile (nearest rank), largest, sum, and bins [low, high, count]."""
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": median_low(ordered),
        "p95": ordered[ceil(0.95 * len(ordered)) - 1],
        "max": ordered[-1],
        "sum": sum(ordered),
        "bins": list(map(list, make_bins(ordered))),
    }


def text_histogram(values: Sequence[int]) -> list[str]:
    """Return a histogram in text, one line a bin."""
    bins = make_bins(values)
    most = max(bin_.num_values for bin_ in bins)
    label_width = 2 * len(str(bins[-1].high)) + len(" - ")
    lines = []
    for bin_ in bins:
        bar = "█" * ceil(_BAR_CHARS * bin_.num_values / most)
        label = f"{bin_.low}" if bin_.low == bin_.high else f"{bin_.low} - {bin_.high}"
        lines.append(f"{label:>{label_width}}  {bar:<{_BAR_CHARS}} {bin_.num_values:,}")
    return lines


def draw_histograms(rows: Mapping[str, Mapping[str, Sequence[int]]], limits: Mapping[str, int]) -> Image.Image:
    """Draw histograms in a grid: values by split (a row) and quantity (a column), and `limits` of quantities in red."""
    num_columns = max(map(len, rows.values()))
    sheet = Image.new("RGB", (num_columns * _PANEL_SIZE[0], len(rows) * _PANEL_SIZE[1]), "white")
    for row_number, (split, row) in enumerate(rows.items()):
        for column_number, (quantity, values) in enumerate(row.items()):
            panel = _draw_histogram(f"{split}: {quantity}", values, limits.get(quantity))
            sheet.paste(panel, (column_number * _PANEL_SIZE[0], row_number * _PANEL_SIZE[1]))
    return sheet


def _draw_histogram(title: str, values: Sequence[int], limit: int | None) -> Image.Image:
    panel = Image.new("RGB", _PANEL_SIZE, "white")
    draw, small = ImageDraw.Draw(panel), ImageFont.load_default(13)
    draw.text((_MARGIN_PX, 12), title, _TEXT_COLOR, ImageFont.load_default(16))
    if not values:
        draw.text((_MARGIN_PX, _PANEL_SIZE[1] / 2), "nothing to measure", _MUTED_COLOR, small)
        return panel
    bins = make_bins(values)
    low, end, most = bins[0].low, bins[-1].high + 1, max(bin_.num_values for bin_ in bins)
    left, right, top, bottom = _MARGIN_PX, _PANEL_SIZE[0] - 20, _MARGIN_PX, _PANEL_SIZE[1] - 36

    def column_of(value: float) -> float:
        return left + (right - left) * (value - low) / (end - low)

    for bin_ in bins:
        height = (bottom - top) * bin_.num_values / most
        draw.rectangle((column_of(bin_.low) + 1, bottom - height, column_of(bin_.high + 1) - 1, bottom), _BAR_COLOR)
    draw.line((left, bottom, right, bottom), _TEXT_COLOR)
    draw.text((left, bottom + 6), str(low), _TEXT_COLOR, small)
    draw.text((right, bottom + 6), str(end - 1), _TEXT_COLOR, small, anchor="ra")
    draw.text((left - 6, top), f"{most:,}", _MUTED_COLOR, small, anchor="rm")
    if limit is not None and low <= limit < end:
        # The limit itself is allowed, so the line is at the end of its column.
        limit_x = column_of(limit + 1)
        draw.line((limit_x, top - 8, limit_x, bottom), _LIMIT_COLOR, 2)
        draw.text((limit_x, bottom + 6), f"limit {limit}", _LIMIT_COLOR, small, anchor="ma")
    return panel
