"""Filters: which groups pass, how many rounds are asked, and what becomes of a surplus."""

from functools import partial

import pytest
from rl_loop import FakeRun, train_rl
from selection import NO_CHANGED_MEDIA, Bank, group, make_prompt, select_all

from mmrl.algo.replay import find_changed_media, find_media_problems
from mmrl.algo.select_experiences import rejection_reason
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import Group, TrainingState, UserError

ACCURACY = DynamicSamplingConfig(
    ranges=(GroupRewardRangeConfig(term="right", low=0.1, high=0.9),), max_rounds=3, extra="carry"
)


def mixed(**settings):
    """DAPO's dynamic sampling."""
    return DynamicSamplingConfig(ranges=(GroupRewardRangeConfig(term="right"),), **settings)


@pytest.mark.parametrize(
    ("rewards", "dapo", "band"),
    [
        ([0.0] * 8, False, False),
        ([1.0] * 8, False, False),
        ([0.3, 0.1 + 0.2], False, False),  # equal up to rounding
        ([1.0] + [0.0] * 7, True, True),
        ([1.0] + [0.0] * 15, True, False),  # 0.06
        ([1.0] + [0.0] * 9, True, True),  # 0.1, inclusive
        ([1.0] * 9 + [0.0], True, True),  # 0.9, inclusive
        ([1.0] * 10 + [0.0], True, False),
    ],
)
def test_groups_pass_by_the_mean_of_a_named_term(rewards, dapo, band):
    shaped = group("s", *rewards)
    assert (rejection_reason(shaped, mixed()) is None) == dapo
    assert (rejection_reason(shaped, ACCURACY) is None) == band
    assert rejection_reason(group("s", *rewards, term="other"), ACCURACY) is None  # it has no such term


def test_what_is_wrong_is_named():
    assert rejection_reason(group("s", 0.0, 0.0), mixed()) == "right"
    assert (
        rejection_reason(group("s", 0.0, 1.0, 1.0, 0.0, cut=1), DynamicSamplingConfig(max_truncated_frac=0.25)) is None
    )
    assert (
        rejection_reason(group("s", 0.0, 1.0, 1.0, 0.0, cut=2), DynamicSamplingConfig(max_truncated_frac=0.25))
        == "truncated"
    )
    assert rejection_reason(Group(prompt=make_prompt("s"), rollouts=(), scores=()), mixed()) == "unscored"
    level = DynamicSamplingConfig(
        ranges=(GroupRewardRangeConfig(term="right", low=0.4, high=0.6, require_mixed=False),)
    )
    assert rejection_reason(group("s", 0.5, 0.5), level) is None
    assert rejection_reason(group("s", 0.5, 0.9), level) == "right"


def dynamic_sampling(options, prompts, media=NO_CHANGED_MEDIA):
    bank = Bank(groups=prompts, informative=0)
    carries = options is not None and options.extra == "carry"
    return select_all(
        bank.advantages,
        dynamic_sampling=options,
        carry_over=carries,
        prompts_per_step=prompts,
        find_changed_media=media,
    )


def test_rounds_go_on_until_enough_pass_or_are_over():
    selector, state = dynamic_sampling(mixed(max_rounds=3), 2), TrainingState()
    good, bad = group("good", 0.0, 1.0), group("bad", 1.0, 1.0)
    assert selector.needs_another_round([], state, rounds=0)
    assert selector.needs_another_round([good, bad], state, rounds=1)
    assert not selector.needs_another_round([good, bad, good, bad], state, rounds=2)
    assert not selector.needs_another_round([bad] * 6, state, rounds=3)


def test_a_surplus_is_dropped_or_learned_first_in_the_next_step():
    groups = [group(name, 0.0, 1.0, 1.0, 0.0) for name in "abc"] + [group("dull", 1.0, 1.0)]
    state = TrainingState()
    choice = dynamic_sampling(mixed(max_rounds=2), 2).select(groups, state)
    assert [e.rollout.prompt.sample.id for e in choice.experiences] == ["a"] * 4 + ["b"] * 4
    assert choice.groups == tuple(groups)
    assert choice.advantages == ((-0.5, 0.5, 0.5, -0.5), (-0.5, 0.5, 0.5, -0.5), (0.0,) * 4, (0.0,) * 2)
    assert state.carried_over == ()

    selector = dynamic_sampling(ACCURACY, 2)
    choice = selector.select(groups, state)
    assert [g.prompt.sample.id for g in state.carried_over] == ["c"]
    assert [g.prompt.sample.id for g in choice.groups] == ["a", "b", "dull"]  # c is shown by the step that trains on it
    assert choice.metrics == {
        "dynamic_sampling/passed_frac": 0.75,
        "dynamic_sampling/rejected/right": 1.0,
        "groups/carried_over": 0.0,
        "groups/dropped_changed_media": 0.0,
    }
    state.step, state.version = 1, 1
    fresh = [group("d", 0.0, 0.0, 1.0, version=1), group("e", 0.0, 1.0, version=1)]
    assert not selector.needs_another_round(fresh, state, rounds=1)
    choice = selector.select(fresh, state)
    learned = [(e.rollout.prompt.sample.id, e.staleness, e.old_logprobs_source) for e in choice.experiences]
    assert learned == [("c", 1, "recorded")] * 4 + [("d", 0, None)] * 3
    assert [g.prompt.sample.id for g in choice.groups] == ["c", "d"]
    assert choice.advantages[0] == (-0.5, 0.5, 0.5, -0.5)
    assert choice.metrics["groups/carried_over"] == 1.0
    assert [g.prompt.sample.id for g in state.carried_over] == ["e"]


def test_a_carried_group_whose_media_changed_is_dropped_and_named():
    said = []

    def ask(sample):
        raise UserError("c.png: no such file")

    selector = dynamic_sampling(
        ACCURACY, 2, partial(find_changed_media, find_problems=partial(find_media_problems, ask), warn=said.append)
    )
    state = TrainingState(carried_over=(group("c", 0.0, 1.0),))
    choice = selector.select([group("d", 0.0, 1.0)], state)
    assert [e.rollout.prompt.sample.id for e in choice.experiences] == ["d"] * 2
    assert said == ["sample c: c.png: no such file; its rollouts of earlier steps are dropped"]
    assert choice.metrics["groups/dropped_changed_media"] == 1.0
    assert choice.metrics["groups/carried_over"] == 0.0


def test_more_groups_than_a_step_has_room_for_wait_for_the_next_ones():
    """A round of oversampled prompts can leave more than a whole step of groups."""
    selector, state = dynamic_sampling(ACCURACY, 2), TrainingState()
    arriving = [group(str(number), 0.0, 1.0) for number in range(12)]
    trained = []
    for step in range(6):
        if selector.needs_another_round([], state, rounds=0):
            fresh, arriving = arriving[:6], arriving[6:]
        else:
            fresh = []
        choice = selector.select(fresh, state)
        trained.append([each.prompt.sample.id for each in choice.groups])
        state.step, state.version = step + 1, step + 1
    assert trained == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"], ["10", "11"]]


def test_a_filter_that_rejects_everything_for_ever_ends_by_a_sentence():
    run, state = FakeRun(rewards=(1.0, 1.0)), TrainingState()
    selector = dynamic_sampling(DynamicSamplingConfig(ranges=(GroupRewardRangeConfig(term="count"),), max_rounds=3), 2)
    with pytest.raises(UserError, match="2 steps in a row had no group to learn from: .*`dynamic_sampling` rejected"):
        train_rl(run, state, steps=10, selector=selector)
    assert [call for call in run.calls if call[0] == "take"] == [("take", 2 * i) for i in range(6)]
    assert state.data_position == 12
    assert run.learner.learned == [(), ()]
    assert run.logger.metrics[0]["dynamic_sampling/rejected/count"] == 6.0
    assert run.logger.metrics[0]["groups/nonzero_advantage_frac"] == 0.0
