"""Helpers for tests of benchmarks: rows as files of any format, a question as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from factories import make_context, png_bytes

from mmrl.benchmarks.readers.questions import Question
from mmrl.types import DatasetContext, VideoRef
from mmrl_datasets.formats.tables import write_parquet

PICTURE = {"bytes": png_bytes(), "path": None}
"""An image as Parquet holds it."""


def place(folder: Path) -> DatasetContext:
    """The context of a benchmark in a folder, whose images may also be data URLs."""
    return make_context(folder, schemes=("data",))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = ["\t".join(rows[0]), *("\t".join(_cell(value) for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")


def _cell(value: object) -> str:
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if "\n" in text else text


def shown(question: Question) -> str:
    """Return the question as text, with * for an image and ~ for a video."""
    assert question.sample is not None, question.problem
    parts = question.sample.parts
    return "".join(part if isinstance(part, str) else "~" if isinstance(part, VideoRef) else "*" for part in parts)
