"""Functions named in YAML: `package.module:function` or `./file.py:function`, with options checked before use."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mmrl.types import UserError


def resolve(name: str, base: Path) -> Any:
    """The object that `name` stands for; file paths start from `base`.

    Raises:
        UserError: there is no such module, file or attribute.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{name!r} names no function: write `package.module:function` or `./file.py:function`")
    module = _from_file(base / where, name) if where.endswith(".py") else _from_package(where, name)
    members = vars(module)
    if attribute not in members:
        close = difflib.get_close_matches(attribute, members, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{name!r}: {where} has no {attribute!r}{hint}")
    return members[attribute]


def check_options(fn: Callable[..., Any], args: Mapping[str, Any], name: str) -> None:
    """Refuse options that `fn` does not take, or lacks.

    Raises:
        UserError: naming the option and what exists instead.
    """
    options = {
        key: parameter
        for key, parameter in inspect.signature(fn).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for key in args:
        if key not in options:
            close = difflib.get_close_matches(key, options, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(options)}"
            raise UserError(f"{name!r} has no option {key!r}; {hint}")
    for key, parameter in options.items():
        if parameter.default is parameter.empty and key not in args:
            raise UserError(f"{name!r} needs the option {key!r}")


def _from_package(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module exists, and something it imports does not: the user's traceback says where
        raise UserError(f"{name!r}: there is no module {error.name!r}") from error


def _from_file(path: Path, name: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UserError(f"{name!r}: there is no file {path}")
    # Named after its place, so that two files of one name do not collide, and known to `sys.modules`, so that what it
    # defines can be pickled.
    module_name = f"mmrl_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
