"""Read COCO detection annotations: a question for every image and every category in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, Region, RejectedRow, Sample, UserError
from mmrl_datasets.formats.row import BadRowError, Cells, Row, did_you_mean, short_repr
from mmrl_datasets.formats.tables import load_json
from mmrl_datasets.readers.answers import AnswerSpec, check_text
from mmrl_datasets.readers.columns import Column, parse_template
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import Limit, SampleFields, convert_rows

TABLE_KEYS: Final = {
    "images": ("id", "file_name"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id", "bbox"),
}
"""The lists of the file, and the keys that each of their entries must have."""
ANSWER_SPEC: Final = AnswerSpec(answer_type=AnswerType.BOXES, coordinate_system=CoordinateSystem.PX_ORIGINAL)
Entry = Mapping[str, Any]


def rows(
    context: DatasetContext,
    *,
    split: str = "train",
    path: str,
    prompt: str = "Find every {{ category }}.",
    categories: tuple[str, ...] = (),
    task: str | None = None,
    media_root: str | None = None,
    limit: Limit = None,
) -> Iterator[Sample | RejectedRow]:
    """Yield a sample for every category in an image: the boxes of all its objects, in pixels, each with its label.

    A crowd (`iscrowd: 1`) need not be found, and finding it is not a mistake: its boxes go into `meta.crowds`.

    Options:
        path: an `instances_*.json` as COCO publishes it, relative to the config, with images, categories, annotations.
        prompt: a Jinja template over category, file_name and image_id.
        categories: categories to ask for; empty asks for all of the file.
        split, task, media_root, limit: as in `table.rows`.

    Raises:
        UserError: no such file, or it holds no annotations; an unknown category.
    """
    prompt_template = parse_template(prompt, "prompt")
    resolver = make_media_resolver(context, media_root, path)
    read_fields = partial(_read_fields, prompt_template=prompt_template, resolver=resolver)
    joined = _join_annotations(context.base_dir / path, categories)
    expected = prompt_template.required_columns
    return convert_rows(joined, read_fields, expected, path=path, split=split, task=task, limit=limit)


def _read_fields(cells: Cells, prompt_template: Column, resolver: MediaResolver) -> SampleFields:
    category = cells["category"]
    regions: list[Region] = []
    crowds: list[tuple[float, ...]] = []
    images = resolver.images(cells["file_name"])
    question = check_text(prompt_template.read(cells), "prompt")
    for annotation in cells["annotations"]:
        match annotation["bbox"]:
            case [int() | float() as x, int() | float() as y, int() | float() as width, int() | float() as height]:
                box = (x, y, x + width, y + height)
            case other:
                raise BadRowError(f"bbox must be four numbers xywh, is {short_repr(other)}")
        # A crowd is one box around many objects, so it is not an answer to "find every".
        if annotation.get("iscrowd"):
            crowds.append(box)
        else:
            regions.append(Region(box, category))
    return SampleFields(
        parts=(*images, question),
        answer_spec=ANSWER_SPEC,
        answer=regions,
        row_id=f"{cells['image_id']}-{cells['category_id']}",
        meta={"category": category, "image_id": cells["image_id"], "crowds": crowds},
    )


def _join_annotations(file: Path, categories: tuple[str, ...]) -> Iterator[Row]:
    """Yield a row for each image and category with an annotation that is not a crowd."""
    tables = _load_tables(file)
    category_names = {category["id"]: category["name"] for category in tables["categories"]}
    file_names = {image["id"]: image["file_name"] for image in tables["images"]}
    for name in categories:
        if name not in category_names.values():
            hint = did_you_mean(name, map(str, category_names.values()))
            raise UserError(f"categories: {file} has no {name!r}{hint}")
    grouped: dict[tuple[Any, Any], list[Entry]] = defaultdict(list)
    for annotation in tables["annotations"]:
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in file_names or category not in category_names:
            raise UserError(f"{file}: an annotation has image {image} and category {category}, one of which is missing")
        if not categories or category_names[category] in categories:
            grouped[image, category].append(annotation)
    for (image, category), entries in grouped.items():
        if all(entry.get("iscrowd") for entry in entries):
            # Without an object to find there is no question.
            continue
        cells = {
            "image_id": image,
            "category_id": category,
            "file_name": file_names[image],
            "category": category_names[category],
            "annotations": entries,
        }
        yield Row(f"{image}-{category}", f"{file}: image {image}, category {category_names[category]}", cells)


def _load_tables(file: Path) -> dict[str, list[Entry]]:
    content = load_json(file)
    if not isinstance(content, dict) or not all(isinstance(content.get(table), list) for table in TABLE_KEYS):
        raise UserError(f"{file}: must be an object with the lists {', '.join(TABLE_KEYS)}; is {short_repr(content)}")
    for table, keys in TABLE_KEYS.items():
        ids = [key for key in keys if key.endswith("id")]
        for number, entry in enumerate(content[table]):
            has_keys = isinstance(entry, dict) and entry.keys() >= set(keys)
            # An id that is a list could not be looked up in a dict.
            if not has_keys or not all(isinstance(entry[key], int | str) for key in ids):
                raise UserError(f"{file}: {table}[{number}] must have {', '.join(keys)}; is {short_repr(entry)}")
    return {table: content[table] for table in TABLE_KEYS}
