"""Loads the group rewards of a config, calls them, and adds their values to the scores of a group.

The formulas that come with mmrl are in `mmrl.algo.group_rewards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any

from mmrl.config import Config
from mmrl.config.schema import GroupRewardConfig, RewardFailurePolicy, ScoringConfig, matches_conditions
from mmrl.scoring import BoundTerm, RewardError, RewardFunctionScorer, registry
from mmrl.scoring.reward_workers import make_worker_limits, worker_failure
from mmrl.types import (
    Contribution,
    Dropped,
    Failure,
    FailureKind,
    Group,
    MediaOpener,
    RewardValue,
    Sample,
    Unscorable,
    UserError,
    use_media_opener,
)
from mmrl.utils.plugins import describe_plugin_error, load_plugin
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity

GroupRewardFunction = Callable[[Group], Sequence[RewardValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundGroupReward:
    """A group reward from YAML, ready to be called."""

    name: str  # its name among the reward terms, unique in the config
    # Its options are bound; returns one value for each rollout, or the failure of the process that it runs in.
    compute: Callable[[Group], Sequence[RewardValue] | Failure]
    options: GroupRewardConfig  # weight, schedule and `when`
    # After a failure: `stop` ends the run, `fallback` counts 0 for every rollout, any other drops the group.
    on_missing_score: RewardFailurePolicy = "skip_group"
    close: Callable[[], None] = lambda: None  # ends the process that it runs in, if there is one


def apply_group_rewards(group: Group, step: int, *, group_rewards: Sequence[BoundGroupReward]) -> Group:
    """Return the group with every group reward that applies to its sample added to terms and totals.

    They are added in the order of `group_rewards`, with their weights at `step`.

    Raises:
        UserError: a group reward cannot be computed for this group, or failed, and the config says to stop.
    """
    for reward in group_rewards:
        if not group.rollouts or not matches_conditions(reward.options.when, group.prompt.sample):
            continue
        weight = reward.options.weight_at(step)
        values, failures = reward.compute(group), {}
        if isinstance(values, Failure):
            failures = {reward.name: values}
            if reward.on_missing_score == "stop":
                sample_id = group.prompt.sample.id
                raise RewardError(f"group reward {reward.name!r} on sample {sample_id!r}: {values.reason}")
            if reward.on_missing_score != "fallback":
                dropped = [Dropped(rollout, failures) for rollout in group.rollouts]
                group = replace(group, rollouts=(), scores=(), dropped=(*group.dropped, *dropped))
                continue
            values = [RewardValue(0.0, f"fallback: {values.reason}")] * len(group.scores)
        if len(values) != len(group.scores):
            raise UserError(
                f"group reward {reward.name!r}, sample {group.prompt.sample.id}: {len(values)} values for "
                f"{len(group.scores)} rollouts; return one for each"
            )
        scores = []
        for score, value in zip(group.scores, values, strict=True):
            contribution = Contribution(value.value, weight, True, weight * value.value)
            # A comparison of siblings judges the whole episode, so it counts at the last turn.
            by_turn = (*score.by_turn[:-1], score.by_turn[-1] + weight * value.value) if score.by_turn else ()
            updated = replace(
                score,
                terms={**score.terms, reward.name: value},
                total=score.total + weight * value.value,
                failures={**score.failures, **failures},
                contributions={**score.contributions, reward.name: contribution},
                by_turn=by_turn,
            )
            scores.append(updated)
        # The next group reward may read this one's term.
        group = replace(group, scores=tuple(scores))
    return group


@dataclass(slots=True)
class IsolatedGroupReward:
    """Calls a group reward of the user's in a worker process, which starts with the first call."""

    name: str
    load: Callable[[], GroupRewardFunction]  # picklable; loads the function in the worker
    options: ScoringConfig
    media_opener: MediaOpener | None  # picklable
    _pool: WorkerPool[Group, Sequence[RewardValue] | Failure] | None = None

    def __call__(self, group: Group) -> Sequence[RewardValue] | Failure:
        """Return the values, or the failure of the process.

        Raises:
            UserError: the function raised, or no process can be started.
            KeyboardInterrupt: this process was told to stop while the function hangs.
        """
        try:
            if self._pool is None:
                load = partial(_start_group_reward, self.name, self.load, self.media_opener)
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

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _load_group_reward(options: GroupRewardConfig, base: Path) -> GroupRewardFunction:
    return load_plugin(options.fn, base, options.args, role="group reward", parameters=("group",))


def _start_group_reward(
    name: str, load: Callable[[], GroupRewardFunction], media_opener: MediaOpener | None, report: ReportActivity
) -> Callable[[Group], Sequence[RewardValue] | Failure]:
    report(f"loading group reward {name!r}")
    return partial(_call_and_locate_errors, name, load(), media_opener)


def _call_group_reward(
    name: str, compute: Callable[[Group], Any], media_opener: MediaOpener | None, group: Group
) -> Sequence[RewardValue] | Failure:
    """Return the values, or the failure of a function that abstained, which sees pictures through `media_opener`.

    Raises:
        UserError: the function returned something other than finite values.
    """
    try:
        with use_media_opener(media_opener):
            returned = compute(group)
            values = list(returned) if isinstance(returned, Iterable) else [returned]
    except Unscorable as error:
        return Failure(FailureKind.UNSCORABLE, str(error))
    for value in values:
        if not (isinstance(value, RewardValue) and isinstance(value.value, Real) and isfinite(value.value)):
            raise UserError(
                f"group reward {name!r}, sample {group.prompt.sample.id}: {value!r:.80} is not a RewardValue with a "
                "finite number; return one for each rollout"
            )
    return values


def _call_and_locate_errors(
    name: str, compute: Callable[[Group], Any], media_opener: MediaOpener | None, group: Group
) -> Sequence[RewardValue] | Failure:
    """Call a group reward; whatever it raises becomes a UserError with sample, file and line, which ends the run."""
    try:
        return _call_group_reward(name, compute, media_opener, group)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = describe_plugin_error(error) or f"it raised {type(error).__name__}: {error}"
        raise UserError(f"group reward {name!r} on sample {group.prompt.sample.id!r}: {message}") from error


def load_group_rewards(config: Config, base: Path, terms: Sequence[BoundTerm]) -> tuple[BoundGroupReward, ...]:
    """Load the functions of `rewards.group_rewards`. Files are relative to `base`; `terms` are the reward terms.

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
    media_opener: MediaOpener | None = None,
) -> tuple[BoundGroupReward, ...]:
    """Move the user's group rewards into worker processes, unless `options` keep them in this one.

    They see pictures through `media_opener`, of which worker processes receive a pickled copy.
    """
    callable_rewards = []
    for group_reward in group_rewards:
        comes_with_mmrl = group_reward.options.fn.startswith(("mmrl.", "mmrl_rewards."))
        bound = replace(group_reward, on_missing_score=options.on_missing_score)
        if comes_with_mmrl or (options.custom_rewards != "worker" and not options.workers):
            # An error in a function of ours is a defect, which needs its traceback.
            make_call = _call_group_reward if comes_with_mmrl else _call_and_locate_errors
            compute = partial(make_call, group_reward.name, group_reward.compute, media_opener)
            callable_rewards.append(replace(bound, compute=compute))
            continue
        load = partial(_load_group_reward, group_reward.options, base)
        in_worker = IsolatedGroupReward(group_reward.name, load, options, media_opener)
        callable_rewards.append(replace(bound, compute=in_worker, close=in_worker.close))
    return tuple(callable_rewards)


def check_group_rewards(
    group_rewards: Sequence[BoundGroupReward], scorer: RewardFunctionScorer, samples: Iterable[Sample]
) -> None:
    """Raise UserError if a group reward applies to a sample, but a reward term that it reads does not."""
    for group_reward in group_rewards:
        for sample in samples:
            if not matches_conditions(group_reward.options.when, sample):
                continue
            applicable = list(map(attrgetter("name"), scorer.caller.applicable_terms(sample)))
            missing = [name for name in group_reward.options.args.get("correct", ()) if name not in applicable]
            if missing:
                raise UserError(
                    f"group reward {group_reward.name!r} reads the term {missing[0]!r}, which does not apply to sample "
                    f"{sample.id!r} of task {sample.task!r}: give both the same `when`"
                )


def reward_weights(scorer: RewardFunctionScorer, group_rewards: Sequence[BoundGroupReward]) -> dict[str, float]:
    """Return the weight of each reward term and group reward, without schedules."""
    return {**scorer.term_weights, **{term.name: term.options.weight for term in group_rewards}}
