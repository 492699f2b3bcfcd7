"""What a reward is: a pure function `(response, sample, *, options) -> float | Term`, with a name and a range.

The decorator states name and range; the options are the keyword-only parameters, so the signature is their only home:

    @reward(name="iou")
    def iou(response: Response, sample: Sample, *, threshold: float | None = None) -> Term: ...

    bind(iou, {"threshold": 0.5})(response, sample)

A bad answer earns the low end of the range. A bad sample raises `Unscorable`, whatever the response, so that it is
found before training starts. No I/O, clock, randomness or global state.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, get_type_hints

from pydantic import TypeAdapter, ValidationError

from mmrl.types import Kind, Response, Sample, Term, Unscorable, UserError

Options = ParamSpec("Options")


class Option(NamedTuple):
    """One option of a reward: its type, and its default unless it must be given."""

    hint: Any
    default: Any
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward(Generic[Options]):
    """A decorated reward function; call it as you would the function."""

    fn: Callable[Concatenate[Response, Sample, Options], float | Term]
    name: str
    low: float
    high: float
    options: Mapping[str, Option]

    @property
    def doc(self) -> str:
        """The function's docstring: formula, source, departures."""
        return inspect.getdoc(self.fn) or ""

    def __call__(
        self, response: Response, sample: Sample, *args: Options.args, **kwargs: Options.kwargs
    ) -> float | Term:
        """Score one response."""
        return self.fn(response, sample, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        """Pickle by reference, as functions are."""
        return _import, (self.fn.__module__, self.fn.__qualname__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundReward:
    """A reward with its options settled."""

    reward: Reward[...]
    args: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, response: Response, sample: Sample) -> float | Term:
        """Score one response with these options."""
        return self.reward(response, sample, **self.args)


def reward(
    *, name: str, low: float = 0.0, high: float = 1.0
) -> Callable[[Callable[Concatenate[Response, Sample, Options], float | Term]], Reward[Options]]:
    """Declare a reward: its name in metrics and the range its values stay in.

    Raises:
        UserError: at import, when the range is empty or an option is not a keyword-only parameter with a type.
    """
    if not (isfinite(low) and isfinite(high) and low < high):
        raise UserError(f"reward {name!r}: the range [{low}, {high}] is empty or endless")

    def declare(fn: Callable[Concatenate[Response, Sample, Options], float | Term]) -> Reward[Options]:
        return Reward(fn=fn, name=name, low=low, high=high, options=MappingProxyType(_options(fn)))

    return declare


def bind(fn: object, args: Mapping[str, Any]) -> BoundReward:
    """Settle a reward's options, checked by name and type as JSON is (a list stands for a tuple, a string for an enum).

    Raises:
        UserError: `fn` is not a reward; an option is unknown, missing or of the wrong type.
    """
    if not isinstance(fn, Reward):
        raise UserError(f"{fn!r} is not a reward: decorate the function with @mmrl_rewards.contract.reward(name=...)")
    for name in args:
        if name not in fn.options:
            raise UserError(f"reward {fn.name!r} has no option {name!r}; {_alternatives(name, fn.options)}")
    missing = [name for name, option in fn.options.items() if option.required and name not in args]
    if missing:
        raise UserError(f"reward {fn.name!r} needs the option {missing[0]!r}")
    return BoundReward(
        reward=fn, args={name: _checked(fn, name, fn.options[name], value) for name, value in args.items()}
    )


def gold(sample: Sample, kind: Kind) -> object:
    """The target's value, for a reward that compares answers of one kind.

    Raises:
        Unscorable: the target is of another kind.
    """
    if sample.target.kind is not kind:
        raise Unscorable(f"the target is a {sample.target.kind}, this reward compares a {kind}")
    return sample.target.value


def _options(fn: Callable[..., Any]) -> dict[str, Option]:
    hints = get_type_hints(fn, include_extras=True)
    options = {}
    for name, parameter in list(inspect.signature(fn).parameters.items())[2:]:
        if parameter.kind is not parameter.KEYWORD_ONLY or name not in hints:
            raise UserError(f"{fn.__qualname__}: option {name!r} must come after `*` and have a type")
        required = parameter.default is parameter.empty
        options[name] = Option(hints[name], None if required else parameter.default, required)
    return options


def _checked(fn: Reward[...], name: str, option: Option, value: object) -> object:
    adapter: TypeAdapter[object] = TypeAdapter(option.hint)
    try:
        return adapter.validate_json(TypeAdapter(Any).dump_json(value), strict=True)
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise UserError(f"reward {fn.name!r}, option {name!r} = {value!r}: {what}") from None


def _alternatives(name: str, options: Mapping[str, Option]) -> str:
    if close := difflib.get_close_matches(name, options, n=1):
        return f"did you mean {close[0]!r}?"
    return f"it has {', '.join(map(repr, options))}" if options else "it has none"


def _import(module: str, qualname: str) -> object:
    return getattr(importlib.import_module(module), qualname)
