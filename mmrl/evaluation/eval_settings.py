"""The settings of an evaluation: those of the run that the model is from, or the defaults. Imports without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mmrl.benchmarks.registry import get_benchmark
from mmrl.config import Config, EvalConfig, load_config, load_eval_config
from mmrl.evaluation.eval_dir import EvalDir, identifying_settings
from mmrl.evaluation.graders import CORRECT_TERM
from mmrl.log.run_dir import EXPORTED_CONFIG_FILE, RunDir
from mmrl.rollout.available import check_model_and_libraries
from mmrl.types import CoordinateSystem, UserError

RUN_DATA_PREFIX: Final = "run:"
"""Begins the name of a run's own data, such as `run:test`, where the command line expects a benchmark."""
_INHERITED_SECTIONS: Final = ("model", "media", "response_format", "rollout", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """The arguments of `mmrl eval run`."""

    model: str  # folder of a model, a run or a checkpoint
    benchmark: str  # name of a benchmark, a function that returns one, or `run:` with a split of the run's own data
    data_files: Sequence[str]  # files or folders of questions
    out_dir: Path  # folder of all results
    overrides: Sequence[str]  # settings as `key=value`
    checkpoint: str | None = None  # checkpoint of a run; None takes the newest
    split: str | None = None  # split of a folder; None takes the benchmark's usual one
    media_root: str | None = None  # folder that relative media paths start from; None takes that of the questions
    coordinate_system: CoordinateSystem | None = None  # coordinate system of boxes, for files that do not say it
    allow_missing: bool = False  # count questions that cannot be asked as incorrect
    rescore: bool = False  # grade the predictions again and replace the verdicts

    @property
    def is_on_run_data(self) -> bool:
        """True if the questions are the run's own data, which its rewards grade."""
        return self.benchmark.startswith(RUN_DATA_PREFIX)


def default_out_dir(model: str, benchmark: str) -> Path:
    """Return the folder for the results of a model on a benchmark, below `evals`.

    Raises:
        UserError: there is no such benchmark.
    """
    is_run_data = benchmark.startswith(RUN_DATA_PREFIX)
    label = benchmark.replace(":", "-") if is_run_data else get_benchmark(benchmark).name
    return Path("evals") / f"{Path(model).resolve().name}-{label}"


def find_settings_file(model: str, checkpoint_name: str | None) -> tuple[Path, str | None, Path | None]:
    """Return the run or folder of transformers that `model` names, its checkpoint if one is named, and its config.

    Raises:
        UserError: the path is neither, or has no checkpoints where one is named.
    """
    path = Path(model)
    # The folder of a checkpoint stands for the checkpoint of its run.
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
        path, checkpoint_name = path.parent.parent, path.name
    run = RunDir(path)
    if run.config.is_file():
        return path, checkpoint_name, run.config
    if checkpoint_name is not None:
        raise UserError(f"checkpoint {checkpoint_name}: {path} is not an mmrl run directory, so it has no checkpoints")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(f"{path} is an adapter alone; name its run, or export it with `mmrl export --merge-lora`")
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} is neither a folder of transformers (no config.json) nor an mmrl run (no config.yaml); download a "
            "model from the hub first"
        )
    exported = path / EXPORTED_CONFIG_FILE
    return path, checkpoint_name, exported if exported.is_file() else None


def inherit_settings(config: Config, *, by_rule: bool) -> dict[str, Any]:
    """Return a run's settings for `load_eval_config`; with `by_rule` a benchmark grades, not the run's rewards."""
    plain = config.model_dump(mode="json")
    settings = {name: plain[name] for name in _INHERITED_SECTIONS}
    del settings["evaluation"]["benchmarks"]
    if by_rule:
        # Steps that ask which responses are correct get the benchmark's verdict in place of the run's rewards.
        for step in settings["evaluation"]["rollout_steps"]:
            if "correct" in step:
                step["correct"] = [CORRECT_TERM]
    settings["run"] = {name: plain["run"][name] for name in ("seed", "cpu_threads")}
    settings["media_limits"] = plain["data"]["media_limits"]
    return settings


def make_eval_config(request: EvalRequest, path: Path, config: Config | None, *, is_checkpoint: bool) -> EvalConfig:
    """Return the settings of an evaluation of the model at `path`, which came with `config`.

    Raises:
        UserError: a setting is invalid.
    """
    settings: dict[str, Any] = {"model": {"path": str(path)}}
    if config is not None:
        settings = inherit_settings(config, by_rule=not request.is_on_run_data)
        if not is_checkpoint:
            # An export holds everything itself, so what the run was built from no longer matters.
            settings["model"] |= {"path": str(path), "from_scratch": None, "lora": None}
    return load_eval_config(settings, request.model, request.overrides)


def check_request(request: EvalRequest) -> None:
    """Check what needs neither torch nor the questions; `evaluate` checks all of it again.

    Raises:
        UserError: the benchmark, model, settings, engine, files or output folder cannot be used.
    """
    if not request.is_on_run_data:
        get_benchmark(request.benchmark)
    path, checkpoint_name, settings_file = find_settings_file(request.model, request.checkpoint)
    run = RunDir(path)
    is_checkpoint = settings_file == run.config
    if is_checkpoint:
        # Every checkpoint has a config of its own. Which one is the best is found out later.
        saved = sorted(run.checkpoints.glob(f"{checkpoint_name or '*'}/config.yaml"))
        settings_file = saved[-1] if saved else settings_file
    config = load_config(settings_file).config if settings_file else None
    eval_config = make_eval_config(request, path, config, is_checkpoint=is_checkpoint)
    if request.out_dir.is_dir() and checkpoint_name != "best":
        with RunDir(request.out_dir).lock():
            EvalDir(request.out_dir).check(identifying_settings(eval_config), later=("benchmark", "model", "data"))
    if not request.is_on_run_data:
        missing = [file for file in request.data_files if "://" not in file and not Path(file).exists()]
        if missing:
            here = Path.cwd()
            raise UserError(f"data: {here / missing[0]}: no such file or folder; a relative path starts from {here}")
    elif request.split is not None:
        raise UserError(f"split {request.split}: benchmark {request.benchmark} names the split already; leave it out")
    check_model_and_libraries(eval_config)
