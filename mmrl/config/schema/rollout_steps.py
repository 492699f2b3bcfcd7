"""What is done with a prompt until it has its rollouts: a list of steps, each taking over what the one before left."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from mmrl.config.schema.base import Fraction, Identifier, NonNegativeInt, PositiveInt, StrictModel
from mmrl.config.schema.custom_rollouts import CustomStepConfig, find_step_kind
from mmrl.config.schema.presets import RETHINK_PRESETS, RethinkPreset, check_preset_applied

PositiveFloat = Annotated[float, Field(gt=0.0)]
RewardTermNames = Annotated[tuple[str, ...], Field(min_length=1)]


class GenerateConfig(StrictModel):
    """`group_size` responses to each prompt: the first step, and often the only one.

    With `chunk`, groups that take long go on in later steps, each token under the weights it was drawn with (APRIL).
    """

    kind: Literal["generate"]
    """Selects this kind of step."""
    partial_rollout_tokens: PositiveInt | None = None
    """Tokens drawn of every open response before a look at which groups are complete; without it, all are completed."""
    oversampling: Annotated[float, Field(ge=1.0, le=16.0)] = 1.0
    """Prompts asked at once, relative to `prompts_per_step`: as soon as that many groups are complete the step goes on,
    and the others wait for the next."""
    max_tokens_per_step: PositiveInt | None = None
    """Tokens drawn in a step, about: then the step goes on with the groups that are complete, one at least."""

    @model_validator(mode="after")
    def _check_partial_rollouts(self) -> GenerateConfig:
        if self.partial_rollout_tokens is None and (self.oversampling > 1.0 or self.max_tokens_per_step is not None):
            raise ValueError("over_sample and token_budget need `chunk`: how often to look at what is complete")
        return self


class RethinkTriggerConfig(StrictModel):
    """Words that the model is made to say, and that it never learns."""

    text: Annotated[str, Field(min_length=1)]
    """The words, with the blank that parts them from the draft."""
    weight: PositiveFloat = 1.0
    """How often they are taken, relative to other triggers."""
    only: Literal["any", "correct", "incorrect"] = "any"
    """Drafts they are for. Words for right or for wrong drafts alone tell the model what its draft was worth."""


class RethinkConfig(StrictModel):
    """Forced rethinking: finished responses go on behind a trigger, and the last answer counts.

    Who takes part does not depend on whether a draft is right, unless this says so; `mmrl explain` names what does.
    """

    kind: Literal["rethink"]
    """Selects this kind of step."""
    name: Identifier = "rethink"
    """Its name in metrics."""
    preset: RethinkPreset = "unbiased"
    """`paper` is what VL-Rethinker's code does: other defaults for all below. Its group means are biased: only right
    second answers enter, and half of the triggers tell whether the draft is right."""
    correct: RewardTermNames
    """Reward terms that say whether a response is right: all of those that apply to its sample must reach
    `threshold`."""
    threshold: float = 1.0
    """What they must reach."""
    only: Literal["any", "correct", "incorrect"] = "any"
    """Drafts that take part."""
    accuracy_range: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Groups that take part: their share of right drafts, both ends included."""
    min_free_tokens: NonNegativeInt = 0
    """Tokens of `sampling.max_new_tokens` that a draft must have left over to take part."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of these drafts that are drawn to go on."""
    max_attempts_per_group: PositiveInt | None = None
    """At most this many of a group."""
    triggers: Annotated[tuple[RethinkTriggerConfig, ...], Field(min_length=1)] = (
        RethinkTriggerConfig(text="\n\nWait, let me check."),
    )
    """What they go on behind, drawn by weight."""
    cut_answer_fraction: Fraction = 0.0
    """Share of attempts in which the draft's last answer is cut off before the trigger; otherwise it stays."""
    temperature: PositiveFloat | None = None
    """Temperature of what follows; that of the drafts when left out."""
    max_new_tokens: PositiveInt = 512
    """Tokens that may follow the trigger."""
    min_new_tokens: NonNegativeInt = 0
    """An attempt of fewer tokens is dropped, and its draft stays."""
    keep: Literal["all", "correct", "improved"] = "all"
    """Attempts that count: all; those that end right; or those that turn wrong into right. The others are dropped, and
    the group looks better than the policy is."""
    max_kept_per_group: PositiveInt | None = None
    """At most this many of a group; the others are dropped."""
    mode: Literal["replace", "add"] = "replace"
    """An attempt takes the place of its draft, or stands beside it."""

    @model_validator(mode="after")
    def _check_options(self) -> RethinkConfig:
        if self.accuracy_range[0] > self.accuracy_range[1]:
            raise ValueError(f"band [{self.accuracy_range[0]:g}, {self.accuracy_range[1]:g}] is empty")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        for verdict in ("correct", "incorrect") if self.only == "any" else (self.only,):
            if not any(trigger.only in ("any", verdict) for trigger in self.triggers):
                raise ValueError(f"no trigger is for {verdict} drafts; add one, or set `which`")
        if self.keep == "improved" and self.only == "correct":
            raise ValueError("keep improved drops every attempt where `which` is right")
        return self

    @model_validator(mode="after")
    def _check_preset(self) -> RethinkConfig:
        check_preset_applied(f"preset {self.preset!r}", RETHINK_PRESETS[self.preset], self.model_fields_set)
        return self

    @property
    def correctness_dependent_key(self) -> str:
        """The first key by which it matters whether a draft is right; empty when none does."""
        told = any(trigger.only != "any" for trigger in self.triggers)
        uses = {
            "which": self.only != "any",
            "band": self.accuracy_range != (0.0, 1.0),
            "triggers": told,
            "keep": self.keep != "all",
        }
        return next((key for key, used in uses.items() if used), "")


class ToolConfig(StrictModel):
    """Something a response may call."""

    fn: str
    """`module:function` or `./file.py:function`, such as `mmrl.rollout.tools.builtin:search`."""
    name: Identifier | None = None
    """What the model calls it; the function's own name when left out."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function; what the model writes are its arguments."""

    @property
    def call_name(self) -> str:
        """What the model calls it."""
        return self.name or self.fn.rpartition(":")[2]


_MEDIA_TOOLS = tuple(f"mmrl.rollout.tools.builtin:{name}" for name in ("zoom", "frames", "passage"))


class ToolsConfig(StrictModel):
    """A response that ends in <tool_call>{"name": .., "arguments": {..}}</tool_call> goes on behind what the tool says,
    which it never learns. The last answer counts.
    """

    kind: Literal["tools"]
    """Selects this kind of step."""
    name: Identifier = "tools"
    """Its name in metrics."""
    tools: Annotated[tuple[ToolConfig, ...], Field(min_length=1)]
    """The tools."""
    max_turns: PositiveInt = 4
    """Calls of a response that are answered; one more ends it."""
    max_total_tokens: PositiveInt = 4096
    """A response of more tokens, those of tools included, gets no further answer."""
    max_result_chars: PositiveInt = 2000
    """Characters of a tool's text that are shown."""
    max_media: NonNegativeInt = 0
    """Pictures and videos that tools, such as `mmrl.rollout.tools.builtin:zoom`, may show in a response."""
    timeout_s: PositiveFloat = 10.0
    """Seconds a call may take; then its process is killed."""
    workers: PositiveInt = 1
    """Processes that call tools at once."""
    on_error: Literal["feedback", "stop"] = "feedback"
    """A tool that raises, or is killed at its deadline: the model is told, or the run ends. Counted either way."""
    result_prefix: str = "\n<tool_response>\n"
    """What stands before a tool's text; marks of the chat template may be among it."""
    result_suffix: str = "\n</tool_response>\n"
    """What stands behind it."""

    @model_validator(mode="after")
    def _check_max_media(self) -> ToolsConfig:
        if not self.max_media and (shows := [tool.fn for tool in self.tools if tool.fn in _MEDIA_TOOLS]):
            raise ValueError(f"{shows[0]} shows pictures or videos, and `max_views` allows none; say how many")
        return self

    @field_validator("tools")
    @classmethod
    def _check_unique_names(cls, tools: tuple[ToolConfig, ...]) -> tuple[ToolConfig, ...]:
        names = [tool.call_name for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are called {twice[0]!r}; give one another `name`")
        return tools


class BlindProbeConfig(StrictModel):
    """More rollouts, of a prompt that hides what is to be looked at; second looks and tools go on with them as with all
    others. They never train: they measure whether the model looks. Metric `probe/blind_gap/<name>/<term>`: mean of a
    reward term with, minus without.
    """

    kind: Literal["probe"]
    """Selects this kind of step."""
    corruption: Literal["left_out", "grey", "noise", "swapped", "shuffled", "cropped"]
    """What is done to pictures and videos: left out, with everything that says where they were; painted grey; replaced
    by noise; exchanged for another training sample's; the frames of videos put in another order; pictures cut down to
    a part of them that chance places."""
    crop_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """What is left of a picture's width and height where `what` is `cropped`; half of them when left out."""
    name: Identifier | None = None
    """Its name in metrics and for the group term `contrast`; that of `what` when left out."""
    rollouts_per_prompt: PositiveInt = 1
    """How many for each prompt."""
    every: PositiveInt = 1
    """Steps from one probe to the next."""

    @model_validator(mode="after")
    def _check_crop_fraction(self) -> BlindProbeConfig:
        if self.crop_fraction is not None and self.corruption != "cropped":
            raise ValueError(
                f"share is what `cropped` leaves of a picture, and what is {self.corruption!r}; leave it out"
            )
        return self


RolloutStepConfig = Annotated[
    Annotated[GenerateConfig, Tag("generate")]
    | Annotated[RethinkConfig, Tag("rethink")]
    | Annotated[ToolsConfig, Tag("tools")]
    | Annotated[BlindProbeConfig, Tag("probe")]
    | Annotated[CustomStepConfig, Tag("custom")],
    Discriminator(find_step_kind),
]
RolloutStepConfigs = Annotated[tuple[RolloutStepConfig, ...], Field(min_length=1)]
GENERATE_ONLY: RolloutStepConfigs = (GenerateConfig(kind="generate"),)
"""The simplest program."""


def check_rollout_steps(steps: RolloutStepConfigs) -> RolloutStepConfigs:
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


def check_plain_generation(steps: RolloutStepConfigs, who: str, writes: str) -> None:
    """Refuse what training alone can do: `who` completes what it draws, probes nothing, and `writes` no more than that.

    Raises:
        ValueError: a step does.
    """
    for step in steps:
        if isinstance(step, GenerateConfig) and step.partial_rollout_tokens is not None:
            raise ValueError(f"{who} completes every response: leave out `chunk`")
        if isinstance(step, BlindProbeConfig):
            raise ValueError(f"a probe measures a step of training; {who} has none")
        if isinstance(step, RethinkConfig) and step.mode == "add":
            raise ValueError(f"step {step.name!r} has `place: add`, but {who} {writes}")


def check_free_tokens(steps: RolloutStepConfigs, longest: int) -> None:
    """Refuse a second look that wants drafts to leave more room than the `longest` has tokens.

    Raises:
        ValueError: one does.
    """
    for step in steps:
        if isinstance(step, RethinkConfig) and step.min_free_tokens >= longest:
            raise ValueError(
                f"step {step.name!r} wants drafts that leave {step.min_free_tokens} of sampling.max_new_tokens={longest}, "
                "which none does; lower `room`, or raise that"
            )


def step_name(step: RolloutStepConfig) -> str:
    """What metrics call a step; nothing for the first."""
    match step:
        case BlindProbeConfig():
            return step.name or step.corruption
        case RethinkConfig() | ToolsConfig():
            return step.name
        case CustomStepConfig():
            return step.name or step.fn.rpartition(":")[2]
        case GenerateConfig():
            return ""
