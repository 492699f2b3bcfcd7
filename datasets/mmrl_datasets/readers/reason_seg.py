"""Read ReasonSeg (LISA): a folder of images, each with a JSON file of instructions and outlines beside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from mmrl.answer.values import is_number
from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, RejectedRow, Sample, UserError
from mmrl_datasets.formats.row import BadRowError, Cells, Row, get_cell, short_repr
from mmrl_datasets.formats.tables import load_json
from mmrl_datasets.readers.answers import AnswerSpec, check_text
from mmrl_datasets.readers.columns import Column, parse_template
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import Limit, SampleFields, convert_rows

ANSWER_SPEC: Final = AnswerSpec(answer_type=AnswerType.BOX, coordinate_system=CoordinateSystem.PX_ORIGINAL)


def rows(
    context: DatasetContext,
    *,
    split: str = "train",
    path: str,
    prompt: str = "{{ text }}",
    task: str | None = None,
    media_root: str | None = None,
    limit: Limit = None,
) -> Iterator[Sample | RejectedRow]:
    """Yield a sample for every instruction: the box around all outlines labelled `target`, in pixels.

    Options:
        path: a folder of `NAME.json`, relative to the config; `NAME.jpg` lies beside it, or in `media_root`.
        prompt: a Jinja template over text, the instruction.
        split, task, media_root, limit: as in `table.rows`.

    Raises:
        UserError: no such folder, or no JSON file in it.
    """
    prompt_template = parse_template(prompt, "prompt")
    resolver = make_media_resolver(context, media_root, path)
    read_fields = partial(_read_fields, prompt_template=prompt_template, resolver=resolver)
    found = _read_rows(context.base_dir / path)
    return convert_rows(found, read_fields, (), path=path, split=split, task=task, limit=limit)


def _read_rows(folder: Path) -> Iterator[Row]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; correct the path")
    for file in sorted(folder.glob("*.json")):
        try:
            try:
                content: Any = load_json(file)
            except UserError:
                content = load_json(file, "cp1252")  # as LISA's own reader
            texts = content["text"]
            if not isinstance(texts, list) or not isinstance(content["shapes"], list):
                raise TypeError("text and shapes must be lists")
        except UserError as error:
            yield Row(file.stem, str(file), BadRowError(str(error)))
        except (KeyError, TypeError) as error:
            yield Row(file.stem, str(file), BadRowError(f"must have text, shapes and is_sentence: {error!r}"))
        else:
            for number, text in enumerate(texts):
                yield Row(f"{file.stem}-{number}", str(file), {**content, "text": text, "image": f"{file.stem}.jpg"})


def _read_fields(cells: Cells, prompt_template: Column, resolver: MediaResolver) -> SampleFields:
    # A template without `text` in it would hide an instruction that is empty.
    check_text(get_cell(cells, "text"), "text")
    images = resolver.images(cells["image"])
    question = check_text(prompt_template.read(cells), "prompt")
    points: list[list[float]] = []
    for shape in cells["shapes"]:
        points += _target_outline(shape)
    if not points:
        raise BadRowError("no shape is labelled target")
    xs, ys = zip(*points, strict=True)
    return SampleFields(
        parts=(*images, question),
        answer_spec=ANSWER_SPEC,
        answer=[min(xs), min(ys), max(xs), max(ys)],
        meta={"shapes": cells["shapes"], "is_sentence": get_cell(cells, "is_sentence")},
    )


def _target_outline(shape: object) -> list[list[float]]:
    """Return the points of an outline, or none if it is labelled `ignore` or `flag` instead of `target`."""
    match shape:
        case {"label": "target", "points": list(points)}:
            for point in points:
                if not (isinstance(point, list) and len(point) == 2 and all(map(is_number, point))):
                    raise BadRowError(f"a corner must be [x, y], is {short_repr(point)}")
            return points
        case {"label": str(), "points": list()}:
            return []
    raise BadRowError(f"a shape must have label and points, is {short_repr(shape)}")
