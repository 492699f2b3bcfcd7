"""How long prompts are: numbers, bars of text, a picture of bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median_low
from typing import Any, Final, NamedTuple

from PIL import Image, ImageDraw, ImageFont

_NUM_BINS: Final = 12
_BAR_CHARS: Final = 40
_PANEL_SIZE: Final = (460, 260)
_MARGIN: Final = 48
_TEXT_COLOR, _MUTED_COLOR, _BAR_COLOR, _LIMIT_COLOR = "#1f2933", "#7b8794", "#3b82c4", "#d64545"


class HistogramBin(NamedTuple):
    """How many values lie from `low` to `high`, both included."""

    low: int
    high: int
    num_values: int


def make_bins(values: Sequence[int]) -> list[HistogramBin]:
    """Bins of equal width that cover all values."""
    low, high = min(values), max(values)
    width = ceil((high - low + 1) / _NUM_BINS)
    starts = range(low, high + 1, width)
    counts = [0] * len(starts)
    for value in values:
        counts[(value - low) // width] += 1
    return [HistogramBin(start, start + width - 1, count) for start, count in zip(starts, counts, strict=True)]


def summarize_lengths(values: Sequence[int]) -> dict[str, Any]:
    """Smallest, median, 95th percentile (nearest rank), largest, sum, and the bins, each [low, high, samples]."""
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": median_low(ordered),
        "p95": ordered[ceil(0.95 * len(ordered)) - 1],
        "max": ordered[-1],
        "sum": sum(ordered),
        "bins": [list(bin_) for bin_ in make_bins(ordered)],
    }


def text_histogram(values: Sequence[int]) -> list[str]:
    """A histogram in text, a line per bin."""
    found = make_bins(values)
    most, digits = max(bin_.num_values for bin_ in found), len(str(found[-1].high))
    return [
        f"{_format_bin(bin_):>{2 * digits + 3}}  {'█' * ceil(_BAR_CHARS * bin_.num_values / most):<{_BAR_CHARS}} {bin_.num_values:,}"
        for bin_ in found
    ]


def draw_histograms(rows: Mapping[str, Mapping[str, Sequence[int]]], limits: Mapping[str, int]) -> Image.Image:
    """Histograms: a row per part, a column per quantity; a quantity's limit is a red line where it fits."""
    columns = max(len(row) for row in rows.values())
    sheet = Image.new("RGB", (columns * _PANEL_SIZE[0], len(rows) * _PANEL_SIZE[1]), "white")
    for y, (part, row) in enumerate(rows.items()):
        for x, (quantity, values) in enumerate(row.items()):
            panel = _draw_histogram(f"{part}: {quantity}", values, limits.get(quantity))
            sheet.paste(panel, (x * _PANEL_SIZE[0], y * _PANEL_SIZE[1]))
    return sheet


def _draw_histogram(title: str, values: Sequence[int], limit: int | None) -> Image.Image:
    panel = Image.new("RGB", _PANEL_SIZE, "white")
    draw, small = ImageDraw.Draw(panel), ImageFont.load_default(13)
    draw.text((_MARGIN, 12), title, _TEXT_COLOR, ImageFont.load_default(16))
    if not values:
        draw.text((_MARGIN, _PANEL_SIZE[1] / 2), "nothing to measure", _MUTED_COLOR, small)
        return panel
    found = make_bins(values)
    low, end, most = found[0].low, found[-1].high + 1, max(bin_.num_values for bin_ in found)
    left, right, top, bottom = _MARGIN, _PANEL_SIZE[0] - 20, _MARGIN, _PANEL_SIZE[1] - 36

    def column(value: float) -> float:
        return left + (right - left) * (value - low) / (end - low)

    for bin_ in found:
        height = (bottom - top) * bin_.num_values / most
        draw.rectangle((column(bin_.low) + 1, bottom - height, column(bin_.high + 1) - 1, bottom), _BAR_COLOR)
    draw.line((left, bottom, right, bottom), _TEXT_COLOR)
    draw.text((left, bottom + 6), str(low), _TEXT_COLOR, small)
    draw.text((right, bottom + 6), str(end - 1), _TEXT_COLOR, small, anchor="ra")
    draw.text((left - 6, top), f"{most:,}", _MUTED_COLOR, small, anchor="rm")
    if limit is not None and low <= limit < end:
        draw.line((column(limit + 1), top - 8, column(limit + 1), bottom), _LIMIT_COLOR, 2)
        draw.text((column(limit + 1), bottom + 6), f"limit {limit}", _LIMIT_COLOR, small, anchor="ma")
    return panel


def _format_bin(bin_: HistogramBin) -> str:
    return f"{bin_.low}" if bin_.low == bin_.high else f"{bin_.low} - {bin_.high}"
