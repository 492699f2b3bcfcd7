"""Read any table of questions, whatever its format. The config says which column plays which role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Final

from pydantic import Field

from mmrl.types import DatasetContext, RejectedRow, Sample, UserError
from mmrl_datasets.choices import format_choices
from mmrl_datasets.formats.row import Cells, has_column
from mmrl_datasets.formats.tables import open_rows, unfold_rows
from mmrl_datasets.readers.answers import BoxFormat, ChoiceAnswer, check_text
from mmrl_datasets.readers.columns import Column, collect_required_columns, parse_columns, parse_template
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver, parse_time_range
from mmrl_datasets.readers.row_to_sample import (
    Limit,
    RowAnswerSpec,
    SampleFields,
    convert_rows,
    insert_media,
    make_row_answer_spec,
    parse_choices,
    parse_id,
    split_at_placeholders,
    unused_cells,
)

REQUIRED_ROLES: Final = ("question", "answer")
ROLES: Final = (
    *("id", "task", "images", "videos", "start", "end", *REQUIRED_ROLES),
    *("choices", "label", "thinking", "response", "media_index"),
)
"""The roles that the option `columns` may name."""


def rows(
    context: DatasetContext,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str | tuple[str, ...]],
    answer_type: str,
    coordinates: str | None = None,
    box_format: BoxFormat = "xyxy",
    choice_answer: ChoiceAnswer | None = None,
    prompt: str | None = None,
    unfold: tuple[str, ...] = (),
    task: str | None = None,
    media_root: str | None = None,
    fps: Annotated[float, Field(gt=0.0)] | None = None,
    limit: Limit = None,
) -> Iterator[Sample | RejectedRow]:
    """Yield the samples of a file, a folder or a hub dataset, and a `RejectedRow` for each row that makes none.

    Options:
        split: part of the samples' ids, so that files of several splits may use the same row numbers; also the split
            that is read of a folder or a hub dataset.
        path: a .jsonl, .json, .tsv, .csv or .parquet file, a folder of Parquet files, or a folder that Hugging Face
            `datasets` saved, relative to the config; or `hf://owner/name[:config][@revision]`. JSON is a list of rows,
            or an object that has one list, or rows by their keys, which get a column `key`.
        columns: the column of each role. Required: question, answer. Optional: id, task, images and videos (a path, an
            embedded file as Hugging Face writes it, or a list of these; a row may lack it), start and end (of the
            video, in seconds), choices (a list: A, B, ...), label, thinking, response (a whole response to imitate),
            media_index (the image or video that coordinates lie in, from 0). `a.b` is the key `b` within column `a`. A
            list of columns holds one entry each. An entry that contains `{{` is a Jinja template over the columns.
            Columns without a role and the other keys of `a` go into `meta`. Where the question or a choice says
            `<image>` or `<video>`, the next one is put; `<image 2>` is the second image. Without any, images and videos
            come first.
        answer_type: the type of the answer and the label (text, number, box, ...), or a template that gives it for each
            row. An answer may also quote one of the choices.
        coordinates: the coordinate system of answers that have coordinates, and only of them; a template if
            `answer_type` is one. In JSON answers coordinates are under bbox_2d, point_2d or coordinate:
            `{"image": 2, "bbox_2d": [10, 20, 50, 60]}`.
        box_format: xyxy for two corners, xywh for a corner with width and height, in answers of type box or boxes.
        choice_answer: how answers name a choice, `letter` or `text`; null takes either, but no letter that is both.
        prompt: a Jinja template that replaces the column of the question: `Where is {{ problem }}?`.
        unfold: columns that hold lists of one length, such as the sentences about a video and their times: each entry
            makes a separate row.
        task: the task of rows whose column gives none; null takes the name of the file.
        media_root: folder that relative paths of media start from, relative to the config; null takes the folder of the
            table.
        fps: frames per second of videos that are folders of frames; null refuses such.
        limit: most rows to read.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    roles = parse_columns(columns, ROLES, REQUIRED_ROLES if prompt is None else ("answer",))
    if prompt is not None:
        if "question" in roles:
            raise UserError("prompt takes the place of columns.question: keep one of them")
        roles["question"] = parse_template(prompt, "prompt")
    resolver = make_media_resolver(context, media_root, path)
    answer_spec = make_row_answer_spec(answer_type, coordinates, box_format, choice_answer)
    read_fields = partial(_read_fields, roles=roles, answer_spec=answer_spec, resolver=resolver, fps=fps)
    expected = collect_required_columns(roles.values()) | answer_spec.required_columns
    table_rows = open_rows(context.base_dir, path, split)
    if unfold:
        table_rows = unfold_rows(table_rows, unfold)
    return convert_rows(table_rows, read_fields, expected, path=path, split=split, task=task, limit=limit)


def _read_fields(
    cells: Cells, roles: Mapping[str, Column], answer_spec: RowAnswerSpec, resolver: MediaResolver, fps: float | None
) -> SampleFields:
    values = {}
    for role, column in roles.items():
        media_columns = column.consumed_columns if role in ("images", "videos") else ()
        # A row without a picture may lack its column.
        if not media_columns or any(has_column(cells, name) for name in media_columns):
            values[role] = column.read(cells)
    choices = parse_choices(values.get("choices"))
    question = check_text(values["question"], "question") + format_choices(choices)
    images = resolver.images(values.get("images"))
    videos = resolver.videos(values.get("videos"), parse_time_range(values.get("start"), values.get("end")), fps)
    return SampleFields(
        parts=insert_media(split_at_placeholders(question), images, videos),
        answer_spec=answer_spec.resolve(cells),
        answer=values["answer"],
        choices=choices,
        row_id=parse_id(values["id"]) if "id" in values else None,
        task=values.get("task"),
        label=values.get("label"),
        thinking=values.get("thinking"),
        response=values.get("response"),
        media_index=values.get("media_index"),
        meta=unused_cells(cells, roles.values()),
    )
