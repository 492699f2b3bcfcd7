"""Options of the trackers that follow a run: TensorBoard, Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from mmrl.config.schema.base import StrictModel, check_unique

_SECRET_WORDS = ("key", "token", "password", "secret")


class TrackerConfig(StrictModel):
    """Base of the trackers' sections, which refuses secrets: a config is copied to where others read it."""

    secret_variables: ClassVar[str] = ""  # environment variables that take a secret's place
    project: str = Field(default="mmrl", min_length=1)
    """Project that the run belongs to; MLflow calls it an experiment."""
    name: str | None = None
    """Name of the run in the tracker; `run.name` when left out."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, options: object) -> object:
        for key in options if isinstance(options, dict) else ():
            if any(word in str(key).lower() for word in _SECRET_WORDS):
                where = f"set {cls.secret_variables} in the environment" if cls.secret_variables else "take it out"
                raise ValueError(f"`{key}` would put a secret into a file that is copied to others; {where}")
        return options


class TensorboardConfig(StrictModel):
    """TensorBoard: event files in `RUN/tensorboard`, read by `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"]
    """Selects this tracker."""


class WandbConfig(TrackerConfig):
    """Weights & Biases. The environment has the key: WANDB_API_KEY, or what `wandb login` wrote."""

    secret_variables: ClassVar[str] = "WANDB_API_KEY"
    kind: Literal["wandb"]
    """Selects this tracker."""
    entity: str | None = None
    """Team or user that the project belongs to; the key's own when left out."""
    group: str | None = None
    """Group of runs that this one belongs to, such as the seeds of one experiment."""
    # Not strict: the list is a Python list here, since what reads names has taken the entry out of its JSON.
    tags: tuple[str, ...] = Field(default=(), strict=False)
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to `RUN/trackers/wandb` alone, for `wandb sync`; when left out, WANDB_MODE or else `online`."""


class TrackioConfig(TrackerConfig):
    """Trackio: a local database in TRACKIO_DIR, shown by `trackio show`."""

    secret_variables: ClassVar[str] = "HF_TOKEN"
    kind: Literal["trackio"]
    """Selects this tracker."""
    space_id: str | None = None
    """Hugging Face Space that is sent the points as well, such as `me/runs`; it is made if there is none."""


class MlflowConfig(TrackerConfig):
    """MLflow."""

    secret_variables: ClassVar[str] = "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,"
    kind: Literal["mlflow"]
    """Selects this tracker."""
    tracking_uri: str | None = None
    """Server or database, such as `http://host:5000`; when left out, MLFLOW_TRACKING_URI, or else the database
    `RUN/trackers/mlflow.db`."""

    @field_validator("tracking_uri")
    @classmethod
    def _refuse_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(f"has a password in it; set {cls.secret_variables} in the environment")
        return uri


AnyTracker = TensorboardConfig | WandbConfig | TrackioConfig | MlflowConfig


def _name_to_section(entry: object) -> object:
    """Return the section that a tracker's name alone stands for."""
    return {"kind": entry} if isinstance(entry, str) else entry


def _check_kinds(trackers: tuple[AnyTracker, ...]) -> tuple[AnyTracker, ...]:
    # Each kind has one file with its position in the run's directory.
    check_unique([tracker.kind for tracker in trackers], "trackers", "leave one out")
    return trackers


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
_Entry = Annotated[
    Annotated[AnyTracker, Field(discriminator="kind")],
    BeforeValidator(_name_to_section, json_schema_input_type=TrackerName | AnyTracker),
]
TrackerConfigs = Annotated[tuple[_Entry, ...], AfterValidator(_check_kinds)]
"""A list of names, such as `tensorboard`, and of sections with `kind` and options."""
