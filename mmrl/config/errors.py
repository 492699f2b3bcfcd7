"""Pydantic's validation errors as sentences that name file, line and key, and what to write instead."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML

from mmrl.config.schema import Config
from mmrl.config.yaml_tree import ConfigNode, ConfigProblem, KeyPath
from mmrl.utils.messages import did_you_mean

_MAX_SHOWN_CHARS = 60
_MAX_SHOWN_INTEGER = 1e15  # a larger float cannot hold every digit
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


def to_problem(error: ErrorDetails, root: ConfigNode, schema: type[BaseModel]) -> ConfigProblem | None:
    """Return one pydantic error as a problem of the tree `root`; None when it only repeats an error further down."""
    place = _locate_error(error["loc"], schema)
    kind, given = error["type"], error["input"]
    if kind.startswith("union_tag"):
        kinds = tuple(map(_kind_of, _model_choices(place.expected)))
        given = given.get("kind") if isinstance(given, dict) else None
        place = _ErrorPlace((*place.path, "kind"), None, Literal[kinds])
        kind = "literal_error" if kind == "union_tag_invalid" else "missing"
    # A list that holds an invalid entry is reported as too short as well: pydantic counts the valid ones.
    if kind == "too_short" and len(given) >= error["ctx"]["min_length"]:
        return None
    path = place.path
    # An old name of the missing key is a separate error, which names the new key.
    old_names = given if kind == "missing" and isinstance(given, dict) else ()
    if any(_look_up("renamed", place.owner, name) == path[-1] for name in old_names):
        return None
    node, depth = root.find_nearest(path)
    if kind == "missing" and isinstance(path[-1], int):
        path = path[:-1]
    return ConfigProblem(node.origin if depth else root.origin, path, _explain(kind, given, error, place))


class _ErrorPlace(NamedTuple):
    """The place of an error in the config and in the schema."""

    path: KeyPath  # keys and indices from the root
    owner: Any  # type that holds the last key or index
    expected: Any  # type of the value there


def _explain(kind: str, given: Any, error: ErrorDetails, place: _ErrorPlace) -> str:  # noqa: ANN401
    match kind:
        # An entry of a list of fixed length: `betas: [0.9]`.
        case "missing" if isinstance(place.path[-1], int):
            text = f"needs {len(get_args(_strip_annotated(place.owner)))} values, got {len(given)}"
        case "missing":
            description = _describe_key(place.owner, place.path[-1])
            text = f"missing; {description or f'write one of {_join_choices(get_args(place.expected))}'}"
        case "extra_forbidden":
            removed = _find_removed(place.owner, str(place.path[-1]))
            text = removed or f"unknown key; {_suggest_key(place.owner, place.path)}"
        case "literal_error":
            choices = _allowed_values(place.expected)
            close = did_you_mean(str(given), map(str, choices))
            hint = f"; {close}" if close else ""
            removed = _find_removed(place.owner, f"{place.path[-1]}={given}")
            text = removed or f"must be {_join_choices(choices)}, got {_describe_value(given)}{hint}"
        case "value_error":
            text = str(error["ctx"]["error"])
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
    return text


def _locate_error(loc: Sequence[int | str], schema: type[BaseModel]) -> _ErrorPlace:
    """Follow a pydantic location through the schema."""
    # Pydantic's location includes the tags of unions. The file does not, so the path leaves them out.
    path: KeyPath = ()
    owner: Any = None
    here: Any = schema
    for step in loc:
        tagged = _find_tagged_choice(here, step)
        if tagged is not None:
            here = tagged
            continue
        here = _strip_annotated(here)
        models = _model_choices(here)
        if len(models) > 1:
            here = next(model for model in models if _kind_of(model) == step)
            continue
        owner, path = (models[0] if models else here), (*path, step)
        if isinstance(owner, type) and issubclass(owner, BaseModel) and step in owner.model_fields:
            here = owner.model_fields[str(step)].annotation
        else:
            lists = [choice for choice in map(_strip_annotated, _union_choices(owner)) if get_origin(choice) is tuple]
            here = get_args(lists[0])[0] if lists else Any
    return _ErrorPlace(path, owner, here)


def _strip_annotated(annotation: object) -> object:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _union_choices(annotation: object) -> tuple[object, ...]:
    """Return the members of a union, or the type itself."""
    bare = _strip_annotated(annotation)
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)


def _allowed_values(annotation: object) -> tuple[object, ...]:
    """Return the values of the `Literal` in a type; enum members as their text."""
    values: list[object] = []
    for choice in _union_choices(annotation):
        bare = _strip_annotated(choice)
        if get_origin(bare) is Literal:
            values += [str(value) if isinstance(value, str) else value for value in get_args(bare)]
    return tuple(values)


def _model_choices(annotation: object) -> tuple[type[BaseModel], ...]:
    """Return the models that a value of this type may be."""
    choices = list(map(_strip_annotated, _union_choices(annotation)))
    return tuple(choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel))


def _find_tagged_choice(annotation: object, tag: int | str) -> Any:  # noqa: ANN401
    """Return the choice of a union that is annotated with this `Tag`, or None."""
    for choice in _union_choices(annotation):
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


def _suggest_key(owner: type[BaseModel], path: KeyPath) -> str:
    """Name the key that was meant."""
    # From the surest guess to the least: the key deeper in this section, a synonym, a typing error, another place.
    key = str(path[-1])
    for key_path in _iter_key_paths(owner):
        if key_path[-1] == key:
            return f"did you mean `{'.'.join(key_path)}`?"
    synonym = _find_synonym(owner, path)
    if synonym is not None:
        return f"the key for it is {synonym}"
    hint = did_you_mean(key, owner.model_fields, cutoff=0.7, quote="`")
    if hint:
        return hint
    for key_path in _iter_key_paths(Config):
        # A key of a run in the settings of an evaluation is in its right place, and still unknown.
        if key_path[-1] == key and key_path != path:
            return f"did you mean `{'.'.join(key_path)}`?"
    return f"the keys here are {', '.join(owner.model_fields)}"


@cache
def read_synonyms() -> dict[str, Any]:
    """Return the tables of synonyms.yaml: keys of other frameworks and of earlier versions, with our key for each."""
    # Read on the first unknown key, since a config without mistakes does not need it.
    tables: dict[str, Any] = YAML(typ="safe", pure=True).load(Path(__file__).with_name("synonyms.yaml"))
    return tables


def _find_removed(owner: object, key: str) -> str:
    """Return a sentence about a key, or a `key=value`, that was removed; empty for any other."""
    sentence = _look_up("removed", owner, key)
    return f"this {'value' if '=' in key else 'key'} is gone; {sentence}" if sentence else ""


def _look_up(table: str, section: object, key: str) -> str | None:
    """Return what a table of `read_synonyms` has for a key of a section; None if it has nothing."""
    # Base classes too: the keys that all stages share are listed under TrainingStage.
    for model in getattr(section, "__mro__", ()):
        entries = read_synonyms()[table].get(model.__name__, {})
        if key in entries:
            return str(entries[key])
    return None


def _find_synonym(section: type[BaseModel], path: KeyPath) -> str | None:
    """Return our key for an unknown one, with a note where the meaning differs, or None."""
    tables = read_synonyms()
    key, dotted = str(path[-1]), ".".join(map(str, path))
    renamed = _look_up("renamed", section, key)
    if renamed is not None:
        return f"`{renamed}`"
    if dotted in tables["moved"]:
        return f"`{tables['moved'][dotted]}`"
    # The last two words come first: verl's `rollout.n` is more specific than any key `n`.
    for theirs in (".".join(map(str, path[-2:])), key):
        for entry in tables["other_frameworks"]:
            if theirs in entry["theirs"]:
                return f"`{entry['ours']}` ({entry['note']})" if "note" in entry else f"`{entry['ours']}`"
    return None


def _iter_key_paths(owner: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key below a section, outside of lists."""
    for name, field in owner.model_fields.items():
        yield (*prefix, name)
        for model in _model_choices(field.annotation):
            yield from _iter_key_paths(model, (*prefix, name))


def _join_choices(choices: Sequence[Any]) -> str:
    *most, last = list(map(repr, choices))
    return f"{', '.join(most)} or {last}" if most else last


def _describe_value(value: object) -> str:
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case str():
            is_long = len(value) > _MAX_SHOWN_CHARS
            return f"the text {value[: _MAX_SHOWN_CHARS - 3]!r}..." if is_long else f"the text {value!r}"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return repr(value)


def _suggest_fix(kind: str, given: object) -> str:
    """Return what to change for the most common mistakes of type, as a clause; empty for others."""
    match kind, given:
        case "int_type" | "float_type", str() if _is_number(given):
            remedy = "remove the quotes"
        case "int_type", float() if given.is_integer() and abs(given) < _MAX_SHOWN_INTEGER:
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
