"""Layouts of MathVerse: the Hugging Face dataset AI4Math/MathVerse, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text"),
    TableLayout(
        name="MathVerse of Hugging Face",
        answer_type="{{ 'choice' if question_type == 'multi-choice' else 'text' }}",
        columns={"id": "sample_index", "question": "query_wo", "images": "image", "answer": "answer"},
        subset_columns=("problem_version", "question_type", "metadata.subject", "metadata.subfield"),
        question_lists_options=True,
    ),
)
