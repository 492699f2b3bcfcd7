"""Layouts of MMMU and MMMU-Pro: the Hugging Face datasets MMMU/MMMU and MMMU/MMMU_Pro, and VLMEvalKit's tables."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

_COLUMNS: Final = {
    "id": "id",
    "question": "question",
    "options": "options",
    "images": tuple(f"image_{number}" for number in range(1, 8)),
    "answer": "answer",
}

MMMU_LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text", image_numbering="some"),
    TableLayout(
        name="MMMU of Hugging Face",
        answer_type="{{ 'choice' if question_type == 'multiple-choice' else 'text' }}",
        columns=_COLUMNS,
        subset_columns=("topic_difficulty", "subfield"),
        image_numbering="some",
    ),
)

MMMU_PRO_LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="choice", image_numbering="some"),
    TableLayout(
        name="MMMU-Pro of Hugging Face (standard)",
        answer_type="choice",
        columns=_COLUMNS,
        subset_columns=("topic_difficulty", "subject"),
        image_numbering="some",
    ),
    TableLayout(
        name="MMMU-Pro of Hugging Face (vision)",
        answer_type="choice",
        columns={
            "id": "id",
            "images": "image",
            "options": "options",
            "answer": "answer",
            # Question and options are part of the screenshot. The condition on `id` makes a template of a fixed text.
            "question": "{% if id %}Answer the question in the picture.{% endif %}",
        },
        subset_columns=("subject",),
        question_lists_options=True,
    ),
)
