"""Read rows from tables in any format: JSON Lines, JSON, CSV, TSV, Parquet, and Hugging Face `datasets`.

Each `_read_*` function yields rows one by one, so that a table larger than memory can be read, except from JSON.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, Row, did_you_mean, short_repr

if TYPE_CHECKING:
    import datasets

HUB_SCHEME: Final = "hf://"
HUB_ADDRESS: Final = re.compile(r"hf://(?P<path>[\w.-]+/[\w.-]+)(:(?P<name>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
SAVED_DATASET_FILES: Final = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes: the first for a dataset of several splits, the second for one split."""
SHARD_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]{16})?\.parquet")  # older versions add a hash
UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
MAX_LINE_BYTES: Final = 64 << 20  # a longer line of JSON Lines is rejected, and never held in memory as a whole
MAX_CELL_CHARS: Final = 64 << 20  # longest cell of a CSV or TSV file
MAX_JSON_BYTES: Final = 512 << 20
"""Largest JSON file. JSON is read as a whole, and its objects take several times the size of the file."""
BATCH_ROWS: Final = 64  # rows of Parquet and `datasets` that are read at once: some megabytes where they hold images
BUFFER_BYTES: Final = 1 << 20


def open_rows(base: Path, path: str, split: str) -> Iterator[Row]:
    """Yield the rows of a file, a folder or `hf://owner/name`. Relative paths start from `base`.

    `split` chooses a part of folders and hub datasets; a file has one split only.

    Raises:
        UserError: there is no such file, or its format is unknown; while rows are read, the file is damaged.
    """
    if path.startswith(HUB_SCHEME):
        return _read_from_hub(path, split)
    file = base / path
    if file.is_dir():
        if any((file / name).is_file() for name in SAVED_DATASET_FILES):
            return _read_saved_dataset(file, split)
        return _read_parquet(*_find_shards(file, split))
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file}: no such file, or it cannot be read; a relative path starts from {base}")
    read_file = READERS.get(file.suffix.lower())
    if read_file is None:
        raise UserError(f"{file}: the format is unknown; the name must end in one of {', '.join(READERS)}")
    return read_file(file)


def load_json(file: Path, encoding: str = "utf-8-sig") -> object:
    """Return the content of a JSON file; raises UserError if it is missing, too large or no JSON."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; correct the path")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise UserError(
            f"{file}: is larger than {MAX_JSON_BYTES >> 20} MiB; write it as JSON Lines, which is read in parts"
        )
    try:
        # The default encoding reads UTF-8 with and without the byte order mark that Windows editors write.
        content: object = json.loads(file.read_bytes().decode(encoding))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not JSON in UTF-8 ({error})") from error
    return content


def write_parquet(file: Path, rows: Sequence[Cells]) -> None:
    """Write rows, with null for a column that a row lacks; raises UserError if a column mixes types."""
    import pyarrow
    from pyarrow.parquet import write_table

    # A dict keeps the order in which the columns come up first.
    names = dict.fromkeys(chain.from_iterable(rows))
    try:
        columns = {}
        for name in names:
            columns[name] = [row.get(name) for row in rows]
        write_table(pyarrow.table(columns), file)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: Parquet cannot hold the rows ({error}); write JSON Lines instead") from error


def _read_json_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as content:
        if content.read(2) in UTF16_BOMS:
            raise UserError(f"{file}: is UTF-16; save it as UTF-8")
        content.seek(0)
        # One byte more than allowed distinguishes a line that is too long from one that just fits.
        read_piece = partial(content.readline, MAX_LINE_BYTES + 1)
        for number, line in enumerate(iter(read_piece, b""), start=1):
            # The rest of a line that is too long is skipped in pieces.
            piece = line
            while len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n"):
                piece = read_piece()
            if line.strip():
                yield Row(f"line-{number}", f"{file}:{number}", _parse_json_line(line))


def _parse_json_line(line: bytes) -> Cells | BadRowError:
    if len(line) > MAX_LINE_BYTES:
        return BadRowError(f"longer than {MAX_LINE_BYTES >> 20} MiB; keep images in separate files")
    try:
        return _as_cells(json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return BadRowError(f"not a line of JSON ({error})")


def _read_json(file: Path) -> Iterator[Row]:
    """Yield the rows of a list, of the only list of an object or that under `data`, or of an object of rows by name.

    Such a name becomes the column `key`.
    """
    content = load_json(file)
    items = content
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        # COCO keeps captions under `annotations`, beside other lists.
        items = content.get("data", lists[0] if len(lists) == 1 else content.get("annotations"))
        if content and all(isinstance(item, dict) for item in content.values()):
            items = [{"key": key, **item} for key, item in content.items()]
    if not isinstance(items, list):
        forms = "must be a list of rows, hold one (under `data` if several), or be an object of rows by name"
        raise UserError(f"{file}: {forms}; is {short_repr(content)}")
    for number, item in enumerate(items, start=1):
        yield Row(f"row-{number}", f"{file}: row {number}", _as_cells(item))


def unfold_rows(rows: Iterable[Row], columns: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each entry of the lists in these columns, which must be equally long, with all other columns."""
    for row in rows:
        if isinstance(row.cells, BadRowError):
            yield row
            continue
        lists: list[Any] = [row.cells.get(column) for column in columns]
        if not all(isinstance(entries, list) and len(entries) == len(lists[0]) for entries in lists):
            yield row._replace(cells=BadRowError(f"the columns {', '.join(columns)} must be lists of one length"))
            continue
        for number, entries in enumerate(zip(*lists, strict=True), start=1):
            cells = {**row.cells, **dict(zip(columns, entries, strict=True))}
            yield Row(f"{row.name}-{number}", f"{row.location}, entry {number}", cells)


def _as_cells(value: object) -> Cells | BadRowError:
    if isinstance(value, dict):
        return value
    return BadRowError(f"must be an object of columns, is {short_repr(value)}")


def _read_csv(file: Path) -> Iterator[Row]:
    """Yield each record that is not blank. All cells are text, and the name gives the line on which a record ends."""
    # The limit belongs to the whole process. Images in base64 exceed Python's default of 128 KiB.
    csv.field_size_limit(MAX_CELL_CHARS)
    # Bytes that are not UTF-8 become lone surrogates, so that they spoil their own record instead of the whole file.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        records = csv.reader(lines, delimiter="," if file.suffix.lower() == ".csv" else "\t", strict=True)
        header = _read_csv_header(file, records)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                cells: Cells | BadRowError = BadRowError(f"not a record of a table ({error})")
            else:
                if not record:
                    continue
                if len(record) != len(header):
                    cells = BadRowError(f"has {len(record)} cells, the header has {len(header)}")
                elif not all(map(_is_utf8, record)):
                    cells = BadRowError("is not UTF-8")
                else:
                    cells = dict(zip(header, record, strict=True))
            yield Row(f"line-{records.line_num}", f"{file}:{records.line_num}", cells)


def _read_csv_header(file: Path, records: Iterator[list[str]]) -> list[str]:
    try:
        header = next(records, [])
    except csv.Error as error:
        raise UserError(f"{file}: the header cannot be read ({error})") from error
    if not all(map(_is_utf8, header)):
        raise UserError(f"{file}: the header is not UTF-8; save the file as UTF-8")
    if not any(header) or len(set(header)) < len(header):
        raise UserError(f"{file}: the first line must name the columns, each once; it is {header}")
    return header


def _is_utf8(text: str) -> bool:
    # A surrogate of this range replaces a byte that was not UTF-8.
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)


def _find_shards(folder: Path, split: str) -> list[Path]:
    """Return the Parquet files under a folder, sorted by path.

    If some are named `<split>-00000-of-00001.parquet`, as Hugging Face exports them, return only the split's.

    Raises:
        UserError: there is no such file or split, or the names of the split's shards say that some are missing.
    """
    files = sorted(folder.rglob("*.parquet"))
    split_of_file = {}
    # Numbers of the split's shards, by the folder that they lie in and how many of them there should be.
    numbers_found: dict[tuple[Path, int], set[int]] = {}
    for file in files:
        match = SHARD_NAME.fullmatch(file.name)
        if match:
            split_of_file[file] = match.group(1)
            if match.group(1) == split:
                numbers_found.setdefault((file.parent, int(match.group(3))), set()).add(int(match.group(2)))
    if split_of_file and split not in split_of_file.values():
        known = sorted(set(split_of_file.values()))
        raise UserError(f"{folder}: has no split {split!r}{did_you_mean(split, known)}; there are {', '.join(known)}")
    if not files:
        raise UserError(f"{folder}: holds neither Parquet files nor a dataset saved to disk")
    if not split_of_file:
        return files
    for (shard_folder, total), numbers in numbers_found.items():
        first = 1 if total in numbers else 0  # some are counted from 1
        missing = sorted(set(range(first, first + total)) - numbers)
        if missing:
            raise UserError(
                f"{shard_folder}: {len(missing)} of {total} shards of split {split!r} are missing, the first of them "
                f"{split}-{missing[0]:05}-of-{total:05}.parquet; fetch them, or name the file of each shard that you "
                "want as the `path` of a source"
            )
    return [file for file in files if split_of_file.get(file) == split]


def _read_parquet(*files: Path) -> Iterator[Row]:
    # The name `row-7` counts through all files, so that it is an id; the location says where to look.
    total = 0
    for file in files:
        for number_in_file, cells in enumerate(_iter_parquet(file), start=1):
            total += 1
            yield Row(f"row-{total}", f"{file}: row {number_in_file}", cells)


def _iter_parquet(file: Path) -> Iterator[Cells]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    rows_read = 0
    try:
        # By default Arrow reads ahead and keeps all that it has read until the file is closed.
        with ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES) as content:
            for batch in content.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
                rows_read += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as Parquet beyond row {rows_read} ({error})") from error


def _read_saved_dataset(folder: Path, split: str) -> Iterator[Row]:
    """Return the rows that `save_to_disk` wrote; `split` chooses among the splits if there are several."""
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
    return _iter_dataset(saved, str(folder))


def _read_from_hub(address: str, split: str) -> Iterator[Row]:
    """Stream the rows of `hf://owner/name[:config][@revision]`."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    match = HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address}: write hf://owner/name, hf://owner/name:config or hf://owner/name@revision")
    try:
        yield from _iter_dataset(datasets.load_dataset(**match.groupdict(), split=split, streaming=True), address)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"{address}: split {split!r} cannot be loaded from the hub ({error}); "
            "without a network give the folder of a local copy"
        ) from error


def _iter_dataset(dataset: datasets.Dataset | datasets.IterableDataset, source: str) -> Iterator[Row]:
    # In Arrow tables images stay bytes; in its own format `datasets` would decode them.
    number = 0
    for batch in dataset.with_format("arrow").iter(BATCH_ROWS):
        for cells in batch.to_pylist():
            number += 1
            yield Row(f"row-{number}", f"{source}: row {number}", cells)


READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".tsv": _read_csv,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""The function that reads a file, by the end of its name."""
