"""Does a JSON answer have the shape that was asked for?"""

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
from mmrl_rewards.contract import reward, target_value

_MAX_MESSAGE_CHARS: Final = 120


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    _build_validator(json.dumps(schema))
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_check_schema)]


@reward(name="schema", answer_types=(AnswerType.JSON,), timeout_s=5.0)
def valid(
    response: Response, sample: Sample, *, schema: Schema | None = None, column: str | None = None
) -> RewardValue:
    """1 if the JSON answer meets `schema`, or else the JSON Schema in `sample.meta[column]`; otherwise 0.

    Source: JSON Schema 2020-12 (json-schema.org), or the draft that `$schema` names, by the library jsonschema.
    Departures: `$ref` reaches no further than the schema itself; `format` is not checked. A `pattern` may take for ever
    on some text, hence the deadline. It says nothing of what the fields hold: combine it with a reward that does.

    Raises:
        Unscorable: there is no schema, it is none, or the target does not meet it.
    """
    target = target_value(sample, AnswerType.JSON)
    try:
        validator = _build_validator(json.dumps(_read_schema(sample, column) if schema is None else schema))
    except ValueError as error:
        raise Unscorable(f"column {column!r}: {error}") from error
    if flaw := _first_violation(validator, target):
        raise Unscorable(f"the target {target!r:.80} does not meet the schema: {flaw}")
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    flaw = _first_violation(validator, response.answer.value)
    return RewardValue(float(not flaw), flaw or "meets the schema")


def _read_schema(sample: Sample, column: str | None) -> object:
    if column is None:
        raise Unscorable("there is no schema: set args.schema, or args.column to the column that holds it")
    if column not in sample.meta:
        raise Unscorable(f"the sample has no column {column!r}; it has {', '.join(map(repr, sample.meta)) or 'none'}")
    given = sample.meta[column]
    return json.loads(given) if isinstance(given, str) else given


@lru_cache(maxsize=256)
def _build_validator(text: str) -> Validator:
    """Return the validator of a schema.

    Raises:
        ValueError: it is no JSON Schema, or refers to a definition outside itself.
    """
    schema = json.loads(text)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON Schema is an object, got {text:.80}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"no JSON Schema: at {error.json_path}: {error.message:.200}") from None
    own = Registry[Any]().resolver_with_root(Resource.from_contents(schema, default_specification=DRAFT202012))
    for reference in _iter_references(schema):
        try:
            own.lookup(reference)
        except Unresolvable:
            raise ValueError(f"no JSON Schema: $ref {reference!r:.80} leads nowhere in it") from None
    return kind(schema, registry=Registry())  # an empty one fetches nothing


def _iter_references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from (schema[key] for key in ("$ref", "$dynamicRef") if isinstance(schema.get(key), str))
        yield from (found for value in schema.values() for found in _iter_references(value))
    elif isinstance(schema, list):
        yield from (found for value in schema for found in _iter_references(value))


def _first_violation(validator: Validator, value: object) -> str:
    """Return the first error of a value, or an empty string."""
    try:
        error = next(iter(validator.iter_errors(value)), None)
    except RecursionError:
        return "nested too deeply to check"
    except OverflowError:
        return "a number too large to check"
    return f"at {error.json_path:.40}: {error.message:.{_MAX_MESSAGE_CHARS}}" if error else ""
