"""Samples as a table and files beside it, which `table.rows` reads back to equal samples.

    DIR/samples.jsonl     a row per sample: id, images, videos, question, answer, label, thought, then the keys of meta
    DIR/media/            pictures and videos; the table names them relative to DIR

A column that no sample needs is left out. In the question `<image>` and `<video>` stand where the media do.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from mmrl.types import (
    AnswerType,
    CoordinateSystem,
    DatasetContext,
    ImageRef,
    MediaPolicy,
    MediaRef,
    RejectedRow,
    Sample,
    Target,
    UserError,
    VideoRef,
)
from mmrl.utils.files import json_line
from mmrl_datasets.formats import parquet
from mmrl_datasets.readers import table

TableFormat = Literal["jsonl", "parquet"]
MEDIA_DIR: Final = "media"
TABLE_READER: Final = "mmrl_datasets.readers.table:rows"
ROLES: Final = (
    *("id", "images", "videos", "start", "end", "question", "answer", "label", "thought", "response", "medium"),
)


@contextmanager
def atomic_output_dir(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place when all went well, and leaves nothing behind otherwise.

    Raises:
        UserError: `out` holds something already, or cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; choose another place, or remove it first")
    with _report_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
        with _report_write_errors(out):
            folder.chmod(0o755)  # a temporary folder is the owner's alone
            folder.replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_table(samples: Iterable[Sample | RejectedRow], folder: Path, form: TableFormat) -> dict[str, Any]:
    """Write samples below a folder; returns the options with which `table.rows` reads them, relative to the folder.

    Media that do not lie in `folder`/media yet are copied there.

    Raises:
        UserError: there is no sample, or a rejected one; they are not of one task, split and kind; one of them does not
            read back as it was.
    """
    kept = [_require_sample(sample) for sample in samples]
    if not kept:
        raise UserError("there is not one sample to write")
    options = _shared_options(kept)
    own = [sample_columns(sample, partial(_copy_media, who=sample.id, folder=folder)) for sample in kept]
    for row in own:
        row["id"] = row["id"].removeprefix(f"{options['task']}/{options['split']}/")
    used = [role for role in ROLES if any(row[role] not in (None, []) for row in own)]
    rows = [{role: row[role] for role in used} | dict(sample.meta) for sample, row in zip(kept, own, strict=True)]
    options |= {"path": f"samples.{form}", "columns": {role: role for role in used}}
    with _report_write_errors(folder / options["path"]):
        if form == "parquet":
            parquet.write_rows(folder / options["path"], rows)
        else:
            (folder / options["path"]).write_text("".join(map(json_line, rows)), encoding="utf-8")
    _check_reads_back(kept, folder, options)
    return options


@contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _require_sample(sample: Sample | RejectedRow) -> Sample:
    if isinstance(sample, RejectedRow):
        raise UserError(f"sample {sample.id} cannot be written: {sample.reason}")
    return sample


def _shared_options(samples: Sequence[Sample]) -> dict[str, Any]:
    """What the reader's options say of all samples at once."""
    first = samples[0]
    split = first.id.removeprefix(f"{first.task}/").partition("/")[0]
    for sample in samples:
        if (sample.task, _answer_type(sample.target)) != (first.task, _answer_type(first.target)):
            raise UserError(
                f"{first.id} and {sample.id} differ in task, kind or frame: write each to a table of its own"
            )
        if not sample.id.startswith(f"{first.task}/{split}/"):
            raise UserError(f"sample {sample.id!r} is not called <task>/<split>/<name>, as a table calls its rows")
    frame = {} if first.target.coordinate_system is None else {"frame": str(first.target.coordinate_system)}
    return {"split": split, "task": first.task, "kind": str(first.target.answer_type), **frame}


def sample_columns(sample: Sample, path_of: Callable[[MediaRef], str]) -> dict[str, Any]:
    """What a sample has in each of the table's own columns; `stored` says how the table names a medium.

    Raises:
        UserError: it shows a part of one of several videos, or of a picture, which a table cannot say.
    """
    if any((ref.timestamp, ref.crop) != (None, None) for ref in sample.images):
        raise UserError(f"sample {sample.id} shows a part of a picture or a video's frame: write that to a file first")
    videos = [ref for ref in sample.media if isinstance(ref, VideoRef)]
    if any(ref.fps is not None for ref in videos):
        raise UserError(f"sample {sample.id} shows a folder of frames, which a table cannot say: make it a video file")
    if len(videos) > 1 and any((ref.start, ref.end) != (None, None) for ref in videos):
        raise UserError(f"sample {sample.id} shows a part of one of {len(videos)} videos: a table can say that of one")
    return {
        "id": sample.id,
        "images": [path_of(ref) for ref in sample.images],
        "videos": [path_of(ref) for ref in videos],
        "start": videos[0].start if videos else None,
        "end": videos[0].end if videos else None,
        "question": _question_text(sample),
        "answer": sample.target.value,
        "label": None if sample.label is None else sample.label.value,
        "thought": sample.thinking,
        "response": sample.response,
        "medium": sample.target.media_index or None,
    }


def _question_text(sample: Sample) -> str:
    markers = {ImageRef: "<image>", VideoRef: "<video>"}
    return "".join(part if isinstance(part, str) else markers[type(part)] for part in sample.parts)


def _copy_media(ref: MediaRef, *, who: str, folder: Path) -> str:
    """The medium's path within the folder, which it is copied to unless it lies there."""
    source, media = Path(ref.path).resolve(), folder.resolve() / MEDIA_DIR
    if not source.is_relative_to(media):
        copy = media / f"{ref.sha256}{source.suffix}"
        try:
            media.mkdir(exist_ok=True)
            shutil.copyfile(source, copy)
        except OSError as error:
            raise UserError(f"sample {who}: {source} cannot be copied: {error.strerror}") from error
        source = copy
    return source.relative_to(folder.resolve()).as_posix()


def _check_reads_back(samples: Sequence[Sample], folder: Path, options: Mapping[str, Any]) -> None:
    """Read the table as a run will, and compare."""
    place = DatasetContext(
        work_dir=folder, base_dir=folder, seed=0, media_policy=MediaPolicy(roots=(folder.resolve(),))
    )
    for sample, again in zip(samples, table.rows(place, **options), strict=True):
        if isinstance(again, RejectedRow):
            raise UserError(f"sample {sample.id} cannot be read back: {again.reason}")
        if _comparable_facts(sample) != _comparable_facts(again):
            raise UserError(
                f"sample {sample.id} reads back as another: {_comparable_facts(again)} instead of {_comparable_facts(sample)}; "
                "a key of `meta` may have the name of a column, or a text say <image>"
            )


def _comparable_facts(sample: Sample) -> dict[str, Any]:
    """A sample as JSON would have it, media by their digests; a missing key of `meta` is as good as null."""
    facts = {
        "id": sample.id,
        "question": _question_text(sample),
        "media": [(ref.sha256, *_time_range(ref)) for ref in sample.media],
        "answers": [
            answer and (*_answer_type(answer), answer.media_index, answer.value)
            for answer in (sample.target, sample.label)
        ],
        "thought": sample.thinking,
        "response": sample.response,
        "meta": {key: value for key, value in sample.meta.items() if value is not None},
    }
    plain: dict[str, Any] = json.loads(json_line(facts))
    return plain


def _answer_type(target: Target) -> tuple[AnswerType, CoordinateSystem | None]:
    return target.answer_type, target.coordinate_system


def _time_range(ref: MediaRef) -> tuple[float | None, float | None]:
    """The part of a video that is shown; of a picture there is none."""
    return (ref.start, ref.end) if isinstance(ref, VideoRef) else (None, None)
