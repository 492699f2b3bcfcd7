"""Functions named in YAML: `package.module:function` or `./file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from mmrl.types import UserError


def load_object(name: str, base_dir: Path) -> object:
    """The object that `name` stands for; file paths start from `base`.

    Raises:
        UserError: there is no such module, file or attribute.
    """
    where, _, attribute = name.rpartition(":")
    if not attribute or not (where.endswith(".py") or all(part.isidentifier() for part in where.split("."))):
        raise UserError(f"{name!r} names no function: write `package.module:function` or `./file.py:function`")
    module = _import_file(base_dir / where, name) if where.endswith(".py") else _import_package_module(where, name)
    members = vars(module)
    if attribute not in members:
        close = difflib.get_close_matches(attribute, members, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{name!r}: {where} has no {attribute!r}{hint}")
    return members[attribute]


def _import_package_module(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and something it imports does not: the user's traceback says where
        raise UserError(f"{name!r}: there is no module {error.name!r}") from error


def _import_file(path: Path, name: str) -> ModuleType:
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
