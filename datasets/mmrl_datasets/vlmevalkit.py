"""VLMEvalKit's benchmark tables: TSV with pictures inside, options in columns of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from mmrl.types import ImageRef, Place, Reject, Sample
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, cell, shown
from mmrl_datasets.mapping import Fields, Source, identity, interleaved, optional, others, picture_files
from mmrl_datasets.picture_files import PictureFiles
from mmrl_datasets.targets import LETTERS, answer_form, text

REQUIRED: Final = ("index", "question", "answer")
MAX_INDEX_CHARS: Final = 64  # a shorter `image` is the index of the row that has the picture


def rows(
    place: Place,
    *,
    split: str = "test",
    path: str,
    kind: str = "choice",
    task: str | None = None,
    image_root: str = ".",
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """Samples of columns index, question, answer, image or image_path, and where there are any hint and A, B, C, ...

    `image` is base64, a list of it, or the index of an earlier row with the same picture. Options that are empty are
    left out from the first one on. Other columns go into `meta`. The options are those of `table.rows`.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    pictures = picture_files(place, image_root)
    earlier: dict[str, list[ImageRef]] = {}
    source = Source(path=path, split=split, task=task, form=answer_form(kind, None), limit=limit)
    return source.samples(place, REQUIRED, lambda cells: _fields(cells, pictures, earlier))


def _fields(cells: Cells, pictures: PictureFiles, earlier: dict[str, list[ImageRef]]) -> Fields:
    index, question, answer = (cell(cells, column) for column in REQUIRED)
    name = identity(index)
    images = _images(cells, pictures, earlier)
    earlier[name] = images
    hint = _written(cells, "hint")
    return Fields(
        parts=interleaved(f"{hint}\n{text(question, 'question')}" if hint else text(question, "question"), images),
        answer=answer,
        options=_options(cells),
        name=name,
        meta=others(cells, (*REQUIRED, "image", "image_path", "hint", *LETTERS)),
    )


def _images(cells: Cells, pictures: PictureFiles, earlier: dict[str, list[ImageRef]]) -> list[ImageRef]:
    if written := _written(cells, "image"):
        if len(written) > MAX_INDEX_CHARS or written.startswith("["):
            return [pictures.base64(entry) for entry in _listed(written)]
        if written not in earlier:
            raise BadRowError(f"image {written!r} is the index of no earlier row with a picture")
        return earlier[written]
    if path := _written(cells, "image_path"):
        return pictures.refs(_listed(path))
    if "image" not in cells and "image_path" not in cells:
        raise MissingColumnError("image", cells)
    raise BadRowError("both image and image_path are empty")


def _written(cells: Cells, column: str) -> str:
    """The text of a cell; empty when there is none."""
    value = optional(cells, column)
    if not isinstance(value, str | None):
        raise BadRowError(f"{column} must be text, is {shown(value)}")
    return (value or "").strip()


def _listed(written: str) -> list[str]:
    """A cell, or the cells of a list that was written as Python or JSON do."""
    if not written.startswith("["):
        return [written]
    try:
        entries = json.loads(written.replace("'", '"'))
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not a list of pictures: {shown(written)}") from error
    return [text(entry, "picture") for entry in entries]


def _options(cells: Cells) -> tuple[str, ...]:
    options = [_written(cells, letter) for letter in LETTERS]
    count = options.index("") if "" in options else len(options)
    if any(options[count:]):
        raise BadRowError(f"option {LETTERS[count]} is empty, and a later one is not")
    return tuple(options[:count])
