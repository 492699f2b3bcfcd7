"""What is done with a prompt until it has its rollouts: a list of steps, each taking over what the one before left."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mmrl.config.schema.base import Count, Fraction, Positive, Strict, Word
from mmrl.config.schema.presets import RETHINKING, Rethinking, refuse_gaps

Above0 = Annotated[float, Field(gt=0.0)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class Generate(Strict):
    """`group_size` responses to each prompt: the first step, and often the only one.

    With `chunk`, groups that take long go on in later steps, each token under the weights it was drawn with (APRIL).
    """

    kind: Literal["generate"]
    """Selects this kind of step."""
    chunk: Positive | None = None
    """Tokens drawn of every open response before a look at which groups are complete; without it, all are completed."""
    over_sample: Annotated[float, Field(ge=1.0, le=16.0)] = 1.0
    """Prompts asked at once, relative to `prompts_per_step`: as soon as that many groups are complete the step goes on,
    and the others wait for the next."""
    token_budget: Positive | None = None
    """Tokens drawn in a step, about: then the step goes on with the groups that are complete, one at least."""

    @model_validator(mode="after")
    def _looks(self) -> Generate:
        if self.chunk is None and (self.over_sample > 1.0 or self.token_budget is not None):
            raise ValueError("over_sample and token_budget need `chunk`: how often to look at what is complete")
        return self


class Trigger(Strict):
    """Words that the model is made to say, and that it never learns."""

    text: Annotated[str, Field(min_length=1)]
    """The words, with the blank that parts them from the draft."""
    weight: Above0 = 1.0
    """How often they are taken, relative to other triggers."""
    verdict: Literal["any", "right", "wrong"] = "any"
    """Drafts they are for. Words for right or for wrong drafts alone tell the model what its draft was worth."""


class ContinueWith(Strict):
    """Forced rethinking: finished responses go on behind a trigger, and the last answer counts.

    Who takes part does not depend on whether a draft is right, unless this says so; `mmrl explain` names what does.
    """

    kind: Literal["continue_with"]
    """Selects this kind of step."""
    name: Word = "rethink"
    """Its name in metrics."""
    preset: Rethinking = "unbiased"
    """`paper` is what VL-Rethinker's code does: other defaults for all below. Its group means are biased: only right
    second answers enter, and half of the triggers tell whether the draft is right."""
    correct: Names
    """Reward terms that say whether a response is right: all of those that apply to its sample must reach
    `threshold`."""
    threshold: float = 1.0
    """What they must reach."""
    which: Literal["any", "right", "wrong"] = "any"
    """Drafts that take part."""
    band: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Groups that take part: their share of right drafts, both ends included."""
    room: Count = 0
    """Tokens of `sampling.max_new_tokens` that a draft must have left over to take part."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of these drafts that are drawn to go on."""
    attempts_per_group: Positive | None = None
    """At most this many of a group."""
    triggers: Annotated[tuple[Trigger, ...], Field(min_length=1)] = (Trigger(text="\n\nWait, let me check."),)
    """What they go on behind, drawn by weight."""
    cut_fraction: Fraction = 0.0
    """Share of attempts in which the draft's last answer is cut off before the trigger; otherwise it stays."""
    temperature: Above0 | None = None
    """Temperature of what follows; that of the drafts when left out."""
    max_new_tokens: Positive = 512
    """Tokens that may follow the trigger."""
    min_new_tokens: Count = 0
    """An attempt of fewer tokens is dropped, and its draft stays."""
    keep: Literal["all", "correct", "improved"] = "all"
    """Attempts that count: all; those that end right; or those that turn wrong into right. The others are dropped, and
    the group looks better than the policy is."""
    kept_per_group: Positive | None = None
    """At most this many of a group; the others are dropped."""
    place: Literal["replace", "add"] = "replace"
    """An attempt takes the place of its draft, or stands beside it."""

    @model_validator(mode="after")
    def _can_happen(self) -> ContinueWith:
        if self.band[0] > self.band[1]:
            raise ValueError(f"band [{self.band[0]:g}, {self.band[1]:g}] is empty")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        for verdict in ("right", "wrong") if self.which == "any" else (self.which,):
            if not any(trigger.verdict in ("any", verdict) for trigger in self.triggers):
                raise ValueError(f"no trigger is for {verdict} drafts; add one, or set `which`")
        if self.keep == "improved" and self.which == "right":
            raise ValueError("keep improved drops every attempt where `which` is right")
        return self

    @model_validator(mode="after")
    def _preset_is_in_place(self) -> ContinueWith:
        refuse_gaps(f"preset {self.preset!r}", RETHINKING[self.preset], self.model_fields_set)
        return self

    @property
    def looks_at_verdicts(self) -> str:
        """The first key by which it matters whether a draft is right; empty when none does."""
        told = any(trigger.verdict != "any" for trigger in self.triggers)
        uses = {
            "which": self.which != "any",
            "band": self.band != (0.0, 1.0),
            "triggers": told,
            "keep": self.keep != "all",
        }
        return next((key for key, used in uses.items() if used), "")


class Tool(Strict):
    """Something a response may call."""

    fn: str
    """`module:function` or `./file.py:function`, such as `mmrl.rollout.tools.builtin:search`."""
    name: Word | None = None
    """What the model calls it; the function's own name when left out."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function; what the model writes are its arguments."""

    @property
    def called(self) -> str:
        """What the model calls it."""
        return self.name or self.fn.rpartition(":")[2]


_SHOWING = tuple(f"mmrl.rollout.tools.builtin:{name}" for name in ("zoom", "frames", "passage"))


class UseTools(Strict):
    """A response that ends in <tool_call>{"name": .., "arguments": {..}}</tool_call> goes on behind what the tool says,
    which it never learns. The last answer counts.
    """

    kind: Literal["tools"]
    """Selects this kind of step."""
    name: Word = "tools"
    """Its name in metrics."""
    tools: Annotated[tuple[Tool, ...], Field(min_length=1)]
    """The tools."""
    turns: Positive = 4
    """Calls of a response that are answered; one more ends it."""
    max_tokens: Positive = 4096
    """A response of more tokens, those of tools included, gets no further answer."""
    max_chars: Positive = 2000
    """Characters of a tool's text that are shown."""
    max_views: Count = 0
    """Pictures and videos that tools, such as `mmrl.rollout.tools.builtin:zoom`, may show in a response."""
    deadline_s: Above0 = 10.0
    """Seconds a call may take; then its process is killed."""
    workers: Positive = 1
    """Processes that call tools at once."""
    on_error: Literal["feedback", "stop"] = "feedback"
    """A tool that raises, or is killed at its deadline: the model is told, or the run ends. Counted either way."""
    before: str = "\n<tool_response>\n"
    """What stands before a tool's text; marks of the chat template may be among it."""
    after: str = "\n</tool_response>\n"
    """What stands behind it."""

    @model_validator(mode="after")
    def _may_show(self) -> UseTools:
        if not self.max_views and (shows := [tool.fn for tool in self.tools if tool.fn in _SHOWING]):
            raise ValueError(f"{shows[0]} shows pictures or videos, and `max_views` allows none; say how many")
        return self

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        names = [tool.called for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are called {twice[0]!r}; give one another `name`")
        return tools


class Probe(Strict):
    """More rollouts, of a prompt that hides what is to be looked at; second looks and tools go on with them as with all
    others. They never train: they measure whether the model looks. Metric `probe/blind_gap/<name>/<term>`: mean of a
    reward term with, minus without.
    """

    kind: Literal["probe"]
    """Selects this kind of step."""
    what: Literal["left_out", "grey", "noise", "swapped", "shuffled", "cropped"]
    """What is done to pictures and videos: left out, with everything that says where they were; painted grey; replaced
    by noise; exchanged for another training sample's; the frames of videos put in another order; pictures cut down to
    a part of them that chance places."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """What is left of a picture's width and height where `what` is `cropped`; half of them when left out."""
    name: Word | None = None
    """Its name in metrics and for the group term `contrast`; that of `what` when left out."""
    rollouts: Positive = 1
    """How many for each prompt."""
    every: Positive = 1
    """Steps from one probe to the next."""

    @model_validator(mode="after")
    def _only_crops_have_a_share(self) -> Probe:
        if self.share is not None and self.what != "cropped":
            raise ValueError(f"share is what `cropped` leaves of a picture, and what is {self.what!r}; leave it out")
        return self


Step = Annotated[Generate | ContinueWith | UseTools | Probe, Field(discriminator="kind")]
Steps = Annotated[tuple[Step, ...], Field(min_length=1)]
ONCE: Steps = (Generate(kind="generate"),)
"""The simplest program."""


def check_order(steps: Steps) -> Steps:
    """Refuse a program that does not begin by generating, or where two steps have one name.

    Raises:
        ValueError: it is one.
    """
    kinds = [step.kind for step in steps]
    if kinds[0] != "generate" or kinds.count("generate") > 1:
        raise ValueError(f"a program begins with one step of kind generate; got {', '.join(kinds)}")
    names = [name for step in steps if (name := step_name(step))]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two steps of a program are named {twice[0]!r}; give one another `name`")
    return steps


def check_answers_only(steps: Steps, who: str, writes: str) -> None:
    """Refuse what training alone can do: `who` completes what it draws, probes nothing, and `writes` no more than that.

    Raises:
        ValueError: a step does.
    """
    for step in steps:
        if isinstance(step, Generate) and step.chunk is not None:
            raise ValueError(f"{who} completes every response: leave out `chunk`")
        if isinstance(step, Probe):
            raise ValueError(f"a probe measures a step of training; {who} has none")
        if isinstance(step, ContinueWith) and step.place == "add":
            raise ValueError(f"step {step.name!r} has `place: add`, but {who} {writes}")


def check_room(steps: Steps, longest: int) -> None:
    """Refuse a second look that wants drafts to leave more room than the `longest` has tokens.

    Raises:
        ValueError: one does.
    """
    for step in steps:
        if isinstance(step, ContinueWith) and step.room >= longest:
            raise ValueError(
                f"step {step.name!r} wants drafts that leave {step.room} of sampling.max_new_tokens={longest}, "
                "which none does; lower `room`, or raise that"
            )


def step_name(step: Step) -> str:
    """What metrics call a step; nothing for the first."""
    match step:
        case Probe():
            return step.name or step.what
        case ContinueWith() | UseTools():
            return step.name
        case Generate():
            return ""
