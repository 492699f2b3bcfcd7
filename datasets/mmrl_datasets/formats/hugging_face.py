"""Hugging Face `datasets`: saved to disk, or streamed from the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import Row, did_you_mean

if TYPE_CHECKING:
    import datasets

HUB_SCHEME: Final = "hf://"
HUB_ADDRESS: Final = re.compile(r"hf://(?P<path>[\w.-]+/[\w.-]+)(:(?P<name>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
SAVED_DATASET_FILES: Final = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes: the first for a dataset of several splits, the second for one split."""
BATCH_ROWS: Final = 64


def is_saved_dataset(folder: Path) -> bool:
    """Return True if `save_to_disk` made this folder."""
    return any((folder / name).is_file() for name in SAVED_DATASET_FILES)


def read_from_disk(folder: Path, split: str) -> Iterator[Row]:
    """Return the rows of a saved dataset; `split` chooses among its splits if it has several.

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
    return _iter_rows(saved, str(folder))


def read_from_hub(address: str, split: str) -> Iterator[Row]:
    """Stream the rows of `hf://owner/name[:config][@revision]`.

    Raises:
        UserError: the address is malformed; the hub cannot be reached or has no such dataset, config or split.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    match = HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address}: write hf://owner/name, hf://owner/name:config or hf://owner/name@revision")
    try:
        yield from _iter_rows(datasets.load_dataset(**match.groupdict(), split=split, streaming=True), address)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"{address}: split {split!r} cannot be loaded from the hub ({error}); "
            "without a network give the folder of a local copy"
        ) from error


def _iter_rows(dataset: datasets.Dataset | datasets.IterableDataset, source: str) -> Iterator[Row]:
    # In Arrow tables images stay bytes; in its own format `datasets` would decode them.
    number = 0
    for batch in dataset.with_format("arrow").iter(BATCH_ROWS):
        for cells in batch.to_pylist():
            number += 1
            yield Row(f"row-{number}", f"{source}: row {number}", cells)
