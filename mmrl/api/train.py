"""`mmrl.train`: a whole run from Python, with functions and samples in place of the names in a config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from mmrl.api.functions import name_function, name_rows, replace_functions
from mmrl.config import Config, LoadedConfig, check_data_files, load_config, locate_errors
from mmrl.distributed.launch import is_launched
from mmrl.log.logger import read_records
from mmrl.log.run_dir import RunDir, run_dir_of
from mmrl.types import Sample, UserError
from mmrl_rewards.contract import takes_group

if TYPE_CHECKING:
    from mmrl.training.callbacks import Callback

ConfigSource: TypeAlias = str | Path | Mapping[str, Any] | LoadedConfig | Config
"""A YAML file, its settings as a mapping, or a config that is loaded already."""
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
            A function whose first parameter is `group` becomes a group reward.
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
    loaded = load(config, [*overrides, *_replaced_sections(rewards, dataset, callbacks)])
    check_data_files(loaded)
    run_dir = run_dir_of(loaded.config)
    if not resume and run_dir.config.exists():
        raise UserError(f"{run_dir.path} holds a run; resume=True continues it, another run.dir starts a new one")
    with locate_errors(loaded):
        _run(loaded, run_dir)
    return TrainResult(run_dir.path, run_dir.model)


def load(config: ConfigSource, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the validated config of any source. Raises as `load_config`."""
    match config:
        case LoadedConfig():
            settings = config.config.model_dump(mode="json")
            return replace(load_config(settings, overrides), files=config.files) if overrides else config
        case Config():
            return load_config(config.model_dump(mode="json"), overrides)
        case Mapping():
            return load_config(replace_functions(config), overrides)
        case str() | Path():
            return load_config(config, overrides)
        case _:
            raise UserError(f"a config is a file, a mapping or what load_config returned, not {type(config).__name__}")


def check_is_list(name: str, given: object) -> None:
    """Raise a UserError for one function or text in place of a list: a text would be read letter by letter."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"{name} must be a list, got {given!r:.80}; put it in brackets")


def check_overrides(overrides: object) -> None:
    """Raise a UserError for anything but a list of texts."""
    check_is_list("overrides", overrides)
    for text in cast(Sequence[object], overrides):
        if not isinstance(text, str):
            raise UserError(f'overrides: {text!r:.80} is not text; write it as "run.seed=1"')


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


def _replaced_sections(
    rewards: Sequence[FunctionSource] | None,
    dataset: DataSource | Mapping[str, DataSource] | None,
    callbacks: Sequence[FunctionSource | Callback] | None,
) -> list[str]:
    """Return overrides that put functions and samples from memory into a config."""
    sections: dict[str, list[dict[str, Any]]] = {}
    if rewards is not None:
        # Rewards of users run in worker processes, where one that hangs or crashes ends nothing else.
        entries = [_entry(reward, copy_for_workers=True) for reward in rewards]
        is_group = [_is_group_reward(reward) for reward in rewards]
        sections["rewards.terms"] = [entry for entry, group in zip(entries, is_group, strict=True) if not group]
        sections["rewards.group_rewards"] = [entry for entry, group in zip(entries, is_group, strict=True) if group]
    if dataset is not None:
        has_splits = isinstance(dataset, Mapping) and "fn" not in dataset
        splits: Mapping[str, object] = cast(Mapping[str, object], dataset) if has_splits else {"train": dataset}
        for split, source in splits.items():
            sections[f"data.{split}"] = _data_sources(source, split)
    if callbacks is not None:
        sections["callbacks"] = [_callback_entry(callback) for callback in callbacks]
    return [f"{key}={json.dumps(entries)}" for key, entries in sections.items()]


def _entry(given: object, *, copy_for_workers: bool = False) -> dict[str, Any]:
    """Return the config entry for a function: a mapping with its name, or `given` if that is a mapping already."""
    if isinstance(given, Mapping):
        return dict(replace_functions(given, copy_for_workers=copy_for_workers))
    if isinstance(given, str):
        return {"fn": given}
    if not callable(given):
        raise UserError(f"{given!r:.80} is neither a function nor the name of one")
    return {"fn": name_function(given, copy_for_workers=copy_for_workers)}


def _is_group_reward(given: FunctionSource) -> bool:
    function = given.get("fn") if isinstance(given, Mapping) else given
    return callable(function) and takes_group(function)


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
    return [_entry(source) for source in sources]


def _callback_entry(given: FunctionSource | Callback) -> dict[str, Any]:
    """Return the entry of a callback, which may be an object: the config names a function that returns it."""
    is_object = not isinstance(given, type) and callable(getattr(given, "on_step_end", None))
    if isinstance(given, Mapping | str) or not is_object:
        return _entry(given)
    return {"fn": name_function(lambda context: given, stands_for=type(given))}
