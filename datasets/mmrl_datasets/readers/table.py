"""Any table of questions, whatever its format: its columns are named in the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from mmrl.types import DatasetContext, RejectedRow, Sample, UserError
from mmrl_datasets.formats.row import Cells
from mmrl_datasets.readers.answers import BoxFormat, check_text
from mmrl_datasets.readers.columns import Column, collect_required_columns, parse_columns, parse_template
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver, parse_time_range
from mmrl_datasets.readers.row_to_sample import (
    RowAnswerSpec,
    RowSource,
    SampleFields,
    format_choices,
    insert_media,
    make_row_answer_spec,
    parse_choices,
    parse_id,
    split_at_placeholders,
    unused_cells,
)

REQUIRED: Final = ("question", "answer")
ROLES: Final = (
    *("id", "task", "images", "videos", "start", "end", *REQUIRED),
    *("choices", "label", "thought", "response", "medium"),
)


def rows(
    place: DatasetContext,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str | tuple[str, ...]],
    kind: str,
    frame: str | None = None,
    corners: BoxFormat = "xyxy",
    prompt: str | None = None,
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | RejectedRow]:
    """Samples of a file, a folder or a dataset of the hub; a row that makes none becomes a `Reject` with the reason.

    Options:
        split: part of the samples' ids, so that files of several splits may number their rows alike; and which split
            of a folder or of the hub is read.
        path: relative to `place.base`; a .jsonl, .json, .tsv, .csv or .parquet file, a folder of Parquet files or one
            that Hugging Face `datasets` saved, or `hf://owner/name[:config][@revision]`.
        columns: which column plays which role: question and answer, and optionally id, task, images and videos (a path,
            what Hugging Face embeds, or a list of these), start and end (of the video, in seconds), choices (a list: A,
            B, ...), label, thought, response (a whole response to imitate), and medium (which picture or video
            coordinates belong to, from 0). `a.b` is the key `b` within column `a`; a list of columns holds one entry
            each; what contains `{{` is a Jinja template over the columns. Columns without a role go into `meta`. Where
            the question or a choice says `<image>` or `<video>`, the next one stands; `<image 2>` is the second
            picture. Without any, they come first.
        kind: of the answer and the label (text, number, box, ...), or a template that says it for each row. An answer
            may also quote one of the choices.
        frame: what coordinates are measured in; given for them and only for them, or a template beside one of `kind`.
            In JSON coordinates are what stands under bbox_2d, point_2d or coordinate: `{"image": 2, "bbox_2d": [10, 20,
            50, 60]}`.
        corners: how boxes are written: xyxy, or xywh for corner and size.
        prompt: a Jinja template of the question, instead of a column: `Where is {{ problem }}?`.
        task: name of the task, where no column says it; the file's name when None.
        media_root: folder that relative paths of media start from, itself relative to the config; by default where
            the table lies.
        limit: rows to read at most.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    roles = parse_columns(columns, ROLES, REQUIRED if prompt is None else ("answer",))
    if prompt is not None:
        if "question" in roles:
            raise UserError("prompt takes the place of columns.question: keep one of them")
        roles["question"] = parse_template(prompt, "prompt")
    files = make_media_resolver(place, media_root, path)
    answers = make_row_answer_spec(kind, frame, corners)
    source = RowSource(path=path, split=split, task=task, limit=limit)
    return source.convert_rows(
        source.read_rows(place),
        collect_required_columns(roles.values()) | answers.required_columns,
        lambda cells: _read_fields(cells, roles, answers, files),
    )


def _read_fields(
    cells: Cells, roles: Mapping[str, Column], answers: RowAnswerSpec, files: MediaResolver
) -> SampleFields:
    given = {role: column.read(cells) for role, column in roles.items()}
    options = parse_choices(given.get("choices"))
    question = check_text(given["question"], "question") + format_choices(options)
    images = files.images(given.get("images"))
    videos = files.videos(given.get("videos"), parse_time_range(given.get("start"), given.get("end")))
    return SampleFields(
        parts=insert_media(split_at_placeholders(question), images, videos),
        answer_spec=answers.resolve(cells),
        answer=given["answer"],
        choices=options,
        row_id=parse_id(given["id"]) if "id" in given else None,
        task=given.get("task"),
        label=given.get("label"),
        thought=given.get("thought"),
        response=given.get("response"),
        medium=given.get("medium"),
        meta=unused_cells(cells, roles.values()),
    )
