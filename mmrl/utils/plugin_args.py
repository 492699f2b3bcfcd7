"""Options of plug-in functions: the keyword-only parameters of a signature, checked against YAML."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mmrl.types import FunctionCall, UserError
from mmrl.utils.messages import did_you_mean

# By default an infinity would be written as null, and arrive as None.
_JSON: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))


class PluginOption(NamedTuple):
    """A keyword-only parameter of a plug-in function."""

    type_hint: Any  # type that a value from YAML is converted to
    default: Any  # value when YAML sets none; None for a required option
    required: bool  # True if YAML must set it


def check_positional_parameters(function: Callable[..., Any], parameters: Sequence[str], *, role: str) -> None:
    """Check that a function takes as many positional arguments as `parameters` names. Raises UserError if not."""
    own = list(_read_signature(function).parameters.values())
    positional = [entry for entry in own if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)]
    required = [entry for entry in positional if entry.default is entry.empty]
    takes_any_number = any(entry.kind is entry.VAR_POSITIONAL for entry in own)
    enough = takes_any_number or len(positional) >= len(parameters)
    if not enough or len(required) > len(parameters):
        found = ", ".join(entry.name for entry in positional) or "none"
        article = "an" if role[0] in "aeiou" else "a"
        raise UserError(
            f"{locate_function(function)}: {article} {role} is called with ({', '.join(parameters)}), but its "
            f"positional parameters are ({found}); put options after `*`"
        )


def check_methods(found: object, port: type, names: Sequence[str], *, owner: str) -> None:
    """Check that an object from a user's function has the methods `names`, callable like the methods of `port`.

    Raises:
        UserError: `owner` returned an object without one of the methods `names`, or with other parameters.
    """
    for name in names:
        expected = [entry for entry in _read_signature(getattr(port, name)).parameters.values() if entry.name != "self"]
        positional = [entry.name for entry in expected if entry.kind is not entry.KEYWORD_ONLY]
        keywords = [entry.name for entry in expected if entry.kind is entry.KEYWORD_ONLY]
        # The `__call__` of a function takes anything, so the signature of the function itself is read.
        method = found if name == "__call__" else getattr(found, name, None)
        check_call(method, positional, keywords, name=name, owner=f"{owner} returned {found!r:.80}")


def check_call(
    function: object, positional: Sequence[str], keywords: Sequence[str] = (), *, name: str, owner: str
) -> None:
    """Check that the function `name`, given by `owner`, can be called with these arguments.

    Raises:
        UserError: it is not a function, or has other parameters.
    """
    call = f"{name}({', '.join([*positional, *(f'{keyword}=...' for keyword in keywords)])})"
    if not callable(function):
        raise UserError(f"{owner}, which has no method {name!r}; it is called as {call}")
    try:
        _read_signature(function).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise UserError(f"{locate_function(function)}: {owner}: it is called as {call}, but: {error}") from error


def read_plugin_options(function: Callable[..., Any], *, skip: int) -> dict[str, PluginOption]:
    """Return the options of a function: every parameter but the first `skip`.

    Raises:
        UserError: one of them is not keyword-only, or has no type.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"{locate_function(function)}: its type hints cannot be read: {error}") from error
    options = {}
    for name, parameter in list(_read_signature(function).parameters.items())[skip:]:
        if parameter.kind is not parameter.KEYWORD_ONLY or name not in hints:
            raise UserError(f"{locate_function(function)}: option {name!r} must come after `*` and have a type")
        required = parameter.default is parameter.empty
        options[name] = PluginOption(hints[name], None if required else parameter.default, required)
    return options


def validate_args(owner: str, options: Mapping[str, PluginOption], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` converted to the types of the signature.

    They are checked as JSON is: a list becomes a tuple and a string an enum member, but "3" is not a number.

    Raises:
        UserError: an option of `owner` is unknown, missing or of the wrong type.
    """
    for name in args:
        if name not in options:
            known = f"it has {', '.join(map(repr, options))}" if options else "it has none"
            raise _option_error(f"{owner} has no option {name!r}; {did_you_mean(name, options) or known}", name, args)
    for name, option in options.items():
        if option.required and name not in args:
            raise UserError(f"{owner} needs the option {name!r}")
    validated = {}
    for name, value in args.items():
        adapter: TypeAdapter[object] = TypeAdapter(options[name].type_hint)
        try:
            # By way of JSON, because strict checks of Python objects would refuse a list where a tuple is wanted.
            validated[name] = adapter.validate_json(_JSON.dump_json(value), strict=True)
        except ValidationError as error:
            raise _validation_error(error, owner, name, args) from None
    return validated


def _validation_error(error: ValidationError, owner: str, name: str, args: Mapping[str, Any]) -> UserError:
    """Return an error about the option `name`. If the option is a mapping, the error names the key in it."""
    # A misspelled key can give two problems, a missing key and then an unknown one. The second says more.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    place, inner = [name], args[name]
    # Pydantic also lists the tags of unions, which are keys of nothing.
    for key in problems[0]["loc"]:
        is_entry = isinstance(inner, list) and isinstance(key, int) and key < len(inner)
        if is_entry or (isinstance(inner, Mapping) and key in inner):
            place.append(str(key))
            inner = inner[key]
    message = problems[0]["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    message = message.replace("Extra inputs are not permitted", "there is no such key")
    if problems[0]["type"] == "missing" and isinstance(inner, Mapping):
        message = f"needs the key {problems[0]['loc'][-1]!r}"
    at = "" if len(place) == 1 else f", {'.'.join(place)}"
    return _option_error(f"{owner}, option {name!r} = {args[name]!r}{at}: {message}", ".".join(place), args)


def _option_error(message: str, option: str, args: Mapping[str, Any]) -> UserError:
    error = UserError(message)
    error.call = FunctionCall("", args, option)
    return error


def locate_function(function: Callable[..., Any]) -> str:
    """Return `file:line: name` of a function, or only its name if it has no Python source."""
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{code.co_filename}:{code.co_firstlineno}: {name}"


def _read_signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    # Some functions written in C have none.
    except (TypeError, ValueError) as error:
        raise UserError(f"{locate_function(function)}: its parameters cannot be read: {error}") from error
