"""Load functions that YAML names: `package.module:function`, or `./file.py:function` beside the config.

Any error while a user's file is imported becomes a `UserError` with file, line and cause. The original exception is its
`__cause__`. `describe_plugin_error` does the same for later errors, when a function is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

from mmrl.types import FunctionCall, UserError
from mmrl.utils.digests import text_digest
from mmrl.utils.messages import did_you_mean
from mmrl.utils.plugin_args import check_positional_parameters, read_plugin_options, validate_args

IMPORT_TIMEOUT_S: Final = 120.0
"""Longest import of a plug-in, in seconds. Importing torch and vLLM with cold caches takes less than half of it."""
IN_MEMORY_PACKAGE: Final = "mmrl_in_memory"
"""Package of functions and samples passed to `mmrl.train` from memory; names in it end with a digest."""

_OWN_PACKAGES: Final = ("mmrl.", "mmrl_rewards.", "mmrl_datasets.")
# Uses of each loaded function that is not ours, by its source file, such as "policy loss './mine.py:soft'".
_LOADED_FROM: dict[str, list[str]] = {}


def load_plugin(
    name: str, base_dir: Path, args: Mapping[str, Any], *, role: str, parameters: Sequence[str]
) -> Callable[..., Any]:
    """Load the function that YAML names and bind its options.

    Args:
        name: `package.module:function` or `./file.py:function`.
        base_dir: folder that relative files start from; the config's.
        args: options from YAML, the keyword-only parameters of the function.
        role: the function's job, for messages: "policy loss", "tool".
        parameters: names of the positional arguments that it will be called with; its own may differ.

    Returns:
        The function with its options bound, to be called with `parameters`.

    Raises:
        UserError: the file cannot be imported, has no such function, or has one of another signature; an option is
            unknown, missing or of the wrong type.
    """
    with errors_about_call(name, args):
        function = load_function(name, base_dir, role=role)
        check_positional_parameters(function, parameters, role=role)
        options = read_plugin_options(function, skip=len(parameters))
        return partial(function, **validate_args(f"{role} {name!r}", options, args))


@contextmanager
def errors_about_call(name: str, args: Mapping[str, Any]) -> Iterator[None]:
    """Record in a UserError of this block the config's function that it is about, and the option if it can be found."""
    try:
        yield
    except UserError as error:
        option = error.call.option if error.call else ""
        for key, value in args.items():
            # A function says `size=0 must be ...`, or names the file that it cannot read.
            names_file = isinstance(value, str) and ("/" in value or "." in value) and value in str(error)
            if not option and (f"{key}=" in str(error) or names_file):
                option = key
        error.call = FunctionCall(name, args, option)
        raise


def load_function(name: str, base_dir: Path, *, role: str) -> Callable[..., Any]:
    """Load the function that YAML names; file paths start from `base_dir`.

    Raises:
        UserError: there is no such module, file or function, it cannot be imported, or is not a function.
    """
    place, _, attribute = name.rpartition(":")
    is_file = place.endswith(".py")
    if not attribute or not (is_file or all(part.isidentifier() for part in place.split("."))):
        raise UserError(f"{name!r} names no function: write `package.module:function` or `./file.py:function`")
    if is_file:
        module = _import_file(base_dir / place, name)
    elif place in sys.modules:
        module = sys.modules[place]
    else:
        with _import_errors_explained(name, place):
            module = importlib.import_module(place)
    members = vars(module)
    if attribute not in members:
        hint = did_you_mean(attribute, members)
        raise UserError(f"{name!r}: {place} has no {attribute!r}" + (f"; {hint}" if hint else ""))
    found: object = members[attribute]
    if not callable(found):
        raise UserError(f"{role} {name!r} is not a function, but {type(found).__name__} {found!r:.60}")
    code = getattr(inspect.unwrap(found), "__code__", None)
    if code is not None and not found.__module__.startswith(_OWN_PACKAGES):
        _LOADED_FROM.setdefault(code.co_filename, []).append(f"{role} {name!r}")
    return found


def describe_plugin_error(error: BaseException) -> str | None:
    """Return role, name, exception, file and line of an error in a user's function; None for an error elsewhere."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if entry.filename in _LOADED_FROM:
            used_as = " or ".join(dict.fromkeys(_LOADED_FROM[entry.filename]))
            cause = ": ".join(filter(None, (type(error).__name__, str(error))))
            return f"{used_as} raised {cause} ({entry.filename}:{entry.lineno})"
    return None


class _ImportTimeoutError(BaseException):
    """The deadline of an import has passed. Not an `Exception`, so that a plug-in's own `except` cannot swallow it."""


def _import_file(path: Path, name: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UserError(f"{name!r}: there is no file {path}")
    # Two files of one name must not collide, so the name holds a digest of the path. It has to be in `sys.modules`,
    # or nothing that the file defines could be pickled for a worker process.
    module_name = f"mmrl_plugin_{path.stem}_{text_digest(str(path))[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _import_errors_explained(name, str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        # A half-imported module would make the next load find it and continue without its functions.
        del sys.modules[module_name]
        raise
    return module


@contextmanager
def _import_errors_explained(name: str, imported: str) -> Iterator[None]:
    """Turn an error of the import inside this block into a `UserError` with file, line and cause.

    `imported` is a module's name or a file's path.
    """
    try:
        with _import_deadline(IMPORT_TIMEOUT_S):
            yield
    except ModuleNotFoundError as error:
        if imported.startswith(f"{IN_MEMORY_PACKAGE}."):
            raise UserError(
                f"{name!r} was given to `mmrl.train` from the memory of a Python process, and this one does not have "
                "it. Call `mmrl.train` in the same way first, which returns a finished run at once; or write the "
                "function in a file, and name that"
            ) from error
        # `a.b:fn` with no package `a` is a wrong name; with `import c` inside `a.b`, it is an error of that file.
        if error.name is not None and f"{imported}.".startswith(f"{error.name}."):
            raise UserError(f"{name!r}: there is no module {error.name!r}") from error
        raise UserError(f"{name!r}: {_locate(error, imported)}: {type(error).__name__}: {error}") from error
    except SyntaxError as error:
        raise UserError(f"{name!r}: {error.filename}:{error.lineno}: syntax error: {error.msg}") from error
    except UserError as error:
        raise UserError(f"{name!r}: {_locate(error, imported)}: {error}") from error
    except _ImportTimeoutError as error:
        place = _locate(error, imported)
        raise UserError(f"{name!r}: {place}: still not imported after {IMPORT_TIMEOUT_S:g} s, here") from error
    except KeyboardInterrupt:
        raise
    # A plug-in can raise anything, SystemExit too, and all of it is reported to its author with the cause.
    except BaseException as error:
        raise UserError(f"{name!r}: {_locate(error, imported)}: {type(error).__name__}: {error}") from error


@contextmanager
def _import_deadline(seconds: float) -> Iterator[None]:
    """Raise `_ImportTimeoutError` at the line that this block has reached after so many seconds.

    A signal interrupts sleeps, locks and endless loops, and its traceback shows the line. Python delivers signals only
    to the main thread; in another thread the block has no deadline. The first load of a run is in the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return

    def stop(signum: int, call_frame: FrameType | None) -> NoReturn:
        raise _ImportTimeoutError

    previous_handler = signal.signal(signal.SIGALRM, stop)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)


def _locate(error: BaseException, imported: str) -> str:
    """Return `file:line` of the plug-in's own last line before an error, else that of the error itself.

    The last line of the plug-in is what its author can change; an error deep in a library is named in full by the
    message that follows.
    """
    entries = traceback.extract_tb(error.__traceback__)
    module_path = imported.replace(".", "/") + ".py"
    own = [entry for entry in entries if entry.filename == imported or entry.filename.endswith(f"/{module_path}")]
    entry = (own or entries)[-1]
    return f"{entry.filename}:{entry.lineno}"
