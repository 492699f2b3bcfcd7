"""VLMEvalKit's benchmark tables: TSV with pictures inside, options in columns of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from mmrl.types import ImageRef, Place, Reject, Sample
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, cell, shown
from mmrl_datasets.readers.answers import LETTERS, AnswerForm, answer_form, text
from mmrl_datasets.readers.columns import Named, optional
from mmrl_datasets.readers.media_resolver import MediaFiles, media_files
from mmrl_datasets.readers.row_to_sample import Fields, Source, identity, interleaved, listed, literal, marked, others

REQUIRED: Final = ("index", "question", "answer")
MAX_INDEX_CHARS: Final = 64  # a shorter `image` is the index of the row that has the picture


def rows(
    place: Place,
    *,
    split: str = "test",
    path: str,
    kind: str = "choice",
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """Samples of columns index, question, answer, image or image_path, and where there are any hint and A, B, C, ...

    `image` is base64, a list of it, or the index of an earlier row with the same picture. Options that are empty are
    left out from the first one on. Other columns go into `meta`. The options are those of `table.rows`.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    files = media_files(place, media_root, path)
    form = answer_form(kind, None)
    earlier: dict[str, list[ImageRef]] = {}
    source = Source(path=path, split=split, task=task, limit=limit)
    return source.samples(source.rows(place), REQUIRED, lambda cells: _fields(cells, form, files, earlier))


def _fields(cells: Cells, form: AnswerForm, files: MediaFiles, earlier: dict[str, list[ImageRef]]) -> Fields:
    index, question, answer = (cell(cells, column) for column in REQUIRED)
    name = identity(index)
    images = images_of(cells, files, earlier)
    earlier[name] = images
    hint = written(cells, "hint")
    asked = f"{hint}\n{text(question, 'question')}" if hint else text(question, "question")
    options = options_of(cells)
    return Fields(
        parts=interleaved(marked(asked + listed(options)), images),
        form=form,
        answer=answer,
        options=options,
        name=name,
        meta=others(cells, map(Named, (*REQUIRED, "image", "image_path", "hint", *LETTERS))),
    )


def images_of(cells: Cells, files: MediaFiles, earlier: Mapping[str, list[ImageRef]]) -> list[ImageRef]:
    """The pictures of a row; `earlier` has those of the rows before it, by index. Raises BadRowError."""
    if image := written(cells, "image"):
        if len(image) > MAX_INDEX_CHARS or image.startswith("["):
            return [files.base64(entry) for entry in _listed(image)]
        if image not in earlier:
            raise BadRowError(f"image {image!r} is the index of no earlier row with a picture")
        return earlier[image]
    if path := written(cells, "image_path"):
        return files.images(_listed(path))
    if "image" not in cells and "image_path" not in cells:
        raise MissingColumnError("image", cells)
    raise BadRowError("both image and image_path are empty")


def written(cells: Cells, column: str) -> str:
    """The text of a cell; empty when there is none."""
    value = optional(cells, Named(column))
    if not isinstance(value, str | None):
        raise BadRowError(f"{column} must be text, is {shown(value)}")
    return (value or "").strip()


def _listed(written: str) -> list[str]:
    """A cell, or the cells of a list that was written as Python or JSON do."""
    if not written.startswith("["):
        return [written]
    entries = literal(written, "picture")
    if not isinstance(entries, list):
        raise BadRowError(f"picture must be a list, is {shown(written)}")
    return [text(entry, "picture") for entry in entries]


def options_of(cells: Cells) -> tuple[str, ...]:
    """The options in columns A, B, ...; raises BadRowError where one between them is empty."""
    options = [written(cells, letter) for letter in LETTERS]
    count = options.index("") if "" in options else len(options)
    if any(options[count:]):
        raise BadRowError(f"option {LETTERS[count]} is empty, and a later one is not")
    return tuple(options[:count])
