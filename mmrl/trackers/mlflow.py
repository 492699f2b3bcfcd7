"""Sends a run to an MLflow server or database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from mmrl.config.schema.trackers import MlflowConfig
from mmrl.trackers.pictures import draw_boxes
from mmrl.trackers.tracker import Picture, Point, RunFacts, RunStatus

_ID_TAG: Final = "mmrl.id"
_MAX_PARAMS, _MAX_METRICS = 100, 1000  # that MLflow takes in one call
_MAX_VALUE_CHARS: Final = 500
_REFUSED_CHARS: Final = re.compile(r"[^/\w.\- :]")
_STATUS: Final[Mapping[RunStatus, str]] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A run of MLflow."""

    rewinds = False

    def __init__(self, options: MlflowConfig, run: RunFacts) -> None:
        """Start the run, or continue the one that has our id as a tag."""
        folder = run.folder / "trackers"
        uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
        experiment = self._client.get_experiment_by_name(options.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            artifacts = None if uri else (folder / "mlflow-artifacts").as_uri()
            experiment_id = self._client.create_experiment(options.project, artifact_location=artifacts)
        found = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.id}'")
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {_ID_TAG: run.id, **{f"mmrl.{key}": value for key, value in run.facts.items()}}
        self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        params = []
        for key, value in run.config.items():
            params.append(Param(_allowed(key), str(value)[:_MAX_VALUE_CHARS]))
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def known_points(self, since: int) -> set[tuple[int, str]]:
        """Return what the server has."""
        points = set()
        for name in self._client.get_run(self._run_id).data.metrics:
            for metric in self._client.get_metric_history(self._run_id, name):
                if metric.step >= since:
                    points.add((metric.step, name))
        return points

    def log(self, points: Sequence[Point]) -> None:
        """Add a metric for each value."""
        now = int(time.time() * 1000)
        metrics = []
        for point in points:
            for name, value in point.values.items():
                metrics.append(Metric(_allowed(name), value, now, point.global_step))
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def show(self, global_step: int, pictures: Sequence[Picture]) -> None:
        """Add the images with their boxes drawn on them, and their texts as a file."""
        for index, picture in enumerate(pictures):
            self._client.log_image(self._run_id, draw_boxes(picture), key=f"rollouts-{index}", step=global_step)
        texts = "\n\n".join(picture.text for picture in pictures)
        self._client.log_text(self._run_id, texts, f"rollouts/{global_step:08d}.txt")

    def finish(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """Add the summary as tags, and end the run."""
        tags = [RunTag("mmrl.status", status)]
        for name, value in summary.items():
            tags.append(RunTag(_allowed(f"mmrl.{name}"), str(value)))
        self._client.log_batch(self._run_id, tags=tags)
        self._client.set_terminated(self._run_id, _STATUS[status])


def _allowed(name: str) -> str:
    """Return a name with an underscore for every character that MLflow refuses."""
    return _REFUSED_CHARS.sub("_", name)
