"""Episodes of environments in worker processes that can be killed. Nothing heavy is imported: every process imports it.

A sample, a seed and actions define an episode. After its process was killed, another process begins it again and
repeats the actions, and each observation must have the same digest as before. So a run that is resumed, or repeated
with other processes, sees the same episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmrl.types import (
    Action,
    Environment,
    MediaOpener,
    RewardErrorKind,
    RewardFailure,
    Sample,
    StepResult,
    Unscorable,
    UserError,
    use_media_opener,
)
from mmrl.utils.observations import check_observation, check_step_result, observation_digest, state_name
from mmrl.utils.plugins import load_plugin
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import (
    WorkerError,
    WorkerLimitError,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
)
from mmrl.utils.worker_server import ReportActivity

if TYPE_CHECKING:
    from mmrl.config.schema import EnvironmentConfig

MakeEnvironment: TypeAlias = Callable[[], Environment]
EpisodeKey: TypeAlias = tuple[int, int]
"""Index of a rollout's group in the batch, and of the rollout in its group."""

_MAX_BATCH_SIZE = 8  # steps of most environments take about as long as a message between processes


class Ask(Enum):
    """A request to the environment in place of an action."""

    EXPERT = "expert"  # the action that the environment's expert would take
    STATE = "state"  # the current state, without an action; `gigpo` compares siblings by it


class EpisodeRequest(NamedTuple):
    """One action, with everything that is needed to repeat the episode up to it."""

    key: EpisodeKey
    sample: Sample
    seed: int
    first_digest: str | None  # digest that the first observation must have; None if nothing may be shown at first
    past: tuple[str | Action, ...]  # the actions before
    digests: tuple[str, ...]  # of the observation after each of them
    action: str | Action | Ask
    replayable: bool


class EpisodeReply(NamedTuple):
    """The result of one request."""

    action: str | Action | None  # the action that was taken, if any
    state: str  # name of the state in which it was taken
    result: StepResult
    digest: str  # of the observation that followed
    replayed: bool  # earlier actions were taken again first


EpisodeOutcome: TypeAlias = EpisodeReply | RewardFailure


def load_environment(base: Path, options: EnvironmentConfig) -> MakeEnvironment:
    """Return the function that makes an environment, with its options bound. Raises as `load_plugin`."""
    return load_plugin(options.fn, base, options.args, role="environment", parameters=())


@dataclass(slots=True)
class EpisodeWorkers:
    """Runs the episodes of a step in processes, from first action to `close`. An episode's key decides its process."""

    base_dir: Path  # folder that a relative file of the environment starts from
    options: EnvironmentConfig
    media_opener: MediaOpener | None = None  # through which environments see the media of samples; picklable
    _pools: list[WorkerPool[Any, Any]] = field(default_factory=list)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def play(self, requests: Sequence[EpisodeRequest]) -> list[EpisodeOutcome]:
        """Take an action in each of several episodes; return what came of it or why it failed, in order.

        Raises:
            UserError: a process cannot be started, or the environment cannot be loaded, or refuses to be made.
            KeyboardInterrupt: this process was asked to stop while an environment hangs.
        """
        timeout_s = self.options.timeout_s
        outcomes = self._call(requests, [timeout_s] * len(requests))
        # A killed process loses its other episodes. Their next calls repeat all earlier actions first, and so may have
        # exceeded a deadline that is meant for one action. These calls are made again with more time.
        repeated: dict[int, float] = {}
        lost_workers: set[int] = set()
        for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if isinstance(outcome, WorkerTimeoutError):
                worker = self._worker_of(request.key)
                if worker in lost_workers and request.past:
                    repeated[index] = timeout_s * (1 + len(request.past))
                lost_workers.add(worker)
        if repeated:
            again = self._call([requests[index] for index in repeated], list(repeated.values()))
            for index, outcome in zip(repeated, again, strict=True):
                outcomes[index] = outcome
        return [self._describe(outcome) for outcome in outcomes]

    def close_episodes(self, keys: Sequence[EpisodeKey]) -> None:
        """Close the environments of these episodes if they are still open."""
        keys_of: dict[int, list[EpisodeKey]] = {}
        for key in keys:
            keys_of.setdefault(self._worker_of(key), []).append(key)
        futures = []
        for worker, own_keys in keys_of.items():
            futures.append(self._pools[worker].submit(own_keys, self.options.timeout_s * len(own_keys)))
        for pool, future in zip([self._pools[worker] for worker in keys_of], futures, strict=True):
            pool.wait_for_calls([future])

    def _worker_of(self, key: EpisodeKey) -> int:
        # Siblings are spread over the processes: they take the same time.
        return sum(key) % self.options.workers

    def _call(self, requests: Sequence[EpisodeRequest], timeouts_s: Sequence[float]) -> list[Any]:
        """Return the reply to each request, or the WorkerError that took its place."""
        self._start()
        places: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            places.setdefault(self._worker_of(request.key), []).append(index)
        # All are sent before any reply is awaited, so processes work at the same time.
        futures: dict[int, Future[Any]] = {}
        for worker, indices in places.items():
            own_requests = [requests[index] for index in indices]
            own_timeouts = [timeouts_s[index] for index in indices]
            futures |= zip(indices, self._pools[worker].submit_all(own_requests, own_timeouts), strict=True)
        for worker, indices in places.items():
            self._pools[worker].wait_for_calls([futures[index] for index in indices])
        return [_read_outcome(futures[index]) for index in range(len(requests))]

    def _start(self) -> None:
        if self._pools:
            return
        limits = WorkerLimits(STARTUP_TIMEOUT_S, reads_output=True, **self.options.worker_limits.model_dump())
        for _ in range(self.options.workers):
            # One pool per process, because an episode stays in the process where it began. With `shared_imports` each
            # process loads after the fork: a fork would lose threads and connections that loading starts.
            load = partial(_load_episodes, self.base_dir, self.options, self.media_opener)
            self._pools.append(WorkerPool(load, 1, limits=limits, shared_imports=(), max_batch_size=_MAX_BATCH_SIZE))
        # Make one environment in each: a missing corpus or package would else fail every episode, which
        # `on_error: skip` only counts.
        trials = [pool.submit(None, self.options.timeout_s) for pool in self._pools]
        for pool, trial in zip(self._pools, trials, strict=True):
            pool.wait_for_calls([trial])
            _read_outcome(trial)

    def _describe(self, outcome: EpisodeReply | RewardFailure | WorkerError) -> EpisodeOutcome:
        match outcome:
            case WorkerTimeoutError():
                reason = f"the environment did not answer within {self.options.timeout_s:g} s"
                return RewardFailure(RewardErrorKind.TIMEOUT, reason)
            case WorkerLimitError():
                return RewardFailure(RewardErrorKind.LIMIT, f"the process of the environment {outcome}")
            case WorkerError():
                return RewardFailure(RewardErrorKind.CRASH, f"the process of the environment {outcome}")
            case _:
                return outcome


def _read_outcome(future: Future[Any]) -> EpisodeReply | RewardFailure | WorkerError:
    try:
        outcome: EpisodeReply | RewardFailure = future.result()
    except WorkerStartError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise UserError(
            f"a process for environments {error}: does the environment's file hang, or end the process, as it is "
            "imported?"
        ) from error
    except WorkerError as error:
        return error
    return outcome


def _load_episodes(
    base_dir: Path, options: EnvironmentConfig, media_opener: MediaOpener | None, report: ReportActivity
) -> Callable[[EpisodeRequest | list[EpisodeKey] | None], EpisodeOutcome | None]:
    """Load the environment before the first action, so that loading does not count toward the action's deadline."""
    report("loading the environment")
    return _Episodes(load_environment(base_dir, options), media_opener)


@dataclass(slots=True)
class _Episode:
    """An episode in progress."""

    environment: Environment
    state: str  # name of the state that it is in
    num_actions: int = 0


@dataclass(slots=True)
class _Episodes:
    """The episodes that a worker process holds.

    A call takes one action, closes the episodes of several keys, or for None tries to make an environment.
    """

    make: MakeEnvironment
    media_opener: MediaOpener | None
    episodes: dict[EpisodeKey, _Episode] = field(default_factory=dict)

    def __call__(self, request: EpisodeRequest | list[EpisodeKey] | None) -> EpisodeOutcome | None:
        if request is None:
            try:
                self.make().close()
            except UserError:
                raise
            except (Exception, SystemExit):  # noqa: BLE001
                return None  # other errors, such as those of a busy server, are left to `on_error` in each episode
            return None
        if isinstance(request, list):
            for key in request:
                self._close(key)
            return None
        # An error of the user's code is an outcome of the episode, not of the worker.
        try:
            with use_media_opener(self.media_opener):
                return self._act(request)
        except Unscorable as error:
            failure = RewardFailure(RewardErrorKind.UNSCORABLE, str(error))
        except UserError as error:
            failure = RewardFailure(RewardErrorKind.ERROR, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            message = f"the environment raised {type(error).__name__}: {error}"
            failure = RewardFailure(RewardErrorKind.ERROR, message)
        self._close(request.key)
        return failure

    def _act(self, request: EpisodeRequest) -> EpisodeReply:
        episode = self.episodes.get(request.key)
        replayed = False
        if episode is None or episode.num_actions != len(request.past):
            if request.past and not request.replayable:
                raise UserError(
                    "its process was lost, and an environment that is not replayable cannot be played again"
                )
            episode, replayed = self._begin(request), bool(request.past)
            for action, digest in zip(request.past, request.digests, strict=True):
                _step(episode, action, digest)
        state = episode.state
        if request.action is Ask.STATE:
            return EpisodeReply(None, state, StepResult(), "", replayed)
        action = _ask_expert(episode.environment) if request.action is Ask.EXPERT else request.action
        result = _step(episode, action)
        digest = observation_digest(result.observation)
        if result.terminated or result.truncated:
            self._close(request.key)
        return EpisodeReply(action, state, result, digest, replayed)

    def _begin(self, request: EpisodeRequest) -> _Episode:
        """Begin the episode of a request, and close an earlier one with the same key."""
        self._close(request.key)
        environment = self.make()
        first = check_observation(environment.reset(request.sample, request.seed))
        if request.first_digest is None:
            if first.text or first.media:
                raise UserError(
                    "reset showed something that the question does not; make the questions from the environment with "
                    "`mmrl_datasets.readers.environment:episodes`, or show nothing at first"
                )
        elif request.replayable and observation_digest(first) != request.first_digest:
            raise UserError(
                "reset showed something else than the question does; the same seed must give the same observation, to "
                "the byte, or set `replayable: false`"
            )
        self.episodes[request.key] = _Episode(environment, state_name(first))
        return self.episodes[request.key]

    def _close(self, key: EpisodeKey) -> None:
        episode = self.episodes.pop(key, None)
        if episode is not None:
            with suppress(Exception, SystemExit):  # nobody needs this environment any more
                episode.environment.close()


def _step(episode: _Episode, action: str | Action, expected_digest: str | None = None) -> StepResult:
    result = check_step_result(episode.environment.step(action))
    if expected_digest is not None and observation_digest(result.observation) != expected_digest:
        raise UserError(
            f"action {episode.num_actions + 1} was taken again after a process was lost, and showed something else; "
            "the environment must be a function of sample, seed and actions, or set `replayable: false`"
        )
    episode.num_actions += 1
    episode.state = state_name(result.observation)
    return result


def _ask_expert(environment: Environment) -> str | Action:
    expert = getattr(environment, "expert", None)
    if expert is None:
        raise UserError(f"{type(environment).__name__} has no method `expert`, which demonstrations are made with")
    action: str | Action = expert()
    if not isinstance(action, str | Action) or not action:
        raise UserError(f"expert returned {action!r:.80}; it returns the action that it would take")
    return action
