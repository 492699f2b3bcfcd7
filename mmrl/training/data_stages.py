"""Stages that make data: how they meet the machinery of a run."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.config.schema import Rl, Sample, Select
from mmrl.data.stage_tables import write_history
from mmrl.distributed.ranks import Homes, SharedJudge
from mmrl.log.logger import Muted, Teller
from mmrl.training import sample, select
from mmrl.training.build import World
from mmrl.types import State


def draw(stage: Sample, world: World, teller: Teller | Muted, state: State, stop_wanted: Callable[[], bool]) -> None:
    """Write the rollouts of the policy as it is; raises as `mmrl.training.sample.sample`."""
    asked = world.supply.samples_of(stage)
    asked = asked if stage.steps is None else asked[: stage.steps * stage.prompts_per_step]
    plan = sample.Plan(
        samples=asked,
        prompts=stage.prompts_per_step,
        group_size=stage.group_size,
        path=world.run_dir.outputs / f"{stage.name}.jsonl",
    )
    sampler = world.samplers.sampler(world.config.run.seed, stage.name, version=state.version)
    world.samplers.follow(state.version)
    parts = sample.Parts(
        asker=world.processor,
        program=world.program(stage, sampler),
        judge=SharedJudge(inner=world.judge, ranks=world.ranks, homes=Homes()),
        ranks=world.ranks,
        stop_wanted=stop_wanted,
    )
    done = world.ranks.once(lambda: sample.steps_done(plan))
    with teller.stage(stage.name, plan.steps, done):
        for step in sample.sample(plan, parts):
            teller.progress(step)
        teller.record(state, world.ranks.once(lambda: sample.describe(plan.path)))


def keep_history(stage: Rl, world: World, state: State) -> None:
    """Write how the stage's samples fared; raises UserError where that cannot be written."""
    table, samples = world.run_dir.outputs / f"{stage.name}.jsonl", world.supply.samples_of(stage)
    world.ranks.once(lambda: write_history(table, samples, state.history))


def choose(stage: Select, world: World, teller: Teller | Muted, state: State) -> None:
    """Write what later stages train on; raises as `mmrl.training.select.select`."""
    found = world.ranks.once(lambda: select.select(stage, world.run_dir.outputs))
    world.console.say(
        f"Stage {stage.name} kept {found.kept} of {found.of} samples of {stage.source}, in {found.rows} rows; their "
        f"{stage.by} is {found.median:g} in the middle."
    )
    with teller.stage(stage.name, 1):
        teller.record(state, {f"select/{name}": float(value) for name, value in found._asdict().items()})
