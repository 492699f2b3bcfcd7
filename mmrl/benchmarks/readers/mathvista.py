"""Layouts of MathVista: the Hugging Face dataset AI4Math/MathVista, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text"),
    TableLayout(
        name="MathVista of Hugging Face",
        answer_type="{{ 'choice' if question_type == 'multi_choice' else answer_type }}",
        columns={
            "id": "pid",
            "images": "decoded_image",
            "answer": "answer",
            "question": "{{ question }}{% if unit %} (Unit: {{ unit }}){% endif %}",
        },
        optional_columns={"options": "choices", "precision": "precision", "unit": "unit"},
        subset_columns=(
            *("question_type", "answer_type"),
            *("metadata.task", "metadata.category", "metadata.context"),
            *("metadata.grade", "metadata.source", "metadata.skills"),
        ),
    ),
)
