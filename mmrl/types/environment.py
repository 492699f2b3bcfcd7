"""What tools and environments show to the model, and the interface of environments. Needs only the standard library.

Words and contracts follow gymnasium (https://gymnasium.farama.org/api/env): `reset`, `step`, `terminated` for an end
that belongs to the task, `truncated` for one that does not. Departures: observations are text and media, `step` returns
a `StepResult` in place of a tuple, and `valid` says whether the environment could use the action at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from mmrl.types.sample import Action, CoordinateSystem, MediaRef, Sample

LAST_MEDIUM: Final = 0
"""Medium number by which an environment refers to the last image or video that the response has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCrop:
    """A rectangle of an image that the response has seen."""

    medium_number: int
    """Number of the image, from 1 in the order in which the response saw them, the question's first."""
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 on that very image, in `coordinate_system`."""
    coordinate_system: CoordinateSystem | None = None
    """Units of the box; None for the model's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFrames:
    """Single frames of a video that the response has seen, each shown as an image."""

    medium_number: int
    """Number of the video, as in `ImageCrop`."""
    seconds: tuple[float, ...]
    """Times of the frames, from the start of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoClip:
    """A part of a video, with frames sampled again as for any video: closer together than in the whole."""

    medium_number: int
    """Number of the video, as in `ImageCrop`."""
    start: float
    """Seconds from the start of the file."""
    end: float
    """Seconds from the start of the file."""


MediaResult: TypeAlias = ImageCrop | VideoFrames | VideoClip
"""Part of an image or video that the response has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Media, and text after them, that an environment shows to the model."""

    text: str = ""
    media: tuple[bytes | MediaRef | MediaResult, ...] = ()
    """PNG or JPEG files in bytes, files under `data.media_roots`, or parts of media that the response has seen."""
    state: str | None = None
    """Name of the state, by which `advantage.credit: gigpo` compares siblings; None: the hash of what is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of an action in an environment."""

    observation: Observation = field(default_factory=Observation)
    """What the model sees next; not shown after the end of the episode."""
    reward: float = 0.0
    """Reward of the action, finite; reward functions read it from `response.turns`."""
    terminated: bool = False
    """The task has ended, well or badly."""
    truncated: bool = False
    """The episode was cut for another reason, such as a limit of time."""
    valid: bool = True
    """The environment could use the action; False for text that is not one of its actions."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers for metrics and rewards, such as {"success": 1.0}."""


class Environment(Protocol):
    """A task with state, one episode at a time, in a worker process that is killed when a call takes too long.

    A replayable environment is a function of sample, seed and actions: the same ones give the same observations, to the
    byte. Demonstrations are made with a method `expert()`, if it has one: the action that an expert would take now.
    """

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin an episode. The first observation is the question of `sample`, or empty if the sample states all of it.

        Siblings, the rollouts of one group, are given equal seeds.
        """

    def step(self, action: Any) -> StepResult:  # noqa: ANN401  # text, or an Action: see below
        """Take an action: a str, or with `action: call` an `Action` with name and arguments that the model wrote.

        Any exception counts as a failure of the environment: the rollout gets no score, not a reward of 0.
        """

    def close(self) -> None:
        """End the episode. The environment is not used again, so keep expensive objects at module level."""
        return  # a subclass without anything to release inherits this


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action of the policy in an environment, and its result. An episode is its sample, seed and actions."""

    action: str | Action | None = None
    """The action as the environment was given it; None if the policy wrote none."""
    state: str = ""
    """Name of the state in which the action was taken."""
    reward: float = 0.0
    """Reward that the environment gave."""
    terminated: bool = False
    truncated: bool = False
    """The environment cut the episode here, or a limit of turns, media or tokens did."""
    valid: bool = True
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment reported."""
