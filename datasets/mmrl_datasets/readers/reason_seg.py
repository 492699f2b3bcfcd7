"""ReasonSeg (LISA): a folder of pictures, and beside each a JSON file with instructions and outlines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.answer.values import is_number
from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, RejectedRow, Sample, UserError
from mmrl_datasets.formats.json_file import load_json
from mmrl_datasets.formats.row import BadRowError, Cells, Row, get_cell, short_repr
from mmrl_datasets.readers.answers import AnswerSpec, check_text
from mmrl_datasets.readers.columns import ColumnTemplate, parse_template
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import RowSource, SampleFields

ANSWER_SPEC = AnswerSpec(answer_type=AnswerType.BOX, coordinate_system=CoordinateSystem.PX_ORIGINAL)


def rows(
    place: DatasetContext,
    *,
    split: str = "train",
    path: str,
    prompt: str = "{{ text }}",
    task: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | RejectedRow]:
    """A sample for every instruction of every picture: the box around all outlines labelled `target`, in pixels.

    Options:
        split: part of the samples' ids.
        path: a folder of `NAME.jpg` and `NAME.json`, relative to `place.base`.
        prompt: a Jinja template over text, the instruction.
        task, limit: as in `table.rows`.

    Raises:
        UserError: no such folder, or no JSON file in it.
    """
    asked = parse_template(prompt, "prompt")
    files = make_media_resolver(place, None, path)
    source = RowSource(path=path, split=split, task=task, limit=limit)
    return source.convert_rows(_read_rows(place.base_dir / path), (), lambda cells: _read_fields(cells, asked, files))


def _read_rows(folder: Path) -> Iterator[Row]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; correct the path")
    for file in sorted(folder.glob("*.json")):
        try:
            content: Any = load_json(file)
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


def _read_fields(cells: Cells, asked: ColumnTemplate, files: MediaResolver) -> SampleFields:
    check_text(get_cell(cells, "text"), "text")
    return SampleFields(
        parts=(*files.images(cells["image"]), check_text(asked.read(cells), "prompt")),
        answer_spec=ANSWER_SPEC,
        answer=_bounding_box([point for shape in cells["shapes"] for point in _target_outline(shape)]),
        meta={"shapes": cells["shapes"], "is_sentence": get_cell(cells, "is_sentence")},
    )


def _target_outline(shape: object) -> list[list[float]]:
    """The corners of an outline, none unless it is of the target (others are `ignore` and `flag`)."""
    match shape:
        case {"label": "target", "points": list(points)}:
            for point in points:
                if not (isinstance(point, list) and len(point) == 2 and all(map(is_number, point))):
                    raise BadRowError(f"a corner must be [x, y], is {short_repr(point)}")
            return points
        case {"label": str(), "points": list()}:
            return []
    raise BadRowError(f"a shape must have label and points, is {short_repr(shape)}")


def _bounding_box(points: list[list[float]]) -> list[float]:
    if not points:
        raise BadRowError("no shape is labelled target")
    xs, ys = zip(*points, strict=True)
    return [min(xs), min(ys), max(xs), max(ys)]
