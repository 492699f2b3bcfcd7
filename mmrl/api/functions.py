"""Names for functions that exist only in memory: in a notebook cell, a script, or another function.

A config names every function by its module, so such a function gets its own module, `mmrl_in_memory.NAME_DIGEST`.
In this process the module holds the function itself. Worker processes share this process's `sys.path` and find a file
of that name there, which loads a copy. The digest is part of the config, so a run is not resumed with other code.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias, get_type_hints

import cloudpickle

from mmrl.utils.plugins import IN_MEMORY_PACKAGE
from mmrl_rewards.contract import Reward, reward

AnyFunction: TypeAlias = Callable[..., Any]

_LOADER: Final = """\
import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
"""
_REFUSAL: Final = """\
from mmrl.types import UserError

raise UserError({message!r})
"""
_PICKLING_ERRORS: Final = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


def name_function(
    function: AnyFunction, *, copy_for_workers: bool = False, stands_for: AnyFunction | None = None
) -> str:
    """Return the name by which a config finds a function: `package.module:function`, or one in `mmrl_in_memory`.

    With `copy_for_workers`, worker processes find it too. If it cannot be copied, the worker that loads it raises a
    UserError. Name and digest are those of `stands_for`, if it is given.
    """
    named = _innermost(stands_for or function)
    name, module_name = getattr(named, "__qualname__", type(named).__qualname__), named.__module__
    # A module without a package is not named: its name would be taken for one of `mmrl_rewards`.
    if "." in module_name and _is_member(function, module_name, name):
        return f"{module_name}:{name}"
    digest = hashlib.sha256(_describe(stands_for or function, module_name, set()).encode()).hexdigest()[:8]
    short_name = name.rpartition(".")[2]
    # A lambda has no name that a config could use.
    full_name = _make_module(function, short_name if short_name.isidentifier() else "function", digest)
    if copy_for_workers:
        _write_copy(full_name, function)
    return full_name


def name_rows(samples: Sequence[object], split: str) -> str:
    """Return the name of a dataset function that yields these samples."""
    rows = tuple(samples)
    digest = hashlib.sha256(repr(rows).encode(errors="surrogatepass")).hexdigest()[:8]

    def read_rows(context: object) -> Iterator[object]:
        yield from rows

    return _make_module(read_rows, f"{split}_rows", digest)


def replace_functions(settings: object, *, copy_for_workers: bool = False) -> Any:  # noqa: ANN401 - as what is given
    """Return the settings of a config with each function replaced by its name."""
    if isinstance(settings, Mapping):
        replaced = {}
        for key, value in settings.items():
            # Rewards and tools run in worker processes, everything else in this one.
            in_worker = copy_for_workers or key in ("rewards", "tools")
            replaced[key] = replace_functions(value, copy_for_workers=in_worker)
        return replaced
    if isinstance(settings, list | tuple):
        return [replace_functions(value, copy_for_workers=copy_for_workers) for value in settings]
    return name_function(settings, copy_for_workers=copy_for_workers) if callable(settings) else settings


def _make_module(function: AnyFunction, name: str, digest: str) -> str:
    module = ModuleType(f"{IN_MEMORY_PACKAGE}.{name}_{digest}")
    setattr(module, name, function)
    sys.modules[module.__name__] = module
    return f"{module.__name__}:{name}"


def _innermost(function: AnyFunction) -> AnyFunction:
    """Return the function that a reward or a partial function calls."""
    while isinstance(function, Reward | partial):
        function = function.fn if isinstance(function, Reward) else function.func
    return function


def _is_member(function: AnyFunction, module_name: str, name: str) -> bool:
    """Return True if another process can import the function by this name."""
    module = sys.modules.get(module_name)
    is_importable = module is not None and module_name != "__main__" and module.__spec__ is not None
    return is_importable and vars(module).get(name) is function


# Description of code, for the digest.


def _describe(value: object, home: str, seen: set[int]) -> str:
    """Return a text that changes with the code of functions and classes in module `home`, and with constants.

    Objects that may change while a run continues, such as a list or model, are described only by type. `seen` holds the
    ids of functions and classes that are described already.
    """
    if isinstance(value, str | bytes | bool | int | float | complex | None):
        return repr(value)
    if isinstance(value, FunctionType | type):
        if id(value) in seen:
            return value.__qualname__
        seen.add(id(value))
    return " ".join(_describe(part, home, seen) for part in _find_parts(value, home))


def _find_parts(value: object, home: str) -> Iterable[object]:
    parts: Iterable[object]
    match value:
        case Reward():
            parts = (value.name, value.low, value.high, value.timeout_s, value.fn)
        case partial():
            parts = (value.func, value.args, *value.keywords.items())
        case MethodType():
            parts = (value.__func__,)
        case FunctionType() if value.__module__ == home:
            closure = tuple(cell.cell_contents for cell in value.__closure__ or ())
            used = tuple(value.__globals__.get(name) for name in sorted(_names_in(value.__code__)))
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
            parts = (value.__code__, defaults, closure, used)
        case CodeType():
            # Without file and line numbers, which differ from cell to cell.
            parts = (value.co_code, value.co_names, value.co_varnames, value.co_consts)
        case type() if value.__module__ == home:
            parts = sorted(vars(value).items())
        case FunctionType() | type() | ModuleType():
            parts = (value.__name__,)
        case tuple():
            parts = value
        case frozenset():
            # Each process orders a set of texts in its own way.
            parts = sorted(map(repr, value))
        case _:
            parts = (type(value).__qualname__,)
    return parts


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


# Copies for worker processes.


@cache
def _copies_folder() -> TemporaryDirectory[str]:
    """Return a folder on the `sys.path` of this process, which workers share; it is deleted when the process ends."""
    folder = TemporaryDirectory(prefix="mmrl-functions-")
    sys.path.append(folder.name)
    return folder


def _write_copy(full_name: str, function: AnyFunction) -> None:
    module_name, _, name = full_name.partition(":")
    path = Path(_copies_folder().name, *module_name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    copy = io.BytesIO()
    try:
        _Pickler(copy).dump(_with_resolved_hints(function))
    except _PICKLING_ERRORS as error:
        message = (
            f"{name} cannot be copied to a worker process ({type(error).__name__}: {error}); write it in a file, or "
            "let rewards run in the main process with rewards.custom_rewards=main_process"
        )
        path.write_text(_REFUSAL.format(message=message), encoding="utf-8")
        return
    path.with_suffix(".pkl").write_bytes(copy.getvalue())
    path.write_text(_LOADER.format(name=name), encoding="utf-8")


def _with_resolved_hints(function: AnyFunction) -> AnyFunction:
    """Return the function with resolved type hints, since a copy lacks the module in which they are looked up."""
    if not isinstance(function, FunctionType) or _is_member(function, function.__module__, function.__qualname__):
        return function
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:
        return function  # refused with a line, when the function is loaded
    resolved = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    resolved.__kwdefaults__ = function.__kwdefaults__
    resolved.__dict__.update(vars(function))
    resolved.__annotations__ = hints
    resolved.__module__, resolved.__qualname__ = function.__module__, function.__qualname__
    return resolved


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions of a script or notebook by value, and rewards with their declaration."""

    def reducer_override(self, value: object) -> object:
        """Return how a copy is made of a reward that workers cannot import."""
        if isinstance(value, Reward) and not _is_member(value, value.fn.__module__, value.fn.__qualname__):
            derived = ("fn", "options")
            declaration = {
                entry.name: getattr(value, entry.name) for entry in fields(value) if entry.name not in derived
            }
            return _declare_reward, (_with_resolved_hints(value.fn), declaration)
        return super().reducer_override(value)


def _declare_reward(function: AnyFunction, declaration: Mapping[str, Any]) -> object:
    return reward(**declaration)(function)
