"""Finds rewards and their case tables by name, both mmrl's and those in your own files."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mmrl_rewards
from mmrl.config.schema import RethinkConfig, RolloutStepConfigs, ScoringConfig
from mmrl.media.pixel_reader import PixelReader
from mmrl.scoring.reward_workers import first_call_timeout_s, make_worker_limits
from mmrl.types import MediaPolicy, UserError, use_media_opener
from mmrl.utils.files import shipped_folder
from mmrl.utils.messages import did_you_mean
from mmrl.utils.plugins import errors_about_call, load_function
from mmrl.utils.worker_pool import WorkerError, WorkerPool
from mmrl.utils.worker_server import ReportActivity
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import BoundReward, FallbackOn, Reward, bind, takes_group

AnyReward = Reward[...]
_CASES_DIR = shipped_folder(Path(mmrl_rewards.__path__[0]).parent, "mmrl_cases", "cases")


def builtin_rewards() -> dict[str, AnyReward]:
    """Return every reward of `mmrl_rewards` by its name, `module:function`."""
    found = {}
    for info in pkgutil.iter_modules(mmrl_rewards.__path__, "mmrl_rewards."):
        module = importlib.import_module(info.name)
        for name, member in vars(module).items():
            if isinstance(member, Reward) and member.fn.__module__ == info.name:
                found[f"{info.name}:{name}"] = member
    return dict(sorted(found.items()))


def qualified_name(name: str) -> str:
    """Return the full name of a reward: `box:iou` is short for `mmrl_rewards.box:iou`; other names stay as they are.

    Raises:
        UserError: no reward and no module has this name.
    """
    module = name.rpartition(":")[0]
    if module.endswith(".py") or "." in module:
        return name
    if name.endswith(".py"):
        raise UserError(f"{name!r} names no function; write {name}:FUNCTION")
    known_names = builtin_rewards()
    if f"mmrl_rewards.{name}" in known_names:
        return f"mmrl_rewards.{name}"
    if module and find_spec(module):  # a top-level module of the user's
        return name
    short_names = [known_name.removeprefix("mmrl_rewards.") for known_name in known_names]
    hint = did_you_mean(name, short_names) or "`mmrl reward list` shows all"
    raise UserError(f"there is no reward {name!r}; {hint}")


def load_reward(name: str, base: Path) -> AnyReward:
    """Return a reward by its name. Files are relative to `base`.

    Raises:
        UserError: there is nothing of this name, or it is not a reward.
    """
    found = load_function(qualified_name(name), base, role="reward")
    if not isinstance(found, Reward):
        if takes_group(found):
            raise UserError(
                f"{name!r} is a group reward, which compares the rollouts of a prompt: name it in "
                "`rewards.group_rewards`, and try it with two short steps: `mmrl train CONFIG stages.rl.steps=2`. "
                "`mmrl reward` and `rewards.terms` take rewards of single responses"
            )
        raise UserError(f"{name!r} is not a reward: decorate the function with @mmrl.reward(name=...)")
    return found


def load_bound_reward(
    name: str, base: Path, args: Mapping[str, Any], fallback_on: FallbackOn = "abstention"
) -> BoundReward:
    """Return a reward with its options bound. Raises as `load_reward`, or UserError if an option does not fit."""
    with errors_about_call(name, args):
        return replace(bind(load_reward(name, base), args), fallback_on=fallback_on)


def check_rollout_step_terms(steps: RolloutStepConfigs, terms: Sequence[str], *, key: str) -> None:
    """Raise UserError if `correct` of a rollout step names no reward term; `key` is the dotted path of the steps."""
    for index, step in enumerate(steps):
        if isinstance(step, RethinkConfig):
            check_names(step.correct, terms, key=f"{key}.{index}.correct", place=f"step {step.name}: correct")


def check_names(names: Iterable[str], terms: Sequence[str], *, key: str, place: str) -> None:
    """Raise UserError unless all `names` are `terms`; `key` is their path in the config, `place` begins the message."""
    for name in names:
        if name not in terms:
            raise UserError(f"{place}: there is no reward term {name!r}; there are {', '.join(terms)}", key=key)


def builtin_case_tables() -> tuple[Path, ...]:
    """Return the case tables that come with mmrl, from its source tree.

    Raises:
        UserError: mmrl was installed without them.
    """
    tables = tuple(sorted(_CASES_DIR.glob("*.json")))
    if not tables:
        raise UserError(
            f"there are no case tables in {_CASES_DIR}: they come with the source tree; name a table of your own"
        )
    return tables


@cache
def case_media(folder: Path) -> PixelReader:
    """Return a reader of the files that case tables name, which lie in `folder` or beside the tables of mmrl."""
    return PixelReader(MediaPolicy(roots=(folder.resolve(), _CASES_DIR.resolve())))


def find_cases(name: str, base: Path) -> tuple[tuple[Case, ...], Path]:
    """Return the case-table rows about a reward, and the folder that relative files in them start from.

    The table of a reward in your own file lies beside that file and has the ending `.json`.

    Raises:
        UserError: there is no table, or no row about it.
    """
    reward_name, own_table = _own_case_table(name, base)
    tables, folder = ((own_table,), own_table.parent) if own_table else (builtin_case_tables(), base)
    rows = tuple(case for table in tables for case in load_case_table(table) if case.fn == reward_name)
    if not rows:
        raise UserError(f"no case table has a row about {reward_name!r}; looked in {', '.join(map(str, tables))}")
    return rows, folder


def check_case_tables(names: Iterable[str], base: Path, options: ScoringConfig) -> None:
    """Run the case tables of rewards, to check that the installed libraries give the same values.

    Raises:
        UserError: a row got a different value than it states, or a user's reward hangs or exceeds a limit.
    """
    load_table = cache(load_case_table)
    for name in dict.fromkeys(names):
        reward_name, own_table = _own_case_table(name, base)
        # A user's reward may have no table, and an installed package lacks those of mmrl.
        tables = sorted(_CASES_DIR.glob("*.json")) if own_table is None else filter(Path.is_file, [own_table])
        # Searching the text of mmrl's tables for the name first is faster than parsing the rows of all of them.
        tables = [table for table in tables if own_table or reward_name in table.read_text(encoding="utf-8")]
        cases = [case for table in tables for case in load_table(table) if case.fn == reward_name]
        if own_table is None or options.custom_rewards == "main_process":
            for case in cases:
                _check_case(name, base, case)
        elif cases:
            _check_cases_in_worker(name, base, cases, options)


def _check_cases_in_worker(name: str, base: Path, cases: Sequence[Case], options: ScoringConfig) -> None:
    load = partial(_load_case_check, name, base)
    with closing(WorkerPool(load, 1, limits=make_worker_limits(options))) as pool:
        reward = load_reward(name, base)
        timeout_s = reward.timeout_s or options.timeout_s
        next_timeout_s = first_call_timeout_s(timeout_s)
        for case in cases:
            try:
                pool.submit(case, next_timeout_s).result()
            except WorkerError as error:
                row = f"the row of its case table with the response {case.response!r:.80}"
                raise UserError(f"reward {name!r} ({reward.place}), {row}: a process for rewards {error}") from error
            next_timeout_s = timeout_s


def _check_case(name: str, base: Path, case: Case) -> None:
    with use_media_opener(case_media(find_own_folder(name, base))):
        failure = case.failure_message(load_bound_reward(name, base, case.args))
    if failure:
        raise UserError(f"reward {name!r} contradicts its case table: {failure}")


def _load_case_check(name: str, base: Path, report: ReportActivity) -> Callable[[Case], None]:
    report(f"loading reward {name!r}")
    load_reward(name, base)
    return partial(_check_case, name, base)


def find_own_folder(name: str, base: Path) -> Path:
    """Return the folder of the file that a reward is in; `base` for a reward in a package."""
    own_table = _own_case_table(name, base)[1]
    return own_table.parent if own_table else base


def _own_case_table(name: str, base: Path) -> tuple[str, Path | None]:
    """Return the name that rows use for a reward, and the table beside its file; None for a reward in a package."""
    full_name = qualified_name(name)
    module, _, function = full_name.rpartition(":")
    if not module.endswith(".py"):
        return full_name, None
    return f"./{Path(module).name}:{function}", (base / module).with_suffix(".json")
