"""What pydantic found wrong, in words that name the line, the dotted path, and what to write instead."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic_core import ErrorDetails

from mmrl.config.schema import Config
from mmrl.config.yaml_tree import ConfigNode, ConfigProblem, KeyPath

_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def to_problem(error: ErrorDetails, root: ConfigNode, schema: type[BaseModel] = Config) -> ConfigProblem | None:
    """One pydantic error as a problem of the tree `root`; None when it only repeats an error further down."""
    kind, given = error["type"], error["input"]
    path, owner, wanted = _locate_error(error["loc"], schema)
    if kind.startswith("union_tag"):
        kind = "literal_error" if kind == "union_tag_invalid" else "missing"
        path, owner, given = (*path, "kind"), None, given.get("kind")
        wanted = Literal[tuple(_kind_of(model) for model in _models_in(wanted))]
    node, depth = root.find_nearest(path)
    match kind:
        case "missing" if isinstance(path[-1], int):
            path, text = path[:-1], f"needs {len(get_args(_strip_annotated(owner)))} values, got {len(given)}"
        case "missing":
            text = "missing; " + (_describe_key(owner, path[-1]) or f"write one of {_join_choices(get_args(wanted))}")
        case "extra_forbidden":
            text = f"unknown key; {_suggest_key(owner, str(path[-1]))}"
        case "literal_error":
            text = f"must be {_join_choices(_allowed_values(wanted))}, got {_describe_value(given)}"
            text += _did_you_mean(str(given), [*map(str, _allowed_values(wanted))])
        case "value_error":
            text = str(error["ctx"]["error"])
        case "too_short" if len(given) >= error["ctx"]["min_length"]:
            return None
        case "too_short":
            text = "needs at least one entry"
        case "too_long":
            text = f"needs {error['ctx']['max_length']} values, got {len(given)}"
        case "string_pattern_mismatch":
            text = f"must serve as a file name: letters, digits, - and _, a letter first; got {_describe_value(given)}"
        case _ if kind in _EXPECTED_TYPES:
            text = f"must be {_EXPECTED_TYPES[kind]}, got {_describe_value(given)}{_suggest_fix(kind, given)}"
        case _:
            text = f"{error['msg'].replace('Input should be', 'must be')}, got {_describe_value(given)}"
    return ConfigProblem(node.origin if depth else root.origin, path, text)


def _locate_error(loc: Sequence[int | str], schema: type[BaseModel]) -> tuple[KeyPath, Any, Any]:
    """A pydantic location without its union tags, the type that holds its last step, and that step's own type."""
    path: KeyPath = ()
    owner: Any = None
    here: Any = schema
    for step in loc:
        tagged = _find_tagged_choice(here, step)
        if tagged is not None:  # the step is the tag of a union, not a place in the file
            here = tagged
            continue
        here = _strip_annotated(here)
        models = _models_in(here)
        if len(models) > 1:  # the step is the tag of a discriminated union, not a place in the file
            here = next(model for model in models if _kind_of(model) == step)
            continue
        owner, path = (models[0] if models else here), (*path, step)
        here = _type_of_key(owner, step)
    return path, owner, here


def _type_of_key(owner: object, step: int | str) -> object:
    if isinstance(owner, type) and issubclass(owner, BaseModel) and step in owner.model_fields:
        return owner.model_fields[str(step)].annotation
    return get_args(owner)[0] if get_origin(owner) is tuple else Any


def _strip_annotated(annotation: object) -> object:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _allowed_values(annotation: object) -> tuple[object, ...]:
    """The words a value of this type may be; of one that may be left open, those that name something."""
    bare = _strip_annotated(annotation)
    parts = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    named = (choice for part in parts if get_origin(part) is Literal for choice in get_args(part))
    return tuple(str(choice) if isinstance(choice, str) else choice for choice in named)


def _models_in(annotation: object) -> tuple[type[BaseModel], ...]:
    """The models a value of this type may be."""
    bare = _strip_annotated(annotation)
    choices = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    choices = tuple(_strip_annotated(choice) for choice in choices)
    return tuple(choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel))


def _find_tagged_choice(annotation: object, tag: int | str) -> Any:
    """Return the choice of a union that is annotated with this `Tag`, or None."""
    bare = _strip_annotated(annotation)
    choices: tuple[object, ...] = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else ()
    for choice in choices:
        if Tag(str(tag)) in getattr(choice, "__metadata__", ()):
            return choice
    return None


def _kind_of(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])


def _describe_key(owner: object, key: int | str) -> str:
    if not (isinstance(owner, type) and issubclass(owner, BaseModel)):
        return ""
    text = owner.model_fields[str(key)].description or ""
    return text[:1].lower() + text[1:].rstrip(".")


def _suggest_key(owner: type[BaseModel], key: str) -> str:
    beneath = [path for path in _iter_key_paths(owner) if path[-1] == key]
    close = get_close_matches(key, owner.model_fields, n=1, cutoff=0.7)
    elsewhere = [path for path in _iter_key_paths(Config) if path[-1] == key]
    guesses = [".".join(path) for path in beneath] or close or [".".join(path) for path in elsewhere]
    return f"did you mean `{guesses[0]}`?" if guesses else f"the keys here are {', '.join(owner.model_fields)}"


def _iter_key_paths(owner: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in owner.model_fields.items():
        yield (*prefix, name)
        for model in _models_in(field.annotation):
            yield from _iter_key_paths(model, (*prefix, name))


def _did_you_mean(given: str, choices: Sequence[str]) -> str:
    close = get_close_matches(given, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _join_choices(choices: Sequence[Any]) -> str:
    *most, last = [repr(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last


def _describe_value(value: object) -> str:
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}..."
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return repr(value)


def _suggest_fix(kind: str, given: object) -> str:
    match kind, given:
        case "int_type" | "float_type", str() if _is_number(given):
            remedy = "remove the quotes"
        case "int_type", float() if given.is_integer():
            remedy = f"write {int(given)}"
        case "bool_type", "on" | "yes" | "true" | "On" | "Yes":
            remedy = "write true"
        case "bool_type", "off" | "no" | "false" | "Off" | "No":
            remedy = "write false"
        case "string_type", int() | float():
            remedy = "put quotes around it"
        case "tuple_type", dict():
            remedy = "begin each entry with `- `"
        case "tuple_type", str() | int() | float():
            remedy = f"write [{given}]"
        case _, None:
            remedy = "leave the key out to keep the default"
        case _:
            return ""
    return f"; {remedy}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
