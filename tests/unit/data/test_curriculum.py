"""Orders that depend on training progress: scheduled mixtures, phases, priorities, reward history."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from factories import make_group, make_prompt, make_sample, make_score
from selection import select_all

from mmrl.algo.reward_history import has_plateaued, measure_samples, record_rewards
from mmrl.config.schema import (
    CurriculumPhaseConfig,
    MixtureOrderConfig,
    PlateauConfig,
    PriorityOrderConfig,
    matches_conditions,
)
from mmrl.config.schema.data import find_phase
from mmrl.data.order import (
    SCHEDULED_BLOCK_SIZE,
    CurriculumOrder,
    PriorityOrder,
    SequentialOrder,
    ShuffledOrder,
    scheduled_mixture,
    sort_by_column,
    weights_at,
)
from mmrl.data.stage_data import repeat_samples
from mmrl.types import SampleStats, TrainingState, UserError


def sample(name, task="t", **meta):
    return make_sample(id=name, task=task, meta=meta)


def samples(task, count):
    return [sample(f"{task}-{i}", task) for i in range(count)]


def group(of, *values):
    """A group of scores alone, whose totals differ from the values of the one term."""
    return make_group(make_prompt(of), (), [replace(make_score(count=value), total=9.0) for value in values])


def tasks(taken):
    return Counter(row.id.split("-")[0] for row in taken)


@pytest.mark.parametrize(
    ("interpolation", "step", "weights"),
    [
        ("linear", 0, (1.0, 0.0)),
        ("linear", 5, (0.625, 0.375)),
        ("linear", 18, (0.05, 0.95)),
        ("linear", 99, (0.0, 1.0)),
        ("steps", 9, (1.0, 0.0)),
        ("steps", 10, (0.25, 0.75)),
        ("steps", 19, (0.25, 0.75)),
        ("steps", 20, (0.0, 1.0)),
    ],
)
def test_weights_follow_their_schedule(interpolation, step, weights):
    points = ((0, (1.0, 0.0)), (10, (1.0, 3.0)), (20, (0.0, 5.0)))
    options = MixtureOrderConfig(kind="mixture", points=points, interpolation=interpolation)
    assert weights_at(options, step) == pytest.approx(weights)


def test_a_scheduled_mixture_has_the_shares_of_its_steps():
    points = ((0, (1.0, 0.0)), (50, (1.0, 1.0)), (100, (1.0, 9.0)))
    options = MixtureOrderConfig(kind="mixture", points=points, interpolation="steps")

    def order():
        return scheduled_mixture([ShuffledOrder(samples(t, 30), 1) for t in "ab"], options, per_step=10, seed=0)

    taken = order().take(0, 1500)
    assert tasks(taken[:500]) == {"a": 500}
    assert tasks(taken[500:1000]) == {"a": 250, "b": 250}
    assert tasks(taken[1000:]) == {"a": 50, "b": 450}
    resumed = order()
    for position in (1200, 3, 640):
        assert resumed.take(position, 7) == taken[position : position + 7]
    own = [row for row in taken if row.task == "b"]
    assert own == ShuffledOrder(samples("b", 30), 1).take(0, len(own))


def test_a_scheduled_weight_too_small_to_count_is_refused():
    options = MixtureOrderConfig(kind="mixture", points=((3, (1.0, 1e-4)),))
    with pytest.raises(UserError, match=rf"at step 3: weight 0.0001 of 1.0001 .* {SCHEDULED_BLOCK_SIZE}"):
        scheduled_mixture([ShuffledOrder(samples(t, 3), 1) for t in "ab"], options, per_step=4, seed=0)


def test_sorted_samples_come_in_the_same_order_in_every_epoch():
    rows = [sample("x", level=2), sample("y", level=1), sample("z", level=2)]
    assert [s.id for s in sort_by_column(rows, "level", descending=False)] == ["y", "x", "z"]
    assert [s.id for s in sort_by_column(rows, "level", descending=True)] == ["x", "z", "y"]
    assert [s.id for s in SequentialOrder(rows).take(2, 7)] == ["z", "x", "y", "z", "x", "y", "z"]


@pytest.mark.parametrize("level", [None, "2", True, float("nan")])
def test_samples_without_a_number_cannot_be_sorted(level):
    with pytest.raises(UserError, match="sample w: meta has no number 'level' to sort by"):
        sort_by_column([sample("x", level=2), sample("w", level=level)], "level", descending=False)


COUNTED = (CurriculumPhaseConfig(max_samples=30), CurriculumPhaseConfig(max_samples=50), CurriculumPhaseConfig())


def test_phases_follow_each_other_by_the_number_of_samples():
    orders = [ShuffledOrder(samples(t, 10), 1) for t in "abc"]
    taken = CurriculumOrder(orders, COUNTED, TrainingState()).take(0, 120)
    assert [tasks(taken[a:b]) for a, b in ((0, 30), (30, 80), (80, 120))] == [{"a": 30}, {"b": 50}, {"c": 40}]
    assert taken[30:80] == ShuffledOrder(samples("b", 10), 1).take(0, 50), "each phase begins its own order"
    assert CurriculumOrder(orders, COUNTED, TrainingState()).take(25, 10) == taken[25:35]  # across a border


def test_an_early_end_of_a_phase_moves_later_phases():
    assert find_phase(29, COUNTED, {}) == (0, 0, 30)
    assert find_phase(29, COUNTED, {0: 12}) == (1, 12, 62)
    assert find_phase(62, COUNTED, {0: 12}) == (2, 62, float("inf"))


def test_a_plateau_ends_a_phase_and_the_state_keeps_that():
    plateau = CurriculumPhaseConfig(plateau=PlateauConfig(window=2, min_improvement=0.1), max_samples=400)
    phases = (plateau, CurriculumPhaseConfig(max_samples=8), CurriculumPhaseConfig())
    state = TrainingState()
    selector = select_all(lambda groups: [()] * len(groups), tracked_terms=("count",), curriculum_phases=phases)
    rewards = [0.1, 0.2, 0.3, 0.4, 0.4, 0.45, 0.9, 0.9, 0.9]
    phase_indices = []
    for reward in rewards:
        state.data_position += 4
        phase_indices.append(selector.select([group(sample("s"), reward)], state).metrics["data/curriculum_phase"])
    # Windows 0.1 0.2 | 0.3 0.4 and 0.2 0.3 | 0.4 0.4 rise by 0.2 and 0.15, then 0.3 0.4 | 0.4 0.45 by 0.075.
    # Each step reports the phase that its own samples come from, not the one that it ends in.
    assert phase_indices == [0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert state.phase == 2
    assert state.phase_ends == {0: 24}
    assert [visit.mean for visit in state.reward_history["s"]] == rewards


def test_has_plateaued_needs_two_windows():
    assert not has_plateaued([0.0] * 5, 3, 0.01)
    assert has_plateaued([0.0] * 6, 3, 0.01)
    assert not has_plateaued([0.0] * 3 + [0.2] * 3, 3, 0.2)


def drawn(order, state, count=6):
    return [row.id for row in order.take(state.step_data_start, count)]


def test_priority_follows_the_last_visit():
    """Frequencies of the first draw of 4,000 steps against the weights, within four standard deviations."""
    pool = [sample(name) for name in ("sure", "half", "never", "new")]
    history = {
        "sure": [SampleStats(0.5, 0.5), SampleStats(1.0, 0.0)],
        "half": [SampleStats(0.5, 0.5)],
        "never": [SampleStats(0.25, 0.4)],
    }
    for by, weights in (("uncertainty", (0.1, 1.0, 0.75, 1.0)), ("failure", (0.1, 0.5, 0.75, 1.0))):
        state = TrainingState(reward_history=history)
        order = PriorityOrder(pool, PriorityOrderConfig(kind="priority", weight_by=by, min_weight=0.1), state, seed=1)
        firsts = Counter()
        for state.step_data_start in range(4000):
            firsts.update(drawn(order, state, 1))
        shares = np.array(weights) / sum(weights)
        found = np.array([firsts[s.id] for s in pool]) / 4000
        assert np.abs(found - shares).max() < 4 * 0.5 / 4000**0.5


def test_priority_never_draws_twice_in_a_step_and_starts_anew_in_each():
    pool, state = samples("p", 20), TrainingState(step_data_start=100, reward_history={"p-3": [SampleStats(0.5, 0.1)]})
    order = PriorityOrder(pool, PriorityOrderConfig(kind="priority"), state, seed=1)
    whole = drawn(order, state, 20)
    assert len(set(whole)) == 20
    rounds = [[row.id for row in order.take(start, 5)] for start in (100, 105, 110)]
    assert [name for each in rounds for name in each] == whole[:15]
    state.step_data_start = 120
    assert drawn(order, state, 20) != whole
    state.step_data_start = 100
    again = PriorityOrder(pool, PriorityOrderConfig(kind="priority"), state, seed=1)
    assert drawn(again, state, 20) == whole  # as after a restart
    assert drawn(PriorityOrder(pool, PriorityOrderConfig(kind="priority"), state, seed=2), state, 20) != whole


def test_record_rewards_averages_the_terms_that_apply():
    history = {}
    pair = group(sample("a"), 0.0, 1.0)
    both = make_group(make_prompt(sample("b")), (), [make_score(count=1.0, format=0.5)])
    assert record_rewards(history, [pair, both], ("count", "format")) == [0.5, 0.75]
    assert record_rewards(history, [group(sample("c"))], ("count",)) == []  # nothing could be judged
    assert record_rewards(history, [pair], ("iou",)) == []  # no such term applies
    assert history == {"a": [SampleStats(0.5, 0.5)], "b": [SampleStats(0.75, 0.0)]}


def visits(**rewards):
    return {name: [SampleStats(value, 0.0) for value in values] for name, values in rewards.items()}


def test_limr_equals_numpy():
    """Two samples, two epochs: the means are 0.5 and 0.75; room (0.5^2 + 0.25^2) = 0.3125."""
    found = measure_samples(visits(a=(0.5, 1.0), b=(0.5, 0.5)), "limr")
    assert found == pytest.approx({"a": 1 - 0.0625 / 0.3125, "b": 1 - 0.0625 / 0.3125})
    table = np.random.default_rng(0).random((20, 7))
    means = table.mean(axis=0)
    expected = 1 - ((table - means) ** 2).sum(axis=1) / ((1 - means) ** 2).sum()
    history = visits(**{f"s{i}": row for i, row in enumerate(table)})
    assert list(measure_samples(history, "limr").values()) == pytest.approx(expected)
    assert measure_samples(visits(a=(1.0, 1.0), b=(1.0, 1.0)), "limr") == {"a": 0.0, "b": 0.0}


def test_mean_and_deviation_against_numpy():
    table = np.random.default_rng(1).random((4, 5))
    history = visits(**{f"s{i}": row for i, row in enumerate(table)})
    assert list(measure_samples(history, "reward_mean").values()) == pytest.approx(table.mean(axis=1))
    assert list(measure_samples(history, "reward_std").values()) == pytest.approx(table.std(axis=1))


def test_repeated_samples_have_ids_of_their_own():
    two = samples("r", 2)
    assert [s.id for s in repeat_samples(two, 5)] == ["r-0", "r-1", "r-0#2", "r-1#2", "r-0#3"]
    assert repeat_samples(two, None) == repeat_samples(two, 1) == tuple(two)
    assert {s.parts for s in repeat_samples(two, 9)} == {("How many?",)}
    assert not repeat_samples([], 5)


def test_phases_hold_the_samples_of_their_conditions():
    when = {"task": ("t",), "grid": ("2", "3")}
    assert matches_conditions(when, sample("a", grid=2)) and matches_conditions(when, sample("b", grid="3"))
    assert not matches_conditions(when, sample("c", grid=4)) and not matches_conditions(when, sample("d"))
    assert not matches_conditions(when, sample("e", task="u", grid=2))
    assert matches_conditions({}, sample("f"))


def test_a_meta_column_named_task_is_not_the_task():
    assert not matches_conditions({"task": ("u",)}, replace(sample("a"), meta={"task": "u"}))
    assert matches_conditions({"task": ("t",)}, replace(sample("a"), meta={"task": "u"}))
    assert matches_conditions({"grid": ("None",)}, replace(sample("a"), meta={"grid": None}))
