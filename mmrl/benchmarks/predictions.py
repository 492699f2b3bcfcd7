"""predictions.jsonl: what a model answered, appended batch by batch. Half a batch, as a kill leaves it, is dropped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.benchmarks.items import ItemResponse
from mmrl.types import CoordinateSystem, FinishReason, ResizeMap, Size, UserError
from mmrl.utils.files import json_line, report_write_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One response to the item `id`. `draft` is how many characters stand before the last trigger, where there is one;
    `prompt` the digest of what the model read, coordinates in `frame`.
    """

    id: str
    response_index: int
    text: str
    finish_reason: FinishReason
    num_tokens: int
    prompt_digest: str
    coordinate_system: CoordinateSystem
    resize_maps: tuple[ResizeMap, ...]
    first_response_chars: int | None = None

    def to_row(self) -> dict[str, Any]:
        """The row of predictions.jsonl."""
        return {
            "pid": self.id,
            "sample": self.response_index,
            "response": self.text,
            "finish": self.finish_reason,
            "tokens": self.num_tokens,
            "draft": self.first_response_chars,
            "prompt": self.prompt_digest,
            "frame": self.coordinate_system,
            "sizes": [[*resize.original, *resize.resized] for resize in self.resize_maps],
        }

    def to_item_response(self) -> ItemResponse:
        """What scoring sees of it; the picture that coordinates belong to is the first."""
        return ItemResponse(
            id=self.id,
            text=self.text,
            response_index=self.response_index,
            finished=self.finish_reason is not FinishReason.LENGTH,
            num_tokens=self.num_tokens,
            coordinate_system=self.coordinate_system,
            resized_size=self.resize_maps[0].resized if self.resize_maps else None,
        )


def parse_prediction(row: dict[str, Any]) -> Prediction:
    """A row read back.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    sizes = [(Size(*size[:2]), Size(*size[2:])) for size in row["sizes"]]
    return Prediction(
        id=row["pid"],
        response_index=row["sample"],
        text=row["response"],
        finish_reason=FinishReason(row["finish"]),
        num_tokens=row["tokens"],
        first_response_chars=row["draft"],
        prompt_digest=row["prompt"],
        coordinate_system=CoordinateSystem(row["frame"]),
        resize_maps=tuple(ResizeMap(*pair) for pair in sizes),
    )


def append_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Add a batch, and wait until it is on disk.

    Raises:
        UserError: the file cannot be written.
    """
    with report_write_errors(path), path.open("ab") as file:
        lines = "".join(json_line(prediction.to_row()) for prediction in predictions)
        file.write(lines.encode("utf-8", errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def read_complete_batches(path: Path, batch_sizes: Sequence[int]) -> list[Prediction]:
    """The predictions of the batches that are whole, of so many rows each; what comes behind them is cut off.

    Raises:
        UserError: a row in them cannot be read.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    torn = bool(lines) and not lines[-1].endswith(b"\n")
    whole = len(lines) - torn
    kept = 0
    for size in batch_sizes:
        if kept + size > whole:
            break
        kept += size
    if kept < len(lines):
        os.truncate(path, sum(map(len, lines[:kept])))
    return [_parse_line(path, number, line) for number, line in enumerate(lines[:kept], 1)]


def _parse_line(path: Path, number: int, line: bytes) -> Prediction:
    try:
        return parse_prediction(json.loads(line))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}:{number}: no prediction of mmrl ({error}); choose another --out") from error
