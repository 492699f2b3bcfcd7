"""Sends a run to Weights & Biases, or to its files in RUN/trackers/wandb for `wandb sync`."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import wandb
from wandb.proto.wandb_internal_pb2 import HistoryRecord, Record

from mmrl.config.schema.trackers import WandbConfig
from mmrl.trackers.tracker import Picture, Point, RunFacts, RunStatus

_FLUSH_S: Final = 0.2  # pause between two writes of wandb's process to the run's file
# The file is LevelDB's log: after a header of 7 bytes blocks of 32 KiB, in which records are cut into chunks.
_FILE_HEADER, _BLOCK = 7, 2**15
_CHUNK_HEADER: Final = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last


class WandbTracker:
    """A run of wandb. Its steps are our field `global_step`, since wandb's own must not repeat."""

    rewinds = False

    def __init__(self, options: WandbConfig, run: RunFacts) -> None:
        """Start or continue the run."""
        self._folder = run.folder / "trackers"
        self._id = run.id
        self._run = wandb.init(
            dir=str(self._folder),
            id=run.id,
            resume="allow",
            project=options.project,
            name=run.name,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
            mode=options.mode,
            config={**run.config, "facts": dict(run.facts)},
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                x_transaction_log_flush_interval=_FLUSH_S,
            ),
        )
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def known_points(self, since: int) -> set[tuple[int, str]]:
        """Return what the run's files on this machine have; wandb writes them online, too."""
        points: set[tuple[int, str]] = set()
        for path in sorted(self._folder.glob(f"wandb/*run-*-{self._id}/*.wandb")):
            for row in read_history(path):
                step = row.get("global_step")
                if isinstance(step, int) and step >= since:
                    points.update((step, name) for name in row)
        return points

    def log(self, points: Sequence[Point]) -> None:
        """Add a row for each point."""
        for point in points:
            self._run.log({"global_step": point.global_step, "stage": point.stage, **point.values})
        # Its process writes to the file in the background, and offers no way to wait for that.
        time.sleep(2 * _FLUSH_S)

    def show(self, global_step: int, pictures: Sequence[Picture]) -> None:
        """Add the images, with boxes that can be switched on and off."""
        images = []
        for picture in pictures:
            boxes: dict[str, dict[str, object]] = {}
            for name, is_gold in (("target", True), ("answer", False)):
                drawn = []
                for box in picture.boxes:
                    if box.is_gold == is_gold:
                        corners = dict(zip(("minX", "minY", "maxX", "maxY"), box.corners, strict=True))
                        drawn.append({"position": corners, "class_id": int(is_gold), "box_caption": name})
                if drawn:
                    boxes[name] = {"box_data": drawn, "class_labels": {int(is_gold): name}}
            images.append(wandb.Image(picture.image, caption=picture.text, boxes=boxes or None))
        self._run.log({"global_step": global_step, "rollouts": images})
        time.sleep(2 * _FLUSH_S)

    def finish(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """Add the summary, and wait until wandb has sent everything."""
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=0 if status == "finished" else 1)


def read_history(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows that a file of wandb holds, up to a record that a kill left incomplete."""
    for content in _read_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        if record.HasField("history"):
            yield _read_row(record.history)


def _read_row(history: HistoryRecord) -> dict[str, object]:
    row = {}
    for item in history.item:
        row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return row


def _read_records(data: bytes) -> Iterator[bytes]:
    position, record = _FILE_HEADER, b""
    while position + _CHUNK_HEADER.size <= len(data):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _CHUNK_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        position += _CHUNK_HEADER.size
        if position + length > len(data) or kind not in (1, 2, 3, 4):
            return
        record += data[position : position + length]
        position += length
        if kind in (1, 4):
            yield record
            record = b""
