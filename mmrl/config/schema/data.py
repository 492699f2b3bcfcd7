"""Section `data`: sources of samples, and limits on their media."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


class RowFilterConfig(StrictModel):
    """A filter on a number that rows carry: a pass rate, a difficulty, a quality score."""

    column: str
    """Column of the rows' `meta`; a row without a number there is refused."""
    low: float | None = None
    """Least value that is kept; null for no bound."""
    high: float | None = None
    """Largest value that is kept; null for no bound."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RowFilterConfig:
        if self.low is None and self.high is None:
            raise ValueError("set `low`, `high` or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} must not exceed high {self.high}")
        return self


class DataSourceConfig(StrictModel):
    """One source of samples."""

    fn: str
    """`package.module:function` or `./file.py:function`, loaded when the run starts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of that function."""
    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """Prefix of its samples' ids (`name/id`), for sources whose ids collide: no two samples may have the same id."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the training samples drawn from this source, over the sum of all weights; without weights, every sample
    is drawn once per epoch. Give it to all sources or to none."""
    row_filter: RowFilterConfig | None = None
    """Filter on a number that rows carry; without it all rows are taken."""


class MediaLimitsConfig(StrictModel):
    """Limits on an image or video, checked before it is decoded."""

    max_image_bytes: PositiveInt = 50_000_000
    """Size of an image file, in bytes."""
    max_pixels: PositiveInt = 100_000_000
    """Width times height of an image or a frame."""
    max_aspect_ratio: Annotated[int, Field(ge=1, le=200)] = 200
    """Longer side over shorter side; the model families' resize rules are undefined beyond 200."""
    max_decompression_ratio: PositiveInt = 2000
    """Bytes of pixels per byte of an image file; a decompression bomb has more."""
    max_video_bytes: PositiveInt = 2_000_000_000
    """Size of a video file, in bytes."""
    max_video_frames: PositiveInt = 500_000
    """Frames in a video file."""
    max_video_seconds: PositiveFloat = 7200.0
    """Length of a video file, in seconds."""
    max_frame_drift_s: PositiveFloat = 0.5
    """Seconds between a sampled frame and its place at a constant frame rate: variable rates mislead the model."""
    max_data_url_bytes: PositiveInt = 10_000_000
    """Size of a medium written into a data URL, in bytes."""


class StreamingConfig(StrictModel):
    """Training sources read while training goes on, again for each epoch, and never held in memory."""

    shuffle_buffer_size: PositiveInt = 1000
    """Rows held for shuffling. The checks at the start of a run look at so many rows of each source."""


class DataConfig(StrictModel):
    """Sources of samples."""

    train: Annotated[tuple[DataSourceConfig, ...], Field(min_length=1)]
    """Sources of training samples, mixed in a seeded order."""
    validation: tuple[DataSourceConfig, ...] = ()
    """Sources for a stage's `validation`; never trained on."""
    test: tuple[DataSourceConfig, ...] = ()
    """Sources of the table of rewards before and after the run; used for nothing else."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """After an unreadable medium or unusable row: end the run, or leave the sample out, counted and listed."""
    on_too_long: Literal["stop", "skip"] = "stop"
    """After a prompt beyond `model.max_prompt_tokens`: end the run before it begins, or leave the sample out, counted
    and listed. Nothing is ever cut."""
    media_roots: tuple[str, ...] = (".",)
    """Folders that media must lie in, relative to the config's folder; links that lead out of them are refused."""
    allowed_url_schemes: tuple[Literal["http", "file", "data"], ...] = ()
    """Kinds of URLs that may name a medium; `http` includes https. A URL is fetched once, when samples are read."""
    media_workers: NonNegativeInt = 0
    """Processes that open media: all of them when the run starts, the next step's while a step trains. 0 opens media in
    the main process, between steps."""
    streaming: StreamingConfig | None = None
    """Stream sources that do not fit in memory, or have no end; several sources need weights. A resumed run reads the
    rows again that it had consumed."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Safety limits on media."""

    @property
    def has_weights(self) -> bool:
        """True if training sources are mixed by weight."""
        return any(source.weight is not None for source in self.train)

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        all_weighted = all(source.weight is not None for source in self.train)
        if self.has_weights and not all_weighted:
            raise ValueError("give a `weight` to every training source or to none")
        if any(source.weight is not None for source in (*self.validation, *self.test)):
            raise ValueError("`weight` mixes training sources; validation and test sources are used whole")
        if self.streaming and len(self.train) > 1 and not all_weighted:
            raise ValueError("with `streaming`, several training sources need a `weight` each, by which they are mixed")
        return self
