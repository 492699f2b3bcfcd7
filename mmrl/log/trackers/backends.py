"""The four trackers, and the protocol that they implement. Each imports its library when a run is opened in it."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from PIL.Image import Image

_WANDB_FLUSH_S: Final = 0.2  # pause between two writes of wandb's process to the run's file
_TRACKIO_WAIT_S: Final = 20.0
_allowed = partial(re.compile(r"[^/\w.\- :]").sub, "_")  # makes a name one that MLflow takes
_MLFLOW_STATUS: Final[Mapping[str, str]] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

Points = set[tuple[int, str]]
"""The (global step, metric) of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about the run that a tracker receives once, when it is opened."""

    id: str  # identifies the run in the tracker, over all its resumes
    name: str  # `run.name`
    project: str  # `logging.project`
    folder: Path  # run directory
    config: Mapping[str, object]  # every setting by dotted path, and versions, git commit and platform


@dataclass(slots=True, kw_only=True)
class StepRow:
    """Finite metrics and times of one step."""

    step: int  # global step: grows by 1 with each training step, and with measurements before those of a later stage
    values: dict[str, float]  # by metric
    rollouts: Path | None = None  # file with the step's rollouts, if they were kept


class Picture(NamedTuple):
    """A rollout to look at."""

    image: Image  # the image of the question, with boxes drawn on it
    text: str  # question, target, response and reward


class Tracker(Protocol):
    """A run in a tracker. Once a method returns, the data that it received would survive a kill of this process."""

    def begin(self, step: int, sent: Points) -> Points:
        """Return the points that the tracker has from global step `step` on. The mark holds `step` and `sent`."""
        return sent  # for a tracker that cannot be queried

    def log(self, rows: Sequence[StepRow]) -> None:
        """Add rows, whose steps rise."""

    def log_pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        """Add pictures of a step's rollouts."""

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        """Add the summary, and end the run as "finished", "stopped" by the user, or "failed"."""


class _Tensorboard:
    """Event files in RUN/tensorboard. A resumed run adds one, which voids earlier entries from its step on."""

    def __init__(self, run: RunFacts) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._text_pb = Event, text_pb
        self._restart = SessionLog(status=SessionLog.START)
        self._config = run.config
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # Readers take the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered: a killed process loses nothing that `write` has returned from.
        self._file = (folder / name).open("wb", buffering=0)
        self._records = RecordWriter(self._file)

    def begin(self, step: int, sent: Points) -> Points:
        self._write(file_version="brain.Event:2")
        # Readers drop the entries of earlier files from `step` on, so these steps are sent again.
        self._write(step=step, session_log=self._restart)
        if step == 0:
            self._write_text("run/config", 0, json.dumps(dict(self._config), indent=1))
        return set()

    def log(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            scalars = [{"tag": name, "simple_value": value} for name, value in row.values.items()]
            self._write(step=row.step, summary={"value": scalars})

    def log_pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        for index, (image, _) in enumerate(pictures):
            content = io.BytesIO()
            image.save(content, "PNG")
            proto = {"width": image.width, "height": image.height, "encoded_image_string": content.getvalue()}
            self._write(step=step, summary={"value": [{"tag": f"rollouts/{index}", "image": proto}]})
        self._write_text("rollouts", step, "\n\n".join(picture.text for picture in pictures))

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        self._write_text("run/summary", 0, json.dumps({"status": status, **summary}, indent=1))
        self._file.close()

    def _write_text(self, tag: str, step: int, text: str) -> None:
        # Indented lines are code in Markdown, which shows a response as it is.
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(step=step, summary=self._text_pb(tag, indented.encode("utf-8", "backslashreplace")))

    def _write(self, **fields: Any) -> None:  # noqa: ANN401
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class _Wandb(Tracker):
    """A run of wandb. The field `global_step` holds the step, because wandb's own steps take no late values."""

    def __init__(self, run: RunFacts) -> None:
        import wandb

        self._image = wandb.Image
        options = {"console": "off", "silent": True, "x_disable_stats": True}
        self._run = wandb.init(
            dir=str(run.folder / "trackers"),
            id=run.id,
            resume="allow",
            project=run.project,
            name=run.name,
            config=dict(run.config),
            allow_val_change=True,
            settings={**options, "x_transaction_log_flush_interval": _WANDB_FLUSH_S},
        )
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def log(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._run.log({"global_step": row.step, **row.values})
        # Its process writes to the file in the background, and offers no way to wait for that.
        time.sleep(2 * _WANDB_FLUSH_S)

    def log_pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        images = [self._image(picture.image, caption=picture.text) for picture in pictures]
        self._run.log({"global_step": step, "rollouts": images})

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=0 if status == "finished" else 1)


class _Trackio:
    """A run in Trackio's database on this machine, or in the Space or server that the environment names."""

    def __init__(self, run: RunFacts) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        # The name must be unique, because Trackio finds the run to continue by its name.
        name = f"{run.name}-{run.id}"
        self._image = trackio.Image
        self._rows = partial(SQLiteStorage.get_logs, run.project, name)
        self._is_local = not any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")))
        options = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(run.project, name, config=dict(run.config), **options)

    def begin(self, step: int, sent: Points) -> Points:
        return sent | {(row["step"], name) for row in self._rows() if row["step"] >= step for name in row}

    def log(self, rows: Sequence[StepRow]) -> None:
        # A thread of Trackio's writes to the database, and a failure of it is only a warning.
        num_rows, until = len(self._rows()) + len(rows), time.monotonic() + _TRACKIO_WAIT_S
        for row in rows:
            self._run.log(row.values, step=row.step)
        while self._is_local and len(self._rows()) < num_rows:
            if time.monotonic() > until:
                raise TimeoutError(f"its database took no rows within {_TRACKIO_WAIT_S:.0f} s")
            time.sleep(0.1)

    def log_pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        for index, (image, text) in enumerate(pictures):
            self._run.log({f"rollouts/{index}": self._image(image, caption=text)}, step=step)

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        last_step = max((row["step"] for row in self._rows()), default=0)
        self._run.log({"run/status": status, **summary}, step=last_step)
        self._run.finish()


class _Mlflow:
    def __init__(self, run: RunFacts) -> None:
        # By default MLflow retries for many minutes before it reports that a server is gone.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient, entities

        self._entities = entities
        folder, uri = run.folder / "trackers", os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else None
        if experiment_id is None:
            artifacts = None if uri else (folder / "mlflow-artifacts").as_uri()
            experiment_id = self._client.create_experiment(run.project, artifact_location=artifacts)
        found = self._client.search_runs([experiment_id], f"tags.`mmrl.id` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            created = self._client.create_run(experiment_id, run_name=run.name, tags={"mmrl.id": run.id})
            self._id = created.info.run_id
            params = [entities.Param(_allowed(key), str(value)[:500]) for key, value in run.config.items()]
            self._client.log_batch(self._id, params=params)

    def begin(self, step: int, sent: Points) -> Points:
        points = set(sent)
        for name in self._client.get_run(self._id).data.metrics:
            history = self._client.get_metric_history(self._id, name)
            points.update((metric.step, name) for metric in history if metric.step >= step)
        return points

    def log(self, rows: Sequence[StepRow]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        for row in rows:
            metrics = [metric(_allowed(name), value, now, row.step) for name, value in row.values.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def log_pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        for index, picture in enumerate(pictures):
            self._client.log_image(self._id, picture.image, key=f"rollouts-{index}", step=step)
        self._client.log_text(self._id, "\n\n".join(text for _, text in pictures), f"rollouts/{step:08d}.txt")

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        tags = [self._entities.RunTag(_allowed(f"mmrl.{name}"), str(value)) for name, value in summary.items()]
        self._client.log_batch(self._id, tags=tags)
        self._client.set_terminated(self._id, _MLFLOW_STATUS[status])


TRACKERS: Final[dict[str, Callable[[RunFacts], Tracker]]] = {
    "tensorboard": _Tensorboard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}
"""Name of a tracker, and of its package → class that starts a run in it, or continues the one with this id."""
