"""Layouts of counting benchmarks: CountBenchQA, the files of R1-V and EasyR1, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="count"),
    TableLayout(
        name="CountBenchQA",
        answer_type="count",
        columns={"images": "image", "question": "question", "answer": "number"},
    ),
    TableLayout(
        name="R1-V's",
        answer_type="count",
        columns={"images": "image_path", "question": "question", "answer": "ground_truth"},
    ),
    TableLayout(
        name="R1-V's CLEVR",
        answer_type="count",
        # The solution is written as `<answer> 3 </answer>`.
        columns={"images": "image", "question": "problem", "answer": "{{ solution | striptags }}"},
    ),
    TableLayout(
        name="EasyR1's CLEVR",
        answer_type="count",
        columns={"images": "images", "question": "problem", "answer": "answer"},
    ),
)
