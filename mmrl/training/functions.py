"""The functions that a config names by `fn`, loaded once: `mmrl train`, `explain` and `doctor` use the same ones.

Imports without torch; a function of the user's may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.algo.advantages import CustomAdvantage
from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.registry import get_benchmark, load_benchmark
from mmrl.config import Config
from mmrl.config.schema import (
    AdvantageConfig,
    BenchmarkConfig,
    CustomPolicyLossConfig,
    LossConfig,
    RlStage,
    SelectStage,
)
from mmrl.config.schema.stage_checks import AnyStage
from mmrl.data.rows import DatasetFunction, load_dataset_function
from mmrl.rollout.available import check_family_engine
from mmrl.rollout.load import load_engine, load_rollout_steps
from mmrl.scoring import BoundTerm
from mmrl.scoring.build import load_reward_terms
from mmrl.scoring.group_reward_calls import BoundGroupReward, load_group_rewards
from mmrl.scoring.registry import check_names, check_rollout_step_terms
from mmrl.scoring.terms import find_counted_terms
from mmrl.training.callbacks import Callback
from mmrl.types import UserError
from mmrl.utils.plugins import load_plugin

if TYPE_CHECKING:
    from mmrl.learner.objective import PolicyLossFn
    from mmrl.policy.families import ModelFamily
    from mmrl.rollout.engines.base import EngineContext, RolloutEngine
    from mmrl.rollout.steps.base import StepFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Every function that a config names, with its options bound.

    Tools are missing: the processes that run them load them. `load_functions` only checks that they can.
    """

    rewards: tuple[BoundTerm, ...]  # `rewards.terms`, in order
    group_rewards: tuple[BoundGroupReward, ...]  # `rewards.group_rewards`, in order
    callbacks: tuple[Callable[..., Callback], ...]  # make the callbacks from a `RunComponents`, in order
    advantages: Mapping[str, CustomAdvantage | None]  # of each RL stage, by name; None for a built-in formula
    policy_losses: Mapping[str, PolicyLossFn | None]  # the same for the policy loss
    rollout_steps: Mapping[str, Mapping[str, StepFactory]]  # make the user's steps, by name of stage and of step
    evaluation_steps: Mapping[str, StepFactory]  # make the user's steps in `evaluation.rollout_steps`, by name
    datasets: Mapping[str, tuple[DatasetFunction, ...]]  # `data.train`, `validation` and `test`, by split
    benchmarks: tuple[Benchmark, ...]  # `evaluation.benchmarks`, in order
    engine: Callable[[EngineContext], RolloutEngine] | None  # makes the engine of `rollout.engine: {fn}`
    family: ModelFamily | None  # made by `model.family`


def load_functions(config: Config, base_dir: Path) -> Functions:
    """Load every function that the config names, with its options; relative files start from `base_dir`.

    Raises:
        UserError: one cannot be imported, has another signature, or does not take these options; or a stage or step
            names a reward term that does not exist.
    """
    rewards = load_reward_terms(config, base_dir)
    group_rewards = load_group_rewards(config, base_dir, rewards)
    counted_terms = find_counted_terms(rewards)
    terms = list(map(attrgetter("name"), counted_terms))
    _check_reward_names(config.stages, terms, list(map(attrgetter("name"), group_rewards)))
    callbacks = []
    for callback in config.callbacks:
        callbacks.append(load_plugin(callback.fn, base_dir, callback.args, role="callback", parameters=("run",)))
    advantages: dict[str, CustomAdvantage | None] = {}
    policy_losses: dict[str, PolicyLossFn | None] = {}
    for stage in config.stages:
        if isinstance(stage, RlStage):
            advantages[stage.name] = load_custom_advantage(stage.advantage, base_dir)
            policy_losses[stage.name] = load_policy_loss(stage.loss, base_dir)
    # A term that is left out of evaluation cannot decide if a response is correct.
    scored = [term.name for term in counted_terms if not term.options.training_only]
    rollout_steps = {}
    for index, stage in enumerate(config.stages):
        if not isinstance(stage, SelectStage):
            key = f"stages.{index}.rollout_steps"
            check_rollout_step_terms(stage.rollout_steps, scored, key=key)
            rollout_steps[stage.name] = load_rollout_steps(stage.rollout_steps, base_dir)
    check_rollout_step_terms(config.evaluation.rollout_steps, scored, key="evaluation.rollout_steps")
    evaluation_steps = load_rollout_steps(config.evaluation.rollout_steps, base_dir)
    datasets = {}
    for split, sources in config.data.sources_by_split().items():
        datasets[split] = tuple(load_dataset_function(source, base_dir) for source in sources)
    benchmarks = [load_configured_benchmark(options, base_dir) for options in config.evaluation.benchmarks]
    return Functions(
        rewards=rewards,
        group_rewards=group_rewards,
        callbacks=tuple(callbacks),
        advantages=advantages,
        policy_losses=policy_losses,
        rollout_steps=rollout_steps,
        evaluation_steps=evaluation_steps,
        datasets=datasets,
        benchmarks=tuple(benchmarks),
        engine=load_engine(config.rollout.engine, base_dir),
        family=_load_family(config, base_dir),
    )


def load_custom_advantage(options: AdvantageConfig, base_dir: Path) -> CustomAdvantage | None:
    """Load the function of `advantage.fn` with its options; None for a built-in formula. Raises as `load_plugin`."""
    if options.fn is None:
        return None
    return load_plugin(options.fn, base_dir, options.args, role="advantage function", parameters=("totals", "terms"))


def load_policy_loss(options: LossConfig, base_dir: Path) -> PolicyLossFn | None:
    """Load the function of `loss.policy_loss` with its options; None for a built-in one. Raises as `load_plugin`."""
    if not isinstance(options.policy_loss, CustomPolicyLossConfig):
        return None
    return load_plugin(
        options.policy_loss.fn,
        base_dir,
        options.policy_loss.args,
        role="policy loss",
        parameters=("logprobs", "old_logprobs", "advantages", "mask"),
    )


def load_configured_benchmark(options: BenchmarkConfig, base_dir: Path) -> Benchmark:
    """Return the benchmark that a section of a run's config names; a relative file starts from `base_dir`.

    Raises:
        UserError: there is no such benchmark or function, or it does not take these options.
    """
    try:
        if options.fn is not None:
            return load_benchmark(options.fn, base_dir, options.args)
        return get_benchmark(options.benchmark_name, base_dir)
    except UserError as error:
        if error.call:  # `locate_errors` finds the line of the config by it
            raise
        raise UserError(f"evaluation.benchmarks.{options.name}: {error}") from error


def _load_family(config: Config, base_dir: Path) -> ModelFamily | None:
    if config.model.family is None:
        return None
    from mmrl.policy.families import load_family

    family = load_family(config.model.family.fn, base_dir, config.model.family.args)
    check_family_engine(family.model_type, config.rollout.engine_name, takes_patches=family.takes_patches)
    return family


def _check_reward_names(stages: Sequence[AnyStage], terms: Sequence[str], group_rewards: Sequence[str]) -> None:
    """Raise UserError unless every reward term and group reward that a stage names exists."""
    for index, stage in enumerate(stages):
        key, place = f"stages.{index}", f"stage {stage.name!r}"
        if isinstance(stage, RlStage):
            ranges = stage.dynamic_sampling.ranges if stage.dynamic_sampling else ()
            weight = stage.advantage.difficulty_weight
            named = {
                "track_rewards": stage.track_rewards,
                "dynamic_sampling.ranges": [entry.term for entry in ranges],
                "advantage.difficulty_weight.term": [weight.term] if weight else [],
            }
            for setting, names in named.items():
                check_names(names, [*terms, *group_rewards], key=f"{key}.{setting}", place=f"{place}: {setting}")
        if isinstance(stage, SelectStage):
            check_names(stage.correct, terms, key=f"{key}.correct", place=f"{place}: correct")
