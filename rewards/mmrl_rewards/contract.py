"""Defines rewards: pure functions `(response, sample, *, options) -> float | RewardValue` with a name and a range.

The decorator states the name, the range and the answer types. The options are the keyword-only parameters, so
nothing but the signature lists them:

    @reward(name="iou", answer_types=(AnswerType.BOX,))
    def iou(response: Response, sample: Sample, *, threshold: float | None = None) -> RewardValue: ...

    bind(iou, {"threshold": 0.5})(response, sample)

A bad answer gets the low end of the range. A bad sample raises `Unscorable`, whatever the response, so that it is found
before training starts. No I/O, clock, randomness or global state.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec

from mmrl.answer import COORDINATE_TYPES, AnswerValue, validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable, UserError
from mmrl.utils.plugin_args import PluginOption, read_plugin_options, validate_args

RewardOptions = ParamSpec("RewardOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward(Generic[RewardOptions]):
    """A decorated reward function, which is called like the function."""

    fn: Callable[Concatenate[Response, Sample, RewardOptions], float | RewardValue]
    name: str
    low: float
    high: float
    answer_types: tuple[AnswerType, ...]
    attack_tolerance: Mapping[str, float] | float
    uses_service: bool
    timeout_s: float | None
    options: Mapping[str, PluginOption]

    @property
    def doc(self) -> str:
        """The function's docstring: formula, source, departures."""
        return inspect.getdoc(self.fn) or ""

    def __call__(
        self, response: Response, sample: Sample, *args: RewardOptions.args, **kwargs: RewardOptions.kwargs
    ) -> float | RewardValue:
        """Score one response."""
        return self.fn(response, sample, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        """Pickle by reference, as functions are."""
        return _import_by_name, (self.fn.__module__, self.fn.__qualname__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundReward:
    """A reward with its options bound."""

    reward: Reward[...]
    args: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, response: Response, sample: Sample) -> float | RewardValue:
        """Score one response with these options."""
        return self.reward(response, sample, **self.args)


def reward(
    *,
    name: str,
    low: float = 0.0,
    high: float = 1.0,
    answer_types: tuple[AnswerType, ...] = (),
    attack_tolerance: Mapping[str, float] | float = 0.1,
    uses_service: bool = False,
    timeout_s: float | None = None,
) -> Callable[[Callable[Concatenate[Response, Sample, RewardOptions], float | RewardValue]], Reward[RewardOptions]]:
    """Declare a reward function.

    Args:
        name: its name in metrics.
        low: the lowest value it returns, for bad answers.
        high: the highest value it returns.
        answer_types: the targets that it can score; all, if none is named.
        attack_tolerance: the fraction of the range that `mmrl reward lint` lets a response get which has not looked at
            the sample, such as a box around the whole image. A mapping states it for single attacks by name.
        uses_service: it calls a service of `mmrl_rewards.services`, so lint does not ask it to be pure and fast.
        timeout_s: seconds that one call may take, for a reward that may hang on some response, as solvers do. It then
            always runs in another process, which is killed when a call takes longer.

    Raises:
        UserError: at import, when the range is empty or an option is not a keyword-only parameter with a type.
    """
    if not (isfinite(low) and isfinite(high) and low < high):
        raise UserError(f"reward {name!r}: the range [{low}, {high}] is empty or endless")
    if timeout_s is not None and not 0.0 < timeout_s < inf:
        raise UserError(f"reward {name!r}: timeout_s {timeout_s} is no number of seconds above 0")
    shares = attack_tolerance.values() if isinstance(attack_tolerance, Mapping) else [attack_tolerance]
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise UserError(f"reward {name!r}: attack_tolerance {attack_tolerance} is no share from 0 to 1")

    def declare(
        fn: Callable[Concatenate[Response, Sample, RewardOptions], float | RewardValue],
    ) -> Reward[RewardOptions]:
        return Reward(
            fn=fn,
            name=name,
            low=low,
            high=high,
            answer_types=answer_types,
            attack_tolerance=attack_tolerance,
            uses_service=uses_service,
            timeout_s=timeout_s,
            options=MappingProxyType(read_plugin_options(fn, skip=2)),
        )

    return declare


def bind(fn: object, args: Mapping[str, Any]) -> BoundReward:
    """Bind a reward's options, checked by name and type as JSON is: a list stands for a tuple, a string for an enum.

    Raises:
        UserError: `fn` is not a reward; an option is unknown, missing or of the wrong type.
    """
    if not isinstance(fn, Reward):
        raise UserError(f"{fn!r} is not a reward: decorate the function with @mmrl_rewards.contract.reward(name=...)")
    return BoundReward(reward=fn, args=validate_args(f"reward {fn.name!r}", fn.options, args))


def target_value(sample: Sample, answer_type: AnswerType) -> AnswerValue:
    """Return the target's value, checked, in the form that `AnswerType` states for its type.

    Raises:
        Unscorable: the target is of another type, its value is invalid, or its coordinates do not name their system.
    """
    target = sample.target
    if target.answer_type is not answer_type:
        raise Unscorable(f"the target is a {target.answer_type}, this reward compares a {answer_type}")
    try:
        value = validate_value(answer_type, target.value)
    except ValueError as error:
        raise Unscorable(f"the target {target.value!r:.200} is {error}") from error
    if answer_type in COORDINATE_TYPES and target.coordinate_system is None:
        raise Unscorable(f"the target {target.value!r:.200} does not say what frame its coordinates are in")
    return value


def _import_by_name(module: str, qualname: str) -> object:
    return getattr(importlib.import_module(module), qualname)
