"""Finding rewards, their case tables and tools by name: those that come with mmrl, and those in a file of one's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import mmrl_rewards
from mmrl.config.schema import ToolConfig as ToolOptions
from mmrl.rollout.tools.workers import ToolFunction
from mmrl.types import UserError
from mmrl.utils.plugins import load_object, load_plugin
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import BoundReward, Reward, bind

AnyReward = Reward[...]
_CASES_DIR = Path(mmrl_rewards.__path__[0]).parent / "cases"


def builtin_rewards() -> dict[str, AnyReward]:
    """Every reward of `mmrl_rewards`, by `module:function`."""
    found = {}
    for info in pkgutil.iter_modules(mmrl_rewards.__path__, "mmrl_rewards."):
        module = importlib.import_module(info.name)
        for name, member in vars(module).items():
            if isinstance(member, Reward) and member.fn.__module__ == info.name:
                found[f"{info.name}:{name}"] = member
    return dict(sorted(found.items()))


def qualified_name(name: str) -> str:
    """`box:iou` is short for `mmrl_rewards.box:iou`; names in files stay as they are.

    Raises:
        UserError: there is no such reward.
    """
    where = name.rpartition(":")[0]
    if where.endswith(".py") or "." in where:
        return name
    known = builtin_rewards()
    if f"mmrl_rewards.{name}" in known:
        return f"mmrl_rewards.{name}"
    short = [known_name.removeprefix("mmrl_rewards.") for known_name in known]
    close = get_close_matches(name, short, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`mmrl reward list` shows all"
    raise UserError(f"there is no reward {name!r}; {hint}")


def load_reward(name: str, base: Path) -> AnyReward:
    """The reward of a name; files start from `base`. Raises UserError when the name is none, or not a reward's."""
    found = load_object(qualified_name(name), base)
    if not isinstance(found, Reward):
        raise UserError(f"{name!r} is not a reward: decorate the function with @mmrl_rewards.contract.reward(name=...)")
    return found


def load_bound_reward(name: str, base: Path, args: Mapping[str, Any]) -> BoundReward:
    """The reward of a name with its options. Raises UserError as `get` and `bind` do."""
    return bind(load_reward(name, base), args)


def load_tool(base: Path, options: ToolOptions) -> ToolFunction:
    """The tool that a line of YAML names, with its options settled; files start from `base`.

    Raises:
        UserError: there is none of this name, or an option is unknown, missing or of the wrong type.
    """
    return load_plugin(options.fn, base, options.args, role="tool", parameters=("call", "sample"))


def builtin_case_tables() -> tuple[Path, ...]:
    """The case tables that come with mmrl, in its source tree.

    Raises:
        UserError: mmrl was installed without them.
    """
    if not (found := _list_builtin_tables()):
        raise UserError(
            f"there are no case tables in {_CASES_DIR}: they come with the source tree; name a table of your own"
        )
    return found


def find_cases(name: str, base: Path) -> tuple[tuple[Case, ...], Path]:
    """The rows about one reward and the folder their files start from: of the table beside a reward's own file, or of
    those that come with mmrl.

    Raises:
        UserError: there is no table, or no row about it.
    """
    full, beside = _own_case_table(name, base)
    places, folder = ((beside,), beside.parent) if beside else (builtin_case_tables(), base)
    if not (found := _rows_for_reward(full, places)):
        raise UserError(f"no case table has a row about {full!r}; looked in {', '.join(map(str, places))}")
    return found, folder


def check_case_tables(names: Iterable[str], base: Path) -> None:
    """Run the case tables of rewards, as far as they have any: do they still do here what they say?

    Raises:
        UserError: a row came out otherwise.
    """
    read = cache(load_case_table)
    for name in dict.fromkeys(names):
        full, beside = _own_case_table(name, base)
        places = _list_builtin_tables() if beside is None else tuple(path for path in (beside,) if path.is_file())
        for case in _rows_for_reward(full, places, read):
            if failure := case.failure_message(load_bound_reward(name, base, case.args)):
                raise UserError(f"reward {name!r} contradicts its case table: {failure}")


def _list_builtin_tables() -> tuple[Path, ...]:
    return tuple(sorted(_CASES_DIR.glob("*.json")))


def _own_case_table(name: str, base: Path) -> tuple[str, Path | None]:
    """What rows call a reward, and the table beside its file if it is in one."""
    full = qualified_name(name)
    where, _, function = full.rpartition(":")
    if not where.endswith(".py"):
        return full, None
    return f"./{Path(where).name}:{function}", (base / where).with_suffix(".json")


def _rows_for_reward(
    reward_name: str, tables: Iterable[Path], load_table: Callable[[Path], tuple[Case, ...]] = load_case_table
) -> tuple[Case, ...]:
    return tuple(case for table in tables for case in load_table(table) if case.fn == reward_name)
