"""Checks that take a second, before torch is imported or an image is opened.

The run directory, the model's files, the rollout engine, and every function that the config names, with its options.
The checks that need samples, a tokenizer or the model follow in `mmrl.training.build`. Imports without torch; a
function of the user's may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mmrl.algo.advantages import load_custom_advantage
from mmrl.config import Config, LoadedConfig, locate_errors
from mmrl.config.load import cap_steps
from mmrl.config.schema import (
    CustomEngineConfig,
    CustomPolicyLossConfig,
    RlStage,
    SelectStage,
)
from mmrl.config.schema.stage_checks import AnyStage
from mmrl.data.context import load_dataset_function
from mmrl.evaluation.eval_settings import load_configured_benchmark
from mmrl.log.comparison import print_summary
from mmrl.log.console import Console
from mmrl.log.run_dir import run_dir_of
from mmrl.rollout.available import check_family_engine, check_model_and_engine
from mmrl.scoring.build import build_group_rewards, build_scorer
from mmrl.scoring.registry import check_names, check_steps
from mmrl.training.callbacks import load_callback_makers
from mmrl.types import UserError

FINISHED_MESSAGE = "This run is finished; delete its directory or choose another to run it again."


def effective_config(loaded: LoadedConfig, *, steps: int | None = None, run_dir: Path | None = None) -> Config:
    """Return the config with at most `steps` steps a stage and with `run_dir` for `run.dir`, where they are given."""
    config = (cap_steps(loaded, steps) if steps else loaded).config
    if run_dir is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
    return config


def report_if_finished(config: Config, base_dir: Path) -> bool:
    """Print the summary of a finished run and return True; else check that the run can start or go on.

    Raises:
        UserError: the run would be refused, now or later.
    """
    run_dir = run_dir_of(config)
    if run_dir.check(config):
        console = Console()
        console.info(FINISHED_MESSAGE)
        print_summary(run_dir, console)
        return True
    # A family that vLLM cannot run is refused before the user is asked to install vLLM.
    check_functions(config, base_dir)
    check_model_and_engine(config)
    return False


def find_problems(loaded: LoadedConfig) -> list[str]:
    """Return what is wrong with model, engine and functions, with the line. The run directory is not checked."""
    problems, base_dir = [], loaded.files[0].parent
    for check in (partial(check_model_and_engine, loaded.config), partial(check_functions, loaded.config, base_dir)):
        try:
            with locate_errors(loaded):
                check()
        except UserError as error:
            problems.append(str(error))
    return problems


def check_functions(config: Config, base_dir: Path) -> None:
    """Load every function that the config names, with its options; relative files start from `base_dir`.

    Raises:
        UserError: one cannot be imported, has another signature, or does not take these options; or a stage or step
            names a reward term that there is not.
    """
    terms = [*build_scorer(config, base_dir).term_weights]
    group_rewards = build_group_rewards(config, base_dir)
    _check_reward_names(config.stages, terms, [term.name for term in group_rewards])
    load_callback_makers(config.callbacks, base_dir)
    for stage in config.stages:
        if isinstance(stage, RlStage):
            load_custom_advantage(stage.advantage, base_dir)
            if isinstance(stage.loss.policy_loss, CustomPolicyLossConfig):
                # These modules import torch, as the user's functions for them do, and few runs have one.
                from mmrl.learner.loss import load_policy_loss

                load_policy_loss(stage.loss, base_dir)
    # A term that is left out of evaluation says of no response that it is correct.
    scored = [name for name, term in zip(terms, config.rewards.terms, strict=True) if not term.training_only]
    for index, stage in enumerate(config.stages):
        if not isinstance(stage, SelectStage):
            check_steps(stage.rollout_steps, base_dir, scored, key=f"stages.{index}.rollout_steps")
    check_steps(config.evaluation.rollout_steps, base_dir, scored, key="evaluation.rollout_steps")
    if isinstance(config.rollout.engine, CustomEngineConfig):
        from mmrl.rollout.engines.custom import load_engine

        load_engine(config.rollout.engine, base_dir)
    if config.model.family is not None:
        from mmrl.policy.families import load_family

        family = load_family(config.model.family.fn, base_dir, config.model.family.args)
        check_family_engine(family.model_type, config.rollout.engine_name, takes_patches=family.takes_patches)
    for source in (*config.data.train, *config.data.validation, *config.data.test):
        load_dataset_function(source, base_dir)
    for benchmark in config.evaluation.benchmarks:
        load_configured_benchmark(benchmark, base_dir)


def _check_reward_names(stages: Sequence[AnyStage], terms: Sequence[str], group_rewards: Sequence[str]) -> None:
    """Raise UserError unless every reward term and group reward that a stage names exists."""
    for index, stage in enumerate(stages):
        key, place = f"stages.{index}", f"stage {stage.name!r}"
        if isinstance(stage, RlStage):
            ranges = stage.dynamic_sampling.ranges if stage.dynamic_sampling else ()
            named = {"track_rewards": stage.track_rewards, "dynamic_sampling.ranges": [entry.term for entry in ranges]}
            for setting, names in named.items():
                check_names(names, [*terms, *group_rewards], key=f"{key}.{setting}", place=f"{place}: {setting}")
        if isinstance(stage, SelectStage):
            check_names(stage.correct, terms, key=f"{key}.correct", place=f"{place}: correct")
