"""Any table of questions, whatever its format: its columns are named in the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from mmrl.types import Place, Reject, Sample, UserError
from mmrl_datasets.formats.row import Cells
from mmrl_datasets.readers.answers import Corners, text
from mmrl_datasets.readers.columns import Column, columns_of, needed, template
from mmrl_datasets.readers.media_resolver import MediaFiles, clip, media_files
from mmrl_datasets.readers.row_to_sample import (
    Fields,
    Forms,
    Source,
    choices,
    forms,
    identity,
    interleaved,
    listed,
    marked,
    others,
)

REQUIRED: Final = ("question", "answer")
ROLES: Final = (
    *("id", "task", "images", "videos", "start", "end", *REQUIRED),
    *("choices", "label", "thought", "response", "medium"),
)


def rows(
    place: Place,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str | tuple[str, ...]],
    kind: str,
    frame: str | None = None,
    corners: Corners = "xyxy",
    prompt: str | None = None,
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
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
    roles = columns_of(columns, ROLES, REQUIRED if prompt is None else ("answer",))
    if prompt is not None:
        if "question" in roles:
            raise UserError("prompt takes the place of columns.question: keep one of them")
        roles["question"] = template(prompt, "prompt")
    files = media_files(place, media_root, path)
    answers = forms(kind, frame, corners)
    source = Source(path=path, split=split, task=task, limit=limit)
    return source.samples(
        source.rows(place), needed(roles.values()) | answers.needs, lambda cells: _fields(cells, roles, answers, files)
    )


def _fields(cells: Cells, roles: Mapping[str, Column], answers: Forms, files: MediaFiles) -> Fields:
    given = {role: column.of(cells) for role, column in roles.items()}
    options = choices(given.get("choices"))
    question = text(given["question"], "question") + listed(options)
    images = files.images(given.get("images"))
    videos = files.videos(given.get("videos"), clip(given.get("start"), given.get("end")))
    return Fields(
        parts=interleaved(marked(question), images, videos),
        form=answers.of(cells),
        answer=given["answer"],
        options=options,
        name=identity(given["id"]) if "id" in given else None,
        task=given.get("task"),
        label=given.get("label"),
        thought=given.get("thought"),
        response=given.get("response"),
        medium=given.get("medium"),
        meta=others(cells, roles.values()),
    )
