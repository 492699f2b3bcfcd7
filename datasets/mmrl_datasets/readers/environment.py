"""Make samples of an environment: its first observations are the questions, and a rollout step plays what follows.

The environment runs in a process, which is killed when it hangs. With `steps`, each state that the environment's expert
visits becomes a sample instead, with the expert's action as the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final

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
from mmrl.utils.observations import DIGEST_KEY, SEED_KEY, check_observation, check_step_result, observation_digest
from mmrl.utils.plugins import load_plugin
from mmrl.utils.seeds import derive_seed
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity
from mmrl_datasets.media_files import save_by_hash

NO_ANSWER: Final = Target(answer_type=AnswerType.TEXT, value="-")
"""Target of an episode, which has no right answer: the shortest text that a target may be. Rewards read its turns."""

_MAX_STEPS: Final = 100  # of an expert, which may never finish

_States = list[tuple[Observation, str | Action]]  # what is shown in each state, and what the expert does then, or ""


def episodes(
    context: DatasetContext,
    *,
    fn: str,
    args: Mapping[str, Any] | None = None,
    task: str,
    size: Annotated[int, Field(ge=1)] | None,
    seed: int | None = None,
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0,
    steps: bool = False,
    coordinates: CoordinateSystem | None = None,
) -> Iterator[Sample | RejectedRow]:
    """Yield an episode of an environment for each number, and a `RejectedRow` where it could not begin.

    The question is what `reset` shows: media, then text. Episode i has the seed `derive_seed(seed, task, i)`, so
    training, validation and test data are different episodes if their `seed` differs; ids hold it.

    Options:
        fn: `./file.py:function` or `module:function`, which makes the environment.
        args: its options; the same as those of the rollout step.
        task: the task of all samples, also in their ids.
        size: number of episodes; null never ends.
        seed: fixes the episodes; null takes the seed of the run.
        timeout_s: seconds that an episode may take to begin or, with `steps`, to be played to its end.
        steps: make a sample of each state the expert visits. Its question is the first observation's text, below the
            media of the state; its answer is the expert's action, of the type action if it is one and text otherwise.
        coordinates: with `steps`, the coordinate system of actions.

    Raises:
        UserError: the environment cannot be loaded, or a picture cannot be saved.
    """
    root_seed = context.seed if seed is None else seed
    load = partial(_load, fn, context.base_dir, dict(args or {}), steps)
    limits = WorkerLimits(STARTUP_TIMEOUT_S, timeout_s, reads_output=True)
    # An environment may start threads or open connections as it is loaded, which a fork would lose.
    pool: WorkerPool[Sample, _States | str] = WorkerPool(load, 1, limits=limits, shared_imports=())
    try:
        for index in count() if size is None else range(size):
            meta = {SEED_KEY: derive_seed(root_seed, task, index)}
            bare = Sample(id=f"{task}/{root_seed}/{index:06d}", task=task, parts=(), target=NO_ANSWER, meta=meta)
            try:
                states = pool.submit(bare).result()
            except WorkerStartError as error:
                raise UserError(f"the process of the environment {error.__cause__ or error}") from error
            except WorkerError as error:
                states = f"the process of the environment {error}"
            if isinstance(states, str):
                yield RejectedRow(bare.id, states)
            elif steps:
                yield from _list_steps(context, bare, states, coordinates)
            else:
                first = states[0][0]
                parts = _save_parts(context, first, first.text, bare.id)
                yield replace(bare, parts=parts, meta={**meta, DIGEST_KEY: observation_digest(first)})
    finally:
        pool.close()


def _list_steps(
    context: DatasetContext, episode: Sample, states: _States, coordinates: CoordinateSystem | None
) -> Iterator[Sample]:
    goal = states[0][0].text
    for number, (shown, action) in enumerate(states):
        sample_id = f"{episode.id}/{number}"
        text = "\n".join(filter(None, (goal, shown.text if number else "")))
        target = Target(answer_type=AnswerType.TEXT, value=action)
        with suppress(Exception, SystemExit):  # text that does not parse as an action stays text
            value = parse_answer_value(AnswerType.ACTION, action) if isinstance(action, str) else action
            target = Target(answer_type=AnswerType.ACTION, value=value, coordinate_system=coordinates)
        parts = _save_parts(context, shown, text, sample_id)
        yield Sample(id=sample_id, task=episode.task, parts=parts, target=target, meta={"episode": episode.id})


def _save_parts(context: DatasetContext, shown: Observation, text: str, sample_id: str) -> tuple[ContentPart, ...]:
    parts: list[ContentPart] = []
    folder, _, stem = sample_id.replace("/", "-").rpartition("-")
    for number, medium in enumerate(shown.media, start=1):
        match medium:
            case bytes():
                extension = ".png" if medium.startswith(b"\x89PNG") else ".jpg"
                path, sha256 = save_by_hash(medium, context.work_dir / folder, f"{stem}-{number}", extension)
                parts.append(ImageRef(path=path, sha256=sha256))
            case ImageRef() | VideoRef():
                parts.append(medium)
    return (*parts, text) if text else tuple(parts)


def _load(
    fn: str, base_dir: Path, args: dict[str, Any], steps: bool, report: ReportActivity
) -> Callable[[Sample], _States | str]:
    """Import the environment's file beforehand, so that this does not count against an episode's deadline."""
    report("loading the environment")
    return partial(_play, load_plugin(fn, base_dir, args, role="environment", parameters=()), steps)


def _play(make: Callable[[], Environment], steps: bool, sample: Sample) -> _States | str:
    """Return the first state of an episode, or with `steps` all that its expert visits; or the reason for none."""
    try:
        environment = make()
        shown = _check_question(environment.reset(sample, sample.meta[SEED_KEY]))
        states: _States = _follow_expert(environment, shown) if steps else [(shown, "")]
        environment.close()
        return states
    except UserError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # an error in the user's code rejects this row only
        return f"the environment raised {type(error).__name__}: {error}"


def _follow_expert(environment: Environment, shown: Observation) -> _States:
    expert: Callable[[], str | Action] | None = getattr(environment, "expert", None)
    if expert is None:
        raise UserError("the environment has no method `expert`, whose actions `steps` makes samples of")
    states: _States = []
    while len(states) < _MAX_STEPS:
        states.append((shown, expert()))
        result = check_step_result(environment.step(states[-1][1]))
        if result.terminated or result.truncated:
            return states
        shown = _check_question(result.observation, may_be_empty=True)
    raise UserError(f"the expert took {_MAX_STEPS} actions and was not done")


def _check_question(value: object, *, may_be_empty: bool = False) -> Observation:
    shown = check_observation(value)
    if not may_be_empty and not shown.text and not shown.media:
        raise UserError("reset showed nothing; such an environment needs a dataset that states the task")
    if not all(isinstance(medium, bytes | ImageRef | VideoRef) for medium in shown.media):
        raise UserError("an observation shows a part of other media, which a question does not have")
    return shown
