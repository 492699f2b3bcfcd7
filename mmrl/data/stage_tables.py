"""Tables that stages write: RUN/outputs/NAME.jsonl, a row per line, for `mmrl_datasets.readers.table:rows` to read.

Every row has the columns of its sample, media by path: relative ones start from the table's folder.
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

SELECTION_COLUMNS: Final = ("pass_rate", "first_correct", "reward_mean", "reward_std", "limr")
"""What a row may say of its sample, which then is in the sample's `meta`."""


def build_sample_row(sample: Sample, folder: Path) -> dict[str, Any]:
    """A sample as a row of a table in `folder`, its `meta` included; raises UserError as `columns_of`."""
    columns = sample_columns(sample, partial(_relative_media_path, folder=folder))
    form = {
        "task": sample.task,
        "answer_type": str(sample.target.answer_type),
        "coordinates": sample.target.coordinate_system,
    }
    return {**sample.meta, **columns, **form, "sample": sample.id}


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a table.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); it was written by an earlier stage: restore it, or begin the run anew"
        ) from error


def save_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table in one move; raises UserError where it cannot be."""
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(json_line, rows)))


def write_history_table(path: Path, samples: Iterable[Sample], history: Mapping[str, Sequence[SampleStats]]) -> None:
    """Write the samples that were drawn, each with the mean and standard deviation of its reward at every visit."""
    drawn = (sample for sample in samples if sample.id in history)
    save_table(path, ({**build_sample_row(sample, path.parent), "visits": history[sample.id]} for sample in drawn))


def read_selected_samples(path: Path, train_samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples that a `select` stage chose among the `known` ones, with what it found out in their `meta`.

    Raises:
        UserError: the table cannot be read, or names a sample that is not known.
    """
    by_id = {sample.id: sample for sample in train_samples}
    samples = []
    for row in read_table(path):
        if row["sample"] not in by_id:
            raise UserError(f"{path}: sample {row['sample']!r} is no training sample any more; begin the run anew")
        sample = by_id[row["sample"]]
        found: dict[str, Any] = {name: row[name] for name in SELECTION_COLUMNS if name in row}
        response = row["response"] or sample.response
        samples.append(replace(sample, id=row["id"], response=response, meta={**sample.meta, **found}))
    return tuple(samples)


def _relative_media_path(ref: MediaRef, *, folder: Path) -> str:
    """From the table's folder where the file belongs to the run, so that a run may be moved; else in full."""
    path, home = Path(ref.path).resolve(), folder.resolve()
    return os.path.relpath(path, home) if path.is_relative_to(home.parent) else str(path)
