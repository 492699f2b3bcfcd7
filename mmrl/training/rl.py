"""Reinforcement learning, whole: ask, answer, judge, choose, learn, tell.

     Sample ──ask──► Prompt ──answer──► Rollout ──judge──► Group ──choose──► Experience ──learn──► new weights
                                            ▲──────────────────── sync ◄──────────────────────────────┘

The loop knows ports and nouns only. What a step draws depends on the run's seed, the step and the sample, never on
a clock or on what ran before, so a run continued from a checkpoint is the run that was never interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mmrl.algo.step_metrics import describe
from mmrl.ports import Asker, Chooser, Foresight, Gate, Judge, Keeper, Learner, Program, Sampler, Source, Teller
from mmrl.training.give_up import count_bad_steps, refuse_bad_steps, refuse_barrenness
from mmrl.types import Answers, Group, Prompt, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a stage. A round has `prompts`, waiting ones too; `shape` adds what is earned beside siblings."""

    steps: int
    prompts: int
    shape: Callable[[Group, int], Group]
    max_barren_steps: int
    max_bad_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The machinery, each behind its port; with `foresight`, steps overlap: one is learned, the next one drawn."""

    source: Source
    asker: Asker
    program: Program
    sampler: Sampler
    judge: Judge
    chooser: Chooser
    learner: Learner
    teller: Teller
    gate: Gate
    keeper: Keeper
    foresight: Foresight | None = None


@dataclass(slots=True)
class Clock:
    """Wall-clock seconds by verb."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, verb: str) -> Iterator[None]:
        """Time one verb."""
        start = time.perf_counter()
        yield
        name = f"time/{verb}_s"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train(plan: Plan, parts: Parts, state: State) -> None:
    """Run a stage from wherever `state` stands to its end.

    Raises:
        UserError: `max_barren_steps` steps in a row had no group to learn from, or `max_bad_steps` no finite gradient.
    """
    while state.step < plan.steps and not state.stage_done:
        clock = Clock()

        gathered = Gathered()
        while parts.chooser.wants_more(gathered.groups, state, rounds=gathered.rounds):
            gather(plan, parts, state, gathered, clock)

        # 4. Choose: what a rollout teaches is how much better it did than its siblings.
        with clock.time("choose"):
            choice = parts.chooser.choose(gathered.groups, state)

        # 5. Learn: one update, and the sampler follows once it has drawn the step to come, if it does so meanwhile.
        coming = look_ahead(plan, parts, state, clock)
        with clock.time("learn"):
            learned = parts.learner.learn(choice.experiences, step=state.step)
        with clock.time("answer"):
            state.ahead = coming()
        with clock.time("learn"):
            parts.sampler.sync(state.version + 1)

        # 6. Tell: record the step; perhaps this is the end, or time to save.
        state.step, state.version = state.step + 1, state.version + 1
        count_bad_steps(state, learned)
        kept = parts.teller.show(state, choice.groups, choice.advantages, at_all_events=state.bad_steps > 0)
        said = {**gathered.metrics, **describe(choice.groups, choice.advantages), **choice.metrics, **learned}
        parts.teller.tell(state, said, clock.seconds)
        refuse_barrenness(state, plan.max_barren_steps, [[e.advantage for e in choice.experiences]])
        refuse_bad_steps(state, plan.max_bad_steps, kept)
        state.stage_done = parts.gate.passed(state)
        parts.keeper.keep(state)


@dataclass(slots=True)
class Gathered:
    """What the rounds of a step have brought so far."""

    groups: list[Group] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)
    rounds: int = 0


def gather(plan: Plan, parts: Parts, state: State, gathered: Gathered, clock: Clock) -> None:
    """One round of questions, answered and judged."""
    ahead, state.ahead = state.ahead, None
    if ahead is not None and parts.foresight is not None:
        answers = parts.foresight.due(ahead, version=state.version)
    else:
        prompts = ask(plan, parts, state, clock)

        # 2. Answer: every prompt gets a group of rollouts.
        with clock.time("answer"):
            answers = parts.program.answer(prompts, step=state.step, pending=state.pending)

    # 3. Judge: rewards score each rollout, group terms compare it with its siblings.
    with clock.time("judge"):
        groups = parts.judge.judge(answers.groups, step=state.step, probes=answers.probes)
        gathered.groups += [plan.shape(group, state.step) for group in groups]
    gathered.metrics.update(answers.metrics)
    gathered.rounds += 1
    state.pending = answers.pending


def ask(plan: Plan, parts: Parts, state: State, clock: Clock) -> list[Prompt]:
    """The questions of a round."""
    # 1. Ask: the next samples become prompts.
    with clock.time("ask"):
        count = plan.prompts - len(state.pending)
        samples = parts.source.take(state.cursor, count)
        state.cursor += count
        return [parts.asker.ask(sample) for sample in samples]


def look_ahead(plan: Plan, parts: Parts, state: State, clock: Clock) -> Callable[[], Answers | None]:
    """Have the first round of the step to come answered from now on; what is returned waits for it."""
    if parts.foresight is None or state.step + 1 == plan.steps:
        return lambda: None
    prompts = ask(plan, parts, state, clock)
    return parts.foresight.begin(prompts, step=state.step + 1, version=state.version)
