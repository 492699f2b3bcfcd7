"""Layout of SEED-Bench-R1 (TencentARC/SEED-Bench-R1)."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout

_IF_PROGRESS: Final = "{% if task_progress_metadata %}"
"""Some questions have a video of the steps done so far; all have an image of the present."""

LAYOUTS: Final = (
    TableLayout(
        name="SEED-Bench-R1's",
        answer_type="choice",
        columns={
            "id": "sample_id",
            "images": "images/{{ video_source }}/{{ current_observation_basename }}",
            "question": _IF_PROGRESS + "<video>{% endif %}<image>{{ question }}",
            "options": ("choice_a", "choice_b", "choice_c", "choice_d"),
            "answer": "golden_choice_idx",
        },
        optional_columns={"videos": _IF_PROGRESS + "videos/{{ video_source }}/{{ video_basename }}{% endif %}"},
        subset_columns=("video_source",),
    ),
)
