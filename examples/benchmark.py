"""A benchmark of your own: tell the time from a picture of a clock.

mmrl eval run runs/mine --benchmark ./examples/benchmark.py:make_benchmark --data clocks.jsonl
"""

from functools import partial

from mmrl import Benchmark, Extraction, Item, ItemResponse, TableLayout

CLOCKS = TableLayout(
    name="clocks",
    answer_type="text",
    columns={"images": "file", "question": "What time does this {{ kind }} clock show?", "answer": "time"},
    subset_columns=("kind",),
)


def make_benchmark(*, tolerance: int = 60) -> Benchmark:
    """Return the benchmark; an answer that is `tolerance` minutes off scores 0."""
    return Benchmark(name="clocks", official_score=partial(closeness, tolerance=tolerance), layouts=(CLOCKS,))


def closeness(item: Item, response: ItemResponse, extraction: Extraction, *, tolerance: int) -> float:
    """Return 1 for the right time, and less the more minutes the answer is off."""
    try:
        error = abs(minutes_since_twelve(extraction.value or "") - minutes_since_twelve(item.answer))
    except ValueError:
        return 0.0
    return max(0.0, 1.0 - min(error, 720 - error) / tolerance)


def minutes_since_twelve(time: str) -> int:
    """Return the minutes of a time such as 3:40, which is also 15:40 on a clock with hands."""
    hours, minutes = time.split(":")
    return int(hours) % 12 * 60 + int(minutes)
