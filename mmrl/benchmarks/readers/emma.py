"""Layouts of EMMA: the Hugging Face dataset luckychao/EMMA, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

LAYOUTS: Final = (
    VlmEvalKitLayout(open_answer_type="text", image_numbering="some"),
    TableLayout(
        name="EMMA of Hugging Face",
        answer_type="{{ 'choice' if options else 'text' }}",
        columns={
            "id": "pid",
            "options": "options",
            "images": tuple(f"image_{number}" for number in range(1, 6)),
            "answer": "answer",
            "question": "{% if context %}{{ context }}\n{% endif %}{{ question }}",
        },
        subset_columns=("subject", "task", "category", "source"),
        image_numbering="some",
    ),
)
