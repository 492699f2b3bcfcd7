"""Section `data`, sources of samples and limits on their media, and key `stages[].data_order`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import Field, model_validator

from mmrl.config.schema.base import (
    BAD_DATA_EFFECT,
    NO_EFFECT,
    FunctionConfig,
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


class DataSourceConfig(FunctionConfig):
    """One source of samples: a function that yields them."""

    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """Prefix of the source's sample ids (`name/id`), for sources whose ids collide: every id must be unique."""
    weight: PositiveFloat | None = None
    """The share of training samples drawn from this source is its weight over the sum of all weights. Without
    weights, every sample is drawn once per epoch. Set a weight for all sources or for none."""
    row_filter: RowFilterConfig | None = None
    """Keep only rows whose number in a `meta` column lies in a range; without it all rows are kept."""
    validation_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """About this share of a training source is held out for validation. A hash of the row's id decides, so every run
    holds out the same rows."""


class MediaLimitsConfig(StrictModel):
    """Limits on an image or video, checked before it is decoded."""

    max_image_bytes: NumBytes = 50_000_000
    """An image file of more bytes than this is refused."""
    max_pixels: PositiveInt = 100_000_000
    """An image or frame of more pixels than this (width times height) is refused."""
    max_video_bytes: NumBytes = 2_000_000_000
    """A video file of more bytes than this is refused."""
    max_video_frames: PositiveInt = 500_000
    """A video file of more frames than this is refused."""
    max_video_seconds: PositiveFloat = 7200.0
    """A video of more seconds than this is refused."""
    max_frame_drift_s: PositiveFloat = 0.5
    """A video is refused if the time of a sampled frame is off by more seconds than this from its time at a constant
    frame rate: the model is given only one rate per video."""
    max_data_url_bytes: NumBytes = 10_000_000
    """A medium of more bytes than this in a data URL is refused."""


class MediaConfig(StrictModel):
    """The library that reads videos."""

    video_reader: Literal["pyav", "decord"] = "pyav"
    """Library that decodes the frames of videos. `decord` needs `pip install "mmrl[decord]"`, and refuses videos for
    which it would return the wrong frames."""


class StreamingConfig(StrictModel):
    """Reading of training sources during training: again for each epoch, and without holding all rows in memory."""

    shuffle_buffer_size: PositiveInt = 1000
    """Rows held in memory for shuffling. The checks at the start of a run read this many rows of each source."""


class DataConfig(StrictModel):
    """Sources of samples."""

    dir: str | None = None
    """Folder that replaces `${data}` in all texts of the config, relative to the config's folder; `--data DIR` sets
    it, relative to the working directory."""
    train: Annotated[tuple[DataSourceConfig, ...], Field(min_length=1)]
    """Sources of training samples, which are mixed in a seeded order."""
    validation: tuple[DataSourceConfig, ...] = ()
    """Sources that a stage's `validation` is measured on; they are never trained on."""
    test: tuple[DataSourceConfig, ...] = ()
    """Sources whose rewards are compared before and after the run; they have no other use."""
    on_bad_sample: Annotated[Literal["stop", "skip"], BAD_DATA_EFFECT] = "stop"
    """For an unreadable medium, an unusable row or a target that a reward cannot score: `stop` ends the run, `skip`
    leaves the sample out, counted and listed."""
    on_too_long: Literal["stop", "skip"] = "stop"
    """For a prompt beyond `model.max_prompt_tokens`: `stop` ends the run before it begins; `skip` leaves the sample
    out, counted and listed. Prompts are never cut."""
    on_changed_data: Annotated[Literal["stop", "warn"], BAD_DATA_EFFECT] = "stop"
    """For a resumed run whose rows or media have changed: `stop` ends the run before anything is written; `warn`
    lists the differences, records them in the manifest and continues."""
    media_roots: tuple[str, ...] = (".",)
    """Folders that media must lie in, relative to the config's folder; links that lead out of them are refused. If
    `dir` is set and this key is not, media must lie in `dir`."""
    allowed_url_schemes: tuple[Literal["http", "file", "data"], ...] = ()
    """Kinds of URLs that may name a medium; `http` includes https. A URL is fetched once, when samples are read."""
    media_workers: Annotated[Workers, NO_EFFECT] = 0
    """Processes that open media: all media when the run starts, then the next step's media while a step trains. 0
    opens media in the main process, between steps."""
    media_timeout_s: Annotated[Seconds, NO_EFFECT] = 1800.0
    """Seconds that a media process may take for one sample before it is killed; then `on_bad_sample` applies."""
    streaming: StreamingConfig | None = None
    """Set this for sources that do not fit in memory, or have no end; several sources then need weights. A resumed
    run reads the rows again that it had consumed."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Limits beyond which a medium is refused before it is decoded."""

    @property
    def has_weights(self) -> bool:
        """True if training sources are mixed by weight."""
        return any(source.weight is not None for source in self.train)

    def sources_by_split(self) -> dict[str, tuple[DataSourceConfig, ...]]:
        """Return the sources by the name of their split; a training source with a validation share is in two."""
        shared = [source for source in self.train if source.validation_share]
        return {"train": self.train, "validation": (*self.validation, *shared), "test": self.test}

    @model_validator(mode="after")
    def _check_shares_and_weights(self) -> DataConfig:
        if any(source.validation_share for source in (*self.validation, *self.test)):
            raise ValueError("`validation_share` divides training sources; validation and test sources are used whole")
        if self.streaming and any(source.validation_share for source in self.train):
            raise ValueError(
                "a `validation_share` would be searched for in the whole stream; name `validation` sources"
            )
        all_weighted = all(source.weight is not None for source in self.train)
        if self.has_weights and not all_weighted:
            raise ValueError("give a `weight` to every training source or to none")
        # Every validation and test sample is scored: with a share, results would depend on which samples are drawn.
        if any(source.weight is not None for source in (*self.validation, *self.test)):
            raise ValueError("`weight` mixes training sources; validation and test sources are used whole")
        if self.streaming and len(self.train) > 1 and not all_weighted:
            raise ValueError("with `streaming`, several training sources need a `weight` each, by which they are mixed")
        return self


class ShuffledOrderConfig(StrictModel):
    """Every sample once per epoch, in a new random order each epoch; weighted sources in their shares."""

    kind: Literal["shuffled"]
    """`shuffled` draws every sample once per epoch, in a new order each time."""


class SortedOrderConfig(StrictModel):
    """Every epoch has the same order: the order of the sources, or by a column (easy to hard, for example)."""

    kind: Literal["sorted"]
    """`sorted` draws samples in one order, the same every epoch."""
    column: str | None = None
    """Column of `meta` whose numbers samples are sorted by; without it, samples keep the order of their sources."""
    descending: bool = False
    """Draw the largest numbers first."""

    @model_validator(mode="after")
    def _check_descending(self) -> SortedOrderConfig:
        if self.descending and self.column is None:
            raise ValueError("`descending` needs the `column` whose numbers samples are sorted by")
        return self


class MixtureOrderConfig(StrictModel):
    """Shares of the training sources that change over the steps of the stage."""

    kind: Literal["mixture"]
    """`mixture` draws from each source in shares that change over the steps."""
    points: Annotated[tuple[tuple[NonNegativeInt, tuple[NonNegativeFloat, ...]], ...], Field(min_length=1)]
    """Pairs of a step (from 0) and a list of weights, one for each training source; weight 0 leaves a source out. The
    weights are constant before the first of these steps and after the last. A step is one round of prompts."""
    interpolation: Literal["linear", "steps"] = "linear"
    """`linear` changes weights evenly between two points; `steps` keeps the weights of the earlier point."""

    @model_validator(mode="after")
    def _check_points(self) -> MixtureOrderConfig:
        check_rising_steps([step for step, _ in self.points])
        for step, weights in self.points:
            if not any(weights):
                raise ValueError(f"the weights at step {step} are all 0: nothing could be drawn; set one above 0")
        return self


class PlateauConfig(StrictModel):
    """A plateau of the mean of the `track_rewards` terms.

    It is reached when the mean over `window` steps is less than `min_improvement` above the mean of the window before.
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
    """Return the phase that a data position falls in. `ends` maps phases that a plateau ended to their ends."""
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
        # If the last phase ended, no samples would be left for the steps after it.
        last = self.phases[-1]
        if last.max_samples is not None or last.plateau is not None:
            raise ValueError("the last phase lasts until the stage ends; it takes neither `max_samples` nor `plateau`")
        return self


class PriorityOrderConfig(StrictModel):
    """Samples drawn with probabilities that depend on their tracked rewards, each at most once in a step."""

    kind: Literal["priority"]
    """`priority` draws samples by their last rewards."""
    weight_by: Literal["uncertainty", "failure"] = "uncertainty"
    """Weight of a sample whose last mean reward was p; samples are drawn in proportion to their weights.
    `uncertainty`: 4 p (1 - p). `failure`: 1 - p (Kimi k1.5). A sample that was not drawn yet has weight 1."""
    min_weight: PositiveFraction = 0.05
    """Lower bound of all weights, so that samples that were too hard or too easy are still drawn sometimes."""


DataOrderConfig: TypeAlias = Annotated[
    ShuffledOrderConfig | SortedOrderConfig | MixtureOrderConfig | CurriculumOrderConfig | PriorityOrderConfig,
    Field(discriminator="kind"),
]
