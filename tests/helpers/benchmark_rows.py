"""Rows of benchmarks as files of any format, read as questions."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from factories import make_context, png_bytes
from ruamel.yaml import YAML

from mmrl.benchmarks.readers.questions import BenchmarkQuestions, Question, read_questions
from mmrl.benchmarks.registry import get_benchmark
from mmrl.types import CoordinateSystem, VideoRef
from mmrl_datasets.formats.tables import write_parquet

PNG: Final = {"bytes": png_bytes(), "path": None}
"""An image as Parquet holds it."""
PNG_BASE64: Final = base64.b64encode(png_bytes()).decode()
"""An image as VLMEvalKit's tables hold it."""


def load_published_rows() -> dict[str, Any]:
    """Return the entries of data/benchmark_rows.yaml by name, with images in place of their names."""
    path = Path(__file__).parents[1] / "data" / "benchmark_rows.yaml"
    return _insert_images(YAML(typ="safe", pure=True).load(path))


def read(
    folder: Path,
    benchmark: str,
    *rows: Mapping[str, Any],
    name: str = "rows.jsonl",
    coordinate_system: CoordinateSystem | None = None,
) -> BenchmarkQuestions:
    """Write rows to a file in a folder, and read them as questions; images may also be data URLs."""
    write_rows(folder / name, rows)
    context = make_context(folder, schemes=("data",))
    return read_questions(get_benchmark(benchmark), [name], context, coordinate_system=coordinate_system)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    elif path.suffix == ".jsonl":
        path.write_text(_json_lines(rows))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(_json_lines(rows).encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        table = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
        path.write_text("".join("\t".join(cells) + "\n" for cells in table))


def as_text(question: Question) -> str:
    """Return the question as text, with * for an image and ~ for a video."""
    assert question.sample is not None, question.problem
    parts = question.sample.parts
    return "".join(part if isinstance(part, str) else "~" if isinstance(part, VideoRef) else "*" for part in parts)


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _cell(value: object) -> str:
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if "\n" in text else text


def _insert_images(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _insert_images(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_insert_images(inner) for inner in value]
    return {"PNG": PNG, "PNG_BASE64": PNG_BASE64}.get(value, value) if isinstance(value, str) else value
