"""A reward for JSON answers that satisfy a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Final

from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from pydantic import AfterValidator
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import answer_value, column_value, reward, target_value

_MAX_MESSAGE_CHARS: Final = 120


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema. Raise ValueError if it is not a JSON Schema."""
    _build_validator(json.dumps(schema))
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_check_schema)]


@reward(name="schema", answer_types=(AnswerType.JSON,), timeout_s=5.0)
def valid(
    response: Response, sample: Sample, *, schema: Schema | None = None, column: str | None = None
) -> RewardValue:
    """Return 1 if the JSON answer satisfies the schema, else 0.

    The schema is `schema`, or that in `sample.meta[column]` if `schema` is null. The values of the fields are not
    compared with the target's, so combine it with a reward that does. A `pattern` can run forever on some texts, so a
    call has a time limit.

    Source: JSON Schema 2020-12 (json-schema.org), or the draft that `$schema` names, by the library jsonschema.
    Departures: `$ref` can only refer to the schema itself, and `format` is not checked.
    Unscorable: there is no schema, it is invalid, or the target does not satisfy it.
    """
    target = target_value(sample, AnswerType.JSON)
    given: object = schema
    if schema is None:
        if column is None:
            raise Unscorable("there is no schema: set args.schema, or args.column to the column that holds it")
        given = column_value(sample, column)
    try:
        # A column holds it as JSON text, or parsed.
        validator = _build_validator(json.dumps(json.loads(given) if isinstance(given, str) else given))
    except ValueError as error:
        raise Unscorable(f"column {column!r}: {error}") from error
    target_violation = _first_violation(validator, target)
    if target_violation:
        raise Unscorable(f"the target {target!r:.80} does not meet the schema: {target_violation}")
    violation = _first_violation(validator, answer_value(response))
    return RewardValue(float(not violation), violation or "meets the schema")


@lru_cache(maxsize=256)
def _build_validator(text: str) -> Validator:
    """Return the validator of a schema.

    Raises:
        ValueError: the text is not a JSON Schema, or it refers to a definition outside itself.
    """
    schema = json.loads(text)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON Schema is an object, got {text:.80}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"no JSON Schema: at {error.json_path}: {error.message:.200}") from None
    resolver = Registry[Any]().resolver_with_root(Resource.from_contents(schema, default_specification=DRAFT202012))
    # Look references up now, so that a broken one is found before training, not by the first answer that meets it.
    for reference in _iter_references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(f"no JSON Schema: $ref {reference!r:.80} leads nowhere in it") from None
    # An empty registry, because the default one fetches what `$ref` names from the network.
    return kind(schema, registry=Registry())


def _iter_references(schema: object) -> Iterator[str]:
    """Yield the value of every `$ref` and `$dynamicRef` in a schema."""
    inner: list[object] = []
    if isinstance(schema, Mapping):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(schema.get(key), str):
                yield schema[key]
        inner = list(schema.values())
    elif isinstance(schema, list):
        inner = schema
    for value in inner:
        yield from _iter_references(value)


def _first_violation(validator: Validator, value: object) -> str:
    """Return the message of the first violation, or "" if the value satisfies the schema."""
    try:
        error = next(iter(validator.iter_errors(value)), None)
    except RecursionError:
        return "nested too deeply to check"
    except OverflowError:
        return "a number too large to check"
    return f"at {error.json_path:.40}: {error.message:.{_MAX_MESSAGE_CHARS}}" if error else ""
