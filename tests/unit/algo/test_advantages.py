"""Advantages, against hand-computed values, the textbook and torch; what must be exactly zero; what is refused."""

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from factories import make_group, make_prompt, make_sample, make_score

from mmrl.algo.advantages import batch_normalize, compute_advantages, normalize_rewards, rewards_differ, zero_outliers
from mmrl.config.schema import AdvantageConfig, DifficultyWeightConfig

GRPO = AdvantageConfig()


def one(totals, **options):
    return normalize_rewards([totals], AdvantageConfig(**options))[0]


def group(totals=None, *, name="q", **terms):
    """A group with scores alone; totals default to the sum of the terms."""
    rows = zip(*(terms or {"r": totals}).values(), strict=True)
    scores = [make_score(**dict(zip(terms or ["r"], row, strict=True))) for row in rows]
    if totals:
        scores = [replace(score, total=total) for score, total in zip(scores, totals, strict=True)]
    return make_group(make_prompt(make_sample(id=name)), (None,) * len(scores), scores)


@pytest.mark.parametrize(
    ("totals", "options", "expected"),
    [
        ([1, 0, 0, 1], {"scale": "none"}, [0.5, -0.5, -0.5, 0.5]),
        ([3, 1], {"baseline": "none", "scale": "none"}, [3, 1]),
        ([3, 1], {"baseline": "none"}, [3 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)]),
        ([1, 0, 0], {"baseline": "leave_one_out", "scale": "none"}, [1.0, -0.5, -0.5]),
        ([1.0, 1.0], {"baseline": "none", "scale": "none"}, [1.0, 1.0]),
        ([1.0, 1.0], {"baseline": "none"}, [0.0, 0.0]),
    ],
)
def test_advantages_by_hand(totals, options, expected):
    assert one(totals, **options) == pytest.approx(expected)


def test_advantages_equal_the_textbook():
    rng = random.Random(0)
    for _ in range(200):
        totals = [rng.uniform(-2, 2) for _ in range(rng.randint(2, 16))]
        mean, std = statistics.mean(totals), statistics.stdev(totals)
        expected = [(total - mean) / (std + 1e-4) for total in totals]
        assert one(totals) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        tensor = torch.tensor(totals)
        assert one(totals) == pytest.approx(((tensor - mean) / (tensor.std() + 1e-4)).tolist(), abs=1e-4)


def test_statistics_of_the_step_equal_torch():
    rows = [[0.1, 0.7, 0.2], [1.0, 0.5], [0.0, 0.3, 0.4, 0.4]]
    flat = torch.tensor([reward for row in rows for reward in row], dtype=torch.float64)
    found = normalize_rewards(rows, AdvantageConfig(baseline="batch_mean", scale="batch_std"))
    assert [a for row in found for a in row] == pytest.approx(((flat - flat.mean()) / (flat.std() + 1e-4)).tolist())
    mixed = normalize_rewards(rows, AdvantageConfig(scale="batch_std"))  # TRL's scale_rewards="batch"
    centred = [reward - statistics.mean(row) for row in rows for reward in row]
    assert [a for row in mixed for a in row] == pytest.approx([a / (float(flat.std()) + 1e-4) for a in centred])
    a = torch.tensor([0.5, -0.5, 2.0, -1.0], dtype=torch.float64)
    assert [x for row in batch_normalize([(0.5, -0.5), (2.0, -1.0)], 1e-4) for x in row] == pytest.approx(
        ((a - a.mean()) / (a.std() + 1e-4)).tolist()
    )


def test_advantages_do_not_depend_on_the_order_of_siblings_or_groups():
    rows = [[0.1, 0.7, 0.2], [1.0, 0.5, 0.3]]
    for changed in ({}, {"batch_normalize": True}, {"scale": "batch_std"}, {"baseline": "leave_one_out"}):
        options = AdvantageConfig(**changed)
        forward = compute_advantages([group(row) for row in rows], options, {})
        backward = compute_advantages([group(row[::-1]) for row in rows[::-1]], options, {})
        assert forward == [row[::-1] for row in backward][::-1]


@pytest.mark.parametrize("totals", [[0.1] * 3, [0.0] * 8, [0.1 + 0.2, 0.3], [1.0], [1e6] * 7])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_rewards_in_a_group_have_advantages_of_exactly_0(totals, scale, baseline):
    assert not rewards_differ(totals)
    nothing = (0.0,) * len(totals)
    options = AdvantageConfig(baseline=baseline, scale=scale)
    assert normalize_rewards([totals], options) == [nothing]
    among = compute_advantages(
        [group(totals), group([0.0, 1.0])], options.model_copy(update={"batch_normalize": True}), {}
    )
    assert among[0] == nothing
    assert any(among[1])


def test_equal_rewards_in_a_step_have_advantages_of_exactly_0():
    equal = [group([1.0, 1.0]), group([1.0, 1.0])]
    for options in (
        AdvantageConfig(baseline="batch_mean", scale="none"),
        AdvantageConfig(baseline="none", scale="batch_std"),
        AdvantageConfig(baseline="none", scale="none", batch_normalize=True, outlier_std=3.0),
        AdvantageConfig(combine="per_term", batch_normalize=True),
    ):
        assert compute_advantages(equal, options, {"r": 1.0}) == [(0.0, 0.0)] * 2
    assert compute_advantages([], AdvantageConfig(), {}) == []


def test_outliers_by_z_score_become_0():
    rows = [[0.0] * 10 + [1.0], [0.0] * 9 + [-0.1, 9.0]]
    flat = [a for row in rows for a in row]
    far = [abs(a - statistics.mean(flat)) > 3 * statistics.stdev(flat) for a in flat]
    assert far == [a == 9.0 for a in flat]
    assert zero_outliers(rows, 3.0) == [tuple(rows[0]), (*rows[1][:-1], 0.0)]
    assert zero_outliers(rows, 5.0) == [tuple(row) for row in rows]


def test_each_term_can_be_normalized_by_itself():
    right, form = [1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 0.5, 0.5]
    weights = {"correct": 2.0, "form": 0.5}
    options = AdvantageConfig(combine="per_term")
    separate = [2.0 * a + 0.5 * b for a, b in zip(one(right), one(form), strict=True)]
    assert compute_advantages([group(correct=right, form=form)], options, weights)[0] == pytest.approx(separate)
    alone = group(correct=right)
    assert compute_advantages([alone], options, {"correct": 1.0}) == compute_advantages([alone], GRPO, {})
    mixed = compute_advantages(
        [group(correct=right, form=form), group(form=form)], options, weights
    )  # tasks differ in terms
    assert mixed[1] == pytest.approx([0.5 * a for a in one(form)])


def test_groups_of_medium_difficulty_weigh_most():
    doubt = AdvantageConfig(difficulty_weight=DifficultyWeightConfig(term="acc", max_weight=1.8))
    acc, bonus = [1.0] + [0.0] * 7, [0.2] * 8
    (weighed,) = compute_advantages([group(acc=acc, bonus=bonus)], doubt, {})
    assert weighed == pytest.approx([0.7875 * a for a in one([a + 0.2 for a in acc])])
    half = [1.0, 0.0]
    assert compute_advantages([group(acc=half)], doubt, {})[0] == pytest.approx([1.8 * a for a in one(half)])


def test_the_difficulty_weight_leaves_groups_alone_that_its_term_does_not_apply_to():
    doubt = AdvantageConfig(difficulty_weight=DifficultyWeightConfig(term="acc", max_weight=1.8))
    bonus = [0.5, 0.0]
    weighed = compute_advantages([group(acc=[1.0, 0.0]), group(bonus=bonus)], doubt, {})
    assert weighed[1] == pytest.approx(one(bonus))


def published_weight(curve, rate):
    """The weights of VL-Cogito's code at commit 7ab7856 (verl/trainer/ray_trainer.py, 726 to 758), written anew."""
    wave = math.cos((rate - 0.5) * math.pi)
    if curve == "medium":
        return 0.0 if rate == 0 else wave
    if curve == "easy":
        return 1.0 if rate > 0.5 else 0.0 if rate == 0 else wave
    return 0.25 if rate == 0 else 1.0 if rate <= 0.5 else wave


@pytest.mark.parametrize("curve", ["easy", "medium", "hard"])
def test_curves_of_difficulty_are_those_of_vl_cogito(curve):
    options = AdvantageConfig(difficulty_weight=DifficultyWeightConfig(term="acc", curve=curve))
    form = [1.0, 0.0] * 4
    for right in range(9):
        acc = [1.0] * right + [0.0] * (8 - right)
        (weighed,) = compute_advantages([group(acc=acc, form=form)], options, {})
        plain = one([a + f for a, f in zip(acc, form, strict=True)])
        assert weighed == pytest.approx([published_weight(curve, right / 8) * a for a in plain], abs=1e-12)
    # Not 1e-16: such a group would count as one that teaches something.
    certain = compute_advantages([group(acc=[1.0] * 8, form=form)], options, {})[0]
    assert any(certain) == (curve == "easy")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_sample(bad):
    with pytest.raises(ValueError, match="sample q7: .*finite"):
        compute_advantages([group([0.0, 1.0]), group([bad, 1.0], name="q7")], GRPO, {})


def test_groups_without_scores_keep_their_place():
    empty = make_group(make_prompt(), (), ())
    options = AdvantageConfig(scale="none")
    assert compute_advantages([empty, group([0.0, 1.0]), empty], options, {}) == [(), (-0.5, 0.5), ()]
    assert compute_advantages([empty], GRPO, {}) == [()]


def test_a_single_outlier_is_a_difference():
    assert rewards_differ([0, 0, 0, 1e-6])
    assert not rewards_differ([0.5])
