"""Read the benchmark tables of VLMEvalKit: TSV with embedded images and a column for each option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from mmrl.types import DatasetContext, ImageRef, RejectedRow, Sample
from mmrl_datasets.choices import LETTERS, format_choices
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, get_cell, short_repr
from mmrl_datasets.formats.tables import open_rows
from mmrl_datasets.readers.answers import AnswerSpec, check_text, make_answer_spec
from mmrl_datasets.readers.columns import optional_value, single_column
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import (
    Limit,
    SampleFields,
    convert_rows,
    insert_media,
    parse_id,
    parse_literal,
    split_at_placeholders,
    unused_cells,
)

REQUIRED_COLUMNS: Final = ("index", "question", "answer")
MAX_INDEX_CHARS: Final = 64  # up to this length, `image` is the index of the row with the image; beyond, base64


def rows(
    context: DatasetContext,
    *,
    split: str = "test",
    path: str,
    answer_type: str = "choice",
    task: str | None = None,
    media_root: str | None = None,
    limit: Limit = None,
) -> Iterator[Sample | RejectedRow]:
    """Yield the samples of a table with columns index, question, answer, image or image_path, hint, and A, B, C, ...

    `image` is base64, a list of base64, or the index of an earlier row with the same image. The options end at the
    first empty one. Other columns go into `meta`. This function has the options of `table.rows`.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    resolver = make_media_resolver(context, media_root, path)
    answer_spec = make_answer_spec(answer_type, None)
    images_by_index: dict[str, list[ImageRef]] = {}
    read_fields = partial(_read_fields, answer_spec=answer_spec, resolver=resolver, images_by_index=images_by_index)
    table_rows = open_rows(context.base_dir, path, split)
    return convert_rows(table_rows, read_fields, REQUIRED_COLUMNS, path=path, split=split, task=task, limit=limit)


def read_images(cells: Cells, resolver: MediaResolver, images_by_index: Mapping[str, list[ImageRef]]) -> list[ImageRef]:
    """Return the images of a row; `images_by_index` holds the images of earlier rows.

    Raises MissingColumnError or BadRowError if there is none, or if it cannot be read.
    """
    image = cell_text(cells, "image")
    if image:
        if len(image) > MAX_INDEX_CHARS or image.startswith("["):
            return list(map(resolver.image_from_base64, _parse_list(image)))
        if image not in images_by_index:
            raise BadRowError(f"image {image!r} is the index of no earlier row with an image")
        return images_by_index[image]
    path = cell_text(cells, "image_path")
    if path:
        return resolver.images(_parse_list(path))
    if "image" not in cells and "image_path" not in cells:
        raise MissingColumnError("image", cells)
    raise BadRowError("both image and image_path are empty")


def read_options(cells: Cells) -> tuple[str, ...]:
    """Return the options in columns A, B, ...; raises BadRowError if one between them is empty."""
    options = [cell_text(cells, letter) for letter in LETTERS]
    # Questions have different numbers of options; the columns beyond are empty.
    count = options.index("") if "" in options else len(options)
    if any(options[count:]):
        raise BadRowError(f"option {LETTERS[count]} is empty, and a later one is not")
    return tuple(options[:count])


def cell_text(cells: Cells, column: str) -> str:
    """Return the text of a cell, empty if it is null or missing; raises BadRowError if it holds something else."""
    value = optional_value(cells, single_column(column))
    if not isinstance(value, str | None):
        raise BadRowError(f"{column} must be text, is {short_repr(value)}")
    return (value or "").strip()


def _read_fields(
    cells: Cells, answer_spec: AnswerSpec, resolver: MediaResolver, images_by_index: dict[str, list[ImageRef]]
) -> SampleFields:
    index, question, answer = (get_cell(cells, column) for column in REQUIRED_COLUMNS)
    row_id = parse_id(index)
    images = read_images(cells, resolver, images_by_index)
    # VLMEvalKit writes an image once; later rows with the same image name this row.
    images_by_index[row_id] = images
    hint = cell_text(cells, "hint")
    text = check_text(question, "question")
    if hint:
        text = f"{hint}\n{text}"
    options = read_options(cells)
    if answer in tuple(LETTERS[: len(options)]):
        # The answer names the column of an option, even if the text of another option is that letter.
        answer_spec = replace(answer_spec, choice_answer="letter")
    return SampleFields(
        parts=insert_media(split_at_placeholders(text + format_choices(options)), images),
        answer_spec=answer_spec,
        answer=answer,
        choices=options,
        row_id=row_id,
        meta=unused_cells(cells, map(single_column, (*REQUIRED_COLUMNS, "image", "image_path", "hint", *LETTERS))),
    )


def _parse_list(text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    entries = parse_literal(text, "image")
    if not isinstance(entries, list):
        raise BadRowError(f"image must be a list, is {short_repr(text)}")
    return [check_text(entry, "image") for entry in entries]
