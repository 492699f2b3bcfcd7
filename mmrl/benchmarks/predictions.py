"""predictions.jsonl: the responses of a model, appended batch by batch.

Whole batches make an evaluation resumable: a kill leaves half a batch at most, which the next start drops.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from mmrl.benchmarks.items import ItemResponse
from mmrl.types import CoordinateSystem, Failure, FinishReason, ResizeMap, Size, Turn, UserError
from mmrl.utils.files import json_line, read_complete_batches, report_write_errors

_EPISODE: Final = TypeAdapter(tuple[tuple[Turn, ...], Failure | None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One response to an item, with what is needed to score it again."""

    id: str  # id of the item
    response_index: int  # number of the response among those to the same item, from 0
    text: str  # everything the model wrote, forced text included
    finish_reason: FinishReason  # reason why generation ended
    num_tokens: int  # length of the response in tokens
    prompt_digest: str  # hash of the text, images and positions that the model read
    coordinate_system: CoordinateSystem  # coordinate system that the prompt asked for
    resize_maps: tuple[ResizeMap, ...]  # resize of each image, from its own size to the one the model saw
    # Characters before the last continuation: up to a forced trigger, or to the end of a tool's reply. None for a
    # response that was not continued.
    first_response_chars: int | None = None
    tool_resize_maps: tuple[ResizeMap, ...] = ()  # this and the four below as in `Response`
    num_turns: int = 1
    used_tool: bool = False
    rethought: bool = False
    turns: tuple[Turn, ...] = ()
    failure: Failure | None = None  # of the rollout step that failed, if any

    def to_row(self) -> dict[str, Any]:
        """Return the row of predictions.jsonl."""
        row = {
            "pid": self.id,
            "sample": self.response_index,
            "response": self.text,
            "finish": self.finish_reason,
            "tokens": self.num_tokens,
            "first_response_chars": self.first_response_chars,
            "prompt": self.prompt_digest,
            "frame": self.coordinate_system,
            "sizes": list(map(_resize_to_row, self.resize_maps)),
        }
        # Of a response that was not continued, these have their defaults.
        if self.first_response_chars is not None:
            row["tool_sizes"] = list(map(_resize_to_row, self.tool_resize_maps))
            row |= {"num_turns": self.num_turns, "used_tool": self.used_tool, "rethought": self.rethought}
        if self.turns or self.failure:
            row["turns"], row["failure"] = _EPISODE.dump_python((self.turns, self.failure), mode="json")
        return row

    def to_item_response(self) -> ItemResponse:
        """Return what scoring needs."""
        return ItemResponse(
            id=self.id,
            text=self.text,
            response_index=self.response_index,
            finished=self.finish_reason is not FinishReason.LENGTH,
            num_tokens=self.num_tokens,
            coordinate_system=self.coordinate_system,
            # Coordinates belong to the first image.
            resized_size=self.resize_maps[0].resized if self.resize_maps else None,
        )


def parse_prediction(row: dict[str, Any]) -> Prediction:
    """Return the prediction of a row of predictions.jsonl.

    Raises:
        KeyError, TypeError, ValueError: a column is missing, has the wrong type, or holds an unknown value.
    """
    turns, failure = _EPISODE.validate_python((row.get("turns", ()), row.get("failure")))
    if row["first_response_chars"] is not None and "rethought" not in row:
        raise ValueError("an earlier version wrote it, without saying whether a tool or a rethink continued it")
    return Prediction(
        id=row["pid"],
        response_index=row["sample"],
        text=row["response"],
        finish_reason=FinishReason(row["finish"]),
        num_tokens=row["tokens"],
        first_response_chars=row["first_response_chars"],
        prompt_digest=row["prompt"],
        coordinate_system=CoordinateSystem(row["frame"]),
        resize_maps=tuple(map(_parse_resize, row["sizes"])),
        tool_resize_maps=tuple(map(_parse_resize, row.get("tool_sizes", ()))),
        num_turns=row.get("num_turns", 1),
        used_tool=row.get("used_tool", False),
        rethought=row.get("rethought", False),
        turns=turns,
        failure=failure,
    )


def _resize_to_row(resize_map: ResizeMap) -> list[int]:
    offset = resize_map.offset if any(resize_map.offset) else ()
    return [*resize_map.original, *resize_map.resized, *offset]


def _parse_resize(row: list[int]) -> ResizeMap:
    left, top = row[4:] or (0, 0)
    return ResizeMap(Size(*row[:2]), Size(*row[2:4]), (left, top))


def append_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Append a batch, and return once it is on disk.

    Raises:
        UserError: the file cannot be written.
    """
    with report_write_errors(path), path.open("ab") as file:
        lines = "".join(json_line(prediction.to_row()) for prediction in predictions)
        # A model may write half of a surrogate pair, which UTF-8 cannot encode.
        file.write(lines.encode("utf-8", errors="backslashreplace"))
        file.flush()
        # A batch that counts as saved must survive a crash of the machine.
        os.fsync(file.fileno())


def read_complete_predictions(path: Path, batch_sizes: Sequence[int]) -> list[Prediction]:
    """Return the predictions of the complete batches at the start of a file, and cut the file off after them.

    `batch_sizes` has the rows of each batch, in order. The file need not exist.

    Raises:
        UserError: a row cannot be read.
    """
    predictions = []
    for number, line in enumerate(chain.from_iterable(read_complete_batches(path, batch_sizes)), 1):
        try:
            predictions.append(parse_prediction(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}:{number}: not a prediction of mmrl ({error}); choose another folder") from error
    return predictions
