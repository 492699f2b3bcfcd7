"""Layouts of MATH-Vision: the Hugging Face dataset, the authors' JSON, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout


def _mathvision_table(name: str, image_column: str) -> TableLayout:
    return TableLayout(
        name=name,
        answer_type="{{ 'choice' if options else 'text' }}",
        columns={
            "id": "id",
            "question": "question",
            "options": "options",
            "images": image_column,
            "answer": "answer",
        },
        subset_columns=("level", "subject"),
        image_numbering="parts",
    )


LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text", image_numbering="parts"),
    _mathvision_table("MathVision of Hugging Face", "decoded_image"),
    _mathvision_table("MathVision of its authors", "image"),
)
