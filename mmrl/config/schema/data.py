"""Section `data`, sources of samples and limits on their media, and key `stages[].data_order`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field, model_validator

from mmrl.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    NumBytes,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    SampleConditions,
    Seconds,
    StrictModel,
    Workers,
    check_rising_steps,
)


class RowFilterConfig(StrictModel):
    """A filter on a number that rows carry: a pass rate, a difficulty, a quality score."""

    column: str
    """Column of the rows' `meta`; a row without a number there is refused."""
    low: float | None = None
    """The least value that is kept; null sets no lower bound."""
    high: float | None = None
    """The largest value that is kept; null sets no upper bound."""

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
    """Options that the function is called with."""
    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """Prefix of its samples' ids (`name/id`), for sources whose ids collide: no two samples may have the same id."""
    weight: PositiveFloat | None = None
    """Share of the training samples drawn from this source, over the sum of all weights; without weights, every sample
    is drawn once per epoch. Give it to all sources or to none."""
    row_filter: RowFilterConfig | None = None
    """Keep only rows in a range of a number that they carry; without it all rows are taken."""
    validation_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """About this share of a training source is held out for validation. A hash of a row's id decides, so that every run
    holds out the same rows."""


class MediaLimitsConfig(StrictModel):
    """Limits on an image or video, checked before it is decoded."""

    max_image_bytes: NumBytes = 50_000_000
    """An image file of more bytes is refused."""
    max_pixels: PositiveInt = 100_000_000
    """An image or frame whose width times height is more pixels is refused."""
    max_video_bytes: NumBytes = 2_000_000_000
    """A video file of more bytes is refused."""
    max_video_frames: PositiveInt = 500_000
    """A video file of more frames is refused."""
    max_video_seconds: PositiveFloat = 7200.0
    """A video of more seconds is refused."""
    max_frame_drift_s: PositiveFloat = 0.5
    """A video is refused if a sampled frame is more seconds from its place at a constant rate, which misleads the
    model."""
    max_data_url_bytes: NumBytes = 10_000_000
    """A medium of more bytes in a data URL is refused."""


class MediaConfig(StrictModel):
    """The library that reads videos."""

    video_reader: Literal["pyav", "decord"] = "pyav"
    """Library that decodes the frames of videos. `decord` needs `pip install "mmrl[decord]"`, and refuses videos of
    which it would give other frames than those asked for."""


class StreamingConfig(StrictModel):
    """Training sources read while training continues, again for each epoch, and never held in memory."""

    shuffle_buffer_size: PositiveInt = 1000
    """Rows that are held for shuffling. The checks at the start of a run look at so many rows of each source."""


class DataConfig(StrictModel):
    """Sources of samples."""

    dir: str | None = None
    """Folder that `${data}` stands for in all texts of the config, as `--data DIR` sets it."""
    train: Annotated[tuple[DataSourceConfig, ...], Field(min_length=1)]
    """Sources of training samples, which are mixed in a seeded order."""
    validation: tuple[DataSourceConfig, ...] = ()
    """Sources that a stage's `validation` is measured on; they are never trained on."""
    test: tuple[DataSourceConfig, ...] = ()
    """Sources whose rewards are compared before and after the run; they are used for nothing else."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """After an unreadable medium or unusable row: end the run, or leave the sample out, counted and listed."""
    on_too_long: Literal["stop", "skip"] = "stop"
    """After a prompt beyond `model.max_prompt_tokens`: end the run before it begins, or leave the sample out, counted
    and listed. Nothing is ever cut."""
    on_changed_data: Literal["stop", "warn"] = "stop"
    """After a resumed run finds other rows or media than it began with: end it before anything is written, or list the
    differences, record them in the manifest and continue."""
    media_roots: tuple[str, ...] = (".",)
    """Folders that media must lie in, relative to the config's folder; links that lead out of them are refused. With
    `dir` and without roots, media must lie in `dir`."""
    allowed_url_schemes: tuple[Literal["http", "file", "data"], ...] = ()
    """Kinds of URLs that may name a medium; `http` includes https. A URL is fetched once, when samples are read."""
    media_workers: Workers = 0
    """Processes that open media: all of them when the run starts, the next step's while a step trains. 0 opens media in
    the main process, between steps."""
    media_timeout_s: Seconds = 1800.0
    """Seconds one of these processes may take for the media of a sample before it is killed; the sample is then bad."""
    streaming: StreamingConfig | None = None
    """Stream sources that do not fit in memory, or have no end; several sources need weights. A resumed run reads the
    rows again that it had consumed."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Limits beyond which a medium is refused before it is decoded."""

    @property
    def has_weights(self) -> bool:
        """True if training sources are mixed by weight."""
        return any(source.weight is not None for source in self.train)

    @model_validator(mode="after")
    def _check_validation_shares(self) -> DataConfig:
        if any(source.validation_share for source in (*self.validation, *self.test)):
            raise ValueError("`validation_share` divides training sources; validation and test sources are used whole")
        if self.streaming and any(source.validation_share for source in self.train):
            raise ValueError(
                "a `validation_share` would be searched for in the whole stream; name `validation` sources"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        all_weighted = all(source.weight is not None for source in self.train)
        if self.has_weights and not all_weighted:
            raise ValueError("give a `weight` to every training source or to none")
        # They are measured whole and once: a share would make results depend on a draw.
        if any(source.weight is not None for source in (*self.validation, *self.test)):
            raise ValueError("`weight` mixes training sources; validation and test sources are used whole")
        if self.streaming and len(self.train) > 1 and not all_weighted:
            raise ValueError("with `streaming`, several training sources need a `weight` each, by which they are mixed")
        return self


class ShuffledOrderConfig(StrictModel):
    """Every sample once per epoch, shuffled again for each; weighted sources in their shares."""

    kind: Literal["shuffled"]
    """`shuffled` draws every sample once per epoch, in a new order each time."""


class SortedOrderConfig(StrictModel):
    """One order for every epoch: that of the sources, or by a column (easy to hard, for example)."""

    kind: Literal["sorted"]
    """`sorted` draws samples in one order, the same every epoch."""
    column: str | None = None
    """Column of `meta` whose numbers samples are sorted by; without it they keep the order of their sources."""
    descending: bool = False
    """Draw the largest numbers first."""


class MixtureOrderConfig(StrictModel):
    """Shares of the training sources that change over the steps of the stage."""

    kind: Literal["mixture"]
    """`mixture` draws from each source in shares that change over the steps."""
    points: Annotated[tuple[tuple[NonNegativeInt, tuple[NonNegativeFloat, ...]], ...], Field(min_length=1)]
    """Pairs of a step (from 0) and a weight for each training source; weight 0 leaves a source out. The weights are
    constant before the first step and after the last one. A step is one round of prompts."""
    interpolation: Literal["linear", "steps"] = "linear"
    """`linear` changes weights evenly between two points; `steps` keeps those of the earlier point."""

    @model_validator(mode="after")
    def _check_points(self) -> MixtureOrderConfig:
        check_rising_steps([step for step, _ in self.points])
        for step, weights in self.points:
            if not any(weights):
                raise ValueError(f"the weights at step {step} are all 0: nothing could be drawn; set one above 0")
        return self


class PlateauConfig(StrictModel):
    """A stop of progress, measured by the mean of the `track_rewards` terms.

    The mean over `window` steps is less than `min_improvement` above that of the window before.
    """

    window: PositiveInt = 20
    """Steps that each of the two compared means covers."""
    min_improvement: NonNegativeFloat = 0.01
    """The mean reward must rise by this much from window to window to count as progress."""


class CurriculumPhaseConfig(StrictModel):
    """A phase of a curriculum; the last one lasts until the stage ends."""

    when: SampleConditions = Field(default_factory=dict)
    """Samples that the phase draws: allowed values of `task` or of a column of `meta`. All samples when empty."""
    max_samples: PositiveInt | None = None
    """The phase ends after this many samples were drawn in it."""
    plateau: PlateauConfig | None = None
    """The phase ends when the reward stops rising."""


class PhaseSpan(NamedTuple):
    """Data positions that one phase covers, from `start` up to `end`."""

    phase_index: int  # index of the phase in `data_order.phases`, from 0
    start: int  # first data position of the phase
    end: float  # first data position after it; infinite for the last phase and for one that only a plateau ends


def find_phase(position: int, phases: Sequence[CurriculumPhaseConfig], ends: Mapping[int, int]) -> PhaseSpan:
    """Return the phase that a data position falls in. `ends` has the ends that a plateau settled, by phase index."""
    start = 0
    for index, phase in enumerate(phases[:-1]):
        planned_end = inf if phase.max_samples is None else start + phase.max_samples
        end = ends.get(index, planned_end)
        if position < end:
            return PhaseSpan(index, start, end)
        start = int(end)
    return PhaseSpan(len(phases) - 1, start, inf)


class CurriculumOrderConfig(StrictModel):
    """Phases one after another, each with its own samples, shuffled."""

    kind: Literal["curriculum"]
    """`curriculum` goes through phases, each with its own samples."""
    phases: Annotated[tuple[CurriculumPhaseConfig, ...], Field(min_length=2)]
    """The phases, which follow each other in this order."""

    @model_validator(mode="after")
    def _check_phases(self) -> CurriculumOrderConfig:
        for index, phase in enumerate(self.phases[:-1]):
            if phase.max_samples is None and phase.plateau is None:
                raise ValueError(f"phase {index} never ends, and others follow; give it `max_samples` or `plateau`")
        # Were the last one to end, no sample would be left for the steps after it.
        last = self.phases[-1]
        if last.max_samples is not None or last.plateau is not None:
            raise ValueError("the last phase lasts until the stage ends; it takes neither `max_samples` nor `plateau`")
        return self


class PriorityOrderConfig(StrictModel):
    """Samples drawn for every step with probabilities that follow from their tracked rewards, never twice in a step."""

    kind: Literal["priority"]
    """`priority` draws samples by their last rewards."""
    weight_by: Literal["uncertainty", "failure"] = "uncertainty"
    """Probability of drawing a sample whose last mean reward was p: in proportion to 4 p (1 - p), or 1 - p (Kimi k1.5).
    A sample not drawn yet has weight 1."""
    min_weight: PositiveFraction = 0.05
    """No weight is less, so that samples that were too hard or too easy are drawn again now and then."""


DataOrderConfig: TypeAlias = Annotated[
    ShuffledOrderConfig | SortedOrderConfig | MixtureOrderConfig | CurriculumOrderConfig | PriorityOrderConfig,
    Field(discriminator="kind"),
]
