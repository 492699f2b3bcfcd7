"""Dynamic sampling: which groups pass, how many rounds a step samples, and what becomes of extra groups."""

import pytest
from factories import make_group, make_prompt
from selection import NO_CHANGED_MEDIA, centered, group, make_media_finder, select_all

from mmrl.algo.select_experiences import rejection_reason
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import TrainingState, UserError


def make_filter(**settings):
    """DAPO's dynamic sampling, unless the settings of the range say otherwise."""
    in_range = {name: settings.pop(name) for name in ("low", "high", "require_mixed") if name in settings}
    return DynamicSamplingConfig(ranges=(GroupRewardRangeConfig(term="right", **in_range),), **settings)


ACCURACY = make_filter(low=0.1, high=0.9, max_rounds=3, extra="carry")


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
    assert (rejection_reason(group("s", *rewards), make_filter()) is None) == dapo
    assert (rejection_reason(group("s", *rewards), ACCURACY) is None) == band
    assert rejection_reason(group("s", *rewards, term="other"), ACCURACY) is None  # it has no such term


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (group("s", 0.0, 0.0), make_filter(), "right"),
        (make_group(make_prompt(), (), ()), make_filter(), "unscored"),
        (group("s", 0.0, 1.0, 1.0, 0.0, cut=1), DynamicSamplingConfig(max_truncated_frac=0.25), None),
        (group("s", 0.0, 1.0, 1.0, 0.0, cut=2), DynamicSamplingConfig(max_truncated_frac=0.25), "truncated"),
        (group("s", 0.5, 0.5), make_filter(low=0.4, high=0.6, require_mixed=False), None),
        (group("s", 0.5, 0.9), make_filter(low=0.4, high=0.6, require_mixed=False), "right"),
    ],
)
def test_a_rejected_group_has_a_reason(given, options, reason):
    assert rejection_reason(given, options) == reason


def make_selector(options, media=NO_CHANGED_MEDIA):
    """A selector of two groups a step."""
    carry = options.extra == "carry"
    return select_all(
        centered, dynamic_sampling=options, carry_over=carry, prompts_per_step=2, find_changed_media=media
    )


def sample_ids(items):
    """The samples of groups, or of experiences."""
    return [getattr(item, "rollout", item).prompt.sample.id for item in items]


def test_rounds_are_sampled_until_enough_groups_pass_or_none_are_left():
    selector, state = make_selector(make_filter(max_rounds=3)), TrainingState()
    good, bad = group("good", 0.0, 1.0), group("bad", 1.0, 1.0)
    assert selector.needs_another_round([], state, rounds=0)
    assert selector.needs_another_round([good, bad], state, rounds=1)
    assert not selector.needs_another_round([good, bad, good, bad], state, rounds=2)
    assert not selector.needs_another_round([bad] * 6, state, rounds=3)


EXTRA = [*(group(name, 0.0, 1.0, 1.0, 0.0) for name in "abc"), group("dull", 1.0, 1.0)]
"""One group more than a step has room for, and one that is rejected."""


def test_extra_groups_are_dropped():
    state = TrainingState()
    selection = make_selector(make_filter(max_rounds=2)).select(EXTRA, state)
    assert sample_ids(selection.experiences) == ["a"] * 4 + ["b"] * 4
    assert selection.groups == tuple(EXTRA)
    assert selection.advantages == ((-0.5, 0.5, 0.5, -0.5), (-0.5, 0.5, 0.5, -0.5), (0.0,) * 4, (0.0,) * 2)
    statuses = [(selected.status, selected.reason) for selected in selection.selections]
    assert statuses == [("trained", None), ("trained", None), ("no_room", None), ("rejected", "right")]
    assert state.carried_over == ()


def test_extra_groups_that_are_carried_over_are_trained_first_in_the_next_step():
    selector, state = make_selector(ACCURACY), TrainingState()
    selection = selector.select(EXTRA, state)
    assert sample_ids(state.carried_over) == ["c"]
    assert sample_ids(selection.groups) == ["a", "b", "dull"]  # c is shown by the step that trains on it
    assert [selected.status for selected in selection.selections] == ["trained", "trained", "rejected"]
    assert selection.metrics == {
        "dynamic_sampling/passed_frac": 0.75,
        "dynamic_sampling/rejected/right": 1.0,
        "groups/carried_over": 0.0,
        "rollout/staleness_mean": 0.0,
        "rollout/staleness_max": 0.0,
    }
    state.step, state.version = 1, 1
    new = [group("d", 0.0, 0.0, 1.0, version=1), group("e", 0.0, 1.0, version=1)]
    assert not selector.needs_another_round(new, state, rounds=1)
    selection = selector.select(new, state)
    learned = [(e.rollout.prompt.sample.id, e.staleness, e.old_logprobs_source) for e in selection.experiences]
    assert learned == [("c", 1, "recorded")] * 4 + [("d", 0, None)] * 3
    assert sample_ids(selection.groups) == ["c", "d"]
    assert [selected.carried_over for selected in selection.selections] == [True, False]
    assert selection.advantages[0] == (-0.5, 0.5, 0.5, -0.5)
    assert selection.metrics["groups/carried_over"] == 1.0
    assert selection.metrics["rollout/staleness_mean"] == 4 / 7  # four of seven are one version old
    assert selection.metrics["rollout/staleness_max"] == 1.0
    assert sample_ids(state.carried_over) == ["e"]


def test_a_carried_group_whose_media_changed_is_dropped_and_named():
    warnings = []

    def check_media(rollout):
        if rollout.prompt.sample.id == "c":
            raise UserError("c.png: no such file")

    media = make_media_finder(check_media, warnings.append)
    state = TrainingState(carried_over=(group("b", 0.0, 1.0), group("c", 0.0, 1.0)))
    selector = make_selector(ACCURACY, media)
    assert not selector.needs_another_round([], state, rounds=0)  # they would fill the step
    assert selector.recheck_carried_over(state) == {"groups/dropped_changed_media": 1.0}
    assert warnings == ["rollouts of earlier steps are dropped: c.png: no such file"]
    assert sample_ids(state.carried_over) == ["b"]
    assert selector.needs_another_round([], state, rounds=0)


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_step_needs_a_row_of_advantages_for_each_group(extra):
    groups = [group("a", 0.0, 1.0), group("b", 0.0, 1.0)]
    selector = select_all(lambda groups: centered(groups * 2)[: len(groups) + extra], prompts_per_step=2)
    with pytest.raises(ValueError, match="zip"):
        selector.select(groups, TrainingState())
