"""Values of a run as JSON text and back, exactly: types of `mmrl.types`, tuples, enums, and floats bit for bit.

JSON's own values are written as they are. Everything else is an object of one key that begins with `$`:

    (1, 2)                       {"$tuple": [1, 2]}
    AnswerType.BOX               {"$AnswerType": "box"}
    Size(48, 32)                 {"$Size": [48, 32]}
    ImageRef(path="a.png", ..)   {"$ref": 0}, its place in the table of objects

The text is `{"$objects": [..], "$value": ..}`. The table has every dataclass instance once, `{"$ImageRef": {"path":
"a.png", ..}}`, after the instances that it refers to. Equal instances share one entry, even if they are separate
objects in memory, so the text depends only on the value, and a resumed run writes the same text as an undisturbed one.
Rollouts of one group share their prompt in the text, and again after it is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from mmrl import types
from mmrl.types import UserError

Value = TypeVar("Value")

_JSON_SCALAR_TYPES: Final = frozenset({type(None), bool, int})
_CODEC_TYPES: Final[Mapping[str, type[Any]]] = {
    name: kind
    for name, kind in vars(types).items()
    if isinstance(kind, type) and kind.__module__.startswith(f"{types.__name__}.")
    if is_dataclass(kind) or issubclass(kind, tuple | Enum)
}


def dumps(value: object) -> str:
    """Return `value` as strict JSON.

    Raises:
        UserError: it holds something that is neither a type of `mmrl.types` nor plain Python.
    """
    encoder = _ValueEncoder()
    text = json.dumps(encoder.encode(value), allow_nan=False)
    return f'{{"$objects": [{", ".join(encoder.object_numbers)}], "$value": {text}}}'


def loads(text: str, expected_type: type[Value]) -> Value:
    """Return the value that `dumps` wrote as `text`. Objects that were equal are one object now.

    Raises:
        UserError: another version of mmrl wrote it, or it is not an `expected_type`.
    """
    value = json.loads(text, object_hook=_ValueDecoder().decode)
    if not isinstance(value, expected_type):
        raise UserError(f"expected a {expected_type.__name__}, but this is a {type(value).__name__}: {text:.80}")
    return value


class _ValueEncoder:
    """Encodes one value, and collects the table of its objects."""

    def __init__(self) -> None:
        self.object_numbers: dict[str, int] = {}  # text of each distinct dataclass instance → its place in the table
        # By identity, to encode an instance once: `id` is safe here, as all of them stay alive as parts of the value.
        self._numbers_by_id: dict[int, int] = {}
        self._encoders: dict[type, Callable[[Any], object]] = {
            float: _encode_float,
            str: _encode_text,
            bytes: lambda value: {"$bytes": value.hex()},
            list: self._encode_items,
            tuple: lambda values: {"$tuple": self._encode_items(values)},
            dict: self._encode_mapping,
        }

    def encode(self, value: object) -> object:
        """Return the JSON form of a value."""
        # By exact type: an instance of a subclass would come back as one of its base class.
        if type(value) in _JSON_SCALAR_TYPES:
            return value
        return self._encoders.get(type(value), self._encode_object)(value)

    def _encode_items(self, values: Sequence[object]) -> list[object]:
        # Most items are token ids; testing their type here saves a call for each.
        return [value if type(value) in _JSON_SCALAR_TYPES else self.encode(value) for value in values]

    def _encode_mapping(self, mapping: Mapping[object, object]) -> dict[str, object]:
        if all(map(_is_plain_key, mapping)):
            return {str(key): self.encode(value) for key, value in mapping.items()}
        return {"$dict": [[self.encode(key), self.encode(value)] for key, value in mapping.items()]}

    def _encode_object(self, value: object) -> dict[str, object]:
        kind = type(value)
        if _CODEC_TYPES.get(kind.__name__) is not kind:
            raise UserError(
                f"a checkpoint cannot hold {value!r:.80} ({kind.__module__}.{kind.__qualname__}); turn it into "
                "plain Python values where samples are made"
            )
        tag = f"${kind.__name__}"
        if isinstance(value, Enum):
            return {tag: value.value}
        if isinstance(value, tuple):
            return {tag: self._encode_items(value)}
        if id(value) not in self._numbers_by_id:
            content = {field.name: self.encode(getattr(value, field.name)) for field in fields(kind)}
            # Inner instances are in this text by their numbers, so equal instances have equal texts. 0, 0.0, -0.0
            # and False have different texts, though they are equal.
            text = json.dumps({tag: content}, allow_nan=False)
            self._numbers_by_id[id(value)] = self.object_numbers.setdefault(text, len(self.object_numbers))
        return {"$ref": self._numbers_by_id[id(value)]}


class _ValueDecoder:
    """Decodes one value. `json` completes the objects of the table in order, so the n-th of them, from 0, is `$ref` n.

    It also reads texts of earlier versions, which hold each instance at the place where it first occurs.
    """

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._decoders: dict[str, Callable[[Any], object]] = {
            "$float": _decode_float,
            "$str": _decode_text,
            "$bytes": bytes.fromhex,
            "$tuple": tuple,
            "$dict": dict,
            "$ref": self._objects.__getitem__,
        }

    def decode(self, json_object: dict[str, object]) -> object:
        """Return the value of a JSON object."""
        tag, content = next(iter(json_object.items()), ("", None))
        if not tag.startswith("$"):
            return json_object
        if tag == "$objects":
            return json_object["$value"]
        if tag in self._decoders:
            return self._decoders[tag](content)
        name = tag[1:]
        try:
            codec_type = _CODEC_TYPES[name]
            if isinstance(content, dict):
                self._objects.append(codec_type(**content))
                return self._objects[-1]
            return codec_type(*content) if isinstance(content, list) else codec_type(content)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{name}: written by another version of mmrl ({error}); continue with that version, or start a new run"
            ) from error


def _is_plain_key(key: object) -> bool:
    # A plain key comes back from JSON unchanged, and cannot be mistaken for a tag.
    return type(key) is str and _encode_text(key) == key and not key.startswith("$")


def _encode_float(number: float) -> float | dict[str, str]:
    # JSON lacks infinities and NaN; the bits keep a NaN's payload, too.
    return number if math.isfinite(number) else {"$float": struct.pack(">d", number).hex()}


def _decode_float(bits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def _encode_text(text: str) -> str | dict[str, str]:
    # By its bytes if it has lone surrogates: JSON would join two halves of a pair.
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"$str": text.encode("utf-8", errors="surrogatepass").hex()}
    return text


def _decode_text(units: str) -> str:
    return bytes.fromhex(units).decode("utf-8", errors="surrogatepass")
