"""Key `rollout_steps`: the steps from a prompt to its finished rollouts, each using the result of the one before."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from mmrl.config.schema.base import (
    BatchSize,
    Fraction,
    FunctionConfig,
    Identifier,
    NonNegativeInt,
    Number,
    NumParallel,
    NumTokens,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Seconds,
    StrictModel,
    WorkerLimitsConfig,
    check_unique,
)
from mmrl.config.schema.presets import RETHINK_PRESETS, RethinkPreset, check_preset_applied

RewardTermNames = Annotated[tuple[str, ...], Field(min_length=1)]


class GenerateConfig(StrictModel):
    """Generate `group_size` responses to each prompt: the first step, and often the only one.

    With `partial_rollout_tokens`, long groups continue in later rounds. The importance ratio of each token is taken
    against the policy version that sampled it (APRIL).
    """

    kind: Literal["generate"]
    """Selects this kind of step."""
    partial_rollout_tokens: NumTokens | None = None
    """Tokens that are generated for every unfinished response between two counts of complete groups. Without this
    key, every response is completed in its round."""
    oversampling: Annotated[float, Field(ge=1.0, le=16.0)] = 1.0
    """Prompts that are in flight, relative to `prompts_per_step`. The step ends once `prompts_per_step` groups are
    complete; unfinished ones wait for the next step. Complete groups beyond this number wait too, unless
    `dynamic_sampling.extra` drops them."""
    max_tokens_per_step: PositiveInt | None = None
    """Stop generating after about this many tokens, once a group is complete; the step uses the complete groups."""

    @model_validator(mode="after")
    def _check_partial_rollouts(self) -> GenerateConfig:
        if self.partial_rollout_tokens is None and (self.oversampling > 1.0 or self.max_tokens_per_step is not None):
            raise ValueError(
                "oversampling and max_tokens_per_step need `partial_rollout_tokens`: the tokens between two counts of "
                "complete groups"
            )
        return self


class RethinkTriggerConfig(StrictModel):
    """Text forced into a response; it is never trained on."""

    text: Annotated[str, Field(min_length=1)]
    """The text, including the white space that separates it from the first response."""
    weight: PositiveFloat = 1.0
    """Triggers are drawn in proportion to their weights."""
    only: Literal["any", "correct", "incorrect"] = "any"
    """First responses that this trigger may follow. A trigger only for correct responses, or only for incorrect
    ones, reveals the verdict to the model."""


class RethinkConfig(StrictModel):
    """Forced rethinking: finished responses are continued after a trigger, and the last answer counts.

    A response is continued whether it is correct or not. Keys that treat correct and incorrect responses differently
    bias the group; `mmrl explain` warns of them.
    """

    kind: Literal["rethink"]
    """Selects this kind of step."""
    name: Identifier = "rethink"
    """Name that metrics use."""
    preset: RethinkPreset = "unbiased"
    """`paper` sets the keys below to the defaults of VL-Rethinker's code. Its group means are biased: only correct
    continuations enter a group, and half of the triggers reveal whether the first response was correct."""
    correct: RewardTermNames
    """Reward terms that decide whether a response is correct: all that apply to its sample must reach `threshold`."""
    threshold: Number = 1.0
    """Each of these terms must reach this value for a response to be correct."""
    min_free_tokens: NonNegativeInt = 0
    """A first response is continued only if this many tokens of `sampling.max_new_tokens` are left."""
    fraction: PositiveFraction = 1.0
    """Share of the responses with `min_free_tokens` left that is drawn for continuation."""
    max_attempts_per_group: PositiveInt | None = None
    """At most this many responses of a group are continued."""
    triggers: Annotated[tuple[RethinkTriggerConfig, ...], Field(min_length=1)] = (
        RethinkTriggerConfig(text="\n\nWait, let me check."),
    )
    """Texts after which responses are continued, drawn by weight."""
    cut_answer_fraction: Fraction = 0.0
    """Share of continuations whose first response loses its last answer before the trigger."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    """Sampling temperature of continuations; that of first responses when left out."""
    max_new_tokens: NumTokens = 512
    """Tokens that may follow the trigger."""
    min_new_tokens: NonNegativeInt = 0
    """A continuation of fewer tokens is dropped, and its first response stays."""
    keep: Literal["all", "correct"] = "all"
    """Continuations that count: all, or only correct ones. Dropping incorrect ones makes a group look better than
    the policy is."""
    max_kept_per_group: PositiveInt | None = None
    """At most this many continuations of a group count; the rest are dropped."""

    @model_validator(mode="after")
    def _check_options(self) -> RethinkConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        # Each first response that may be continued needs a trigger that is meant for it.
        for verdict in ("correct", "incorrect"):
            if not any(trigger.only in ("any", verdict) for trigger in self.triggers):
                raise ValueError(f"no trigger is for {verdict} first responses; add one")
        check_preset_applied(f"preset {self.preset!r}", RETHINK_PRESETS[self.preset], self.model_fields_set)
        return self

    @property
    def correctness_dependent_key(self) -> str:
        """The first key that treats correct and incorrect responses differently; empty if none does."""
        if self._has_verdict_triggers:
            return "triggers"
        return "keep" if self.keep != "all" else ""

    @property
    def _has_verdict_triggers(self) -> bool:
        return any(trigger.only != "any" for trigger in self.triggers)

    def list_biases(self) -> list[str]:
        """Return a warning for each way in which the step favours correct responses."""
        # Warnings, not errors: VL-Rethinker's code does both.
        biases = []
        if self._has_verdict_triggers:
            biases.append("some triggers follow only correct or only incorrect responses, which reveals the verdict")
        if self.keep != "all":
            biases.append("continuations are dropped by their outcome, so group means exceed the policy's own")
        return biases


class ToolConfig(FunctionConfig):
    """A function that a response may call, such as `mmrl.rollout.tools.builtin:search`.

    It is called with the arguments that the model writes, and with the options in `args`.
    """

    name: Identifier | None = None
    """Name by which the model calls the tool; the function's name when left out."""

    @property
    def call_name(self) -> str:
        """The name by which the model calls it."""
        return self.name or self.fn.rpartition(":")[2]


# Named as text: the schema must import without torch, which these tools need.
_VIDEO_TOOLS: Final = ("mmrl.rollout.tools.builtin:frames", "mmrl.rollout.tools.builtin:passage")
_MEDIA_TOOLS: Final = ("mmrl.rollout.tools.builtin:zoom", "mmrl.rollout.tools.builtin:crop", *_VIDEO_TOOLS)


class ToolsConfig(StrictModel):
    """Tool calls: a response that ends in a call continues after the tool's result, and the last answer counts.

    A call is <tool_call>{"name": .., "arguments": {..}}</tool_call>. Results are never trained on.
    """

    kind: Literal["tools"]
    """Selects this kind of step."""
    name: Identifier = "tools"
    """Name that metrics use."""
    tools: Annotated[tuple[ToolConfig, ...], Field(min_length=1)]
    """Functions that a response may call."""
    max_turns: PositiveInt = 4
    """Calls per response that get a result; the next call ends the response."""
    max_total_tokens: NumTokens = 4096
    """Tokens of a response, results included, beyond which a call gets no result."""
    max_result_chars: NumTokens = 2000
    """Characters of a result that the model sees; the rest is cut."""
    max_media: NonNegativeInt = 0
    """Images and videos per response that tools such as `mmrl.rollout.tools.builtin:zoom` may show."""
    timeout_s: Seconds = 10.0
    """Seconds a call may take before its process is killed."""
    workers: NumParallel = 1
    """Processes that run tools."""
    worker_limits: WorkerLimitsConfig = WorkerLimitsConfig()
    """Limits of the workers that run tools."""
    on_error: Literal["feedback", "stop"] = "feedback"
    """For a tool that raises, or exceeds its deadline or a limit: `feedback` shows the error to the model, `stop` ends
    the run; both are counted."""
    result_prefix: str = "\n<tool_response>\n"  # as in Qwen's chat template
    """Text that is put before a result; it may hold special tokens of the chat template."""
    result_suffix: str = "\n</tool_response>\n"
    """Text that is put after a result."""

    @model_validator(mode="after")
    def _check_max_media(self) -> ToolsConfig:
        for tool in self.tools:
            if not self.max_media and tool.fn in _MEDIA_TOOLS:
                raise ValueError(f"{tool.fn} shows images or videos, and `max_media` allows none; say how many")
        return self

    @field_validator("tools")
    @classmethod
    def _check_unique_names(cls, tools: tuple[ToolConfig, ...]) -> tuple[ToolConfig, ...]:
        check_unique([tool.call_name for tool in tools], "tools")
        return tools


class EnvironmentConfig(StrictModel):
    """An environment: each turn of a response is an action, and the next observation is shown before the next turn.

    A sample's question is the first observation (`mmrl_datasets.readers.environment:episodes`), or states all of it.
    """

    kind: Literal["environment"]
    """Selects this kind of step."""
    name: Identifier = "environment"
    """Name that metrics use."""
    fn: str
    """`module:function` or `./file.py:function` that makes a `mmrl.Environment`; called once for each episode."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function."""
    turns: PositiveInt = 8
    """Largest number of actions in an episode."""
    max_media: NonNegativeInt = 16
    """Pictures and videos that an episode may show in addition to the question's; the episode ends when it shows
    more."""
    max_tokens: NumTokens = 4096
    """Tokens of a response, observations included. An episode ends if the next observation and a turn of
    `sampling.max_new_tokens` after it do not fit."""
    max_observation_chars: NumTokens = 2000
    """Characters of an observation's text that the model sees; the rest is cut."""
    action: Literal["turn", "call", "tag"] = "turn"
    """Part of a turn that is the action. `turn`: its whole text. `call`: the tool call that ends it, or its whole text
    if it has no call. `tag`: its answer, in the notation of `response_format`."""
    on_invalid: Literal["tell", "end"] = "tell"
    """For a turn without a readable action: `tell` reports this to the model, `end` ends the episode."""
    on_error: Literal["skip", "stop"] = "skip"
    """For an environment that fails, or exceeds its deadline or a limit: `skip` leaves the rollout out of its group,
    `stop` ends the run; both are counted."""
    replayable: bool = True
    """True if the same sample, seed and actions always give the same observations, byte for byte; this is checked.
    Set false for a live environment: its episodes cannot continue after a process was lost, and a resumed run may
    see other episodes."""
    timeout_s: Seconds = 10.0
    """Seconds an action may take before the process is killed."""
    workers: NumParallel = 1
    """Processes that hold episodes, on each rank."""
    worker_limits: WorkerLimitsConfig = WorkerLimitsConfig()
    """Limits of these processes."""

    @property
    def brackets(self) -> tuple[str, str]:
        """Text before and after an observation: it is a tool response, or a user turn of Qwen's chat template."""
        if self.action == "call":
            return "\n<tool_response>\n", "\n</tool_response>\n"
        return "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


LOOKED_PROBE: Final = "looked"
"""Name of the probe that shows only the media that tools returned. If rewards stay equal, these media suffice."""


class BlindProbeConfig(StrictModel):
    """Extra rollouts of prompts whose media are hidden, to measure whether the model uses them; never trained on.

    Later steps of kind rethink and tools treat them like all other rollouts. Metric `probe/blind_gap/<name>/<term>`:
    mean of a reward term with the media, minus its mean without them.
    """

    kind: Literal["probe"]
    """Selects this kind of step."""
    corruption: Literal["left_out", "grey", "noise", "swapped", "shuffled", "cropped", "looked"]
    """Images and videos are changed in this way: left out with their placeholders; painted grey; replaced by noise;
    swapped with another training sample's; video frames shuffled; images cropped to a random quarter; or, once for
    each rollout, replaced by what tools showed in it (`looked`)."""
    name: Identifier | None = None
    """Name that metrics and the group reward `blind_contrast` use; the name of `corruption` when left out."""
    rollouts_per_prompt: BatchSize = 1
    """Extra rollouts for each prompt; must be 1 for `looked`, which makes one prompt from each rollout."""
    every: PositiveInt = 1
    """Steps from one probe to the next."""

    @model_validator(mode="after")
    def _check_looked(self) -> BlindProbeConfig:
        if self.corruption == LOOKED_PROBE and (self.rollouts_per_prompt > 1 or self.name is not None):
            raise ValueError("looked makes one rollout for each of the group's: leave out rollouts_per_prompt and name")
        return self


GREEDY_PROBE: Final = "greedy"
"""Name of the probe that a step of kind greedy makes; no blind probe has it."""


class GreedyConfig(StrictModel):
    """One more response to each prompt at temperature 0, which the group reward `greedy_baseline` subtracts.

    The other rollout steps, even those listed later, continue it at temperature 0. It is scored, and never trained on.
    """

    kind: Literal["greedy"]
    """Selects this kind of step."""


class CustomStepConfig(FunctionConfig):
    """A user's rollout step: `fn` is called with a `RolloutContext` and returns a `RolloutStep`.

    See docs/extending/rollout_step.md.
    """

    kind: Literal["custom"] = "custom"
    """Selects this kind of step; may be left out beside `fn`."""
    name: Identifier | None = None
    """Name that messages use; the function's name when left out."""
    max_added_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Tokens that the step may add to a response; vLLM reserves room for them after the longest prompt."""


def _find_step_kind(value: object) -> object:
    """Return the tag by which pydantic chooses the model of a rollout step: its `kind`, or `custom` beside `fn`."""
    if isinstance(value, dict):
        return value.get("kind", "custom" if "fn" in value else None)
    return getattr(value, "kind", None)


RolloutStepConfig = Annotated[
    Annotated[GenerateConfig, Tag("generate")]
    | Annotated[RethinkConfig, Tag("rethink")]
    | Annotated[ToolsConfig, Tag("tools")]
    | Annotated[EnvironmentConfig, Tag("environment")]
    | Annotated[BlindProbeConfig, Tag("probe")]
    | Annotated[GreedyConfig, Tag("greedy")]
    | Annotated[CustomStepConfig, Tag("custom")],
    Discriminator(_find_step_kind),
]
DemonstrationStepConfig = Annotated[
    Annotated[ToolsConfig, Tag("tools")] | Annotated[EnvironmentConfig, Tag("environment")],
    Discriminator(_find_step_kind),
]
"""A rollout step of an `sft` stage, which plays demonstrations as episodes."""
RolloutStepConfigs = Annotated[tuple[RolloutStepConfig, ...], Field(min_length=1)]
GENERATE_ONLY: RolloutStepConfigs = (GenerateConfig(kind="generate"),)


def step_name(step: RolloutStepConfig) -> str:
    """Return a step's name in metrics; empty for the generate step."""
    match step:
        case BlindProbeConfig():
            return step.name or step.corruption
        case GreedyConfig():
            return GREEDY_PROBE
        case RethinkConfig() | ToolsConfig() | EnvironmentConfig():
            return step.name
        case CustomStepConfig():
            return step.name or step.fn.rpartition(":")[2]
        case GenerateConfig():
            return ""


def check_rollout_steps(steps: RolloutStepConfigs) -> RolloutStepConfigs:
    """Return the steps; raise ValueError unless the first one generates, no other does, and names are unique."""
    # The first step generates the responses that all other steps work on.
    kinds = [step.kind for step in steps]
    if kinds[0] != "generate" or kinds.count("generate") > 1:
        raise ValueError(f"rollout_steps begin with one step of kind generate; got {', '.join(kinds)}")
    check_unique([step_name(step) for step in steps if step.kind != "generate"], "rollout_steps")
    if any(isinstance(step, BlindProbeConfig) and step.name == GREEDY_PROBE for step in steps):
        raise ValueError(f"a probe is named {GREEDY_PROBE!r}, the name of responses at temperature 0; choose another")
    _check_shuffled(steps)
    if "environment" in kinds:
        _check_environment(steps)
    return steps


def _check_shuffled(steps: RolloutStepConfigs) -> None:
    """Raise ValueError if a probe shuffles the frames of videos that a tool looks into by time."""
    names = [tool.fn for step in steps if isinstance(step, ToolsConfig) for tool in step.tools]
    shown = [name for name in names if name in _VIDEO_TOOLS]
    if shown and any(isinstance(step, BlindProbeConfig) and step.corruption == "shuffled" for step in steps):
        raise ValueError(f"probe shuffled hides nothing: {shown[0]} finds frames by their time; use grey or noise")


def _check_environment(steps: RolloutStepConfigs) -> None:
    """Raise ValueError for steps that cannot be combined with an environment."""
    for step in steps:
        if isinstance(step, RethinkConfig | ToolsConfig):
            raise ValueError(
                f"a step of kind {step.kind} continues responses, and each turn of them is an action of the "
                "environment; leave one of the two out"
            )
        if isinstance(step, BlindProbeConfig) and step.corruption not in ("grey", "noise"):
            raise ValueError(
                f"probe {step.corruption} leaves what an environment shows as it is, so it hides nothing; use grey or "
                "noise"
            )
    if sum(isinstance(step, EnvironmentConfig) for step in steps) > 1:
        raise ValueError("there are two steps of kind environment; a response can act in one")


def check_plain_generation(steps: RolloutStepConfigs, owner: str) -> None:
    """Raise ValueError for steps that `owner` ("evaluation") has no use for: partial rollouts, probes and greedy."""
    for step in steps:
        if isinstance(step, GenerateConfig) and step.partial_rollout_tokens is not None:
            raise ValueError(f"{owner} completes every response: leave out `partial_rollout_tokens`")
        if isinstance(step, BlindProbeConfig | GreedyConfig):
            raise ValueError(f"a step of kind {step.kind} is for training; {owner} has no use for it")


def check_free_tokens(steps: RolloutStepConfigs, max_new_tokens: int) -> None:
    """Raise ValueError if no first response of `max_new_tokens` at most can leave a rethink step's tokens free."""
    for step in steps:
        if isinstance(step, RethinkConfig) and step.min_free_tokens >= max_new_tokens:
            raise ValueError(
                f"step {step.name!r} needs first responses that leave {step.min_free_tokens} of "
                f"sampling.max_new_tokens={max_new_tokens} free, which none does; lower `min_free_tokens`, or raise "
                "max_new_tokens"
            )
