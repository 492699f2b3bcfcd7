"""Checks that take a second, before torch is imported or an image is opened.

They cover the run directory, the model's files, the libraries that the config needs, and every function that it names,
with its options. Checks that need samples, a tokenizer or the model follow in `mmrl.training.build`. Imports without
torch, unless a user's function imports it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmrl.config import Config, LoadedConfig, locate_errors
from mmrl.config.schema import SelectStage
from mmrl.log.comparison import print_summary
from mmrl.log.console import Console
from mmrl.log.run_dir import run_dir_of
from mmrl.rollout.available import check_model_and_libraries
from mmrl.training.functions import Functions, load_functions
from mmrl.types import UserError

FINISHED_MESSAGE = "This run is finished; delete its directory or choose another to run it again."


def effective_config(loaded: LoadedConfig, *, steps: int | None = None, run_dir: Path | None = None) -> Config:
    """Return the config with at most `steps` steps a stage and with `run_dir` for `run.dir`, where they are given."""
    config = loaded.config
    if steps is not None:
        stages = list(config.stages)
        for index, stage in enumerate(stages):
            if not isinstance(stage, SelectStage):
                stages[index] = stage.model_copy(update={"steps": min(steps, stage.steps or steps)})
        config = config.model_copy(update={"stages": tuple(stages)})
    if run_dir is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
    return config


def load_unless_finished(config: Config, base_dir: Path) -> Functions | None:
    """Return the functions of a run that can start or continue; print the summary of a finished one, and return None.

    Raises:
        UserError: the run would be refused, now or later.
    """
    run_dir = run_dir_of(config)
    if run_dir.check(config):
        console = Console()
        console.info(FINISHED_MESSAGE)
        print_summary(run_dir, console)
        return None
    # A family that vLLM cannot run is refused before the user is asked to install vLLM.
    functions = load_functions(config, base_dir)
    check_model_and_libraries(config)
    return functions


def find_problems(loaded: LoadedConfig) -> list[str]:
    """Return the problems of model, libraries and functions, with their config lines; ignores the run directory."""
    problems, base_dir = [], loaded.files[0].parent
    for check in (partial(check_model_and_libraries, loaded.config), partial(load_functions, loaded.config, base_dir)):
        try:
            with locate_errors(loaded):
                check()
        except UserError as error:
            problems.append(str(error))
    return problems
