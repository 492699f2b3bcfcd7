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

_PLAIN: Final = frozenset({type(None), bool, int})
_NOUNS: Final[Mapping[str, type[Any]]] = MappingProxyType(
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
    return json.dumps(_Writer().write(value), allow_nan=False)


def loads(text: str, kind: type[Value]) -> Value:
    """The value of this `kind` that `dumps` made `text` of; nouns that were one object are one again.

    Raises:
        UserError: it was written by another version of mmrl, whose nouns are different.
    """
    value = json.loads(text, object_hook=_Reader().read)
    if not isinstance(value, kind):
        raise UserError(f"a {kind.__name__} was expected, and this is a {type(value).__name__}: {text:.80}")
    return value


class _Writer:
    """Remembers the nouns it has written, by identity; they stay alive as long as the value they are part of."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._writers: dict[type, Callable[[Any], object]] = {
            float: _float,
            str: _text,
            bytes: lambda value: {"$bytes": value.hex()},
            list: self._items,
            tuple: lambda value: {"$tuple": self._items(value)},
            dict: self._mapping,
        }

    def write(self, value: object) -> object:
        """What stands for a value; an instance of a subclass is not what its class is."""
        if type(value) in _PLAIN:
            return value
        return self._writers.get(type(value), self._noun)(value)

    def _items(self, values: Sequence[object]) -> list[object]:
        return [value if type(value) in _PLAIN else self.write(value) for value in values]

    def _mapping(self, mapping: Mapping[object, object]) -> dict[str, object]:
        if all(type(key) is str and _text(key) == key and not key.startswith("$") for key in mapping):
            return {str(key): self.write(value) for key, value in mapping.items()}
        return {"$dict": [[self.write(key), self.write(value)] for key, value in mapping.items()]}

    def _noun(self, value: object) -> dict[str, object]:
        kind = type(value)
        if _NOUNS.get(kind.__name__) is not kind:
            raise UserError(
                f"a checkpoint cannot hold {value!r:.80} ({kind.__module__}.{kind.__qualname__}); plain Python values "
                "it can: turn it into one where samples are made"
            )
        if isinstance(value, Enum):
            return {f"${kind.__name__}": value.value}
        if isinstance(value, tuple):
            return {f"${kind.__name__}": self._items(value)}
        if id(value) in self._numbers:
            return {"$ref": self._numbers[id(value)]}
        names = [field.name for field in fields(kind)]
        written: dict[str, object] = {f"${kind.__name__}": {name: self.write(getattr(value, name)) for name in names}}
        self._numbers[id(value)] = len(self._numbers)
        return written


class _Reader:
    """Meets objects as they are completed, the innermost first: nouns in the order in which they were numbered."""

    def __init__(self) -> None:
        self._nouns: list[object] = []
        self._readers: dict[str, Callable[[Any], object]] = {
            "$float": lambda bits: struct.unpack(">d", bytes.fromhex(bits))[0],
            "$str": lambda units: bytes.fromhex(units).decode("utf-8", errors="surrogatepass"),
            "$bytes": bytes.fromhex,
            "$tuple": tuple,
            "$dict": dict,
            "$ref": self._nouns.__getitem__,
        }

    def read(self, found: dict[str, object]) -> object:
        """The value that a JSON object stands for."""
        tag, content = next(iter(found.items()), ("", None))
        if not tag.startswith("$"):
            return found
        return self._readers[tag](content) if tag in self._readers else self._noun(tag[1:], content)

    def _noun(self, name: str, content: object) -> object:
        try:
            noun = _NOUNS[name]
            if isinstance(content, dict):
                self._nouns.append(noun(**content))
                return self._nouns[-1]
            return noun(*content) if isinstance(content, list) else noun(content)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{name}: written by another version of mmrl ({error}); go on with that version, or begin the run anew"
            ) from error


def _float(number: float) -> float | dict[str, str]:
    """A number; infinities and NaN, which JSON has not, by their bits."""
    return number if math.isfinite(number) else {"$float": struct.pack(">d", number).hex()}


def _text(text: str) -> str | dict[str, str]:
    """Text; one that JSON would not give back, as it joins halves of surrogate pairs, by its bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"$str": text.encode("utf-8", errors="surrogatepass").hex()}
    return text
