"""Finding rewards, their case tables and tools by name: those that come with mmrl, and those in a file of one's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import mmrl_rewards
from mmrl.config.schema import Tool as ToolOptions
from mmrl.rollout.tools.workers import Tool
from mmrl.types import UserError
from mmrl.utils.plugin_args import options_of, settle
from mmrl.utils.plugins import resolve
from mmrl_rewards.cases import Case, load
from mmrl_rewards.contract import BoundReward, Reward, bind

AnyReward = Reward[...]
_FOLDER = Path(mmrl_rewards.__path__[0]).parent / "cases"


def rewards() -> dict[str, AnyReward]:
    """Every reward of `mmrl_rewards`, by `module:function`."""
    found = {}
    for info in pkgutil.iter_modules(mmrl_rewards.__path__, "mmrl_rewards."):
        module = importlib.import_module(info.name)
        for name, member in vars(module).items():
            if isinstance(member, Reward) and member.fn.__module__ == info.name:
                found[f"{info.name}:{name}"] = member
    return dict(sorted(found.items()))


def full_name(name: str) -> str:
    """`box:iou` is short for `mmrl_rewards.box:iou`; names in files stay as they are.

    Raises:
        UserError: there is no such reward.
    """
    where = name.rpartition(":")[0]
    if where.endswith(".py") or "." in where:
        return name
    known = rewards()
    if f"mmrl_rewards.{name}" in known:
        return f"mmrl_rewards.{name}"
    short = [known_name.removeprefix("mmrl_rewards.") for known_name in known]
    close = get_close_matches(name, short, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`mmrl reward list` shows all"
    raise UserError(f"there is no reward {name!r}; {hint}")


def get(name: str, base: Path) -> AnyReward:
    """The reward of a name; files start from `base`. Raises UserError when the name is none, or not a reward's."""
    found = resolve(full_name(name), base)
    if not isinstance(found, Reward):
        raise UserError(f"{name!r} is not a reward: decorate the function with @mmrl_rewards.contract.reward(name=...)")
    return found


def find(name: str, base: Path, args: Mapping[str, Any]) -> BoundReward:
    """The reward of a name with its options. Raises UserError as `get` and `bind` do."""
    return bind(get(name, base), args)


def find_tool(base: Path, line: ToolOptions) -> Tool:
    """The tool that a line of YAML names, with its options settled; files start from `base`.

    Raises:
        UserError: there is none of this name, or an option is unknown, missing or of the wrong type.
    """
    fn = resolve(line.fn, base)
    if not callable(fn):
        raise UserError(f"{line.fn!r} is no function of a call and a sample")
    return partial(fn, **settle(f"tool {line.called}", options_of(fn, after=2), line.args))


def tables() -> tuple[Path, ...]:
    """The case tables that come with mmrl, in its source tree.

    Raises:
        UserError: mmrl was installed without them.
    """
    if not (found := _shipped()):
        raise UserError(
            f"there are no case tables in {_FOLDER}: they come with the source tree; name a table of your own"
        )
    return found


def cases_of(name: str, base: Path) -> tuple[tuple[Case, ...], Path]:
    """The rows about one reward and the folder their files start from: of the table beside a reward's own file, or of
    those that come with mmrl.

    Raises:
        UserError: there is no table, or no row about it.
    """
    full, beside = _table_beside(name, base)
    places, folder = ((beside,), beside.parent) if beside else (tables(), base)
    if not (found := _rows(full, places)):
        raise UserError(f"no case table has a row about {full!r}; looked in {', '.join(map(str, places))}")
    return found, folder


def check(names: Iterable[str], base: Path) -> None:
    """Run the case tables of rewards, as far as they have any: do they still do here what they say?

    Raises:
        UserError: a row came out otherwise.
    """
    read = cache(load)
    for name in dict.fromkeys(names):
        full, beside = _table_beside(name, base)
        places = _shipped() if beside is None else tuple(path for path in (beside,) if path.is_file())
        for case in _rows(full, places, read):
            if failure := case.failure(find(name, base, case.args)):
                raise UserError(f"reward {name!r} contradicts its case table: {failure}")


def _shipped() -> tuple[Path, ...]:
    return tuple(sorted(_FOLDER.glob("*.json")))


def _table_beside(name: str, base: Path) -> tuple[str, Path | None]:
    """What rows call a reward, and the table beside its file if it is in one."""
    full = full_name(name)
    where, _, function = full.rpartition(":")
    if not where.endswith(".py"):
        return full, None
    return f"./{Path(where).name}:{function}", (base / where).with_suffix(".json")


def _rows(full: str, places: Iterable[Path], read: Callable[[Path], tuple[Case, ...]] = load) -> tuple[Case, ...]:
    return tuple(case for table in places for case in read(table) if case.fn == full)
