"""predictions.jsonl: what a model answered, appended batch by batch. Half a batch, as a kill leaves it, is dropped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.benchmarks.items import Response
from mmrl.types import Finish, Frame, ResizeMap, Size, UserError
from mmrl.utils.files import json_line, refusing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One response to the item `id`. `draft` is how many characters stand before the last trigger, where there is one;
    `prompt` the digest of what the model read, coordinates in `frame`.
    """

    id: str
    sample: int
    text: str
    finish: Finish
    tokens: int
    prompt: str
    frame: Frame
    resizes: tuple[ResizeMap, ...]
    draft: int | None = None

    def as_row(self) -> dict[str, Any]:
        """The row of predictions.jsonl."""
        return {
            "pid": self.id,
            "sample": self.sample,
            "response": self.text,
            "finish": self.finish,
            "tokens": self.tokens,
            "draft": self.draft,
            "prompt": self.prompt,
            "frame": self.frame,
            "sizes": [[*resize.original, *resize.resized] for resize in self.resizes],
        }

    def response(self) -> Response:
        """What scoring sees of it; the picture that coordinates belong to is the first."""
        return Response(
            id=self.id,
            text=self.text,
            sample=self.sample,
            finished=self.finish is not Finish.LENGTH,
            tokens=self.tokens,
            frame=self.frame,
            resized=self.resizes[0].resized if self.resizes else None,
        )


def prediction_of(row: dict[str, Any]) -> Prediction:
    """A row read back.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    sizes = [(Size(*size[:2]), Size(*size[2:])) for size in row["sizes"]]
    return Prediction(
        id=row["pid"],
        sample=row["sample"],
        text=row["response"],
        finish=Finish(row["finish"]),
        tokens=row["tokens"],
        draft=row["draft"],
        prompt=row["prompt"],
        frame=Frame(row["frame"]),
        resizes=tuple(ResizeMap(*pair) for pair in sizes),
    )


def append(path: Path, predictions: Sequence[Prediction]) -> None:
    """Add a batch, and wait until it is on disk.

    Raises:
        UserError: the file cannot be written.
    """
    with refusing(path), path.open("ab") as file:
        lines = "".join(json_line(prediction.as_row()) for prediction in predictions)
        file.write(lines.encode("utf-8", errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def take_up(path: Path, batches: Sequence[int]) -> list[Prediction]:
    """The predictions of the batches that are whole, of so many rows each; what comes behind them is cut off.

    Raises:
        UserError: a row in them cannot be read.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    torn = bool(lines) and not lines[-1].endswith(b"\n")
    whole = len(lines) - torn
    kept = 0
    for size in batches:
        if kept + size > whole:
            break
        kept += size
    if kept < len(lines):
        os.truncate(path, sum(map(len, lines[:kept])))
    return [_read(path, number, line) for number, line in enumerate(lines[:kept], 1)]


def _read(path: Path, number: int, line: bytes) -> Prediction:
    try:
        return prediction_of(json.loads(line))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}:{number}: no prediction of mmrl ({error}); choose another --out") from error
