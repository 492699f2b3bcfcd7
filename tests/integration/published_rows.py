"""Rows in the layouts in which data is published, written as the files that a recipe reads.

`tests/data/recipe_rows/NAME.yaml` has the rows of a recipe: `source` says where the layout was read; `files` holds, by
path below the data folder, a list of rows or the content of one file; `media` names pictures and videos; `id` names a
column that is numbered, since the rows of lists are repeated, unless `once` names the file; `same_as` names a recipe
with the same data; `encoders` names folders that get a small CLIP.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from ruamel.yaml import YAML
from tiny_clip import write_clip
from videos import write_video

FOLDER = Path(__file__).parents[1] / "data" / "recipe_rows"
NUM_ROWS = 8


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_rows(name: str) -> dict[str, Any]:
    rows = YAML(typ="safe", pure=True).load(FOLDER / f"{name}.yaml")
    return load_rows(rows["same_as"]) if "same_as" in rows else rows


def write_data(name: str, folder: Path) -> Path:
    """Write the files of a recipe into a folder, with rows that are repeated, and return it."""
    rows = load_rows(name)
    for medium in rows["media"]:
        write_medium(folder / medium)
    for encoder in rows.get("encoders", ()):
        write_clip(folder / encoder, longest=64)
    for path, table in rows["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        repeated = isinstance(table, list) and path not in rows.get("once", ())
        write_table(folder / path, list(repeat(table, rows.get("id"))) if repeated else table)
    return folder


def repeat(rows: list[dict[str, Any]], column: str | None) -> Iterator[dict[str, Any]]:
    """Yield as many rows as a tiny run needs, with a number in a column."""
    for index in range(NUM_ROWS):
        row = rows[index % len(rows)]
        value = row.get(column)
        yield row if value is None else {**row, column: index if isinstance(value, int) else f"{value}{index}"}


def write_medium(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in (".mp4", ".mkv", ".avi", ".webm"):
        write_video(path, range(24), size=(32, 32))
    else:
        Image.effect_noise((32, 32), 60).convert("RGB").save(path)


def write_table(path: Path, table: Any) -> None:
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(embed(table, path.parent)), path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table))
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(table[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(table)
        case _:
            path.write_text(json.dumps(table))


def embed(value: Any, folder: Path) -> Any:
    """Return rows with the bytes of a picture in place of `{bytes: PNG}`, as Hugging Face embeds images."""
    if isinstance(value, list):
        return [embed(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("bytes") == "PNG":
        write_medium(folder / "embedded.png")
        return {**value, "bytes": (folder / "embedded.png").read_bytes()}
    return {key: embed(inner, folder) for key, inner in value.items()}
