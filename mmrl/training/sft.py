"""Imitation of demonstrations, with the nouns and the learner of the RL loop."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.algo.seeds import derive
from mmrl.config.schema import Sft
from mmrl.data.demonstrations import Imitated, lesson
from mmrl.ports import Asker, Gate, Keeper, Learner, Source, Teller, Tools
from mmrl.training.give_up import count_bad_steps, refuse_bad_steps
from mmrl.training.rl import Clock
from mmrl.types import Experience, Group, Rollout, Sample, Score, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a stage: `imitate` says what is learned, `learn` which part of it, `thought_dropout` how often it
    comes without its thinking, by chance that derives from `salt`.
    """

    steps: int
    batch_size: int
    imitate: Imitated
    learn: Literal["response", "answer"]
    thought_dropout: float
    salt: tuple[str | int, ...]
    max_bad_steps: int


def plan_of(stage: Sft, seed: int) -> Plan:
    """The plan of a stage in a run of this seed."""
    return Plan(
        steps=stage.steps,
        batch_size=stage.batch_size,
        imitate=stage.imitate,
        learn=stage.learn,
        thought_dropout=stage.thought_dropout,
        salt=(seed, stage.name),
        max_bad_steps=stage.max_bad_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The machinery, each behind its port; `tools` answer the calls of demonstrations, where any are to be answered."""

    source: Source
    asker: Asker
    learner: Learner
    teller: Teller
    gate: Gate
    keeper: Keeper
    tools: Tools | None = None


def train(plan: Plan, parts: Parts, state: State) -> None:
    """Run a stage from wherever `state` stands to its end.

    Raises:
        UserError: a sample has no label to imitate, a call in one cannot be answered, or `max_bad_steps` steps in a
            row had no finite gradient.
    """
    while state.step < plan.steps and not state.stage_done:
        clock = Clock()
        with clock.time("ask"):
            samples = parts.source.take(state.cursor, plan.batch_size)
            rollouts: Sequence[Rollout] = [_demonstration(plan, parts.asker, each, state.step) for each in samples]
            rollouts, told = parts.tools.complete(rollouts) if parts.tools else (rollouts, {})
        with clock.time("learn"):
            learned = parts.learner.learn([Experience(rollout=r, advantage=0.0) for r in rollouts], step=state.step)
        state.step, state.cursor, state.version = state.step + 1, state.cursor + plan.batch_size, state.version + 1
        skipped = {"data/skipped": float(plan.batch_size - len(samples))}
        parts.teller.tell(state, {**skipped, **told, **learned}, clock.seconds)
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


def _demonstration(plan: Plan, asker: Asker, sample: Sample, step: int) -> Rollout:
    thinks = random.Random(derive(*plan.salt, "thought", step, sample.id)).random() >= plan.thought_dropout
    return asker.demonstrate(asker.ask(sample), lesson(sample, plan.imitate), thinks=thinks, learn=plan.learn)
