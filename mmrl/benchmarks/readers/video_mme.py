"""Layouts of Video-MME: the Hugging Face dataset lmms-lab/Video-MME, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout

_SUBSET_COLUMNS: Final = ("duration", "domain", "sub_category", "task_type")

LAYOUTS: Final = (
    TableLayout(
        name="VLMEvalKit's Video-MME",
        answer_type="choice",
        columns={
            "id": "index",
            "question": "question",
            "options": "candidates",
            "answer": "answer",
            "videos": "video_path",
        },
        optional_columns={"start": "start", "end": "end"},
        subset_columns=_SUBSET_COLUMNS,
    ),
    TableLayout(
        name="Video-MME of Hugging Face",
        answer_type="choice",
        columns={
            "id": "question_id",
            "question": "question",
            "options": "options",
            "answer": "answer",
            "videos": "{{ videoID }}.mp4",
        },
        subset_columns=_SUBSET_COLUMNS,
    ),
)
