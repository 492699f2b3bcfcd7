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
from mmrl.utils.observations import (
    DIGEST_KEY,
    SEED_KEY,
    ask_expert,
    check_observation,
    check_step_result,
    describe_error,
    observation_digest,
)
from mmrl.utils.plugins import load_plugin
from mmrl.utils.seeds import derive_seed
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerError, WorkerPool, WorkerStartError
from mmrl.utils.worker_server import ReportActivity
from mmrl_datasets.media_files import save_by_hash

NO_ANSWER: Final = Target(answer_type=AnswerType.TEXT, value="-")
"""Target of an episode, which has no right answer: the shortest text that a target may be. Rewards read its turns."""

_MAX_STEPS: Final = 100  # of an expert, which may never finish

_State = tuple[Observation, str | Action]  # what is shown, and what the expert does then; "" where nobody asks


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
    """Yield a sample for each episode of an environment, and a `RejectedRow` for an episode that could not begin.

    The question is what `reset` shows: media, then text. Episode i has the seed `derive_seed(seed, task, i)`, so
    training, validation and test data are different episodes if their `seed` differs; ids hold it. Raises UserError if
    the environment cannot be loaded, or a picture cannot be saved.

    Options:
        fn: `./file.py:function` or `module:function`, which makes the environment.
        args: its options; the same as in the rollout step.
        task: the task of all samples, also in their ids.
        size: number of episodes; null never ends.
        seed: fixes the episodes; null takes the seed of the run.
        timeout_s: seconds that an episode may take to begin or, with `steps`, to be played to its end.
        steps: make a sample of each state the expert visits. Its question is the first observation's text, below the
            media of the state; its answer is the expert's action, of the type action if it is one and text otherwise.
        coordinates: with `steps`, the coordinate system of actions.
    """
    root_seed = context.seed if seed is None else seed
    load = partial(_load, fn, context.base_dir, dict(args or {}), steps)
    limits = WorkerLimits(STARTUP_TIMEOUT_S, timeout_s, reads_output=True)
    # An environment may start threads or open connections as it is loaded, which a fork would lose.
    pool: WorkerPool[Sample, list[_State]] = WorkerPool(load, 1, limits=limits, shared_imports=())
    try:
        for index in count() if size is None else range(size):
            meta = {SEED_KEY: derive_seed(root_seed, task, index)}
            bare = Sample(id=f"{task}/{root_seed}/{index:06d}", task=task, parts=(), target=NO_ANSWER, meta=meta)
            try:
                states = pool.submit(bare).result()
            except WorkerStartError as error:
                if isinstance(error.__cause__, UserError):
                    raise error.__cause__ from error
                raise UserError(f"the process of the environment {error}") from error
            except (WorkerError, UserError) as error:
                owner = "the process of the environment " if isinstance(error, WorkerError) else ""
                yield RejectedRow(bare.id, f"{owner}{error}")
                continue
            if steps:
                yield from _list_steps(context, bare, states, coordinates)
            else:
                first = states[0][0]
                parts = _save_parts(context, first, first.text, bare.id)
                yield replace(bare, parts=parts, meta={**meta, DIGEST_KEY: observation_digest(first)})
    finally:
        pool.close()


def _list_steps(
    context: DatasetContext, episode: Sample, states: list[_State], coordinates: CoordinateSystem | None
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
        if isinstance(medium, bytes):
            extension = ".png" if medium.startswith(b"\x89PNG") else ".jpg"
            path, sha256 = save_by_hash(medium, context.work_dir / folder, f"{stem}-{number}", extension)
            parts.append(ImageRef(path=path, sha256=sha256))
        elif isinstance(medium, ImageRef | VideoRef):
            parts.append(medium)
    return (*parts, text) if text else tuple(parts)


def _load(
    fn: str, base_dir: Path, args: dict[str, Any], steps: bool, report: ReportActivity
) -> Callable[[Sample], list[_State]]:
    """Import the environment's file beforehand, so that this does not count against an episode's deadline."""
    report("loading the environment")
    return partial(_play, load_plugin(fn, base_dir, args, role="environment", parameters=()), steps)


def _play(make: Callable[[], Environment], steps: bool, sample: Sample) -> list[_State]:
    """Return the first state of an episode, or with `steps` all that its expert visits; any error is a UserError."""
    try:
        environment = make()
        shown = check_observation(environment.reset(sample, sample.meta[SEED_KEY]))
        if not shown.text and not shown.media:
            raise UserError("reset showed nothing, so the environment needs a dataset that states the task")
        states: list[_State] = list(_follow_expert(environment, shown)) if steps else [(shown, "")]
        environment.close()
        for shown, _ in states:
            if not all(isinstance(medium, bytes | ImageRef | VideoRef) for medium in shown.media):
                raise UserError("an observation shows a part of other media, which a question does not have")
        return states
    except (Exception, SystemExit) as error:  # an error in the user's code rejects this row only
        raise UserError(describe_error(error)) from error


def _follow_expert(environment: Environment, shown: Observation) -> Iterator[_State]:
    for _ in range(_MAX_STEPS):
        action = ask_expert(environment)
        yield shown, action
        result = check_step_result(environment.step(action))
        if result.terminated or result.truncated:
            return
        shown = result.observation
    raise UserError(f"the expert did not finish within {_MAX_STEPS} actions")
