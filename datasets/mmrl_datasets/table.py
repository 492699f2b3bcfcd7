"""Any table of questions, whatever its format: its columns are named in the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Final

from mmrl.types import Place, Reject, Sample, UserError
from mmrl_datasets.formats.row import BadRowError, Cells, cell, shown
from mmrl_datasets.mapping import Fields, Source, checked_roles, identity, interleaved, others, picture_files
from mmrl_datasets.picture_files import PictureFiles
from mmrl_datasets.targets import Corners, answer_form, text

REQUIRED: Final = ("question", "answer")
ROLES: Final = ("id", "images", *REQUIRED, "choices", "label", "thought")


def rows(
    place: Place,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str],
    kind: str,
    frame: str | None = None,
    corners: Corners = "xyxy",
    prompt: str | None = None,
    task: str | None = None,
    image_root: str = ".",
    allow_data_urls: bool = False,
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """Samples of a file, a folder or a dataset of the hub; a row that makes none becomes a `Reject` with the reason.

    Options:
        split: part of the samples' ids, so that files of several splits may number their rows alike; and which split
            of a folder or of the hub is read.
        path: relative to `place.base`; a .jsonl, .json, .tsv, .csv or .parquet file, a folder of Parquet files or one
            that Hugging Face `datasets` saved, or `hf://owner/name[:config][@revision]`.
        columns: which column plays which role: question and answer, and optionally id, images (a path, what Hugging
            Face embeds, or a list of these), choices (a list: A, B, ...), label and thought. `a.b` is the key `b`
            within column `a`. Columns without a role go into `meta`. Where the question says `<image>`, a picture
            stands, and there are as many of these as pictures; otherwise the pictures come first.
        kind: text, choice, number or box: of the answer and the label. An answer may also quote one of the choices.
        frame: what boxes are measured in; given for them and only for them.
        corners: how boxes are written: xyxy, or xywh for corner and size.
        prompt: the question's text instead of a column: `Where is {problem}?` puts in columns, and does nothing else.
        task: name of the task; the file's name when None.
        image_root: folder that pictures lie in, relative to `place.base`.
        allow_data_urls: whether pictures may be `data:` URLs.
        limit: rows to read at most.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    roles = checked_roles(columns, ROLES, REQUIRED if prompt is None else ("answer",))
    if prompt is not None and "question" in roles:
        raise UserError("prompt takes the place of columns.question: keep one of them")
    template = None if prompt is None else _template(prompt)
    inserted = [] if template is None else [name for _, name in template if name is not None]
    pictures = picture_files(place, image_root, allow_data_urls=allow_data_urls)
    source = Source(path=path, split=split, task=task, form=answer_form(kind, frame, corners), limit=limit)
    return source.samples(place, {*roles.values(), *inserted}, lambda cells: _fields(cells, roles, template, pictures))


_Template = list[tuple[str, str | None]]


def _fields(cells: Cells, roles: Mapping[str, str], template: _Template | None, pictures: PictureFiles) -> Fields:
    given = {role: cell(cells, column) for role, column in roles.items()}
    question = given["question"] if template is None else _filled(template, cells)
    return Fields(
        parts=interleaved(text(question, "question"), pictures.refs(given.get("images"))),
        answer=given["answer"],
        options=_options(given.get("choices")),
        name=identity(given["id"]) if "id" in given else None,
        label=given.get("label"),
        thought=given.get("thought"),
        meta=others(cells, roles.values()),
    )


def _options(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) < 2:
        raise BadRowError(f"choices must be a list of two or more, is {shown(value)}")
    return tuple(text(option, "choice") for option in value)


def _template(prompt: str) -> _Template:
    """The template's texts, each with the column that follows it."""
    pieces: _Template = []
    try:
        for literal, name, spec, conversion in Formatter().parse(prompt):
            if name == "" or spec or conversion:
                raise ValueError(f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}")
            pieces.append((literal, name))
    except ValueError as error:
        raise UserError(
            f"prompt {prompt!r}: {error}; only {{column}} may stand in braces, and {{{{ is a brace"
        ) from error
    return pieces


def _filled(template: _Template, cells: Cells) -> str:
    filled = []
    for literal, column in template:
        filled.append(literal)
        if column is not None:
            value = cell(cells, column)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise BadRowError(f"prompt: column {column!r} must be text or a number, is {shown(value)}")
            filled.append(str(value))
    return "".join(filled)
