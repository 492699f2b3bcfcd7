"""Builds the scorer and the group rewards of a config.

A reward term scores each response by itself. A group reward compares a rollout with the others of its prompt; its value
is added to the total after the terms have been combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, call
from pathlib import Path
from typing import Any

from mmrl.algo.group_rewards import BoundGroupReward
from mmrl.config import Config
from mmrl.config.schema import GroupRewardConfig, ScoringConfig, matches_conditions
from mmrl.scoring import BoundTerm, RewardError, RewardFunctionScorer, registry
from mmrl.scoring.terms import make_worker_limits, worker_failure
from mmrl.types import Group, RewardFailure, RewardValue, Sample, UserError
from mmrl.utils.error_catcher import ErrorCatcher
from mmrl.utils.plugins import describe_plugin_error, load_plugin
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity

GroupRewardFunction = Callable[[Group], Sequence[RewardValue]]


@dataclass(slots=True)
class IsolatedGroupReward:
    """Calls a group reward of the user's in a worker process, which starts with the first call."""

    name: str
    load: Callable[[], GroupRewardFunction]  # picklable; loads the function in the worker
    options: ScoringConfig
    # Runs a call on rank 0 for all ranks: they must agree on which call took too long.
    run_on_rank0: Callable[[Callable[[], Any]], Any]
    _pool: WorkerPool[Group, Sequence[RewardValue]] | None = None

    def __call__(self, group: Group) -> Sequence[RewardValue] | RewardFailure:
        """Return the values, or the failure of the process.

        Raises:
            UserError: the function raised, no process can be started, or one failed and the config says to stop.
            KeyboardInterrupt: this process is to stop, and the function hangs.
        """
        values: Sequence[RewardValue] | RewardFailure = self.run_on_rank0(partial(self._call_in_worker, group))
        if isinstance(values, RewardFailure) and self.options.on_missing_score == "stop":
            raise RewardError(f"group reward {self.name!r} on sample {group.prompt.sample.id!r}: {values.reason}")
        return values

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _call_in_worker(self, group: Group) -> Sequence[RewardValue] | RewardFailure:
        try:
            if self._pool is None:
                load = partial(_start_group_reward, self.name, self.load)
                self._pool = WorkerPool(load, 1, limits=make_worker_limits(self.options))
            future = self._pool.submit(group)
            self._pool.wait_for_calls([future])
            return future.result()
        except WorkerStartError as error:
            self.close()
            raise RewardError(f"a process for the group reward {self.name!r} {error}") from error
        except WorkerError as error:
            return worker_failure(error)
        except KeyboardInterrupt:
            self.close()
            raise


def _load_group_reward(options: GroupRewardConfig, base: Path) -> GroupRewardFunction:
    return load_plugin(options.fn, base, options.args, role="group reward", parameters=("group",))


def _start_group_reward(
    name: str, load: Callable[[], GroupRewardFunction], report: ReportActivity
) -> Callable[[Group], Sequence[RewardValue]]:
    report(f"loading group reward {name!r}")
    return partial(_call_group_reward, load())


def _call_group_reward(compute: GroupRewardFunction, group: Group) -> Sequence[RewardValue]:
    """Return the values; whatever the function raises becomes a UserError with file and line, which ends the run."""
    with ErrorCatcher() as caught:
        return list(compute(group))
    error = caught.error
    assert error is not None
    if isinstance(error, UserError):
        raise error
    raise UserError(describe_plugin_error(error) or f"a group reward raised {type(error).__name__}: {error}")


def load_reward_terms(config: Config, base: Path) -> tuple[BoundTerm, ...]:
    """Load the functions of `rewards.terms`, with their options bound. Files are relative to `base`.

    Raises:
        UserError: there is no such reward, or an option is unknown, missing or of the wrong type.
    """
    terms = []
    for options in config.rewards.terms:
        # Worker processes load the reward again: the module of a user's file does not exist there before.
        load = partial(registry.load_bound_reward, options.fn, base, options.args)
        reward = load()
        terms.append(
            BoundTerm(name=options.name or reward.reward.name, reward=reward, load_reward=load, options=options)
        )
    return tuple(terms)


def build_scorer(config: Config, base: Path) -> RewardFunctionScorer:
    """Return the scorer of `rewards.terms`. Raises as `load_reward_terms`."""
    return RewardFunctionScorer(load_reward_terms(config, base), config.rewards)


def load_group_rewards(config: Config, base: Path, terms: Sequence[BoundTerm]) -> tuple[BoundGroupReward, ...]:
    """Load the functions of `rewards.group_rewards`. Files are relative to `base`; `terms` are those of the config.

    Raises:
        UserError: a function or option is unknown, a name is taken, or `correct` names no reward term.
    """
    term_names = list(map(attrgetter("name"), terms))
    bound = []
    for options in config.rewards.group_rewards:
        name = options.name or options.fn.rpartition(":")[2]
        bound.append(BoundGroupReward(name=name, compute=_load_group_reward(options, base), options=options))
    names = [*term_names, *map(attrgetter("name"), bound)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two reward terms are named {name!r}; give one another `name`")
    for index, options in enumerate(config.rewards.group_rewards):
        key, place = f"rewards.group_rewards.{index}.args.correct", f"group reward {options.fn}: correct"
        registry.check_names(options.args.get("correct", ()), term_names, key=key, place=place)
    return tuple(bound)


def isolate_group_rewards(
    group_rewards: Sequence[BoundGroupReward],
    options: ScoringConfig,
    base: Path,
    run_on_rank0: Callable[[Callable[[], Any]], Any] = call,
) -> tuple[BoundGroupReward, ...]:
    """Move the user's group rewards into worker processes, unless `options` keep them in this one.

    In a run of several ranks, `run_on_rank0` makes a call on rank 0 and returns its result on all.
    """
    isolated = []
    for group_reward in group_rewards:
        comes_with_mmrl = group_reward.options.fn.startswith(("mmrl.", "mmrl_rewards."))
        if comes_with_mmrl or (options.custom_rewards != "worker" and not options.workers):
            isolated.append(group_reward)
            continue
        load = partial(_load_group_reward, group_reward.options, base)
        compute = IsolatedGroupReward(group_reward.name, load, options, run_on_rank0)
        drop_failed = options.on_missing_score != "fallback"
        isolated.append(replace(group_reward, compute=compute, drop_failed=drop_failed, close=compute.close))
    return tuple(isolated)


def reward_weights(scorer: RewardFunctionScorer, group_rewards: Sequence[BoundGroupReward]) -> dict[str, float]:
    """Return the weight of each reward term and group reward, without schedules."""
    return {**scorer.term_weights, **{term.name: term.options.weight for term in group_rewards}}


def check_group_rewards(
    group_rewards: Sequence[BoundGroupReward], scorer: RewardFunctionScorer, samples: Iterable[Sample]
) -> None:
    """Check that group rewards find the reward terms that they read.

    Raises:
        UserError: a group reward applies to a sample, and a term that it reads does not.
    """
    for group_reward in group_rewards:
        for sample in samples:
            if not matches_conditions(group_reward.options.when, sample):
                continue
            applicable = list(map(attrgetter("name"), scorer.applicable_terms(sample)))
            missing = [name for name in group_reward.options.args.get("correct", ()) if name not in applicable]
            if missing:
                raise UserError(
                    f"group reward {group_reward.name!r} reads the term {missing[0]!r}, which does not apply to sample "
                    f"{sample.id!r} of task {sample.task!r}: give both the same `when`"
                )
