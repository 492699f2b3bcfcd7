"""Episodes of environments in worker processes that can be killed. Nothing heavy is imported: every process imports it.

A sample, a seed and actions define an episode. If its process is killed, another process begins it again and repeats
the actions, and each observation must have the same digest as before. So a run that is resumed, or repeated with other
processes, sees the same episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from mmrl.rollout.tools.workers import explain_start_error
from mmrl.types import (
    Action,
    Environment,
    Failure,
    FailureKind,
    MediaOpener,
    Observation,
    Sample,
    StepResult,
    Unscorable,
    UserError,
    use_media_opener,
)
from mmrl.utils.observations import (
    DIGEST_KEY,
    ask_expert,
    check_observation,
    check_step_result,
    describe_error,
    observation_digest,
)
from mmrl.utils.plugins import load_plugin
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerLimitError, WorkerPool, WorkerStartError, WorkerTimeoutError
from mmrl.utils.worker_server import ReportActivity

if TYPE_CHECKING:
    from mmrl.config.schema import EnvironmentConfig

_MAX_BATCH_SIZE = 8  # steps of most environments take about as long as a message between processes


class Ask(Enum):
    """A request to the environment in place of an action."""

    EXPERT = "expert"  # the action that the environment's expert would take
    STATE = "state"  # the current state, without an action; `gigpo` compares siblings by it


class EpisodeRequest(NamedTuple):
    """One action, with everything that is needed to repeat the episode up to it."""

    key: int  # number of the episode among all that are played together
    sample: Sample
    seed: int
    past: tuple[str | Action, ...]  # the actions before
    digests: tuple[str, ...]  # of the observation after each of them
    action: str | Action | Ask
    has_replay_time: bool = False  # its deadline leaves time to take all earlier actions again


class CloseEpisode(NamedTuple):
    """A request to close the environment of an episode if it is still open."""

    key: int


class TryToMake(NamedTuple):
    """A request to make an environment and close it, so that a UserError in making it ends the run at once."""

    key: int  # decides the process, as the key of an episode does


class EpisodeReply(NamedTuple):
    """The result of one request."""

    action: str | Action | None  # the action that was taken, if any
    state: str  # name of the state in which it was taken
    result: StepResult
    digest: str  # of the observation that followed
    replayed: bool  # earlier actions were taken again first


_Request = EpisodeRequest | CloseEpisode | TryToMake
_Outcome = EpisodeReply | Failure | None  # what `_Episodes` returns, or the failure of its process


@dataclass(slots=True)
class EpisodeWorkers:
    """Runs the episodes of a step in processes, from first action to `close`. An episode's key decides its process."""

    base_dir: Path  # folder that a relative file of the environment starts from
    options: EnvironmentConfig
    media_opener: MediaOpener | None = None  # through which environments see the media of samples; picklable
    _pools: list[WorkerPool[_Request, _Outcome]] = field(default_factory=list)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def play(self, requests: Sequence[EpisodeRequest]) -> list[EpisodeReply | Failure]:
        """Take an action in each of several episodes; return the results or failures in order.

        Raises UserError if the environment cannot be made, and KeyboardInterrupt if it hangs while the run has to stop.
        """
        self._start()
        outcomes = self._call(requests)
        # A killed process lost its other episodes, perhaps in an earlier turn. These calls are made again with more
        # time, because `timeout_s` is for one action.
        lost = [index for index, outcome in enumerate(outcomes) if outcome is None]
        replays = [requests[index]._replace(has_replay_time=True) for index in lost]
        for index, outcome in zip(lost, self._call(replays), strict=True):
            outcomes[index] = outcome
        return cast(list[EpisodeReply | Failure], outcomes)  # with time to replay, no outcome is None

    def close_episodes(self, keys: Iterable[int]) -> None:
        """Close the environments of these episodes if they are still open."""
        self._call([CloseEpisode(key) for key in keys])

    def _start(self) -> None:
        if self._pools:
            return
        limits = WorkerLimits(STARTUP_TIMEOUT_S, reads_output=True, **self.options.worker_limits.model_dump())
        load = partial(_load_episodes, self.base_dir, self.options, self.media_opener)
        for _ in range(self.options.workers):
            # One pool per process, because an episode stays in the process where it began. With `shared_imports` each
            # process loads after the fork: a fork would lose threads and connections that loading starts.
            self._pools.append(WorkerPool(load, 1, limits=limits, shared_imports=(), max_batch_size=_MAX_BATCH_SIZE))
        # Make one environment in each: a missing corpus or package would else fail every episode, which
        # `on_error: skip` only counts.
        self._call([TryToMake(worker) for worker in range(self.options.workers)])

    def _call(self, requests: Sequence[_Request]) -> list[_Outcome]:
        """Send each request to the process of its key; return the outcomes in order."""
        # All are sent before any reply is awaited, so processes work at the same time. Siblings, whose keys follow each
        # other, are spread over the processes: they take the same time.
        futures: list[Future[_Outcome]] = []
        futures_of: dict[int, list[Future[_Outcome]]] = {}
        for request in requests:
            worker, timeout_s = request.key % len(self._pools), self.options.timeout_s
            if isinstance(request, EpisodeRequest) and request.has_replay_time:
                timeout_s *= 1 + len(request.past)
            futures.append(self._pools[worker].submit(request, timeout_s))
            futures_of.setdefault(worker, []).append(futures[-1])
        for worker, own_futures in futures_of.items():
            self._pools[worker].wait_for_calls(own_futures)
        return list(map(self._read_outcome, futures))

    def _read_outcome(self, future: Future[_Outcome]) -> _Outcome:
        try:
            return future.result()
        except WorkerStartError as error:
            raise explain_start_error(error, "the environment's file") from error
        except WorkerTimeoutError as error:
            return Failure(FailureKind.TIMEOUT, f"the environment {error}")
        except WorkerError as error:
            kind = FailureKind.LIMIT if isinstance(error, WorkerLimitError) else FailureKind.CRASH
            return Failure(kind, f"the process of the environment {error}")


def _load_episodes(
    base_dir: Path, options: EnvironmentConfig, media_opener: MediaOpener | None, report: ReportActivity
) -> _Episodes:
    """Load the environment before the first action, so that loading does not count toward the action's deadline."""
    report("loading the environment")
    make = load_plugin(options.fn, base_dir, options.args, role="environment", parameters=())
    return _Episodes(make, options.replayable, media_opener)


@dataclass(slots=True)
class _OpenEpisode:
    """An episode in progress, with its environment."""

    environment: Environment
    shown: Observation  # what it showed last
    num_actions: int = 0

    def step(self, action: str | Action, expected_digest: str | None = None) -> StepResult:
        """Take an action, whose observation must have this digest if it is taken again."""
        result = check_step_result(self.environment.step(action))
        self.num_actions += 1
        if expected_digest is not None and observation_digest(result.observation) != expected_digest:
            raise UserError(
                f"action {self.num_actions} was taken again after a process was lost, and showed something else; "
                "the environment must be a function of sample, seed and actions, or set `replayable: false`"
            )
        self.shown = result.observation
        return result


@dataclass(slots=True)
class _Episodes:
    """The episodes that a worker process holds, by their keys."""

    make: Callable[[], Environment]
    replayable: bool
    media_opener: MediaOpener | None
    episodes: dict[int, _OpenEpisode] = field(default_factory=dict)

    def __call__(self, request: _Request) -> _Outcome:
        """Do what a request asks for, and return the outcome of its action.

        None if it has no action, or if the episode is not in this process and the request has no time to replay it.
        """
        match request:
            case TryToMake():
                self._try_to_make()
            case CloseEpisode():
                self._close(request.key)
            case EpisodeRequest():
                return self._try_to_act(request)
        return None

    def _try_to_make(self) -> None:
        try:
            self.make().close()
        except UserError:
            raise
        except (Exception, SystemExit):  # noqa: BLE001, S110
            pass  # other errors, such as those of a busy server, are left to `on_error` in each episode

    def _try_to_act(self, request: EpisodeRequest) -> _Outcome:
        # An error of the user's code is an outcome of the episode, not of the worker.
        try:
            with use_media_opener(self.media_opener):
                return self._act(request)
        except Unscorable as error:
            failure = Failure(FailureKind.UNSCORABLE, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            failure = Failure(FailureKind.ERROR, describe_error(error))
        self._close(request.key)
        return failure

    def _act(self, request: EpisodeRequest) -> EpisodeReply | None:
        episode = self.episodes.get(request.key)
        replayed = False
        if episode is None or episode.num_actions != len(request.past):
            if request.past and not self.replayable:
                raise UserError(
                    "its process was lost, and an environment that is not replayable cannot be played again"
                )
            if request.past and not request.has_replay_time:
                return None
            episode, replayed = self._begin(request), bool(request.past)
            for action, digest in zip(request.past, request.digests, strict=True):
                episode.step(action, digest)
        # Without a name, states are equal if they show the same.
        state = observation_digest(episode.shown) if episode.shown.state is None else episode.shown.state
        if request.action is Ask.STATE:
            return EpisodeReply(None, state, StepResult(), "", replayed)
        action = ask_expert(episode.environment) if request.action is Ask.EXPERT else request.action
        result = episode.step(action)
        if result.terminated or result.truncated:
            self._close(request.key)
        return EpisodeReply(action, state, result, observation_digest(result.observation), replayed)

    def _begin(self, request: EpisodeRequest) -> _OpenEpisode:
        """Begin the episode of a request, and close an earlier one with the same key."""
        self._close(request.key)
        environment = self.make()
        first = check_observation(environment.reset(request.sample, request.seed))
        asked = request.sample.meta.get(DIGEST_KEY)
        if asked is None and (first.text or first.media):
            raise UserError(
                "reset showed something that the question does not; make the questions from the environment with "
                "`mmrl_datasets.readers.environment:episodes`, or show nothing at first"
            )
        if asked is not None and self.replayable and observation_digest(first) != asked:
            raise UserError(
                "reset showed something else than the question does; the same seed, with `args` as in the data, must "
                "give the same observation, to the byte, or set `replayable: false`"
            )
        self.episodes[request.key] = _OpenEpisode(environment, first)
        return self.episodes[request.key]

    def _close(self, key: int) -> None:
        episode = self.episodes.pop(key, None)
        if episode is not None:
            with suppress(Exception, SystemExit):  # this environment is no longer needed
                episode.environment.close()
