"""Layout of Geometry3K as EasyR1 publishes it (hiyouga/geometry3k)."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout

LAYOUTS: Final = (
    TableLayout(
        name="EasyR1's Geometry3K",
        answer_type="text",
        columns={"question": "problem", "answer": "answer", "images": "images"},
    ),
)
