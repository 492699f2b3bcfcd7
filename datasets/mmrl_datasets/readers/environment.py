"""Make samples of an environment: its first observations are the questions, and a rollout step plays what follows.

The environment runs in a process, which is killed where it hangs. With `steps`, each state on the way of its expert
becomes a sample of its own instead, with the expert's action as the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field

from mmrl.answer import parse_answer_value
from mmrl.types import (
    Action,
    AnswerType,
    ContentPart,
    CoordinateSystem,
    DatasetContext,
    Environment,
    ImageRef,
    Observation,
    RejectedRow,
    Sample,
    Target,
    UserError,
    VideoRef,
)
from mmrl.utils.error_catcher import ErrorCatcher
from mmrl.utils.observations import DIGEST_KEY, SEED_KEY, check_observation, check_step_result, observation_digest
from mmrl.utils.plugins import load_plugin
from mmrl.utils.seeds import derive_seed
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity
from mmrl_datasets.generators.common import Size
from mmrl_datasets.media_files import save_by_hash

NO_ANSWER: Final = Target(answer_type=AnswerType.TEXT, value="-")
"""Target of an episode, which has no right answer: the shortest text that a target may be. Rewards read its turns."""
EPISODE_KEY: Final = "episode"
"""Key of `Sample.meta`: the episode that a sample of `steps` is a state of."""

_CHUNK: Final = 64  # episodes that are requested together
_MAX_STEPS: Final = 100  # of an expert, who may never arrive


class _Request(NamedTuple):
    sample: Sample  # without a question yet
    seed: int


class _State(NamedTuple):
    """A state of an episode."""

    shown: Observation
    action: str | Action | None  # what the expert does then; None where it was not asked


def episodes(
    context: DatasetContext,
    *,
    fn: str,
    args: Mapping[str, Any] | None = None,
    task: str,
    size: Size,
    seed: int | None = None,
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0,
    steps: bool = False,
    coordinates: CoordinateSystem | None = None,
) -> Iterator[Sample | RejectedRow]:
    """Yield an episode of an environment for each number, and a `RejectedRow` where it could not begin.

    The question is what `reset` shows: media, then text. Episode i has the seed `derive_seed(seed, task, i)`. Training,
    validation and test data are different episodes if their `seed` differs; ids hold it, so a seed that is used for
    two of them shows.

    Options:
        fn: `./file.py:function` or `module:function`, which makes the environment.
        args: its options; the same as those of the rollout step.
        task: the task of all samples, also in their ids.
        size: number of episodes; null never ends.
        seed: fixes the episodes; null takes the seed of the run.
        timeout_s: seconds that an episode may take to begin, with `steps` to be played.
        steps: make a sample of each state on the expert's way. Its question is the first observation's text, below the
            media of the state; its answer is the expert's action, of the type action if it is one and text otherwise.
        coordinates: with `steps`, the coordinate system of actions.

    Raises:
        UserError: the environment cannot be loaded, or a picture cannot be saved.
    """
    root_seed = context.seed if seed is None else seed
    name = f"{task}/{root_seed}"
    folder = context.work_dir / name.replace("/", "-")
    load = partial(_load, fn, context.base_dir, dict(args or {}), steps)
    limits = WorkerLimits(STARTUP_TIMEOUT_S, timeout_s, reads_output=True)
    # An environment may start threads or open connections as it is loaded, which a fork would lose.
    pool: WorkerPool[_Request, list[_State] | str] = WorkerPool(load, 1, limits=limits, shared_imports=())
    indices = iter(count() if size is None else range(size))
    try:
        while chunk := list(islice(indices, _CHUNK)):
            requests = [_make_request(name, task, derive_seed(root_seed, task, index), index) for index in chunk]
            futures = pool.submit_all(requests, [None] * len(requests))
            for request, future in zip(requests, futures, strict=True):
                try:
                    states = future.result()
                except WorkerStartError as error:
                    raise UserError(f"the process of the environment {error.__cause__ or error}") from error
                except WorkerError as error:
                    states = f"the process of the environment {error}"
                if isinstance(states, str):
                    yield RejectedRow(request.sample.id, states)
                elif steps:
                    yield from _list_steps(request, states, folder, coordinates)
                else:
                    yield _make_episode(request, states[0].shown, folder)
    finally:
        pool.close()


def _make_request(name: str, task: str, seed: int, index: int) -> _Request:
    sample = Sample(id=f"{name}/{index:06d}", task=task, parts=(), target=NO_ANSWER, meta={SEED_KEY: seed})
    return _Request(sample, seed)


def _make_episode(request: _Request, first: Observation, folder: Path) -> Sample | RejectedRow:
    sample = request.sample
    parts = _save_parts(first, first.text, folder, sample.id)
    if not parts:
        return RejectedRow(sample.id, "reset showed nothing; the environment then needs a dataset that states the task")
    meta = {SEED_KEY: request.seed, DIGEST_KEY: observation_digest(first)}
    return Sample(id=sample.id, task=sample.task, parts=parts, target=NO_ANSWER, meta=meta)


def _list_steps(
    request: _Request, states: list[_State], folder: Path, coordinates: CoordinateSystem | None
) -> Iterator[Sample]:
    goal = states[0].shown.text
    for number, state in enumerate(states):
        assert state.action is not None
        sample_id = f"{request.sample.id}/{number}"
        text = goal if number == 0 else "\n".join(filter(None, (goal, state.shown.text)))
        yield Sample(
            id=sample_id,
            task=request.sample.task,
            parts=_save_parts(state.shown, text, folder, sample_id),
            target=_make_target(state.action, coordinates),
            meta={EPISODE_KEY: request.sample.id},
        )


def _make_target(action: str | Action, coordinates: CoordinateSystem | None) -> Target:
    """Return an expert's action as a target: one that is written as an action is compared as one."""
    if isinstance(action, str):
        try:
            action = parse_answer_value(AnswerType.ACTION, action)
        except ValueError:
            return Target(answer_type=AnswerType.TEXT, value=action)
    return Target(answer_type=AnswerType.ACTION, value=action, coordinate_system=coordinates)


def _save_parts(shown: Observation, text: str, folder: Path, sample_id: str) -> tuple[ContentPart, ...]:
    parts: list[ContentPart] = []
    stem = sample_id.partition("/")[2].replace("/", "-")
    for number, medium in enumerate(shown.media, start=1):
        if isinstance(medium, bytes):
            extension = ".png" if medium.startswith(b"\x89PNG") else ".jpg"
            path, sha256 = save_by_hash(medium, folder, f"{stem}-{number}", extension)
            parts.append(ImageRef(path=path, sha256=sha256))
        else:
            assert isinstance(medium, ImageRef | VideoRef)
            parts.append(medium)
    return (*parts, text) if text else tuple(parts)


def _load(
    fn: str, base_dir: Path, args: dict[str, Any], steps: bool, report: ReportActivity
) -> Callable[[_Request], list[_State] | str]:
    """Import the environment's file, so that no deadline of an episode pays for it."""
    report("loading the environment")
    make: Callable[[], Environment] = load_plugin(fn, base_dir, args, role="environment", parameters=())
    return partial(_play, make, steps)


def _play(make: Callable[[], Environment], steps: bool, request: _Request) -> list[_State] | str:
    """Return the states of an episode, the first one or all that its expert sees; or why there are none."""
    # Whatever code of users raises is the fate of one row.
    with ErrorCatcher() as caught:
        environment = make()
        shown = _check_media(environment.reset(request.sample, request.seed))
        states = [_State(shown, None)]
        if steps:
            states = _follow_expert(environment, shown)
        environment.close()
        return states
    error = caught.error
    return str(error) if isinstance(error, UserError) else f"the environment raised {type(error).__name__}: {error}"


def _follow_expert(environment: Environment, shown: Observation) -> list[_State]:
    expert: Callable[[], str | Action] | None = getattr(environment, "expert", None)
    if expert is None:
        raise UserError("the environment has no method `expert`, whose actions `steps` makes samples of")
    states: list[_State] = []
    while len(states) < _MAX_STEPS:
        states.append(_State(shown, expert()))
        result = check_step_result(environment.step(states[-1].action or ""))
        if result.terminated or result.truncated:
            return states
        shown = _check_media(result.observation)
    raise UserError(f"the expert took {_MAX_STEPS} actions and was not done")


def _check_media(value: object) -> Observation:
    shown = check_observation(value)
    for medium in shown.media:
        if not isinstance(medium, bytes | ImageRef | VideoRef):
            raise UserError(f"an observation shows a part of other media, {medium!r:.80}, which a question has none of")
    return shown
