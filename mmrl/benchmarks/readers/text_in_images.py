"""Layouts of benchmarks that read text in images: OCRBench, TextVQA and DocVQA."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

OCRBENCH_LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text"),
    TableLayout(
        name="OCRBench of Hugging Face",
        answer_type="text",
        columns={"images": "image", "question": "question", "answer": "answer"},
        subset_columns=("dataset", "question_type"),
    ),
)

TEXTVQA_LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text"),
    TableLayout(
        name="TextVQA of Hugging Face",
        answer_type="text",
        columns={"id": "question_id", "images": "image", "question": "question", "answer": "answers"},
    ),
)

DOCVQA_LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text"),
    TableLayout(
        name="DocVQA of Hugging Face",
        answer_type="text",
        columns={"id": "questionId", "images": "image", "question": "question", "answer": "answers"},
    ),
)
