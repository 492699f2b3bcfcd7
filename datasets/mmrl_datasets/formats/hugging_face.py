"""Hugging Face `datasets`: saved to disk, or from the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import Row, did_you_mean

if TYPE_CHECKING:
    import datasets

SCHEME: Final = "hf://"
NAME: Final = re.compile(r"hf://(?P<path>[\w.-]+/[\w.-]+)(:(?P<name>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
SAVED: Final = ("dataset_dict.json", "state.json")  # of several splits, of one
ROWS_AT_ONCE: Final = 64


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` made that folder."""
    return any((folder / name).is_file() for name in SAVED)


def from_disk(folder: Path, split: str) -> Iterator[Row]:
    """Each row of a saved dataset; of several splits, of that one.

    Raises:
        UserError: the folder cannot be loaded, or has no such split.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be loaded as a saved dataset ({error})") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise UserError(
                f"{folder}: has no split {split!r}{did_you_mean(split, saved)}; there are {', '.join(saved)}"
            )
        saved = saved[split]
    return _rows(saved, str(folder))


def from_hub(address: str, split: str) -> Iterator[Row]:
    """Each row of `hf://owner/name[:config][@revision]`, streamed.

    Raises:
        UserError: the address is malformed; the hub cannot be reached or has no such dataset, config or split.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    match = NAME.fullmatch(address)
    if match is None:
        raise UserError(f"{address}: write hf://owner/name, hf://owner/name:config or hf://owner/name@revision")
    try:
        yield from _rows(datasets.load_dataset(**match.groupdict(), split=split, streaming=True), address)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"{address}: split {split!r} cannot be had from the hub ({error}); "
            "without a network give the folder of a local copy"
        ) from error


def _rows(dataset: datasets.Dataset | datasets.IterableDataset, where: str) -> Iterator[Row]:
    # As Arrow tables, because then pictures stay bytes: `datasets` would decode them.
    batches = dataset.with_format("arrow").iter(ROWS_AT_ONCE)
    cells = (cells for batch in batches for cells in batch.to_pylist())
    return (Row(f"row-{number}", f"{where}: row {number}", row) for number, row in enumerate(cells, start=1))
