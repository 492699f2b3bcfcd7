"""The loops: the calls of a step in order, its metrics, and when a run gives up."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from factories import make_group, make_prompt, make_rollout, make_sample, make_score
from rl_loop import LABEL, FakePipeline, FakeRun, FakeScorer, FakeSource, numbered_sample, train_with_fakes
from selection import centered, make_experiences, select_all
from thread_ranks import run_on_ranks

from mmrl import types
from mmrl.algo.group_metrics import compute_step_metrics
from mmrl.algo.replay import ReplaySettings
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardConfig, GroupRewardRangeConfig, ReplayConfig, SftStage
from mmrl.config.schema.presets import REPLAY_PRESETS
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.rollout_records import list_step_records
from mmrl.scoring.group_reward_calls import BoundGroupReward
from mmrl.training import sft
from mmrl.training.callbacks import StepLogger
from mmrl.utils.activity import Activity


def test_rl_step_makes_its_calls_in_order():
    run, state = FakeRun(), types.TrainingState(step=4, data_position=8, version=6)
    train_with_fakes(run, state, steps=5)
    before_update = [("take", 8), ("rollout", 4), ("score", 4), ("sleep", None), ("learn", 4)]
    before_update += [("update reference", 4), ("sync", 7)]
    assert run.calls == [*before_update, ("record rollouts", 5), ("log", 5), ("callback", 5)]
    assert (state.step, state.data_position, state.version, state.steps_without_signal) == (5, 10, 7, 0)
    assert state.step_data_start == 10
    assert run.logger.metrics[0]["learner/loss"] == 0.25
    activities = ("prompt", "rollout", "score", "select", "learn")
    times = run.logger.times[0]
    assert times.keys() == {f"time/{activity}_s" for activity in activities} | {"rollout/tokens_per_s"}
    num_tokens = sum(experience.rollout.num_tokens for experience in run.learner.learned[0])
    assert times["rollout/tokens_per_s"] * times["time/rollout_s"] == pytest.approx(num_tokens)


def test_generated_tokens_are_those_of_the_policy_and_have_no_rate_in_the_background():
    reply = types.Segment(token_ids=(7,) * 50, logprobs=(0.0,) * 50, author=types.Author.ENVIRONMENT)

    class WithReplies(FakePipeline):
        def run(self, prompts, *, step, unfinished=()):
            batch = super().run(prompts, step=step)
            groups = [[replace(each, segments=(*each.segments, reply)) for each in group] for group in batch.groups]
            return replace(batch, groups=tuple(map(tuple, groups)))

    class KeepsResult(FakeRun):
        def on_step_end(self, state, result):
            self.result = result

    run = KeepsResult()
    train_with_fakes(run, types.TrainingState(), steps=1, rollout_pipeline=WithReplies(run.calls))
    times = run.logger.times[0]
    assert times["rollout/tokens_per_s"] * times["time/rollout_s"] == pytest.approx(2 * 2 * 2)
    StepLogger(run.logger, run.logger, async_rollouts=True).on_step_end(types.TrainingState(), run.result)
    assert "rollout/tokens_per_s" not in run.logger.times[-1]


def test_a_round_may_consist_of_unfinished_groups_alone():
    """A round may begin a single new prompt, whose sample cannot be used."""
    run, state = FakeRun(), types.TrainingState()

    class Nothing(FakeSource):
        def take(self, start_position, count):
            return []

    class Unfinished(FakePipeline):
        def run(self, prompts, *, step, unfinished=()):
            return types.RolloutBatch(groups=(*super().run(prompts, step=step).groups, *unfinished))

    state.unfinished = ((make_rollout(index=0), make_rollout(index=1)),)
    train_with_fakes(run, state, steps=1, source=Nothing(run.calls), rollout_pipeline=Unfinished(run.calls))
    assert run.logger.metrics[0]["data/dropped"] == 1.0
    assert len(run.learner.learned[0]) == 2
    with pytest.raises(types.UserError, match="none of the 2 samples"):
        train_with_fakes(run, types.TrainingState(), steps=1, source=Nothing(run.calls))


def test_each_call_of_a_step_is_made_under_the_name_of_its_activity():
    run, activity = FakeRun(), Activity()

    class NamedCalls(list):
        def append(self, call):
            super().append((call[0], activity.name))

    for part in (run, run.source, run.pipeline, run.scorer, run.learner, run.logger):
        part.calls = NamedCalls()
    train_with_fakes(run, types.TrainingState(), steps=1, activity=activity)
    assert run.source.calls == [("take", "prompt")]
    assert run.pipeline.calls == [("rollout", "rollout")]
    assert run.scorer.calls == [("score", "score")]
    assert run.learner.calls == [("learn", "learn")]
    assert run.calls == [("sleep", "learn"), ("update reference", "learn"), ("sync", "sync"), ("callback", "")]
    assert activity.name == ""


def test_each_rollout_is_trained_with_its_own_advantage():
    run = FakeRun(rewards=(0.25, 1.0))
    train_with_fakes(run, types.TrainingState(), steps=1)
    found = [(e.rollout.prompt.sample.id, e.rollout.index, e.advantage) for e in run.learner.learned[0]]
    assert found == [("0", 0, -0.375), ("0", 1, 0.375), ("1", 0, -0.375), ("1", 1, 0.375)]


def test_stage_ends_at_its_goal_and_stays_ended():
    run, state = FakeRun(done_at=2), types.TrainingState()
    for _ in range(2):
        train_with_fakes(run, state, steps=10)
        assert (state.step, state.stage_done) == (2, True)


@pytest.mark.parametrize("state", [types.TrainingState(), types.TrainingState(step=1, steps_without_signal=1)])
def test_steps_without_signal_in_a_row_end_the_run_also_across_a_restart(state):
    with pytest.raises(types.UserError, match="2 steps in a row had no group to learn from"):
        train_with_fakes(FakeRun(rewards=(0.5, 0.5)), state, steps=10)
    assert state.step == 2


def test_one_group_with_signal_resets_the_count_of_steps_without():
    state = types.TrainingState()
    run = FakeRun(rewards=lambda step, index: (0.0, 1.0) if step % 2 and index == 0 else (0.5, 0.5))
    train_with_fakes(run, state, steps=6)
    assert (state.step, state.steps_without_signal) == (6, 0)


@pytest.mark.parametrize("preset", REPLAY_PRESETS)
def test_steps_that_only_replay_end_the_run(preset):
    """Only the first step has a group to learn from; replaying it is not a sign that the task still teaches."""
    run, state = FakeRun(rewards=lambda step, index: (1.0 if step else 0.0, 1.0)), types.TrainingState()
    config = ReplayConfig(preset=preset, **REPLAY_PRESETS[preset])
    replay = ReplaySettings(options=config, rollouts_per_step=4, seed=())
    with pytest.raises(types.UserError, match=r"3 steps in a row had no group .*replay"):
        train_with_fakes(run, state, steps=60, selector=select_all(centered, replay=replay), max_steps_without_signal=3)
    assert state.step == 4
    assert all(run.learner.learned[1:]) and run.logger.metrics[-1]["replay/staleness_max"] == 3.0


def test_group_carried_over_is_a_signal():
    """It was sampled before, but is trained on for the first time; the step's own groups are filtered out."""
    prompt = make_prompt(numbered_sample(-1))
    scores = [make_score(count=0.0), make_score(count=1.0)]
    carried = make_group(prompt, [make_rollout(prompt, 0), make_rollout(prompt, 1)], scores)
    run, state = FakeRun(rewards=(1.0, 1.0)), types.TrainingState(steps_without_signal=1, carried_over=(carried,))
    options = DynamicSamplingConfig(ranges=(GroupRewardRangeConfig(term="count"),), max_rounds=2, extra="carry")
    selector = select_all(centered, dynamic_sampling=options, carry_over=True, prompts_per_step=2)
    train_with_fakes(run, state, steps=1, selector=selector)
    assert state.steps_without_signal == 0


def test_step_metrics_equal_those_computed_by_hand():
    a, b = (make_prompt(make_sample(id=name, task=task)) for name, task in (("a", "count"), ("b", "find")))
    truncated = replace(make_rollout(a, 1, num_tokens=2), finish_reason=types.FinishReason.LENGTH)
    groups = [
        make_group(
            a,
            [make_rollout(a, 0, num_tokens=1), truncated],
            [make_score(count=1.0, format=0.5), make_score(count=0.0, format=0.5)],
        ),
        make_group(b, [make_rollout(b, 0, num_tokens=3), make_rollout(b, 1, num_tokens=4)], [make_score(iou=0.25)] * 2),
    ]
    rows = [make_experiences(groups[0], 0.5, -0.5), make_experiences(groups[1], 0.0, 0.0)]
    assert compute_step_metrics(groups, rows) == {
        "reward/mean": 0.625,
        "reward/std": pytest.approx(math.sqrt((0.875**2 + 0.125**2 + 2 * 0.375**2) / 4)),
        "reward/min": 0.25,
        "reward/max": 1.5,
        "reward/task/count": 1.0,
        "reward/task/find": 0.25,
        "reward/term/count": 0.5,
        "reward/term/format": 0.5,
        "reward/term/iou": 0.25,
        "advantage/min": -0.5,
        "advantage/max": 0.5,
        "groups/nonzero_advantage_frac": 0.5,
        "rollout/response_tokens_mean": 2.5,
        "rollout/response_tokens_min": 1.0,
        "rollout/response_tokens_max": 4.0,
        "rollout/truncated_frac": 0.25,
        "rollout/duplicate_frac": 0.5,
        "rollout/duplicate_answer_frac": 0.5,
    }


class DroppingScorer(FakeScorer):
    """Scores the first `num_scored` rollouts of the first group, and no others."""

    def __init__(self, calls, num_scored):
        super().__init__(calls, (0.0, 1.0))
        self.num_scored = num_scored

    def score_groups(self, rollouts, *, step, probes=()):
        first, *others = super().score_groups(rollouts, step=step)
        failures = {"count": types.Failure(types.FailureKind.TIMEOUT, "took more than 1 s")}
        return [self.drop(first, self.num_scored, failures), *(self.drop(other, 0, {}) for other in others)]

    def drop(self, group, kept, failures):
        dropped = tuple(types.Dropped(rollout, failures) for rollout in group.rollouts[kept:])
        return replace(group, rollouts=group.rollouts[:kept], scores=group.scores[:kept], dropped=dropped)


def test_dropped_rollouts_are_counted_but_not_trained_on():
    run, state = FakeRun(), types.TrainingState()
    train_with_fakes(run, state, steps=1, scorer=DroppingScorer(run.calls, 2))
    assert [(e.rollout.prompt.sample.id, e.advantage) for e in run.learner.learned[0]] == [("0", -0.5), ("0", 0.5)]
    assert state.steps_without_signal == 0
    [metrics] = run.logger.metrics
    assert metrics["reward/dropped"] == 2
    assert metrics["reward/mean"] == 0.5  # of the scored rollouts
    assert metrics["rollout/response_tokens_mean"] == 2.0  # of all rollouts
    assert metrics["groups/nonzero_advantage_frac"] == 0.5


def test_run_survives_a_step_whose_rollouts_were_all_dropped_but_not_two():
    run, state = FakeRun(), types.TrainingState()
    scorer = DroppingScorer(run.calls, 0)
    train_with_fakes(run, state, steps=1, scorer=scorer)
    assert run.learner.learned == [()]
    assert state.steps_without_signal == 1
    [metrics] = run.logger.metrics
    assert metrics["reward/count/timeouts"] == 2  # the failures of the other group are not its own
    assert metrics["reward/dropped"] == 4
    assert "reward/mean" not in metrics
    with pytest.raises(types.UserError, match="could not be scored"):
        train_with_fakes(run, state, steps=2, scorer=scorer)


def train_sft(run, state, ranks=None):
    stage = SftStage(kind="sft", name="cold", steps=9, prompts_per_step=2)
    parts = sft.SftParts(
        source=run.source,
        processor=run.processor,
        learner=run.learner,
        engine=SimpleNamespace(sleep=lambda: None),
        callbacks=run.callbacks(),
        seed=0,
        ranks=ranks or SingleProcess(),
    )
    sft.train_sft(stage, parts, state)


@pytest.mark.parametrize("run_stage", [lambda run, state: train_with_fakes(run, state, steps=9), train_sft])
def test_nonfinite_steps_in_a_row_end_the_run_and_name_their_rollouts(run_stage):
    run, state = FakeRun(), types.TrainingState()
    run.learner.nonfinite_updates = {0: 1.0, 1: 0.0, 3: 1.0, 5: 2.0, 6: 0.0}  # steps 2 and 4 attempt no update
    with pytest.raises(types.UserError, match=r"2 steps in a row had an update whose gradient is not finite.* kept-6"):
        run_stage(run, state)
    assert (state.step, state.nonfinite_steps) == (6, 2)
    assert run.logger.forced == [1, 4, 5, 6]


def test_supervised_stage_takes_its_samples_in_order_until_its_goal():
    run, state = FakeRun(done_at=3), types.TrainingState(data_position=4)
    train_sft(run, state)
    assert (state.step, state.data_position, state.version, state.stage_done) == (3, 10, 3, True)
    assert [call for call in run.calls if call[0] == "take"] == [("take", 4), ("take", 6), ("take", 8)]
    assert [e.advantage for e in run.learner.learned[0]] == [0.0, 0.0]


def test_each_rank_of_a_supervised_stage_records_the_samples_of_all_ranks():
    """A record's number of an experience is its place among those that the learner was given."""

    class Recorder(FakeRun):
        def on_step_end(self, state, result):
            super().on_step_end(state, result)
            self.records = list_step_records(result.selected, max_groups=9, version=0, has_gradient=bool)

    def train(ranks):
        run = Recorder(done_at=1)
        train_sft(run, types.TrainingState(data_position=2 * ranks.rank), ranks)
        places = [run.learner.learned[0][record.experience].rollout for record in run.records]
        assert [record.rollout for record in run.records] == places
        return [record.rollout.prompt.sample.id for record in run.records]

    assert run_on_ranks(2, train) == [["0", "1", "2", "3"]] * 2


def test_demonstration_is_the_label_or_the_target():
    label = types.Target(answer_type=LABEL.answer_type, value=2)
    labelled = numbered_sample(1, label=label)
    assert sft.demonstration_text(labelled, "label") is label
    assert sft.demonstration_text(labelled, "target") is labelled.target
    with pytest.raises(types.UserError, match="sample 7 has no label"):
        sft.demonstration_text(numbered_sample(7, label=None), "label")


def test_group_rewards_are_in_totals_advantages_and_metrics():
    def reward_the_first(group):
        return [types.RewardValue(float(index == 0), "") for index in range(len(group.scores))]

    run, options = FakeRun(rewards=(1.0, 1.0)), GroupRewardConfig(fn="order")
    order = BoundGroupReward(name="order", compute=reward_the_first, options=options)
    train_with_fakes(run, types.TrainingState(), steps=1, group_rewards=[order])
    assert [experience.advantage for experience in run.learner.learned[0]] == [0.5, -0.5] * 2
    [metrics] = run.logger.metrics
    assert (metrics["reward/mean"], metrics["reward/term/order"]) == (1.5, 0.5)
