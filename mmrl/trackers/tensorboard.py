"""Writes TensorBoard's event files to RUN/tensorboard, without torch or TensorFlow."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from mmrl.trackers.pictures import draw_boxes
from mmrl.trackers.tracker import Picture, Point, RunFacts, RunStatus


class TensorboardTracker:
    """Event files of a run. A resumed run adds a file, which takes back what earlier ones have from its step on."""

    rewinds = True

    def __init__(self, run: RunFacts) -> None:
        """Open a new event file."""
        self._run = run
        self._folder = run.folder / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self._is_first = not any(self._folder.iterdir())
        # Readers take the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered: a killed process loses nothing that `write` has returned from.
        self._file = (self._folder / name).open("wb", buffering=0)
        self._records = RecordWriter(self._file)

    def known_points(self, since: int) -> set[tuple[int, str]]:
        """Take back everything from step `since` on, and return that nothing is left of it."""
        self._write(file_version="brain.Event:2")
        if not self._is_first:
            self._write(step=since, session_log=SessionLog(status=SessionLog.START))
        if since == 0:
            self._write_text("run/config", 0, json.dumps(self._run.config, indent=1, default=str))
            self._write_text("run/facts", 0, json.dumps(dict(self._run.facts), indent=1))
        return set()

    def log(self, points: Sequence[Point]) -> None:
        """Write a scalar for each metric."""
        for point in points:
            values = []
            for name, value in point.values.items():
                values.append(Summary.Value(tag=name, simple_value=value))
            self._write(step=point.global_step, summary=Summary(value=values))

    def show(self, global_step: int, pictures: Sequence[Picture]) -> None:
        """Write the images with their boxes, and the texts that belong to them."""
        values = []
        for index, picture in enumerate(pictures):
            image, content = draw_boxes(picture), io.BytesIO()
            image.save(content, "PNG")
            proto = Summary.Image(
                height=image.height, width=image.width, colorspace=3, encoded_image_string=content.getvalue()
            )
            values.append(Summary.Value(tag=f"rollouts/{index}", image=proto))
        self._write(step=global_step, summary=Summary(value=values))
        self._write_text("rollouts", global_step, "\n\n".join(picture.text for picture in pictures))

    def finish(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """Write how the run ended, and close the file."""
        self._write_text("run/summary", 0, json.dumps({"status": status, **summary}, indent=1))
        self._file.close()

    def _write_text(self, tag: str, step: int, text: str) -> None:
        # Indented lines are code in Markdown, which shows a response as it is.
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = make_tensor_proto(np.array([indented.encode("utf-8", "backslashreplace")], dtype=object))
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _write(self, **fields: Any) -> None:  # noqa: ANN401
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
