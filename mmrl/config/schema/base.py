"""Base class and shared field types of the schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mmrl.types import Response, Sample

# Every number has an upper bound. A larger value is a typing error, overflows float32 or exhausts the machine, and is
# refused when the config is loaded, not hours into the run.
PositiveInt = Annotated[int, Field(ge=1, le=1_000_000_000)]
NonNegativeInt = Annotated[int, Field(ge=0, le=1_000_000_000)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=1e9)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
Coefficient = Annotated[float, Field(ge=0.0, le=1000.0)]
LearningRate = Annotated[float, Field(gt=0.0, le=1.0)]  # AdamW moves every weight by about this much a step
Temperature = Annotated[float, Field(ge=0.0, le=10.0)]
Nats = Annotated[float, Field(gt=0.0, le=88.0)]  # exp(88.8) is infinite in float32
Seconds = Annotated[float, Field(gt=0.0, le=31_536_000.0)]  # a year; Python's locks refuse timeouts of 300 years
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # torch's seeds have 64 bits
NumBytes = Annotated[int, Field(ge=1, le=10**15)]
NumTokens = Annotated[int, Field(ge=1, le=10_000_000)]
BatchSize = Annotated[int, Field(ge=1, le=1_000_000)]
Dimension = Annotated[int, Field(ge=1, le=100_000)]  # of a model's layers, heads and ranks
Workers = Annotated[int, Field(ge=0, le=4096)]  # processes or threads; 0 means none or a default, as the key says
NumParallel = Annotated[int, Field(ge=1, le=4096)]  # processes, GPUs or requests at a time
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]  # 1 would keep the first value for ever
# Letters of any script; no space or slash, which a file name should not have.
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
# A letter first: `stages.0.steps` on the command line is then an index, and never a name.
Identifier = Annotated[str, Field(pattern=r"^[^\W\d][\w-]*$")]
TagName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


@dataclass(frozen=True, slots=True)
class ChangeableOnResume:
    """Marks a key whose value, and everything below it, may change when a run is resumed."""

    effect: str  # of the new value on the resumed run


NO_EFFECT: Final = ChangeableOnResume("no result depends on it")
BAD_DATA_EFFECT: Final = ChangeableOnResume("results depend on it only where data cannot be used or were changed")
ROUNDING_EFFECT: Final = ChangeableOnResume("results may differ in the last digits")
SampleConditions = dict[str, tuple[str, ...]]
"""Allowed values by name: of `task`, or of a column of `meta`. A sample must meet all conditions."""
ROLLOUT_PREFIX = "rollout."
"""Prefix of a reward term's conditions that test the rollout instead of the sample."""
# Features of a rollout and the values that a condition on them may name.
_ROLLOUT_VALUES = {
    "rethought": "true|false",
    "used_tool": "true|false",
    "turns": "[1-9][0-9]*",
    "finish_reason": "eos|stop|length",
}
Component = Literal["vision", "projector", "language"]
COMPONENTS: tuple[Component, ...] = get_args(Component)


class StrictModel(BaseModel):
    """Base of every section: refuses unknown keys and wrong types, and is immutable."""

    # `strict` converts nothing, so "8" is not 8. The docstring under a field is its description: errors, the reference
    # and the JSON Schema show it.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def has_default(self, key: str) -> bool:
        """Return True if a key has its default value. It may be set: the config that a run saves sets every key."""
        return bool(getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True))


class FunctionConfig(StrictModel):
    """A user's function and its options."""

    fn: str
    """`module:function` or `./file.py:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options that the function is called with."""


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the models that a type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    models = []
    for argument in get_args(annotation):
        models += models_in(argument)
    return models


def find_choice_form(value: object) -> str:
    """Return the union tag of a setting: `function` for a `FunctionConfig`, `name` for the name of a built-in."""
    # With a tag, pydantic reports errors only for the form that was written; without one, for every form of the union.
    return "function" if isinstance(value, dict | FunctionConfig) else "name"


class WorkerLimitsConfig(StrictModel):
    """Limits of each worker process that runs functions, counted together with all processes that it starts.

    Memory and the number of processes are measured ten times a second, on Linux only. A worker that exceeds a limit is
    killed and replaced, and the call that it was running fails.
    """

    memory_mib: Annotated[PositiveInt, NO_EFFECT] = 4096
    """Memory that a worker may hold, in MiB. A page shared by several processes counts as an equal share for each."""
    processes: Annotated[PositiveInt, NO_EFFECT] = 64
    """Processes that a worker may have at a time, itself included."""


def matches_conditions(when: SampleConditions, sample: Sample) -> bool:
    """Return True if a sample meets every condition; a column that its `meta` lacks meets none."""
    for column, allowed in when.items():  # noqa: SIM110  (a generator takes three times as long)
        if condition_value(sample, column) not in allowed:
            return False
    return True


def condition_value(sample: Sample, column: str) -> str | None:
    """Return the sample's value that a condition on `column` tests, as text; None if it has no such column."""
    if column == "task":
        return sample.task
    # As text: a column may hold numbers, and conditions are written as text.
    return str(sample.meta[column]) if column in sample.meta else None


def parse_rollout_conditions(value: object) -> object:
    """Return a `when` whose `rollout.` conditions are tuples of text, from `true`, 2, "eos" or a list of such.

    Raises:
        ValueError: there is no such feature of a rollout, or it has no such value.
    """
    if not isinstance(value, dict):
        return value
    parsed: dict[str, object] = {}
    for key, allowed in value.items():
        values = allowed if isinstance(allowed, list | tuple) else [allowed]
        if not key.startswith(ROLLOUT_PREFIX):
            parsed[key] = tuple(values) if isinstance(allowed, list) else allowed
            continue
        feature, texts = key.removeprefix(ROLLOUT_PREFIX), tuple(str(each).lower() for each in values)
        if feature not in _ROLLOUT_VALUES:
            raise ValueError(f"a rollout has no {feature!r}; it has {', '.join(_ROLLOUT_VALUES)}")
        for text in texts or ("",):
            if not re.fullmatch(_ROLLOUT_VALUES[feature], text):
                wanted = _ROLLOUT_VALUES[feature].replace("|", ", ").replace("[1-9][0-9]*", "a number from 1")
                raise ValueError(f"{key} is {wanted}, not {text!r}")
        parsed[key] = texts
    return parsed


def matches_rollout(when: SampleConditions, response: Response) -> bool:
    """Return True if a response meets every `rollout.` condition."""
    for key, allowed in when.items():
        if key.startswith(ROLLOUT_PREFIX):
            feature = key.removeprefix(ROLLOUT_PREFIX)
            value = response.num_turns if feature == "turns" else getattr(response, feature)
            if str(value).lower() not in allowed:
                return False
    return True


def check_unique(names: Sequence[str], entries: str, remedy: str = "give one another `name`") -> None:
    """Raise ValueError if two of the entries, "tools" for example, have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two {entries} are named {name!r}; {remedy}")


def check_rising_steps(steps: list[int]) -> None:
    """Raise ValueError unless the steps of a schedule rise from point to point."""
    if steps != sorted(set(steps)):
        raise ValueError(f"steps must rise from point to point, got {', '.join(map(str, steps))}")
