"""Options of plug-in functions: the keyword-only parameters of a signature, checked against what YAML says."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mmrl.types import UserError

# By default an infinity would be written as null, and arrive as None.
_JSON: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))


class PluginOption(NamedTuple):
    """One option: its type, and its default unless it must be given."""

    type_hint: Any
    default: Any
    required: bool


def read_plugin_options(fn: Callable[..., Any], *, skip: int) -> dict[str, PluginOption]:
    """What may be set of `fn`: every parameter but the first `after`.

    Raises:
        UserError: one of them is not keyword-only or has no type.
    """
    hints = get_type_hints(fn, include_extras=True)
    options = {}
    for name, parameter in list(inspect.signature(fn).parameters.items())[skip:]:
        if parameter.kind is not parameter.KEYWORD_ONLY or name not in hints:
            raise UserError(f"{fn.__qualname__}: option {name!r} must come after `*` and have a type")
        required = parameter.default is parameter.empty
        options[name] = PluginOption(hints[name], None if required else parameter.default, required)
    return options


def validate_args(owner: str, options: Mapping[str, PluginOption], args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types the signature asks for, checked as JSON is: a list for a tuple, a string for an enum.

    Raises:
        UserError: an option of `who` is unknown, missing or of the wrong type.
    """
    for name in args:
        if name not in options:
            raise UserError(f"{owner} has no option {name!r}; {_suggest_options(name, options)}")
    missing = [name for name, option in options.items() if option.required and name not in args]
    if missing:
        raise UserError(f"{owner} needs the option {missing[0]!r}")
    return {name: _validate_value(owner, name, options[name], value) for name, value in args.items()}


def _validate_value(owner: str, name: str, option: PluginOption, value: object) -> object:
    adapter: TypeAdapter[object] = TypeAdapter(option.type_hint)
    try:
        return adapter.validate_json(_JSON.dump_json(value), strict=True)
    except ValidationError as error:
        raise UserError(f"{owner}, option {name!r} = {value!r}: {error.errors()[0]['msg']}") from None


def _suggest_options(name: str, options: Mapping[str, PluginOption]) -> str:
    if close := difflib.get_close_matches(name, options, n=1):
        return f"did you mean {close[0]!r}?"
    return f"it has {', '.join(map(repr, options))}" if options else "it has none"
