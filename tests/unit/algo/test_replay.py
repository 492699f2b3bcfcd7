"""Selective sample replay: what is kept, sampled and dropped, against the distribution it should follow."""

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from statistics import fmean

import pytest
from factories import make_prompt, make_rollout, make_sample
from selection import NO_CHANGED_MEDIA, Simulator, at_version, centered, group, make_media_finder, select_all

from mmrl.algo import replay
from mmrl.config.schema import ReplayConfig
from mmrl.config.schema.presets import REPLAY_PRESETS
from mmrl.types import Experience, ImageRef, TrainingState, UserError

CHI2_999 = {3: 16.27, 5: 20.52}
"""What chi-square with so many degrees of freedom exceeds once in a thousand."""


def make_experiences(*advantages, version=0):
    """Experiences of one prompt, the first with index 0."""
    rollouts = [at_version(make_rollout(index=index), version) for index in range(len(advantages))]
    return [Experience(rollout=r, advantage=a) for r, a in zip(rollouts, advantages, strict=True)]


def make_options(preset="default", **settings):
    return ReplayConfig(preset=preset, **REPLAY_PRESETS[preset] | settings)


def draw_indices(experiences, count, options, seed):
    """Draw experiences by their advantages, and return the indices of their rollouts in the order drawn."""
    weights = replay.log_weights(experiences, options)
    indices = replay.sample_indices(weights, count, seed, without_replacement=options.without_replacement)
    return [experiences[index].rollout.index for index in indices]


def chi_square(counts, shares):
    total = sum(counts.values())
    return sum((counts[key] - share * total) ** 2 / (share * total) for key, share in shares.items())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("without_replacement", [False, True])
def test_draws_follow_the_advantage_to_the_power_alpha(alpha, without_replacement):
    experiences = make_experiences(0.1, -0.4, 0.8, -1.6)
    weights = [abs(experience.advantage) ** alpha for experience in experiences]
    options = make_options(priority_exponent=alpha, without_replacement=without_replacement)
    counts = Counter(draw_indices(experiences, 1, options, seed)[0] for seed in range(4000))
    assert chi_square(counts, {i: weight / sum(weights) for i, weight in enumerate(weights)}) < CHI2_999[3]


def test_draws_without_replacement_are_successive():
    """P(i then j) = p_i p_j / (1 - p_i), as if one were drawn after the other."""
    experiences = make_experiences(0.25, 0.5, 1.0)
    p = [1 / 7, 2 / 7, 4 / 7]
    pairs = Counter(tuple(draw_indices(experiences, 2, make_options(), seed)) for seed in range(6000))
    shares = {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(3), 2)}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert chi_square(pairs, shares) < CHI2_999[5]


def test_draws_among_equal_advantages_depend_on_the_seed_alone():
    experiences = make_experiences(*[0.5] * 40)
    first, again, other_seed = (draw_indices(experiences, 5, make_options(), seed) for seed in (3, 3, 4))
    assert first == again != other_seed


def test_weights_beyond_the_range_of_floats_are_compared():
    options = make_options(priority_exponent=50.0, without_replacement=False)
    assert set(draw_indices(make_experiences(1e-200, 1.0, 1e200), 50, options, 0)) == {2}


def test_a_draw_of_more_than_there_is_gives_all_and_a_draw_of_nothing_none():
    experiences, options = make_experiences(*[0.5] * 40), make_options()
    assert sorted(draw_indices(experiences, 99, options, 3)) == list(range(40))
    assert draw_indices(experiences, 0, options, 0) == draw_indices(experiences, -3, options, 0) == []
    assert draw_indices([], 5, make_options(without_replacement=False), 0) == []


@pytest.mark.parametrize(("advantages", "size"), [((1.0, -1.0, 1.0), 3.0), ((1.0, -2.0, 3.0), 36 / 14), ((), 0.0)])
def test_the_effective_size_by_hand(advantages, size):
    weights = replay.log_weights(make_experiences(*advantages), make_options())
    assert replay.effective_sample_size(weights) == pytest.approx(size)


def oldest_version(experience):
    return min(segment.version for segment in experience.rollout.segments)


def update_slowly(buffer, new, *, capacity, version, max_staleness):
    """Drop what is too stale, then the oldest, one by one; the first to arrive first among equally old ones."""
    kept = [*buffer, *new]
    if max_staleness is not None:
        kept = [experience for experience in kept if version - oldest_version(experience) <= max_staleness]
    while len(kept) > capacity:
        kept.remove(min(kept, key=oldest_version))
    return tuple(sorted(kept, key=oldest_version))


@pytest.mark.parametrize("seed", range(20))
def test_the_buffer_of_partial_rollouts_equals_that_of_a_slow_version(seed):
    """Partial rollouts have tokens of several versions and arrive in any order of age."""
    rng = random.Random(seed)
    limits = {"capacity": rng.choice((1, 3, 8, 30, 1000)), "max_staleness": rng.choice((None, 1, 2, 4))}
    buffer = slow_buffer = ()
    for version in range(25):
        new = []
        for experience in make_experiences(*(rng.uniform(-2.0, 2.0) for _ in range(rng.randrange(6)))):
            oldest = max(0, version - rng.randrange(7))
            new.append(replace(experience, rollout=at_version(experience.rollout, version, oldest, version)))
        buffer = replay.update_buffer(buffer, new, version=version, **limits)
        slow_buffer = update_slowly(slow_buffer, new, version=version, **limits)
        assert buffer == slow_buffer


# Whole steps: a simulator gives the groups of each step, with the step's policy version.


def select_steps(simulator, options, num_steps, *, rollouts_per_step=None, state=None, media=NO_CHANGED_MEDIA):
    """The selections of some steps, and the state they leave. A full step is what the simulator gives, if not said."""
    state, full_step = state or TrainingState(), rollouts_per_step or simulator.groups * simulator.size
    settings = replay.ReplaySettings(options=options, rollouts_per_step=full_step, seed=("seed", 1))
    selector = select_all(centered, replay=settings, find_changed_media=media)
    selections = []
    for _ in range(num_steps):
        assert selector.needs_another_round([], state, rounds=0)
        assert not selector.needs_another_round([], state, rounds=1)
        selections.append(selector.select(simulator.step(state.version), state))
        state.step, state.version = state.step + 1, state.version + 1
    return selections, state


def test_a_step_that_lacks_signal_is_filled_from_the_buffer():
    selections, _ = select_steps(Simulator(groups=4, with_signal=1), make_options(), 3)
    # Below 16, a full step, each has the 4 rollouts of its one group with a signal and all of the steps before, once.
    assert [len(step.experiences) for step in selections] == [4, 4 + 4, 4 + 8]
    last = selections[-1]
    current, replayed = last.experiences[:4], last.experiences[4:]
    assert {(e.staleness, e.old_logprobs_source) for e in current} == {(0, None)}
    assert Counter((e.staleness, e.old_logprobs_source) for e in replayed) == {(1, "recorded"): 4, (2, "recorded"): 4}
    expected = {"buffer_size": 12.0, "effective_size": pytest.approx(12.0), "frac": pytest.approx(2 / 3)}
    expected |= {"staleness_mean": 1.5, "staleness_max": 2.0, "unique_frac": 1.0, "dropped_changed_media": 0.0}
    assert last.metrics == {f"replay/{name}": value for name, value in expected.items()}
    assert all(len(selection.groups) == 4 for selection in selections)  # the groups of the step, trained on or not


@pytest.mark.parametrize("preset", REPLAY_PRESETS)
@pytest.mark.parametrize(("with_signal", "ages"), [(4, {0}), (0, set())])
def test_a_step_replays_nothing_if_it_is_full_or_the_buffer_empty(preset, with_signal, ages):
    selections, state = select_steps(Simulator(groups=4, with_signal=with_signal), make_options(preset), 3)
    assert {e.staleness for selection in selections for e in selection.experiences} == ages
    assert selections[0].metrics["replay/frac"] == 0.0
    assert bool(state.replay_buffer) == bool(with_signal)


@pytest.mark.parametrize("seed", range(6))
def test_age_is_bounded_where_partial_rollouts_arrive_in_any_order(seed):
    simulator, num_replayed = Simulator(longest=7, groups=6, with_signal=3, seed=seed), 0
    selections, state = select_steps(simulator, make_options(max_staleness=4, capacity=40), 30, rollouts_per_step=48)
    for version, selection in enumerate(selections):
        current_ids = {id(r) for g in selection.groups for r in g.rollouts}
        current = [e.rollout for e in selection.experiences if id(e.rollout) in current_ids]
        replayed = [e.rollout for e in selection.experiences if id(e.rollout) not in current_ids]
        assert len(current) == len({id(r) for r in current}) == 3 * 4  # all with a signal once, also stale ones
        assert len({id(r) for r in replayed}) == len(replayed)
        num_replayed += len(replayed)
        assert max((version - r.oldest_version for r in replayed), default=0) <= 4
    assert num_replayed > 100
    assert max(29 - e.rollout.oldest_version for e in state.replay_buffer) <= 4


def test_equal_rollouts_count_once_whether_or_not_they_are_one_object():
    """A sample that a step draws twice has equal rollouts, which a checkpoint gives back as one object."""
    settings = replay.ReplaySettings(options=make_options(), rollouts_per_step=6, seed=())
    groups = [group("s", 0.0, 1.0), group("s", 0.0, 1.0), group("t", 0.0, 1.0)]
    selection = select_all(centered, replay=settings).select(groups, TrainingState())
    assert selection.metrics["replay/unique_frac"] == pytest.approx(4 / 6)


def test_recomputed_old_log_probs_can_be_asked_for_replayed_rollouts():
    selections, _ = select_steps(Simulator(groups=4, with_signal=1), make_options(old_logprobs="recomputed"), 2)
    assert {(e.staleness, e.old_logprobs_source) for e in selections[-1].experiences} == {(0, None), (1, "recomputed")}


def test_rollouts_without_advantage_can_be_kept_and_are_never_stored():
    options = make_options(drop_zero_advantage=False)
    selections, state = select_steps(Simulator(groups=4, with_signal=1), options, 2, rollouts_per_step=20)
    assert [len(step.experiences) for step in selections] == [16, 16 + 4]  # then the 4 stored ones that had a signal
    assert all(e.advantage for e in state.replay_buffer)


def test_truncated_responses_that_are_masked_are_no_signal_and_never_stored():
    settings = replay.ReplaySettings(options=make_options(), rollouts_per_step=8, seed=("seed", 1))
    selector, state = select_all(centered, replay=settings, mask_truncated=True), TrainingState()
    selection = selector.select([group("a", 1, 0, 0, 0, cut=1), group("b", 1, 0, cut=2)], state)
    kept = [(experience.rollout.prompt.sample.id, experience.rollout.index) for experience in state.replay_buffer]
    # Its advantage is that among all four responses: masked ones stay in the baseline.
    assert sorted(kept) == [("a", 1), ("a", 2), ("a", 3)]
    assert {experience.advantage for experience in selection.experiences} == {-0.25}
    assert selection.has_signal
    assert not selector.select([group("b", 1, 0, cut=2)], TrainingState()).has_signal


def test_the_smallest_buffer_holds_one_rollout():
    selections, state = select_steps(Simulator(groups=1, with_signal=1), make_options("code", target_fraction=0.01), 3)
    assert [len(step.experiences) for step in selections] == [1, 1, 1]
    assert len(state.replay_buffer) == 1


def test_a_step_without_signal_replays_until_the_buffer_is_too_old():
    simulator, options = Simulator(groups=4, with_signal=4), make_options(max_staleness=2)
    _, state = select_steps(simulator, options, 1)
    simulator.num_with_signal = 0
    selections, _ = select_steps(simulator, options, 3, state=state)
    assert [len(step.experiences) for step in selections] == [16, 16, 0]  # the first step's, 1 and 2 versions old


def test_an_advantage_that_is_not_finite_is_refused_and_not_stored():
    state = TrainingState()
    settings = replay.ReplaySettings(options=make_options(), rollouts_per_step=2, seed=())
    selector = select_all(lambda groups: [[1.0, float("nan")]], replay=settings)
    with pytest.raises(ValueError, match="sample s, rollout 1: advantage nan"):
        selector.select([group("s", 0.0, 1.0)], state)
    assert state.replay_buffer == ()


def test_a_step_resumed_from_its_state_draws_the_same():
    def drawn_in(selections):
        return [[(e.rollout.prompt.sample.id, e.rollout.index) for e in step.experiences] for step in selections]

    options = make_options(without_replacement=False)
    simulator, same_simulator = (Simulator(groups=8, with_signal=3, seed=1) for _ in range(2))
    whole, _ = select_steps(same_simulator, options, 6, rollouts_per_step=64)
    first, state = select_steps(simulator, options, 3, rollouts_per_step=64)
    second, _ = select_steps(simulator, options, 3, rollouts_per_step=64, state=state)
    assert drawn_in(whole) == drawn_in([*first, *second])


def test_rollouts_whose_media_changed_are_dropped_counted_and_named():
    simulator, warnings, lost = Simulator(groups=4, with_signal=2), [], {"0-0"}

    def check_media(rollout):
        if rollout.prompt.sample.id in lost:
            raise UserError("0-0.png: changed since it was referenced")

    media = make_media_finder(check_media, warnings.append)
    selections, state = select_steps(simulator, make_options(), 3, media=media)
    assert warnings == ["rollouts of earlier steps are dropped: 0-0.png: changed since it was referenced"]
    assert "0-0" not in {e.rollout.prompt.sample.id for step in selections[1:] for e in step.experiences}
    assert [step.metrics["replay/dropped_changed_media"] for step in selections] == [0.0, 4.0, 0.0]
    assert len(selections[1].experiences) == 8 + 4  # two groups with a signal, and one of the two before them
    lost |= {f"{version}-{g}" for version in range(9) for g in range(4)}  # everything is gone
    options = make_options(without_replacement=False)
    selections, state = select_steps(simulator, options, 2, rollouts_per_step=64, state=state, media=media)
    assert state.replay_buffer == () and len(selections[-1].experiences) == 8


@pytest.mark.parametrize("lost", ["a.png", "b.png"])
def test_each_of_two_files_with_equal_content_is_checked(lost):
    def check_media(rollout):
        [image] = rollout.media
        if image.path == lost:
            raise UserError(f"{lost}: no such file")

    rollouts = []
    for path in ("a.png", "b.png"):
        prompt = make_prompt(make_sample(parts=(ImageRef(path=path, sha256="0" * 64), "How many?")))
        rollouts.append(make_rollout(replace(prompt, digest="same")))
    warnings = []
    assert make_media_finder(check_media, warnings.append)(rollouts) == {("same",)}
    assert warnings == [f"rollouts of earlier steps are dropped: {lost}: no such file"]


# The published behaviour, on the traces that were measured of it: 64 groups of 8, so 512 rollouts a step.


def trace(preset, with_signal, steps, seed):
    simulator = Simulator(groups=64, size=8, with_signal=with_signal, seed=seed, graded=True)
    return [selection.experiences for selection in select_steps(simulator, make_options(preset), steps)[0]]


def num_unique(experiences):
    return len({id(experience.rollout) for experience in experiences})


def test_the_code_trains_on_nothing_old_where_half_of_the_groups_have_a_signal():
    """256 of 512, all of age 0, about 145 different ones."""
    for step in trace("code", 32, 6, seed=0):
        assert len(step) == 256
        assert {e.staleness for e in step} == {0}
        assert 130 <= num_unique(step) <= 165


def test_the_code_mixes_three_steps_where_one_of_five_groups_has_a_signal():
    """50-64 % of the current step, 20-30 % one step old, 11-20 % two; about 0.53 of the samples are different ones."""
    steps = trace("code", 13, 30, seed=1)[5:]
    ages = Counter(e.staleness for step in steps for e in step)
    now, one, two = (ages[age] / ages.total() for age in range(3))
    assert (0.50 <= now <= 0.66) and (0.20 <= one <= 0.30) and (0.09 <= two <= 0.20)
    assert 0.48 <= fmean(num_unique(step) / len(step) for step in steps) <= 0.60


def test_the_paper_trains_on_every_rollout_with_a_signal_and_fills_the_step():
    steps = trace("paper", 13, 10, seed=2)
    for number, step in enumerate(steps):
        assert len(step) == 512
        assert [e.staleness for e in step[: 13 * 8]] == [0] * 104
        assert max(e.staleness for e in step) <= number
    assert max(e.staleness for e in steps[-1]) == 9  # nothing is dropped for its age


def test_own_rollout_that_is_drawn_again_keeps_its_old_logprobs():
    own = [replace(e, staleness=1, old_logprobs_source="recorded") for e in make_experiences(1.0, -1.0)]
    options = make_options("paper", old_logprobs="recomputed")
    settings = replay.ReplaySettings(options=options, rollouts_per_step=8, seed=(0,))
    trained, replayed, _ = replay.replay_experiences(own, TrainingState(version=1), settings, NO_CHANGED_MEDIA)
    assert len(trained) + len(replayed) == 8
    assert {experience.old_logprobs_source for experience in replayed} == {"recorded"}
