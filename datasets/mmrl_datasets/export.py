"""Write samples as a table with media files beside it, which `readers.table.rows` reads back to equal samples.

    DIR/samples.jsonl     a row for each sample, with the columns of `ROLES` and the keys of `meta`
    DIR/media/            images and videos; the table names them relative to DIR

A column that no sample needs is left out, so that the table stays easy to look at. In a question, `<image>` and
`<video>` mark the places of the media.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from mmrl.types import DatasetContext, ImageRef, MediaPolicy, MediaRef, RejectedRow, Sample, Target, UserError, VideoRef
from mmrl.utils.files import json_line, report_write_errors
from mmrl_datasets.formats.tables import write_parquet
from mmrl_datasets.readers import table

TableFormat = Literal["jsonl", "parquet"]
MEDIA_DIR: Final = "media"
TABLE_READER: Final = "mmrl_datasets.readers.table:rows"
ROLES: Final = (
    *("id", "images", "videos", "start", "end", "question", "answer", "label", "thinking", "response", "media_index"),
)
"""The columns of an exported table, each named as the role that it plays for the reader."""
_WRITE_REMEDY: Final = "free space or choose another place"


@contextmanager
def atomic_output_dir(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` if the block succeeds, and removed otherwise.

    Raises:
        UserError: `out` holds something already, or cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; choose another place, or remove it first")
    with report_write_errors(out, _WRITE_REMEDY):
        out.parent.mkdir(parents=True, exist_ok=True)
        # The folder lies beside `out`, so that renaming it is one step of the file system.
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
        with report_write_errors(out, _WRITE_REMEDY):
            # mkdtemp lets nobody but the owner read.
            folder.chmod(0o755)
            folder.replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_table(samples: Iterable[Sample | RejectedRow], folder: Path, file_format: TableFormat) -> dict[str, Any]:
    """Write samples into a folder and return the options with which `table.rows` reads them.

    The path in the options is relative to the folder. Media that do not lie in `folder`/media yet are copied there.

    Raises:
        UserError: there is no sample, or a rejected row; the samples differ in task, split or type of answer; one of
            them does not read back as it was.
    """
    checked: list[Sample] = []
    for row in samples:
        if isinstance(row, RejectedRow):
            raise UserError(f"sample {row.id} cannot be written: {row.reason}")
        checked.append(row)
    if not checked:
        raise UserError("there are no samples to write")
    options = _shared_options(checked)
    prefix = f"{options['task']}/{options['split']}/"
    columns = []
    for sample in checked:
        cells = sample_columns(sample, partial(_copy_media, sample_id=sample.id, folder=folder))
        # The reader puts task and split before the id again.
        cells["id"] = cells["id"].removeprefix(prefix)
        columns.append(cells)
    roles = []
    for role in ROLES:
        if any(cells[role] not in (None, []) for cells in columns):
            roles.append(role)
    rows = []
    for sample, cells in zip(checked, columns, strict=True):
        rows.append({role: cells[role] for role in roles} | dict(sample.meta))
    options |= {"path": f"samples.{file_format}", "columns": {role: role for role in roles}}
    file = folder / options["path"]
    with report_write_errors(file, _WRITE_REMEDY):
        if file_format == "parquet":
            write_parquet(file, rows)
        else:
            file.write_text("".join(map(json_line, rows)), encoding="utf-8")
    _check_reads_back(checked, folder, options)
    return options


def sample_columns(sample: Sample, path_of: Callable[[MediaRef], str]) -> dict[str, Any]:
    """Return the value of a sample for each column of `ROLES`; `path_of` returns the path that the table gives a file.

    Raises:
        UserError: a table cannot hold the sample: it shows a crop of an image, a frame of a video, a folder of frames,
            or a part of one of several videos.
    """
    if any((ref.timestamp, ref.crop) != (None, None) for ref in sample.images):
        raise UserError(f"sample {sample.id} shows a crop of an image or a video's frame: write that to a file first")
    videos = [ref for ref in sample.media if isinstance(ref, VideoRef)]
    if any(ref.fps is not None for ref in videos):
        raise UserError(f"sample {sample.id} shows a folder of frames, which a table cannot name: make it a video file")
    if len(videos) > 1 and any((ref.start, ref.end) != (None, None) for ref in videos):
        raise UserError(f"sample {sample.id} shows a part of one of {len(videos)} videos: a table can cut only one")
    return {
        "id": sample.id,
        "images": list(map(path_of, sample.images)),
        "videos": list(map(path_of, videos)),
        "start": videos[0].start if videos else None,
        "end": videos[0].end if videos else None,
        "question": _question_text(sample),
        "answer": sample.target.value,
        "label": None if sample.label is None else sample.label.value,
        "thinking": sample.thinking,
        "response": sample.response,
        # 0 is what the reader takes anyway, so a table whose samples have one image needs no such column.
        "media_index": sample.target.media_index or None,
    }


def _shared_options(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the options of the reader that must be the same for all samples."""
    first = samples[0]
    split = first.id.removeprefix(f"{first.task}/").partition("/")[0]
    for sample in samples:
        if sample.task != first.task or _answer_form(sample.target) != _answer_form(first.target):
            raise UserError(
                f"{first.id} and {sample.id} differ in task, answer type or coordinates: write each to a separate table"
            )
        if not sample.id.startswith(f"{first.task}/{split}/"):
            raise UserError(f"sample {sample.id!r} is not called <task>/<split>/<name>, as a table calls its rows")
    options = {"split": split, "task": first.task, "answer_type": str(first.target.answer_type)}
    if first.target.coordinate_system is not None:
        options["coordinates"] = str(first.target.coordinate_system)
    return options


def _question_text(sample: Sample) -> str:
    """Return the parts of a sample as one text, with a placeholder for each image and video."""
    placeholders = {ImageRef: "<image>", VideoRef: "<video>"}
    return "".join(part if isinstance(part, str) else placeholders[type(part)] for part in sample.parts)


def _copy_media(ref: MediaRef, *, sample_id: str, folder: Path) -> str:
    """Return the path of an image or video within the folder, where it is copied to unless it lies there already."""
    source, media_dir = Path(ref.path).resolve(), folder.resolve() / MEDIA_DIR
    if not source.is_relative_to(media_dir):
        copy = media_dir / f"{ref.sha256}{source.suffix}"
        try:
            media_dir.mkdir(exist_ok=True)
            shutil.copyfile(source, copy)
        except OSError as error:
            raise UserError(f"sample {sample_id}: {source} cannot be copied: {error.strerror}") from error
        source = copy
    return source.relative_to(folder.resolve()).as_posix()


def _check_reads_back(samples: Sequence[Sample], folder: Path, options: Mapping[str, Any]) -> None:
    """Read the table as a run would, and refuse it if a sample differs from the one that was written."""
    context = DatasetContext(
        work_dir=folder, base_dir=folder, seed=0, media_policy=MediaPolicy(roots=(folder.resolve(),))
    )
    for sample, read_sample in zip(samples, table.rows(context, **options), strict=True):
        if isinstance(read_sample, RejectedRow):
            raise UserError(f"sample {sample.id} cannot be read back: {read_sample.reason}")
        written, read = _comparable_facts(sample), _comparable_facts(read_sample)
        if written != read:
            raise UserError(
                f"sample {sample.id} reads back as another: {read} instead of {written}; a key of `meta` may have the "
                "name of a column, or a text say <image>"
            )


def _comparable_facts(sample: Sample) -> dict[str, Any]:
    """Return what must be equal before and after: media by their sha256, as their paths differ."""
    facts = {
        "id": sample.id,
        "question": _question_text(sample),
        "media": [asdict(replace(ref, path="")) for ref in sample.media],
        "answers": [sample.target, sample.label],
        "thinking": sample.thinking,
        "response": sample.response,
        # Parquet writes null for a key that a row lacks.
        "meta": {key: value for key, value in sample.meta.items() if value is not None},
    }
    # Through JSON, because a tuple comes back as a list.
    plain: dict[str, Any] = json.loads(json_line(facts))
    return plain


def _answer_form(target: Target) -> tuple[str, str | None]:
    return target.answer_type, target.coordinate_system
