"""Selective sample replay: what is kept, sampled and dropped, against the distribution it should follow."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from selection import NO_CHANGED_MEDIA, Bank, group, make_prompt, rollout, select_all

from mmrl.algo import replay
from mmrl.algo.replay import (
    ReplaySettings,
    find_changed_media,
    find_media_problems,
    log_weights,
    update_buffer,
)
from mmrl.config.schema import ReplayConfig
from mmrl.config.schema.presets import REPLAY_PRESETS
from mmrl.types import Experience, TrainingState, UserError

CHI2_999 = {3: 16.27, 5: 20.52}
"""What chi-square with so many degrees of freedom exceeds once in a thousand."""


def experiences(*advantages, version=0):
    prompt = make_prompt("p")
    return [Experience(rollout=rollout(prompt, i, version=version), advantage=a) for i, a in enumerate(advantages)]


def options(preset="default", **settings):
    return ReplayConfig(preset=preset, **REPLAY_PRESETS[preset] | settings)


def drawn(stock, count, config, seed):
    weights, without_replacement = log_weights(stock, config), config.without_replacement
    return [stock[i] for i in replay.sample_indices(weights, count, seed, without_replacement=without_replacement)]


def effective_size(stock, config):
    return replay.effective_sample_size(log_weights(stock, config))


def chi_square(counts, shares):
    total = sum(counts.values())
    return sum((counts[key] - share * total) ** 2 / (share * total) for key, share in shares.items())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("unique", [False, True])
def test_draws_follow_the_advantage_to_the_power_alpha(alpha, unique):
    stock = experiences(0.1, -0.4, 0.8, -1.6)
    weights = [abs(e.advantage) ** alpha for e in stock]
    config = options(priority_exponent=alpha, without_replacement=unique)
    counts = Counter(drawn(stock, 1, config, seed)[0].rollout.index for seed in range(4000))
    shares = {i: weight / sum(weights) for i, weight in enumerate(weights)}
    assert chi_square(counts, shares) < CHI2_999[3]


def test_draws_without_replacement_are_successive():
    """P(i then j) = p_i p_j / (1 - p_i), as if one were drawn after the other."""
    stock = experiences(0.25, 0.5, 1.0)
    p = [1 / 7, 2 / 7, 4 / 7]
    pairs = Counter(tuple(e.rollout.index for e in drawn(stock, 2, options(), seed)) for seed in range(6000))
    shares = {(i, j): p[i] * p[j] / (1 - p[i]) for a, b in combinations(range(3), 2) for i, j in ((a, b), (b, a))}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert chi_square(pairs, shares) < CHI2_999[5]


def test_ties_huge_powers_and_small_stocks():
    tied = experiences(*[0.5] * 40)
    assert sorted(e.rollout.index for e in drawn(tied, 99, options(), 3)) == list(range(40))
    assert drawn(tied, 5, options(), 3) == drawn(tied, 5, options(), 3) != drawn(tied, 5, options(), 4)
    extreme = experiences(1e-200, 1.0, 1e200)
    assert {
        e.rollout.index for e in drawn(extreme, 50, options(priority_exponent=50.0, without_replacement=False), 0)
    } == {2}
    assert (
        drawn([], 5, options(without_replacement=False), 0)
        == drawn(tied, 0, options(), 0)
        == drawn(tied, -3, options(), 0)
        == []
    )


def test_the_effective_size_by_hand():
    assert effective_size(experiences(1.0, -1.0, 1.0), options()) == pytest.approx(3.0)
    assert effective_size(experiences(1.0, -2.0, 3.0), options()) == pytest.approx(36 / 14)
    assert effective_size((), options()) == 0.0


def test_memory_forgets_the_old_and_what_exceeds_it():
    memory = tuple(e for version in range(5) for e in experiences(1.0, -1.0, version=version))
    kept = update_buffer(memory, experiences(2.0, version=5), capacity=100, version=5, max_staleness=2)
    assert [e.rollout.segments[0].version for e in kept] == [3, 3, 4, 4, 5]
    assert [
        e.advantage for e in update_buffer(memory, experiences(2.0, version=5), capacity=2, version=5, max_staleness=2)
    ] == [
        -1.0,
        2.0,
    ]
    assert len(update_buffer(memory, [], capacity=100, version=99, max_staleness=None)) == 10
    assert update_buffer(memory, [], capacity=100, version=99, max_staleness=1) == ()


def waited(experience, rng, version, longest):
    """The experience as a partial rollout whose tokens are of several versions, the oldest up to `longest` ago."""
    oldest = max(0, version - rng.randrange(longest + 1))
    segment = experience.rollout.segments[0]
    segments = [replace(segment, version=each) for each in (version, oldest, version)]
    return replace(experience, rollout=replace(experience.rollout, segments=tuple(segments)))


def oldest_versions(buffer):
    return [min(segment.version for segment in experience.rollout.segments) for experience in buffer]


def slow_update(buffer, fresh, *, capacity, version, max_staleness):
    """Throw out what is too stale, then the oldest, one by one; the first to arrive first among equally old ones."""
    kept = [*buffer, *fresh]
    for experience in list(kept):
        if max_staleness is not None and version - oldest_versions([experience])[0] > max_staleness:
            kept.remove(experience)
    while len(kept) > capacity:
        ages = oldest_versions(kept)
        kept.pop(ages.index(min(ages)))
    in_order = []
    for oldest in sorted(set(oldest_versions(kept))):
        in_order += [each for each in kept if oldest_versions([each]) == [oldest]]
    return tuple(in_order)


@pytest.mark.parametrize("seed", range(40))
def test_the_buffer_of_partial_rollouts_is_that_of_a_slow_oracle(seed):
    """Rollouts that waited arrive in any order of age."""
    rng = random.Random(seed)
    limits = {"capacity": rng.choice((1, 3, 8, 30, 1000)), "max_staleness": rng.choice((None, 1, 2, 4))}
    buffer = slow = ()
    for version in range(25):
        count = rng.randrange(6)
        fresh = experiences(*(rng.uniform(-2.0, 2.0) for _ in range(count)), version=version)
        fresh = [waited(each, rng, version, longest=6) for each in fresh]
        buffer = update_buffer(buffer, fresh, version=version, **limits)
        slow = slow_update(slow, fresh, version=version, **limits)
        assert buffer == slow
        if limits["max_staleness"] is not None:
            assert all(version - oldest <= limits["max_staleness"] for oldest in oldest_versions(buffer))


# Whole steps: a bank of groups, each step's with its own policy version.


def run(bank, config, steps, *, size, state=None, media=NO_CHANGED_MEDIA):
    """The choices of some steps, and the state they leave."""
    state = state or TrainingState()
    settings = ReplaySettings(options=config, rollouts_per_step=size, seed=("seed", 1))
    selector = select_all(bank.advantages, replay=settings, find_changed_media=media)
    choices = []
    for _ in range(steps):
        assert selector.needs_another_round([], state, rounds=0) and not selector.needs_another_round(
            [], state, rounds=1
        )
        choices.append(selector.select(bank.step(state.version), state))
        state.step, state.version = state.step + 1, state.version + 1
    return choices, state


def test_the_missing_are_replayed_and_told():
    choices, _ = run(Bank(groups=4, informative=1), options(), 3, size=16)
    assert [len(choice.experiences) for choice in choices] == [4, 8, 12]  # of the memory nothing twice
    last = choices[-1]
    assert [e.staleness for e in last.experiences[:4]] == [0] * 4
    assert sorted(e.staleness for e in last.experiences[4:]) == [1] * 4 + [2] * 4
    assert {e.old_logprobs_source for e in last.experiences[4:]} == {"recorded"} and {
        e.old_logprobs_source for e in last.experiences[:4]
    } == {None}
    assert last.metrics == {
        "replay/buffer_size": 12.0,
        "replay/effective_size": pytest.approx(12.0),
        "replay/frac": pytest.approx(2 / 3),
        "replay/staleness_mean": 1.5,
        "replay/staleness_max": 2.0,
        "replay/unique_frac": 1.0,
        "replay/dropped_changed_media": 0.0,
    }
    assert all(len(choice.groups) == 4 for choice in choices)  # what is shown is what was asked


@pytest.mark.parametrize("preset", ["default", "paper", "code"])
def test_a_full_step_replays_nothing_fresh_ones_suffice_for(preset):
    choices, _ = run(Bank(groups=4, informative=4), options(preset), 3, size=16)
    assert {e.staleness for choice in choices for e in choice.experiences} == {0}


def test_age_is_bounded_and_nothing_comes_twice():
    bank = Bank(groups=8, informative=2, seed=3)
    for most in (1, 3):
        choices, state = run(bank, options(max_staleness=most), 12, size=64)
        ages = [e.staleness for choice in choices for e in choice.experiences]
        assert max(ages) == most
        assert all(len({id(e.rollout) for e in c.experiences}) == len(c.experiences) for c in choices)
        assert all(state.version - 1 - e.rollout.segments[0].version <= most for e in state.replay_buffer)


class WaitingBank(Bank):
    """A bank whose rollouts have waited: each group's for some steps, up to `longest`."""

    def __init__(self, *, longest, **options):
        super().__init__(**options)
        self.longest = longest

    def step(self, version):
        waiting = []
        for each in super().step(version):
            [one, *_] = [waited(e, self._rng, version, self.longest) for e in experiences(1.0, version=version)]
            rollouts = tuple(replace(r, segments=one.rollout.segments) for r in each.rollouts)
            waiting.append(replace(each, rollouts=rollouts))
        return waiting


@pytest.mark.parametrize("seed", range(6))
def test_age_is_bounded_where_partial_rollouts_arrive_in_any_order(seed):
    bank = WaitingBank(longest=7, groups=6, informative=3, seed=seed)
    choices, state = run(bank, options(max_staleness=4, capacity=40), 30, size=48)
    num_replayed = 0
    for version, choice in enumerate(choices):
        fresh = {id(r) for g in choice.groups for r in g.rollouts}
        own = [e.rollout for e in choice.experiences if id(e.rollout) in fresh]
        replayed = [e.rollout for e in choice.experiences if id(e.rollout) not in fresh]
        assert len(own) == 12 and len({id(r) for r in own}) == 12  # each of the step's own once, also a stale one
        assert len({id(r) for r in replayed}) == len(replayed)
        num_replayed += len(replayed)
        assert max((version - r.oldest_version for r in replayed), default=0) <= 4
    assert num_replayed > 100
    assert max(29 - e.rollout.oldest_version for e in state.replay_buffer) <= 4


def test_equal_rollouts_count_once_whether_or_not_they_are_one_object():
    """A sample that a step draws twice has equal rollouts, which a checkpoint gives back as one object."""
    twice = [group("s", 0.0, 1.0), group("s", 0.0, 1.0), group("t", 0.0, 1.0)]
    settings = ReplaySettings(options=options(), rollouts_per_step=6, seed=())
    selector = select_all(Bank(groups=3, informative=3).advantages, replay=settings)
    assert twice[0] is not twice[1]
    assert selector.select(twice, TrainingState()).metrics["replay/unique_frac"] == pytest.approx(4 / 6)


def test_recomputed_ratios_are_asked_of_the_learner():
    choices, _ = run(Bank(groups=4, informative=1), options(old_logprobs="recomputed"), 2, size=16)
    assert {(e.staleness, e.old_logprobs_source) for e in choices[-1].experiences} == {(0, None), (1, "recomputed")}


def test_without_drop_zero_all_fresh_rollouts_are_learned():
    choices, state = run(
        Bank(groups=4, informative=1),
        options(drop_zero_advantage=False),
        2,
        size=16,
    )
    assert [len(choice.experiences) for choice in choices] == [16, 16]
    assert all(e.advantage for e in state.replay_buffer)


def test_the_smallest_memory_holds_one():
    choices, state = run(Bank(groups=1, informative=1), options("code", target_fraction=0.01), 3, size=4)
    assert [len(choice.experiences) for choice in choices] == [1, 1, 1]
    assert len(state.replay_buffer) == 1


def test_nothing_to_learn_is_an_empty_step():
    for preset in REPLAY_PRESETS:
        choices, state = run(Bank(groups=4, informative=0), options(preset), 2, size=16)
        assert [choice.experiences for choice in choices] == [(), ()]
        assert state.replay_buffer == ()
        assert choices[0].metrics["replay/frac"] == 0.0


def test_replay_goes_on_where_nothing_is_fresh_until_age_ends_it():
    bank = Bank(groups=4, informative=4)
    _, state = run(bank, options(max_staleness=2), 1, size=16)
    bank.num_informative = 0
    choices, _ = run(bank, options(max_staleness=2), 3, size=16, state=state)
    assert [len(choice.experiences) for choice in choices] == [16, 16, 0]


def test_an_advantage_that_is_not_finite_is_refused_before_it_is_remembered():
    state = TrainingState()
    settings = ReplaySettings(options=options(), rollouts_per_step=2, seed=())
    selector = select_all(lambda groups: [[float("nan"), 1.0]], replay=settings)
    with pytest.raises(ValueError, match=r"sample s, rollout 0: advantage nan is not finite"):
        selector.select([group("s", 0.0, 1.0)], state)
    assert state.replay_buffer == ()


def test_a_step_resumed_from_its_state_draws_the_same():
    bank = Bank(groups=8, informative=3, seed=1)
    whole, _ = run(bank, options(without_replacement=False), 6, size=64)
    bank = Bank(groups=8, informative=3, seed=1)
    first, state = run(bank, options(without_replacement=False), 3, size=64)
    second, _ = run(bank, options(without_replacement=False), 3, size=64, state=state)
    drawn_of = [[(e.rollout.prompt.sample.id, e.rollout.index, e.staleness) for e in c.experiences] for c in whole]
    assert drawn_of == [
        [(e.rollout.prompt.sample.id, e.rollout.index, e.staleness) for e in c.experiences] for c in (*first, *second)
    ]


def test_media_that_changed_are_dropped_counted_and_named():
    bank, said = Bank(groups=4, informative=2), []
    lost = {"0-0"}

    def ask(sample):
        if sample.id in lost:
            raise UserError("0-0.png: changed since it was referenced")
        return make_prompt(sample.id)

    media = partial(find_changed_media, find_problems=partial(find_media_problems, ask), warn=said.append)
    choices, state = run(bank, options(), 3, size=16, media=media)
    assert said == ["sample 0-0: 0-0.png: changed since it was referenced; its rollouts of earlier steps are dropped"]
    assert "0-0" not in {e.rollout.prompt.sample.id for choice in choices[1:] for e in choice.experiences}
    assert [choice.metrics["replay/dropped_changed_media"] for choice in choices] == [0.0, 4.0, 0.0]
    assert len(choices[1].experiences) == 8 + 4
    lost |= {f"{version}-{g}" for version in range(9) for g in range(4)}  # everything is gone
    choices, state = run(bank, options(without_replacement=False), 2, size=64, state=state, media=media)
    assert state.replay_buffer == () and len(choices[-1].experiences) == 8


# The published behaviour, on the traces that were measured of it: 64 groups of 8, so 512 rollouts a step.


def trace(preset, informative, steps, seed):
    bank = Bank(groups=64, size=8, informative=informative, seed=seed, graded=True)
    return [choice.experiences for choice in run(bank, options(preset), steps, size=512)[0]]


def shares(experiences_):
    ages = Counter(e.staleness for e in experiences_)
    return [ages[age] / len(experiences_) for age in range(3)]


def test_the_code_with_half_of_the_groups_effective_learns_nothing_old():
    """256 of 512, 100 % of age 0, about 145 different ones."""
    for step in trace("code", 32, 6, seed=0):
        assert len(step) == 256
        assert {e.staleness for e in step} == {0}
        assert 130 <= len({id(e.rollout) for e in step}) <= 165


def test_the_code_with_four_of_five_groups_saturated_mixes_three_steps():
    """50-64 % of the current step, 20-30 % one step old, 11-20 % two; about 0.53 of the samples are different ones."""
    steps = trace("code", 13, 30, seed=1)[5:]
    now, one, two = np.mean([shares(step) for step in steps], axis=0)
    assert (0.50 <= now <= 0.66) and (0.20 <= one <= 0.30) and (0.09 <= two <= 0.20)
    unique = np.mean([len({id(e.rollout) for e in step}) / len(step) for step in steps])
    assert 0.48 <= unique <= 0.60


def test_the_paper_learns_every_effective_rollout_and_fills_the_step():
    steps = trace("paper", 13, 10, seed=2)
    for number, step in enumerate(steps):
        assert len(step) == 512
        assert [e.staleness for e in step[: 13 * 8]] == [0] * 104
        assert max(e.staleness for e in step) <= number
    assert max(e.staleness for e in steps[-1]) == 9  # nothing is forgotten for its age


def test_all_groups_saturated_never_hangs():
    """Where its repository loops for ever."""
    assert [len(step) for step in trace("code", 0, 3, seed=0)] == [0, 0, 0]
