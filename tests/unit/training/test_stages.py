"""Held-out means and rises against oracles, validation and checkpoint callbacks, and the order of samples."""

import io
import random
from math import inf, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
from scoring import constant, make_scorer, term

from mmrl.config.schema import ValidationConfig
from mmrl.data.order import ShuffledOrder
from mmrl.log.comparison import compare_rewards
from mmrl.log.console import Console
from mmrl.rollout.pipeline import StepPipeline
from mmrl.training.callbacks import PeriodicCheckpointer, Validation, evaluate_samples
from mmrl.types import (
    AnswerType,
    EvalRewards,
    RewardValue,
    RunInterrupted,
    Sample,
    Score,
    Target,
    TrainingState,
    Unscorable,
    UserError,
)
from mmrl.utils.stats import mean_with_interval, paired_improvement


def test_a_mean_and_its_interval_equal_numpy():
    values = [random.Random(i).random() for i in range(50)]
    found = mean_with_interval(values)
    half = 1.959964 * np.std(values, ddof=1) / sqrt(50)
    assert found.value == pytest.approx(np.mean(values))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    assert found.n == 50


def test_a_single_value_has_an_infinite_interval():
    found = mean_with_interval([0.5])
    assert (found.value, found.low, found.high, found.n) == (0.5, -inf, inf, 1)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(0)
    found = [mean_with_interval(generator.random(40).tolist()) for _ in range(1000)]
    assert 0.93 < np.mean([each.low < 0.5 < each.high for each in found]) < 0.97


def test_a_rise_is_paired_by_id():
    before, after = {"a": 0.1, "b": 0.5, "c": 0.9}, {"c": 1.0, "b": 0.6, "a": 0.2}
    found = paired_improvement(before, after)
    assert (found.value, found.n) == (pytest.approx(0.1), 3)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-12)  # every sample rose alike
    with pytest.raises(ValueError, match="cannot pair 3 samples"):
        paired_improvement(before, {"a": 0.2, "b": 0.6})
    with pytest.raises(ValueError, match="cannot pair"):
        paired_improvement(before, {"a": 0.2, "b": 0.6, "d": 1.0})


def test_the_table_has_a_row_for_each_task():
    rows = compare_rewards({"b": {"1": 0.0, "2": 1.0}, "a": {"3": 0.5}}, {"a": {"3": 0.75}, "b": {"1": 1.0, "2": 1.0}})
    assert [row.task for row in rows] == ["a", "b"]
    assert [row.improvement.value for row in rows] == [0.25, 0.5]
    assert [row.before.value for row in rows] == [0.5, 0.5]
    assert [row.after.value for row in rows] == [0.75, 1.0]


def once(tiny):
    return StepPipeline(sampler=tiny.sampler(), group_size=1, sampling_params=tiny.params)


def test_an_engine_must_return_a_group_for_each_prompt(make_tiny):
    tiny = make_tiny()
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]

    def generate_fewer(prompts, group_size, sampling_params, *, step):
        return tiny.sampler().generate(prompts[1:], group_size, sampling_params, step=step)

    short = SimpleNamespace(generate=generate_fewer)
    pipeline = StepPipeline(sampler=short, group_size=1, sampling_params=tiny.params)
    with pytest.raises(UserError, match="the rollout engine returned 1 groups for 2 prompts"):
        pipeline.run(prompts, step=0)


def test_the_evaluator_measures_each_sample_once(make_tiny):
    tiny, out = make_tiny(), io.StringIO()
    console = Console(out)

    class LengthScorer:
        def score_eval(self, rollouts):
            return [Score(terms={"n": RewardValue(1.0, "")}, total=float(rollout.num_tokens)) for rollout in rollouts]

    def rewards(batch_size):
        return evaluate_samples(
            tiny.samples[:7],
            processor=tiny.processor,
            rollout_pipeline=once(tiny),
            scorer=LengthScorer(),
            batch_size=batch_size,
            console=console,
            step=3,
        ).rewards

    found = rewards(3)
    assert {id_ for task in found.values() for id_ in task} == {sample.id for sample in tiny.samples[:7]}
    assert all(found[sample.task][sample.id] > 0 for sample in tiny.samples[:7])
    assert found == rewards(1) == rewards(100)
    assert not out.getvalue()


def test_the_evaluator_counts_what_could_not_be_judged(make_tiny):
    tiny, out = make_tiny(), io.StringIO()
    console = Console(out)
    fails = term(constant(Unscorable("no verdict")), fallback=0.5)
    found = evaluate_samples(
        tiny.samples[:7],
        processor=tiny.processor,
        rollout_pipeline=once(tiny),
        scorer=make_scorer(fails, term(constant(1.0, name="fine"))),
        batch_size=4,
        console=console,
        step=0,
    ).rewards
    assert {reward for task in found.values() for reward in task.values()} == {1.5}
    assert out.getvalue() == "warning: evaluation: reward 'odd' failed on 7 of 7 (unscorable); its fallback counts\n"


class Looks:
    """Rewards that rise with every look."""

    def __init__(self, *levels):
        self.levels, self.noted, self.said = list(levels), [], []

    def look(self, state):
        levels = zip("ab", self.levels.pop(0), strict=True)
        return EvalRewards({task: {"x": level, "y": level + 0.2} for task, level in levels}, {"rethink/attempted": 4.0})

    def note(self, state, metrics):
        self.noted.append((state.step, metrics))

    def validation(self, **options):
        return Validation(self.look, ValidationConfig(**options), self.note, self.said.append)


def stage_done_after(callback, step):
    """The state's `stage_done` after the callback has seen a step; validation does not read the result."""
    state = TrainingState(step=step)
    callback.on_step_end(state, None)
    return state.stage_done


def test_validation_measures_when_due_and_ends_the_stage_at_the_goal():
    looks = Looks((0.1, 0.3), (0.5, 0.9))
    validation = looks.validation(every=10, stop_at_mean_reward=0.8)
    assert [stage_done_after(validation, step) for step in (1, 9, 10, 11)] == [False] * 4
    assert stage_done_after(validation, 20)
    assert [step for step, *_ in looks.noted] == [10, 20]
    assert looks.noted[0][1] == pytest.approx(
        {"validation/a": 0.2, "validation/b": 0.4, "validation/mean": 0.3, "validation/rethink/attempted": 4.0}
    )
    assert looks.said[0] == "validation after 10 steps: a 0.200  b 0.400  mean 0.300"


def test_validation_without_a_goal_only_measures():
    looks = Looks((9.0, 9.0))
    assert not stage_done_after(looks.validation(every=2), 2)
    assert len(looks.noted) == 1


class Writer:
    """A checkpoint writer that records its calls."""

    def __init__(self):
        self.calls = []

    def raise_if_failed(self):
        self.calls.append("raise_if_failed")

    def wait(self):
        self.calls.append("wait")


def test_checkpoints_are_saved_when_due_and_when_the_user_stops():
    saved, stop, writer = [], False, Writer()
    saver = PeriodicCheckpointer(lambda state: saved.append(state.step), writer, lambda: stop, every=4)
    for step in range(1, 10):
        saver.on_step_end(TrainingState(step=step), None)
    assert saved == [4, 8]
    assert writer.calls == ["raise_if_failed"] * 9
    stop = True
    with pytest.raises(RunInterrupted):
        saver.on_step_end(TrainingState(step=10), None)
    assert saved == [4, 8, 10]
    assert writer.calls[-2:] == ["raise_if_failed", "wait"]  # nothing is being written any more


def test_a_signal_during_a_save_ends_the_run_after_it():
    stops = iter([False, True])
    saver = PeriodicCheckpointer(lambda state: None, Writer(), lambda: next(stops), every=1)
    with pytest.raises(RunInterrupted):
        saver.on_step_end(TrainingState(step=1), None)


SAMPLES = [
    Sample(id=str(i), task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=i)) for i in range(11)
]


def ids(samples):
    return [sample.id for sample in samples]


def test_a_cursor_means_the_same_sample_however_it_is_reached():
    order = ids(ShuffledOrder(SAMPLES, 5).take(0, 60))
    pieces, data_position = [], 0
    for count in (1, 4, 7, 0, 11, 30, 7):
        pieces += ids(ShuffledOrder(SAMPLES, 5).take(data_position, count))
        data_position += count
    assert pieces == order
    one = ShuffledOrder(SAMPLES, 5)
    for start in (59, 0, 30, 12, 12):
        assert ids(one.take(start, 1)) == [order[start]]


def test_every_sample_comes_once_per_epoch_in_an_order_of_its_own():
    order = ids(ShuffledOrder(SAMPLES, 5).take(0, 33))
    epochs = [order[start : start + 11] for start in (0, 11, 22)]
    assert all(sorted(epoch) == sorted(ids(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize(("apart", "kept"), [(3, 3), (100, 3), (0, 0)])
def test_no_sample_comes_twice_in_a_step_that_begins_in_one_epoch_and_ends_in_the_next(apart, kept):
    """Of 11 samples a third is 3; without the rule epochs that meet in a sample are common."""
    order = ids(ShuffledOrder(SAMPLES, 5, min_gap=apart).take(0, 11 * 40))
    assert all(sorted(order[start : start + 11]) == sorted(ids(SAMPLES)) for start in range(0, len(order), 11))
    latest: dict[str, int] = {}
    gaps = []
    for position, name in enumerate(order):
        gaps.append(position - latest.get(name, -99))
        latest[name] = position
    assert min(gaps) > kept
    assert apart or min(gaps) <= 3
    pieces = [ids(ShuffledOrder(SAMPLES, 5, min_gap=apart).take(start, 7)) for start in range(0, 434, 7)]
    assert [name for piece in pieces for name in piece] == order[: 62 * 7]


def test_seeds_give_orders_of_their_own():
    assert ids(ShuffledOrder(SAMPLES, 1).take(0, 11)) != ids(ShuffledOrder(SAMPLES, 2).take(0, 11))
    with pytest.raises(ValueError, match="no samples"):
        ShuffledOrder([], 1)
