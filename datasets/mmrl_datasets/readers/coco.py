"""COCO detection annotations, joined: a question for every picture and category in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, Region, RejectedRow, Sample, UserError
from mmrl_datasets.formats.json_file import load_json
from mmrl_datasets.formats.row import BadRowError, Cells, Row, did_you_mean, short_repr
from mmrl_datasets.readers.answers import AnswerSpec, check_text
from mmrl_datasets.readers.columns import ColumnTemplate, parse_template
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import RowSource, SampleFields

TABLE_KEYS: Final = {
    "images": ("id", "file_name"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id", "bbox"),
}
ANSWER_SPEC: Final = AnswerSpec(answer_type=AnswerType.BOXES, coordinate_system=CoordinateSystem.PX_ORIGINAL)
Entry = Mapping[str, Any]


def rows(
    place: DatasetContext,
    *,
    split: str = "train",
    path: str,
    prompt: str = "Find every {{ category }}.",
    categories: tuple[str, ...] = (),
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | RejectedRow]:
    """A sample for every category that a picture shows: the boxes of all its things, in pixels, each with its label.

    Options:
        split: part of the samples' ids.
        path: an `instances_*.json` as COCO publishes, relative to `place.base`: images, categories, annotations.
        prompt: a Jinja template over category, file_name and image_id.
        categories: ask for these only; for all of the file when empty.
        task, media_root, limit: as in `table.rows`.

    A crowd (`iscrowd: 1`) need not be found, and finding it is no mistake: its boxes go into `meta.crowds`.

    Raises:
        UserError: no such file, or not one of annotations; an unknown category.
    """
    asked = parse_template(prompt, "prompt")
    files = make_media_resolver(place, media_root, path)
    source = RowSource(path=path, split=split, task=task, limit=limit)
    return source.convert_rows(
        _join_annotations(place.base_dir / path, categories),
        asked.required_columns,
        lambda cells: _read_fields(cells, asked, files),
    )


def _read_fields(cells: Cells, asked: ColumnTemplate, files: MediaResolver) -> SampleFields:
    label, things = cells["category"], cells["annotations"]
    return SampleFields(
        parts=(*files.images(cells["file_name"]), check_text(asked.read(cells), "prompt")),
        answer_spec=ANSWER_SPEC,
        answer=[Region(_xywh_to_xyxy(thing["bbox"]), label) for thing in things if not thing.get("iscrowd")],
        row_id=f"{cells['image_id']}-{cells['category_id']}",
        meta={
            "category": label,
            "image_id": cells["image_id"],
            "crowds": [_xywh_to_xyxy(thing["bbox"]) for thing in things if thing.get("iscrowd")],
        },
    )


def _xywh_to_xyxy(box: object) -> tuple[float, ...]:
    match box:
        case [int() | float() as x, int() | float() as y, int() | float() as width, int() | float() as height]:
            return x, y, x + width, y + height
    raise BadRowError(f"bbox must be four numbers xywh, is {short_repr(box)}")


def _join_annotations(file: Path, categories: tuple[str, ...]) -> Iterator[Row]:
    """A row for each picture and category that an annotation names together."""
    tables = _load_tables(file)
    names = {category["id"]: category["name"] for category in tables["categories"]}
    pictures = {picture["id"]: picture["file_name"] for picture in tables["images"]}
    for name in categories:
        if name not in names.values():
            raise UserError(f"categories: {file} has no {name!r}{did_you_mean(name, map(str, names.values()))}")
    found: dict[tuple[Any, Any], list[Entry]] = defaultdict(list)
    for annotation in tables["annotations"]:
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in pictures or category not in names:
            raise UserError(f"{file}: an annotation names image {image} and category {category}: one is not there")
        if not categories or names[category] in categories:
            found[image, category].append(annotation)
    for (image, category), things in found.items():
        if all(thing.get("iscrowd") for thing in things):
            continue  # there is nothing to be found
        cells = {
            "image_id": image,
            "category_id": category,
            "file_name": pictures[image],
            "category": names[category],
            "annotations": things,
        }
        yield Row(f"{image}-{category}", f"{file}: image {image}, category {names[category]}", cells)


def _load_tables(file: Path) -> dict[str, list[Entry]]:
    content = load_json(file)
    if not isinstance(content, dict) or not all(isinstance(content.get(table), list) for table in TABLE_KEYS):
        raise UserError(f"{file}: must be an object with the lists {', '.join(TABLE_KEYS)}; is {short_repr(content)}")
    for table, keys in TABLE_KEYS.items():
        for number, entry in enumerate(content[table]):
            if not _has_keys(entry, keys):
                raise UserError(f"{file}: {table}[{number}] must have {', '.join(keys)}; is {short_repr(entry)}")
    return {table: content[table] for table in TABLE_KEYS}


def _has_keys(entry: object, keys: tuple[str, ...]) -> bool:
    """Whether an entry has these keys, and its ids can be looked up."""
    if not isinstance(entry, dict) or not all(key in entry for key in keys):
        return False
    return all(isinstance(entry[key], int | str) for key in keys if key.endswith("id"))
