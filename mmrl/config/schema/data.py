"""Where samples come from, and what their media may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveInt, StrictModel


class RowFilterConfig(StrictModel):
    """A filter on what is known of rows beforehand: a pass rate, a difficulty, a score of quality."""

    column: str
    """Column of the rows' `meta`; a row without a number there is refused."""
    low: float | None = None
    """Least value that is kept; null for any."""
    high: float | None = None
    """Largest value that is kept; null for any."""

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
    """`package.module:function` or `./file.py:function`, resolved at start."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of that function."""
    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """Put before its samples' ids (`name/id`), for sources whose ids meet: no two samples may have the same."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the training samples drawn from this source, over the sum of all weights; without weights, every sample
    is drawn once per epoch. Give it to all sources or to none."""
    row_filter: RowFilterConfig | None = None
    """Which rows are taken, by a number they carry; all where there is none."""


class MediaLimitsConfig(StrictModel):
    """What a picture or video may be; checked before it is decoded."""

    max_image_bytes: PositiveInt = 50_000_000
    """Size of a picture's file."""
    max_pixels: PositiveInt = 100_000_000
    """Width times height, of a picture or of a frame."""
    max_aspect_ratio: Annotated[int, Field(ge=1, le=200)] = 200
    """Longer side over shorter side; the families' resize rule knows nothing beyond 200."""
    max_decompression_ratio: PositiveInt = 2000
    """Bytes of pixels per byte of a picture's file; beyond it is a decompression bomb."""
    max_video_bytes: PositiveInt = 2_000_000_000
    """Size of a video's file."""
    max_video_frames: PositiveInt = 500_000
    """Frames in a video's file."""
    max_video_seconds: Annotated[float, Field(gt=0.0)] = 7200.0
    """Length of a video's file."""
    max_frame_drift_s: Annotated[float, Field(gt=0.0)] = 0.5
    """How far a sampled frame may stand from where a constant rate would have it: variable rates mislead the model."""
    max_data_url_bytes: PositiveInt = 10_000_000
    """Size of a medium written into a data URL."""


class StreamingConfig(StrictModel):
    """Training sources are read as training goes, again for each epoch, and never held in memory."""

    shuffle_buffer_size: PositiveInt = 1000
    """Rows held to be shuffled. The checks at start look at so many rows of each source."""


class DataConfig(StrictModel):
    """Where samples come from."""

    train: Annotated[tuple[DataSourceConfig, ...], Field(min_length=1)]
    """Sources of training samples, mixed in a seeded order."""
    validation: tuple[DataSourceConfig, ...] = ()
    """Sources that a stage's `validation` looks at; never trained on."""
    test: tuple[DataSourceConfig, ...] = ()
    """Sources of the before/after table; looked at for nothing else."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """What an unreadable medium or unusable row does: end the run, or be left out, counted and listed."""
    on_too_long: Literal["stop", "skip"] = "stop"
    """What a prompt beyond `model.max_prompt_tokens` does: end the run before it begins, or be left out, counted and
    listed. Nothing is ever cut."""
    media_roots: tuple[str, ...] = (".",)
    """Folders that media must lie in, from the config's folder; links that lead out of them are refused."""
    allowed_url_schemes: tuple[Literal["http", "file", "data"], ...] = ()
    """Kinds of URLs that may name a medium; `http` stands for https too and is fetched once, when samples are read."""
    media_workers: NonNegativeInt = 0
    """Processes that open media: all at the start, the next step's while this one trains; 0 does it in between."""
    streaming: StreamingConfig | None = None
    """For sets that do not fit in memory, and endless generators; several sources need weights. A resumed run reads
    the rows it had seen again."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Safety limits on media."""

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        weighted = [origin.weight is not None for origin in self.train]
        if any(weighted) and not all(weighted):
            raise ValueError("give a `weight` to every training source or to none")
        if any(origin.weight is not None for origin in (*self.validation, *self.test)):
            raise ValueError("`weight` mixes training sources; held-out data are looked at whole")
        if self.streaming and len(self.train) > 1 and not all(weighted):
            raise ValueError(
                "with `stream`, several training sources need a `weight` each; they are mixed as they come"
            )
        return self
