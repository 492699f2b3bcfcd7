"""Layouts in which each shipped benchmark is published; published.yaml beside this file lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from mmrl.benchmarks.readers.layouts import RowLayout
from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
from mmrl.types import CoordinateSystem

_OPTIONAL_ROLES: Final = (
    *("images", "videos", "start", "end", "fps", "frame", "meta"),
    *("question", "prompt", "options", "precision", "unit", "cluster", "image_size"),
)
CANONICAL_JSONL: Final = TableLayout(
    name="canonical JSONL",
    answer_type="{{ answer_type }}",
    choice_answer=None,
    columns={"id": "id", "answer": "answer"},
    optional_columns={role: role for role in _OPTIONAL_ROLES},
)
"""The columns that scoring reads, under their own names. Every benchmark may come in it."""


@lru_cache(maxsize=1)
def read_published_layouts() -> Mapping[str, tuple[RowLayout, ...]]:
    """Return the layouts by benchmark, the more specific first, besides `CANONICAL_JSONL`."""
    tables = YAML(typ="safe", pure=True).load(Path(__file__).with_name("published.yaml"))
    return {benchmark: tuple(map(_make_layout, entries)) for benchmark, entries in tables.items()}


def get_layouts(
    benchmark: str, own_layouts: Sequence[RowLayout] = (), coordinate_system: CoordinateSystem | None = None
) -> tuple[RowLayout, ...]:
    """Return every layout that the files of a benchmark may have, the more specific first.

    `own_layouts` come from a plug-in; `coordinate_system` is set on layouts that need one.
    """
    layouts: list[RowLayout] = []
    for layout in (*read_published_layouts().get(benchmark, ()), *own_layouts, CANONICAL_JSONL):
        if isinstance(layout, VlmEvalKitLayout):
            system = coordinate_system if layout.needs_coordinate_system else layout.coordinate_system
            # A fresh copy for each reading: the layout remembers the images of earlier rows.
            layouts.append(replace(layout, coordinate_system=system, images_by_index={}))
        else:
            layouts.append(layout)
    return tuple(layouts)


def _make_layout(fields: Mapping[str, Any]) -> RowLayout:
    fields = dict(fields)
    if "coordinate_system" in fields:
        fields["coordinate_system"] = CoordinateSystem(fields["coordinate_system"])
    return VlmEvalKitLayout(**fields) if "open_answer_type" in fields else TableLayout(**fields)
