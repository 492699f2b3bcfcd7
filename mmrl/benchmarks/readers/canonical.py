"""Canonical JSONL: the columns that scoring reads, under their own names. Every benchmark may come in it."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout

_OPTIONAL_ROLES: Final = (
    *("images", "videos", "start", "end", "fps", "frame", "meta"),
    *("question", "prompt", "options", "precision", "unit", "cluster", "image_size"),
)

CANONICAL_JSONL: Final = TableLayout(
    name="canonical JSONL",
    answer_type="{{ answer_type }}",
    columns={"id": "id", "answer": "answer"},
    optional_columns={role: role for role in _OPTIONAL_ROLES},
)

LAYOUTS: Final = (VlmEvalKitLayout(open_answer_type="choice"),)
"""Layouts of `--benchmark canonical` besides canonical JSONL itself."""
