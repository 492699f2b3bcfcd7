"""Values of a run as JSON text and back, exactly: nouns, tuples, enums, and floats bit for bit.

What JSON has stands for itself. All else is an object of one key that begins with `$`:

    (1, 2)                       {"$tuple": [1, 2]}
    Kind.BOX                     {"$Kind": "box"}
    Size(48, 32)                 {"$Size": [48, 32]}
    ImageRef(path="a.png", ..)   {"$ImageRef": {"path": "a.png", ..}}
    that very ImageRef again     {"$ref": 0}, the number of nouns completed before it

so siblings share their prompt in the text, and again after it is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeVar

from mmrl import types
from mmrl.types import UserError

Value = TypeVar("Value")

_JSON_SCALAR_TYPES: Final = frozenset({type(None), bool, int})
_CODEC_TYPES: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        name: noun
        for name, noun in vars(types).items()
        if isinstance(noun, type)
        and noun.__module__.startswith(f"{types.__name__}.")
        and (is_dataclass(noun) or issubclass(noun, tuple | Enum))
    }
)


def dumps(value: object) -> str:
    """`value` as strict JSON.

    Raises:
        UserError: it holds something that is neither a noun of `mmrl.types` nor plain Python.
    """
    return json.dumps(_ValueEncoder().encode(value), allow_nan=False)


def loads(text: str, expected_type: type[Value]) -> Value:
    """The value of this `kind` that `dumps` made `text` of; nouns that were one object are one again.

    Raises:
        UserError: it was written by another version of mmrl, whose nouns are different.
    """
    value = json.loads(text, object_hook=_ValueDecoder().decode)
    if not isinstance(value, expected_type):
        raise UserError(f"a {expected_type.__name__} was expected, and this is a {type(value).__name__}: {text:.80}")
    return value


class _ValueEncoder:
    """Remembers the nouns it has written, by identity; they stay alive as long as the value they are part of."""

    def __init__(self) -> None:
        self._object_numbers: dict[int, int] = {}
        self._encoders: dict[type, Callable[[Any], object]] = {
            float: _encode_float,
            str: _encode_text,
            bytes: lambda value: {"$bytes": value.hex()},
            list: self._encode_items,
            tuple: lambda value: {"$tuple": self._encode_items(value)},
            dict: self._encode_mapping,
        }

    def encode(self, value: object) -> object:
        """What stands for a value; an instance of a subclass is not what its class is."""
        if type(value) in _JSON_SCALAR_TYPES:
            return value
        return self._encoders.get(type(value), self._encode_object)(value)

    def _encode_items(self, values: Sequence[object]) -> list[object]:
        return [value if type(value) in _JSON_SCALAR_TYPES else self.encode(value) for value in values]

    def _encode_mapping(self, mapping: Mapping[object, object]) -> dict[str, object]:
        if all(type(key) is str and _encode_text(key) == key and not key.startswith("$") for key in mapping):
            return {str(key): self.encode(value) for key, value in mapping.items()}
        return {"$dict": [[self.encode(key), self.encode(value)] for key, value in mapping.items()]}

    def _encode_object(self, value: object) -> dict[str, object]:
        kind = type(value)
        if _CODEC_TYPES.get(kind.__name__) is not kind:
            raise UserError(
                f"a checkpoint cannot hold {value!r:.80} ({kind.__module__}.{kind.__qualname__}); plain Python values "
                "it can: turn it into one where samples are made"
            )
        if isinstance(value, Enum):
            return {f"${kind.__name__}": value.value}
        if isinstance(value, tuple):
            return {f"${kind.__name__}": self._encode_items(value)}
        if id(value) in self._object_numbers:
            return {"$ref": self._object_numbers[id(value)]}
        names = [field.name for field in fields(kind)]
        written: dict[str, object] = {f"${kind.__name__}": {name: self.encode(getattr(value, name)) for name in names}}
        self._object_numbers[id(value)] = len(self._object_numbers)
        return written


class _ValueDecoder:
    """Meets objects as they are completed, the innermost first: nouns in the order in which they were numbered."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._decoders: dict[str, Callable[[Any], object]] = {
            "$float": lambda bits: struct.unpack(">d", bytes.fromhex(bits))[0],
            "$str": lambda units: bytes.fromhex(units).decode("utf-8", errors="surrogatepass"),
            "$bytes": bytes.fromhex,
            "$tuple": tuple,
            "$dict": dict,
            "$ref": self._objects.__getitem__,
        }

    def decode(self, json_object: dict[str, object]) -> object:
        """The value that a JSON object stands for."""
        tag, content = next(iter(json_object.items()), ("", None))
        if not tag.startswith("$"):
            return json_object
        return self._decoders[tag](content) if tag in self._decoders else self._decode_object(tag[1:], content)

    def _decode_object(self, name: str, content: object) -> object:
        try:
            noun = _CODEC_TYPES[name]
            if isinstance(content, dict):
                self._objects.append(noun(**content))
                return self._objects[-1]
            return noun(*content) if isinstance(content, list) else noun(content)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{name}: written by another version of mmrl ({error}); go on with that version, or begin the run anew"
            ) from error


def _encode_float(number: float) -> float | dict[str, str]:
    """A number; infinities and NaN, which JSON has not, by their bits."""
    return number if math.isfinite(number) else {"$float": struct.pack(">d", number).hex()}


def _encode_text(text: str) -> str | dict[str, str]:
    """Text; one that JSON would not give back, as it joins halves of surrogate pairs, by its bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"$str": text.encode("utf-8", errors="surrogatepass").hex()}
    return text
