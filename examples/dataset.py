"""A dataset of water meters: images, and a table of readings for each split."""

import csv
from collections.abc import Iterator

from mmrl import AnswerType, DatasetContext, RejectedRow, Sample, Target, UserError
from mmrl_datasets import image_ref


def rows(context: DatasetContext, *, split: str, folder: str) -> Iterator[Sample | RejectedRow]:
    """Yield the rows of `<folder>/<split>.csv`, whose columns are `file` and `reading`."""
    table = context.base_dir / folder / f"{split}.csv"
    if not table.is_file():
        raise UserError(f"{table}: no such table; `folder` is relative to {context.base_dir}")
    with table.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            sample_id = f"meter/{split}/{number}"
            image = table.parent / row["file"]
            if not image.is_file():
                yield RejectedRow(sample_id, f"{table}:{number}: there is no image {image}")
                continue
            try:
                reading = float(row["reading"])
            except ValueError:
                yield RejectedRow(sample_id, f"{table}:{number}: reading {row['reading']!r} is not a number")
                continue
            yield Sample(
                id=sample_id,
                task="meter",
                parts=(image_ref(image), "What does the meter show?"),
                target=Target(answer_type=AnswerType.NUMBER, value=reading),
            )
