"""The nouns: frozen data that crosses rooms. Standard library only.

A run is a chain of these, each made from the one before:

    Sample ──ask──► Prompt ──answer──► Rollout ──judge──► Group ──choose──► Experience ──learn──► weights

Example, one counting question on its way through the loop:

    Sample(id="count-7", task="count", parts=(ImageRef(path="7.png", sha256="ab.."), "How many red dots?"),
           target=Target(kind=Kind.NUMBER, value=3))
    Prompt(sample=..., ids=(5, 9, 9, ..), grids=((1, 6, 6),), resizes=(ResizeMap((48, 48), (48, 48)),), ..)
    Rollout(prompt=..., index=0, segments=(Segment(ids=(41, 3), logps=(-0.2, -1.1), author=Author.POLICY),), ..)
    Score(terms={"count": Term(0.0, "2, expected 3")}, total=0.0)
    Group(prompt=..., rollouts=(.., ..), scores=(.., ..))
    Experience(rollout=..., advantage=-0.7)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple


class UserError(Exception):
    """Something the user can put right: a path, a key, a value, a full disk. Ends the command with exit code 2."""


class TooLongError(UserError):
    """A prompt of more tokens than `model.max_prompt_tokens`."""


class Interrupted(Exception):
    """The user asked the run to stop, and everything is saved."""


class Unscorable(Exception):
    """A reward cannot judge this sample (unusable gold, a service that failed). It is never a score of 0."""


class Author(StrEnum):
    """Who produced a segment's tokens; what may be trained follows from it and from nothing else."""

    POLICY = "policy"  # sampled by the model: the policy term
    TEACHER = "teacher"  # a demonstration: the likelihood term
    TRIGGER = "trigger"  # text forced upon the model: never trained
    ENV = "env"  # a tool's or environment's text: never trained


class Kind(StrEnum):
    """What an answer is, hence how it is written, parsed and compared; beside each, the Python value it parses to."""

    TEXT = "text"  # str
    CHOICE = "choice"  # str, one upper-case letter
    NUMBER = "number"  # int | float, finite
    BOX = "box"  # (x1, y1, x2, y2)
    BOXES = "boxes"  # tuple[Region, ...], four coordinates each
    POINT = "point"  # (x, y)
    POINTS = "points"  # tuple[Region, ...], two coordinates each
    SPAN = "span"  # (start, end), seconds
    SPANS = "spans"  # tuple of (start, end), seconds
    PERMUTATION = "permutation"  # tuple[int, ...], a bijection of 1..n
    ACTION = "action"  # Action
    LIST = "list"  # tuple[str, ...]
    JSON = "json"  # what json.loads gives
    LATEX = "latex"  # str, without delimiters
    SVG = "svg"  # str, one <svg> element
    TOOL_CALL = "tool_call"  # Action


class Frame(StrEnum):
    """What a coordinate is measured in. x runs right, y runs down, both from the top left corner."""

    PX_ORIGINAL = "px_original"
    PX_RESIZED = "px_resized"
    NORM_1 = "norm_1"
    NORM_1000 = "norm_1000"


class Size(NamedTuple):
    """A picture's extent, in pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ResizeMap:
    """How one picture was resized before the model saw it; the only converter of coordinates between frames.

    Of a part of a picture, `original` is the part's extent and `corner` where it begins: PX_ORIGINAL counts from the
    corner of the whole, every other frame from that of the part.
    """

    original: Size
    resized: Size
    corner: tuple[int, int] = (0, 0)

    def convert(self, values: Sequence[float], source: Frame, target: Frame) -> tuple[float, ...]:
        """Convert x, y, x, y, ... from one frame to another.

        Raises:
            ValueError: an odd number of values.
        """
        if len(values) % 2:
            raise ValueError(f"coordinates come in x, y pairs, got {len(values)} values: {list(values)}")
        if source == target:
            return tuple(float(value) for value in values)
        (start, span), (other_start, other_span) = self._reach(source), self._reach(target)
        places = ((i % 2, value) for i, value in enumerate(values))
        return tuple((value - start[i]) / span[i] * other_span[i] + other_start[i] for i, value in places)

    def _reach(self, frame: Frame) -> tuple[tuple[int, int], tuple[float, float]]:
        """Where the picture begins and how far it goes."""
        match frame:
            case Frame.PX_ORIGINAL:
                return self.corner, self.original
            case Frame.PX_RESIZED:
                return (0, 0), self.resized
            case Frame.NORM_1:
                return (0, 0), (1.0, 1.0)
            case Frame.NORM_1000:
                return (0, 0), (1000.0, 1000.0)


class Veil(StrEnum):
    """What hides a medium from a model, of which one wants to know whether it looks; its size stays."""

    GREY = "grey"
    NOISE = "noise"
    SHUFFLED = "shuffled"  # the frames of a video


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A picture by reference: a path and the sha256 (hex) of the file's bytes, never pixels. With `at`, the file is a
    video (with `fps`, a folder of frames) and the picture what it shows at that second; `crop` (left, top, right,
    bottom, in its pixels) is a part.
    """

    path: str
    sha256: str
    veil: Veil | None = None
    at: float | None = None
    crop: tuple[int, int, int, int] | None = None
    fps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRef:
    """A video by reference, like `ImageRef`; `start` and `end` (seconds) choose a part of it. With `fps`, the path is a
    folder of pictures, its frames in natural order, so many a second.
    """

    path: str
    sha256: str
    start: float | None = None
    end: float | None = None
    veil: Veil | None = None
    fps: float | None = None


MediaRef = ImageRef | VideoRef
Part = str | ImageRef | VideoRef


class Region(NamedTuple):
    """A box or a point with what it is called and how sure the model is, where it says so."""

    coordinates: tuple[float, ...]
    label: str = ""
    confidence: float | None = None


class Action(NamedTuple):
    """Something to do, such as `click`, and its arguments; coordinates in them are in the frame of the answer."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The right answer. `frame` is set for coordinates and only for them; they belong to the sample's medium number
    `medium`, counted from 0 in reading order.
    """

    kind: Kind
    value: Any
    frame: Frame | None = None
    medium: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question of a dataset. `target` is what rewards check; `label` is what an annotator wrote, and `response` a
    whole response in the model's own format and frame: for imitation.
    """

    id: str
    task: str
    parts: tuple[Part, ...]
    target: Target
    label: Target | None = None
    thought: str | None = None
    response: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The pictures alone, in reading order."""
        return tuple(part for part in self.parts if isinstance(part, ImageRef))

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """The pictures and videos, in reading order."""
        return tuple(part for part in self.parts if not isinstance(part, str))


class Reject(NamedTuple):
    """A row a dataset could not turn into a sample, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which media may be read: files under `roots` (resolved), and URLs of these `schemes` (http, file, data)."""

    roots: tuple[Path, ...]
    schemes: tuple[str, ...] = ()
    max_bytes: int = 50_000_000
    max_video_bytes: int = 2_000_000_000
    max_data_url_bytes: int = 10_000_000


class Place(NamedTuple):
    """Where a dataset function works: files it makes go under `work`; relative paths start from `base`."""

    work: Path
    base: Path
    seed: int
    access: Access = Access(roots=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a reward sees of a rollout; it sees the whole sample too. Coordinates in `answer` are in `frame`.

    `resizes` has one map per medium of the sample, in reading order; a video's frames share one. `shown` has those of
    what tools showed; no coordinates of `answer` are measured there.
    """

    text: str
    answer: Answer
    finish: Finish
    num_tokens: int
    resizes: tuple[ResizeMap, ...]
    frame: Frame
    shown: tuple[ResizeMap, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A sample as the model will read it: `ids` with every placeholder expanded, `digest` a hash of ids, grids, pixels.

    `grids` (t, h, w, in patches) and `resizes` have one entry per medium, in reading order.
    """

    sample: Sample
    ids: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    resizes: tuple[ResizeMap, ...]
    frame: Frame
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLaw:
    """The distribution tokens are drawn from, which the learner evaluates too, and where drawing ends: after EOS, after
    the token that completes one of the strings of `stop`, or after so many tokens. Temperature 0 means greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    banned: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_new_tokens: int

    @property
    def divisor(self) -> float:
        """What logits are divided by: the temperature; 1 for the greedy law, which is evaluated as if it were drawn."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A picture or video that a tool shows in a response; `digest` is a hash of its tokens, grid and patches."""

    ref: MediaRef
    grid: tuple[int, int, int]
    resize: ResizeMap
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens by one author. `logps` are behaviour log-probs in nats, one per token, under the law they were
    drawn from: `law`, or that of the rollout where it is None. Of a `view` they are the tokens, all of them, alone.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    author: Author
    version: int = 0
    law: SamplingLaw | None = None
    view: View | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response, parsed once. `value` is None when nothing of the right kind stands where the answer belongs.

    `sections` holds the text of the grammar's other parts, by their tags: an observation before the thinking, say.
    """

    text: str | None
    thought: str | None
    value: Any
    problems: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)


class Finish(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    STOP = "stop"  # a string that ends responses
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response to a prompt; `index` is its place among its siblings, `parent` that of the draft it went on from.

    `right` is what a step that made it go on found the end to be; None where none has, or where it went on since.
    """

    prompt: Prompt
    index: int
    segments: tuple[Segment, ...]
    text: str
    answer: Answer
    finish: Finish
    law: SamplingLaw
    parent: int | None = None
    right: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt, whoever wrote them."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def views(self) -> tuple[View, ...]:
        """What tools showed, in order."""
        return tuple(segment.view for segment in self.segments if segment.view is not None)

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """The pictures and videos that it saw: the sample's, then what tools showed."""
        return (*self.prompt.sample.media, *(view.ref for view in self.views))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a rollout program made of prompts, in their order: a group of rollouts for each; rollouts that never train,
    by what was done to their prompt (a picture left out, say); and numbers to tell. Groups that are not complete wait
    in `pending` for the next step.
    """

    groups: tuple[tuple[Rollout, ...], ...]
    pending: tuple[tuple[Rollout, ...], ...] = ()
    probes: tuple[Mapping[str, tuple[Rollout, ...]], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Term(NamedTuple):
    """What one reward says: a value in its declared range and one line a person can read."""

    value: float
    reason: str


class Fault(StrEnum):
    """Why a reward gave no value; the value names the metric `reward/<term>/<fault>`."""

    UNSCORABLE = "unscorable"  # it said so
    TIMEOUT = "timeouts"  # it was stopped at its deadline
    DEATH = "deaths"  # its process died
    ERROR = "errors"  # it raised something else, or returned no number in its range


class Failure(NamedTuple):
    """A reward that gave no value for a response."""

    fault: Fault
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Named reward terms, as the rewards gave them, and the total; a term in `failures` holds its fallback."""

    terms: Mapping[str, Term]
    total: float
    failures: Mapping[str, Failure] = field(default_factory=dict)


class HeldOut(NamedTuple):
    """What held-out samples earned, task → sample id → total reward, and what the rollout program counted."""

    rewards: Mapping[str, Mapping[str, float]]
    counts: Mapping[str, float]


class Skip(NamedTuple):
    """A rollout left out of its group, and the terms at fault; none when a sibling's failure took it along."""

    rollout: Rollout
    failures: Mapping[str, Failure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt, its judged rollouts and their scores, in the same order, and those that could not be judged.

    `probes` are the scores of rollouts that never train, by what was done to their prompt (a picture left out, say).
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    skipped: tuple[Skip, ...] = ()
    probes: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)

    @property
    def drawn(self) -> tuple[Rollout, ...]:
        """Every rollout of the prompt, judged or not."""
        return (*self.rollouts, *(skip.rollout for skip in self.skipped))

    @property
    def failures(self) -> tuple[tuple[str, Failure], ...]:
        """Every failed call, by the name of its term."""
        failures = (*(score.failures for score in self.scores), *(skip.failures for skip in self.skipped))
        return tuple(failed for of_one in failures for failed in of_one.items())

    @property
    def totals(self) -> tuple[float, ...]:
        """Total reward of each rollout."""
        return tuple(score.total for score in self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout with what it teaches. `advantage` scales the policy term of its POLICY tokens.

    `age` is how many policy versions ago it was sampled, 0 where it is fresh. `old`, where set, is whose probabilities
    stand below the ratio, whatever the loss says of fresh ones.
    """

    rollout: Rollout
    advantage: float
    age: int = 0
    old: Literal["sampler", "learner"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a step learns from: the groups that count, their advantages, the experiences made of them and of others
    remembered, and numbers to tell.
    """

    groups: tuple[Group, ...]
    advantages: tuple[tuple[float, ...], ...]
    experiences: tuple[Experience, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Visit(NamedTuple):
    """How a sample fared when it was drawn: mean and standard deviation of a reward over its rollouts."""

    mean: float
    std: float


@dataclass(slots=True, kw_only=True)
class State:
    """What a run remembers beyond weights and optimizer: exactly what a checkpoint adds to them.

    `step_start` is the position where the next step's samples begin. `history` has the visits of each sample by id;
    `phase` and what follows it is where a curriculum stands: the ends that were settled by a plateau, and the rewards
    of the steps since the phase began.
    `memory` is what may be replayed, oldest first; `carried` groups passed the filter and wait for the next step.
    `ahead` is the first round of the step to come, answered while the last one was learned.
    """

    stage: int = 0
    step: int = 0
    cursor: int = 0
    version: int = 0
    barren_steps: int = 0
    bad_steps: int = 0
    stage_done: bool = False
    metrics_bytes: int = 0
    pending: tuple[tuple[Rollout, ...], ...] = ()
    ahead: Answers | None = None
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_start: int = 0
    history: dict[str, list[Visit]] = field(default_factory=dict)
    phase: int = 0
    phase_ends: dict[int, int] = field(default_factory=dict)
    phase_rewards: list[float] = field(default_factory=list)
    memory: tuple[Experience, ...] = ()
    carried: tuple[Group, ...] = ()
