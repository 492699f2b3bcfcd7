"""`mmrl.train`: a whole run from Python, with functions and samples in place of the names in a config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from mmrl.api.functions import name_function, name_rows, replace_functions
from mmrl.config import (
    ConfigSource,
    LoadedConfig,
    check_data_files,
    check_is_list,
    check_overrides,
    find_config,
    load_config,
    locate_errors,
    to_json,
)
from mmrl.distributed.launch import is_launched
from mmrl.log.logger import read_records
from mmrl.log.run_dir import RunDir, run_dir_of
from mmrl.scoring.registry import qualified_name
from mmrl.types import Sample, UserError
from mmrl.utils.plugins import load_function
from mmrl_rewards.contract import takes_group

if TYPE_CHECKING:
    from mmrl.training.callbacks import Callback

FunctionSource: TypeAlias = str | Callable[..., object] | Mapping[str, object]
"""A function, its name, or an entry of a config: a mapping with `fn`, which may be either."""
DataSource: TypeAlias = FunctionSource | Sequence[Sample] | Sequence[FunctionSource]
"""Samples, or one or several functions that yield them."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run. Its tables are read from the run directory on each access."""

    run_dir: Path  # everything that the run wrote
    model_dir: Path  # the trained model, as a Hugging Face folder

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: one for each step and each evaluation. A value that is not finite is None."""
        return [row for row, _ in read_records(RunDir(self.run_dir).metrics)]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """One row for each task of the test data: mean reward `before` and `after`, `n`, 95 % intervals."""
        summary = json.loads(RunDir(self.run_dir).summary.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = summary["tasks"]
        return rows


def train(
    config: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    rewards: Sequence[FunctionSource] | None = None,
    dataset: DataSource | Mapping[str, DataSource] | None = None,
    callbacks: Sequence[FunctionSource | Callback] | None = None,
    resume: bool = True,
) -> TrainResult:
    """Run every stage of a config, or continue where the run stopped.

    Args:
        config: A YAML file, a mapping or a loaded config. A mapping may hold functions wherever YAML names one.
        overrides: Settings as `dotted.path=value`, as on the command line.
        rewards: Replaces the rewards of the config: functions, names such as "number:exact", or mappings with `fn`.
            A function whose first parameter is `group`, or its name, becomes a group reward.
        dataset: Replaces `data.train`: samples, or a function that yields them. A mapping replaces several splits:
            {"train": samples, "test": more_samples}.
        callbacks: Replaces the callbacks of the config: objects with `on_step_end`, or functions that make one.
        resume: True continues a run that was interrupted, or lengthened, in its folder. False refuses such a folder.

    Raises:
        UserError: something the user can fix. A run that had not begun leaves nothing behind.
        KeyboardInterrupt: the run was interrupted. The step was saved; the same call continues it.
    """
    check_overrides(overrides)
    for name, given in (("rewards", rewards), ("callbacks", callbacks)):
        if given is not None:
            check_is_list(name, given)
    if not isinstance(resume, bool):
        raise UserError(f"resume must be True or False, got {resume!r:.80}")
    source = replace_functions(config) if isinstance(config, Mapping) else config
    sections = _replaced_sections(rewards, dataset, callbacks, _base_dir(config))
    loaded = load_config(source, overrides, sections=sections)
    check_data_files(loaded)
    run_dir = run_dir_of(loaded.config)
    if not resume and run_dir.config.exists():
        raise UserError(f"{run_dir.path} holds a run; resume=True continues it, another run.dir starts a new one")
    with locate_errors(loaded):
        _run(loaded, run_dir)
    return TrainResult(run_dir.path, run_dir.model)


def _run(loaded: LoadedConfig, run_dir: RunDir) -> None:
    from mmrl.training.preflight import load_unless_finished

    functions = None
    # Checked before torch is imported, which takes seconds. Ranks of a launcher check together, in `train`.
    if not is_launched():
        functions = load_unless_finished(loaded.config, loaded.files[0].parent)
        if functions is None:
            return
    from mmrl.training.run import train as run_stages

    if run_stages(loaded, functions=functions):
        raise KeyboardInterrupt(f"training was interrupted; the same call continues the run in {run_dir.path}")


def _base_dir(config: ConfigSource) -> Path:
    """Return the folder from which a config's `./file.py:function` starts."""
    if isinstance(config, LoadedConfig):
        return config.files[0].parent
    return find_config(config).parent if isinstance(config, str | Path) else Path()


def _replaced_sections(
    rewards: Sequence[FunctionSource] | None,
    dataset: DataSource | Mapping[str, DataSource] | None,
    callbacks: Sequence[FunctionSource | Callback] | None,
    base_dir: Path,
) -> list[tuple[str, str]]:
    """Return overrides that put functions and samples from memory into a config, each with its argument for messages.

    Files in `rewards` start from `base_dir`.
    """
    sections: list[tuple[str, str, list[dict[str, Any]]]] = []
    if rewards is not None:
        terms: list[dict[str, Any]] = []
        group_rewards: list[dict[str, Any]] = []
        for reward in rewards:
            # Rewards of users run in worker processes, where one that hangs or crashes ends nothing else.
            entry = _entry("rewards", reward, copy_for_workers=True)
            (group_rewards if _is_group_reward(entry, base_dir) else terms).append(entry)
        sections += [("rewards", "rewards.terms", terms), ("rewards", "rewards.group_rewards", group_rewards)]
    if dataset is not None:
        has_splits = isinstance(dataset, Mapping) and "fn" not in dataset
        splits: Mapping[str, object] = cast(Mapping[str, object], dataset) if has_splits else {"train": dataset}
        for split, source in splits.items():
            sections.append(("dataset", f"data.{split}", _data_sources(source, split)))
    if callbacks is not None:
        sections.append(("callbacks", "callbacks", [_callback_entry(callback) for callback in callbacks]))
    overrides = []
    for argument, key, entries in sections:
        origin = f"argument `{argument}`"
        overrides.append((origin, f"{key}={to_json(entries, origin)}"))
    return overrides


def _entry(argument: str, given: object, *, copy_for_workers: bool = False) -> dict[str, Any]:
    """Return the config entry for a function: a mapping with its name, or `given` if that is a mapping already."""
    if isinstance(given, Mapping):
        return dict(replace_functions(given, copy_for_workers=copy_for_workers))
    if isinstance(given, str):
        return {"fn": given}
    if not callable(given):
        raise UserError(f"{argument}: {given!r:.80} is neither a function nor the name of one")
    return {"fn": name_function(given, copy_for_workers=copy_for_workers)}


def _is_group_reward(entry: Mapping[str, Any], base_dir: Path) -> bool:
    try:
        return takes_group(load_function(qualified_name(str(entry.get("fn"))), base_dir, role="reward"))
    except UserError:
        return False  # refused with its place in the config, as every function that cannot be loaded


def _data_sources(given: object, split: str) -> list[dict[str, Any]]:
    sources = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if sources is given and all(isinstance(row, Sample) for row in sources):
        return [{"fn": name_rows(sources, split)}]
    for source in sources:
        if not (isinstance(source, str) or callable(source) or (isinstance(source, Mapping) and "fn" in source)):
            raise UserError(
                f"dataset, split {split!r}: {source!r:.60} is neither a function nor its name; "
                "give a list that holds only mmrl.Sample, or functions that yield them"
            )
    return [_entry("dataset", source) for source in sources]


def _callback_entry(given: FunctionSource | Callback) -> dict[str, Any]:
    """Return the entry of a callback, which may be an object: the config names a function that returns it."""
    is_object = not isinstance(given, type) and callable(getattr(given, "on_step_end", None))
    if isinstance(given, Mapping | str) or not is_object:
        return _entry("callbacks", given)
    return {"fn": name_function(lambda context: given, stands_for=type(given))}
