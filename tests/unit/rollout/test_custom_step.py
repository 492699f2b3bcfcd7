"""A user's rollout step that breaks a rule is named before anything relies on what it returned."""

from dataclasses import replace

import pytest
from factories import make_prompt, make_rollout, make_sample

from mmrl.config.schema import SampleStage
from mmrl.rollout.steps.custom import CustomStep
from mmrl.training.sample_stage import check_group_sizes
from mmrl.types import RolloutBatch, UserError

PROMPT = make_prompt(make_sample())
BATCH = RolloutBatch(groups=(tuple(make_rollout(PROMPT, index=index) for index in range(2)),))


def keep(count):
    """A step that keeps the first rollouts of each group."""

    def shorten(batch, *, step):
        return replace(batch, groups=tuple(group[:count] for group in batch.groups))

    return CustomStep(name="shorten", function=shorten)


def test_a_step_that_leaves_a_group_without_rollouts_is_named():
    """Nothing could be scored of such a group, and its prompt would be lost."""
    with pytest.raises(UserError, match=f"rollout step shorten left no rollout of sample {PROMPT.sample.id}"):
        keep(0)(BATCH, step=0)
    assert len(keep(1)(BATCH, step=0).groups[0]) == 1


def test_a_sample_stage_refuses_a_step_that_changes_the_number_of_rollouts():
    """Its table tells by the number of rows which steps are finished."""
    stage = SampleStage(name="draw", kind="sample", group_size=2)
    check_group_sizes(stage, BATCH)
    with pytest.raises(UserError, match="stage 'draw', sample s: rollout_steps made 1 rollouts"):
        check_group_sizes(stage, keep(1)(BATCH, step=0))
