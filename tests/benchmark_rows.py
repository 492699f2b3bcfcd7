"""What tests of benchmarks share: tiny pictures, rows as files of any format, a question as it is asked."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.benchmarks.readers.questions import Question
from mmrl.types import DatasetContext, MediaPolicy, VideoRef
from mmrl_datasets.formats.tables import write_parquet


def png(shade: int = 0) -> bytes:
    """A picture of 40 x 30 pixels."""
    content = io.BytesIO()
    Image.new("RGB", (40, 30), (shade, 0, 0)).save(content, "PNG")
    return content.getvalue()


PICTURE = {"bytes": png(), "path": None}
"""A picture as Parquet holds it."""


def place(folder: Path) -> DatasetContext:
    """A place in a folder, whose files may be read."""
    return DatasetContext(
        work_dir=folder / "work",
        base_dir=folder,
        seed=0,
        media_policy=MediaPolicy(roots=(folder.resolve(),), schemes=("data",)),
    )


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows in the format that the name's ending says."""
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
    """What is asked, with * for a picture and ~ for a video."""
    assert question.sample is not None, question.problem
    parts = question.sample.parts
    return "".join(part if isinstance(part, str) else "~" if isinstance(part, VideoRef) else "*" for part in parts)
