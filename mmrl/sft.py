"""The cold start: imitate demonstrations, with the nouns and the learner of the RL loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.loop import Clock
from mmrl.patience import count_bad_steps, refuse_bad_steps
from mmrl.ports import Asker, Gate, Keeper, Learner, Source, Teller
from mmrl.types import Experience, Group, Rollout, Sample, Score, State, Target, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a stage; `imitate` says whether the annotator's label or the exact target is learned."""

    steps: int
    batch_size: int
    imitate: Literal["label", "target"]
    max_bad_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The machinery, each behind its port."""

    source: Source
    asker: Asker
    learner: Learner
    teller: Teller
    gate: Gate
    keeper: Keeper


def train(plan: Plan, parts: Parts, state: State) -> None:
    """Run a stage from wherever `state` stands to its end.

    Raises:
        UserError: a sample has no label to imitate, or `max_bad_steps` steps in a row had no finite gradient.
    """
    while state.step < plan.steps and not state.stage_done:
        clock = Clock()
        with clock.time("ask"):
            samples = parts.source.take(state.cursor, plan.batch_size)
            lessons = [(parts.asker.ask(sample), lesson(sample, plan.imitate)) for sample in samples]
            rollouts = [parts.asker.demonstrate(prompt, answer) for prompt, answer in lessons]
        with clock.time("learn"):
            learned = parts.learner.learn([Experience(rollout=r, advantage=0.0) for r in rollouts], step=state.step)
        state.step, state.cursor, state.version = state.step + 1, state.cursor + plan.batch_size, state.version + 1
        skipped = {"data/skipped": float(plan.batch_size - len(samples))}
        parts.teller.tell(state, {**skipped, **learned}, clock.seconds)
        count_bad_steps(state, learned)
        if state.bad_steps:
            kept = parts.teller.show(state, *_unscored(rollouts), at_all_events=True)
            refuse_bad_steps(state, plan.max_bad_steps, kept)
        state.stage_done = parts.gate.passed(state)
        parts.keeper.keep(state)


def _unscored(lessons: Sequence[Rollout]) -> tuple[list[Group], list[tuple[float]]]:
    """Demonstrations as groups of one that no reward has judged."""
    score = Score(terms={}, total=math.nan)
    return [Group(prompt=each.prompt, rollouts=(each,), scores=(score,)) for each in lessons], [(0.0,)] * len(lessons)


def lesson(sample: Sample, imitate: Literal["label", "target"]) -> Target:
    """What a demonstration of this sample answers.

    Raises:
        UserError: the sample has no label.
    """
    if imitate == "target":
        return sample.target
    if sample.label is None:
        raise UserError(f"sample {sample.id} has no label to imitate; set `imitate: target` or give the data a label")
    return sample.label
