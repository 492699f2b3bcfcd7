"""ReasonSeg (LISA): a folder of pictures, and beside each a JSON file with instructions and outlines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.answer.values import is_number
from mmrl.types import Frame, Kind, Place, Reject, Sample, UserError
from mmrl_datasets.formats.json_file import load
from mmrl_datasets.formats.row import BadRowError, Cells, Row, cell, shown
from mmrl_datasets.readers.answers import AnswerForm, text
from mmrl_datasets.readers.columns import Filled, template
from mmrl_datasets.readers.media_resolver import MediaFiles, media_files
from mmrl_datasets.readers.row_to_sample import Fields, Source

FORM = AnswerForm(kind=Kind.BOX, frame=Frame.PX_ORIGINAL)


def rows(
    place: Place,
    *,
    split: str = "train",
    path: str,
    prompt: str = "{{ text }}",
    task: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """A sample for every instruction of every picture: the box around all outlines labelled `target`, in pixels.

    Options:
        split: part of the samples' ids.
        path: a folder of `NAME.jpg` and `NAME.json`, relative to `place.base`.
        prompt: a Jinja template over text, the instruction.
        task, limit: as in `table.rows`.

    Raises:
        UserError: no such folder, or no JSON file in it.
    """
    asked = template(prompt, "prompt")
    files = media_files(place, None, path)
    source = Source(path=path, split=split, task=task, limit=limit)
    return source.samples(_rows(place.base / path), (), lambda cells: _fields(cells, asked, files))


def _rows(folder: Path) -> Iterator[Row]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; correct the path")
    for file in sorted(folder.glob("*.json")):
        try:
            content: Any = load(file)
            texts = content["text"]
            if not isinstance(texts, list) or not isinstance(content["shapes"], list):
                raise TypeError("text and shapes must be lists")
        except UserError as error:
            yield Row(file.stem, str(file), BadRowError(str(error)))
        except (KeyError, TypeError) as error:
            yield Row(file.stem, str(file), BadRowError(f"must have text, shapes and is_sentence: {error!r}"))
        else:
            for number, said in enumerate(texts):
                yield Row(f"{file.stem}-{number}", str(file), {**content, "text": said, "image": f"{file.stem}.jpg"})


def _fields(cells: Cells, asked: Filled, files: MediaFiles) -> Fields:
    text(cell(cells, "text"), "text")
    return Fields(
        parts=(*files.images(cells["image"]), text(asked.of(cells), "prompt")),
        form=FORM,
        answer=_around([point for shape in cells["shapes"] for point in _outline(shape)]),
        meta={"shapes": cells["shapes"], "is_sentence": cell(cells, "is_sentence")},
    )


def _outline(shape: object) -> list[list[float]]:
    """The corners of an outline, none unless it is of the target (others are `ignore` and `flag`)."""
    match shape:
        case {"label": "target", "points": list(points)}:
            for point in points:
                if not (isinstance(point, list) and len(point) == 2 and all(map(is_number, point))):
                    raise BadRowError(f"a corner must be [x, y], is {shown(point)}")
            return points
        case {"label": str(), "points": list()}:
            return []
    raise BadRowError(f"a shape must have label and points, is {shown(shape)}")


def _around(points: list[list[float]]) -> list[float]:
    if not points:
        raise BadRowError("no shape is labelled target")
    xs, ys = zip(*points, strict=True)
    return [min(xs), min(ys), max(xs), max(ys)]
