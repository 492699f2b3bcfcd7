"""Tables that stages write: `RUN/outputs/NAME.jsonl`, one row a line, for `mmrl_datasets.readers.table:rows` to read.

A row has the columns of its sample. Media are named by path; relative ones start from the table's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from mmrl.types import MediaRef, Sample, SampleStats, UserError
from mmrl.utils.files import json_line, report_write_errors, write_atomically
from mmrl_datasets.export import sample_columns

# Columns that a `select` stage adds to a row; they end up in the `meta` of the sample.
SELECTION_COLUMNS: Final = ("pass_rate", "first_correct", "reward_mean", "reward_std", "limr")


def build_sample_row(sample: Sample, folder: Path) -> dict[str, Any]:
    """Return a sample as a row of a table in `folder`; raises UserError if it has media that no file holds."""
    columns = sample_columns(sample, partial(_relative_media_path, folder=folder))
    form = {
        "task": sample.task,
        "answer_type": str(sample.target.answer_type),
        "coordinates": sample.target.coordinate_system,
    }
    return {**sample.meta, **columns, **form, "sample": sample.id}


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a table; raises UserError if it cannot be read."""
    try:
        # str.splitlines would also split at separators such as U+2028, which JSON allows within a text.
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); it was written by an earlier stage: restore it, or start a new run"
        ) from error


def save_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table atomically; raises UserError if the disk is full or not writable."""
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(json_line, rows)))


def write_history_table(path: Path, samples: Iterable[Sample], history: Mapping[str, Sequence[SampleStats]]) -> None:
    """Write the samples that training took, each with mean and standard deviation of its reward at every visit."""
    rows = []
    for sample in samples:
        if sample.id in history:
            rows.append({**build_sample_row(sample, path.parent), "visits": history[sample.id]})
    save_table(path, rows)


def read_selected_samples(path: Path, train_samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the training samples that a `select` stage chose, with its findings in their `meta`.

    Each row gives a copy of its sample, with the id and the response of the row.

    Raises:
        UserError: the table cannot be read, or names a sample that is not in the training data.
    """
    by_id = {sample.id: sample for sample in train_samples}
    selected = []
    for row in read_table(path):
        if row["sample"] not in by_id:
            raise UserError(f"{path}: sample {row['sample']!r} is no longer a training sample; start a new run")
        sample = by_id[row["sample"]]
        findings: dict[str, Any] = {name: row[name] for name in SELECTION_COLUMNS if name in row}
        response = row["response"] or sample.response
        selected.append(replace(sample, id=row["id"], response=response, meta={**sample.meta, **findings}))
    return tuple(selected)


def _relative_media_path(ref: MediaRef, *, folder: Path) -> str:
    path, table_folder = Path(ref.path).resolve(), folder.resolve()
    # Relative, because a run may be moved to another folder or machine together with its own files.
    belongs_to_run = path.is_relative_to(table_folder.parent)
    return os.path.relpath(path, table_folder) if belongs_to_run else str(path)
