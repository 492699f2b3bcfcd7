"""VLMEvalKit's benchmark tables: TSV with pictures inside, options in columns of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from mmrl.types import DatasetContext, ImageRef, RejectedRow, Sample
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, get_cell, short_repr
from mmrl_datasets.readers.answers import LETTERS, AnswerSpec, check_text, make_answer_spec
from mmrl_datasets.readers.columns import SingleColumn, optional_value
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import (
    RowSource,
    SampleFields,
    format_choices,
    insert_media,
    parse_id,
    parse_literal,
    split_at_placeholders,
    unused_cells,
)

REQUIRED: Final = ("index", "question", "answer")
MAX_INDEX_CHARS: Final = 64  # a shorter `image` is the index of the row that has the picture


def rows(
    place: DatasetContext,
    *,
    split: str = "test",
    path: str,
    kind: str = "choice",
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | RejectedRow]:
    """Samples of columns index, question, answer, image or image_path, and where there are any hint and A, B, C, ...

    `image` is base64, a list of it, or the index of an earlier row with the same picture. Options that are empty are
    left out from the first one on. Other columns go into `meta`. The options are those of `table.rows`.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    files = make_media_resolver(place, media_root, path)
    form = make_answer_spec(kind, None)
    earlier: dict[str, list[ImageRef]] = {}
    source = RowSource(path=path, split=split, task=task, limit=limit)
    return source.convert_rows(
        source.read_rows(place), REQUIRED, lambda cells: _read_fields(cells, form, files, earlier)
    )


def _read_fields(
    cells: Cells, form: AnswerSpec, files: MediaResolver, earlier: dict[str, list[ImageRef]]
) -> SampleFields:
    index, question, answer = (get_cell(cells, column) for column in REQUIRED)
    name = parse_id(index)
    images = read_images(cells, files, earlier)
    earlier[name] = images
    hint = cell_text(cells, "hint")
    asked = f"{hint}\n{check_text(question, 'question')}" if hint else check_text(question, "question")
    options = read_options(cells)
    return SampleFields(
        parts=insert_media(split_at_placeholders(asked + format_choices(options)), images),
        answer_spec=form,
        answer=answer,
        choices=options,
        row_id=name,
        meta=unused_cells(cells, map(SingleColumn, (*REQUIRED, "image", "image_path", "hint", *LETTERS))),
    )


def read_images(cells: Cells, files: MediaResolver, earlier: Mapping[str, list[ImageRef]]) -> list[ImageRef]:
    """The pictures of a row; `earlier` has those of the rows before it, by index. Raises BadRowError."""
    if image := cell_text(cells, "image"):
        if len(image) > MAX_INDEX_CHARS or image.startswith("["):
            return [files.image_from_base64(entry) for entry in _parse_list(image)]
        if image not in earlier:
            raise BadRowError(f"image {image!r} is the index of no earlier row with a picture")
        return earlier[image]
    if path := cell_text(cells, "image_path"):
        return files.images(_parse_list(path))
    if "image" not in cells and "image_path" not in cells:
        raise MissingColumnError("image", cells)
    raise BadRowError("both image and image_path are empty")


def cell_text(cells: Cells, column: str) -> str:
    """The text of a cell; empty when there is none."""
    value = optional_value(cells, SingleColumn(column))
    if not isinstance(value, str | None):
        raise BadRowError(f"{column} must be text, is {short_repr(value)}")
    return (value or "").strip()


def _parse_list(written: str) -> list[str]:
    """A cell, or the cells of a list that was written as Python or JSON do."""
    if not written.startswith("["):
        return [written]
    entries = parse_literal(written, "picture")
    if not isinstance(entries, list):
        raise BadRowError(f"picture must be a list, is {short_repr(written)}")
    return [check_text(entry, "picture") for entry in entries]


def read_options(cells: Cells) -> tuple[str, ...]:
    """The options in columns A, B, ...; raises BadRowError where one between them is empty."""
    options = [cell_text(cells, letter) for letter in LETTERS]
    count = options.index("") if "" in options else len(options)
    if any(options[count:]):
        raise BadRowError(f"option {LETTERS[count]} is empty, and a later one is not")
    return tuple(options[:count])
