"""Advantages, against hand-computed values, the textbook and torch; what must be exactly zero; what is refused."""

import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from mmrl.algo.advantages import (
    batch_normalize,
    compute_advantages,
    normalize_rewards,
    rewards_differ,
    zero_outliers,
)
from mmrl.config.schema import AdvantageConfig, DifficultyWeightConfig
from mmrl.types import Group, RewardValue, Sample, Score, Target, UserError

GRPO = AdvantageConfig()


def one(totals, **options):
    return normalize_rewards([totals], AdvantageConfig(**options))[0]


def group(totals=None, *, name="q", **terms):
    """A group of which only scores and the sample's name matter; totals default to the sum of the terms."""
    columns = terms or {"r": totals}
    scores = []
    for i in range(len(next(iter(columns.values())))):
        row = {key: RewardValue(values[i], "") for key, values in columns.items()}
        scores.append(Score(terms=row, total=totals[i] if totals else sum(term.value for term in row.values())))
    sample = Sample(id=name, task="t", parts=(), target=Target(answer_type="number", value=0))
    return Group(prompt=SimpleNamespace(sample=sample), rollouts=(None,) * len(scores), scores=tuple(scores))


def test_advantages_by_hand():
    # mean 0.5; sample variance (4 * 0.25) / 3
    width = math.sqrt(1 / 3) + 1e-4
    assert one([1, 0, 0, 1]) == pytest.approx([0.5 / width, -0.5 / width, -0.5 / width, 0.5 / width])
    assert one([1, 0, 0, 1], scale="none") == (0.5, -0.5, -0.5, 0.5)
    assert one([3, 1], baseline="none", scale="none") == (3, 1)
    assert one([3, 1], baseline="none") == pytest.approx([3 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)])
    assert one([1, 0, 0], baseline="leave_one_out", scale="none") == (1.0, -0.5, -0.5)


def test_advantages_equal_the_textbook():
    rng = random.Random(0)
    for _ in range(200):
        totals = [rng.uniform(-2, 2) for _ in range(rng.randint(2, 16))]
        mean, std = statistics.mean(totals), statistics.stdev(totals)
        expected = [(total - mean) / (std + 1e-4) for total in totals]
        assert one(totals) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        tensor = torch.tensor(totals)
        assert one(totals) == pytest.approx(((tensor - mean) / (tensor.std() + 1e-4)).tolist(), abs=1e-4)


def test_leave_one_out_is_the_group_mean_times_g_over_g_minus_1():
    totals = [0.1, 0.7, 0.2, 0.3, 0.9]
    others = [total - statistics.mean(totals[:i] + totals[i + 1 :]) for i, total in enumerate(totals)]
    assert one(totals, baseline="leave_one_out", scale="none") == pytest.approx(others)
    assert others == pytest.approx([1.25 * a for a in one(totals, scale="none")])


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
def test_a_group_without_differences_teaches_exactly_nothing(totals, scale, baseline):
    assert not rewards_differ(totals)
    nothing = (0.0,) * len(totals)
    options = AdvantageConfig(baseline=baseline, scale=scale)
    assert normalize_rewards([totals], options) == [nothing]
    among = compute_advantages(
        [group(totals), group([0.0, 1.0])], options.model_copy(update={"batch_normalize": True}), {}
    )
    assert among[0] == nothing
    assert any(among[1])


def test_a_step_without_differences_teaches_exactly_nothing():
    equal = [group([1.0, 1.0]), group([1.0, 1.0])]
    for options in (
        AdvantageConfig(baseline="batch_mean", scale="none"),
        AdvantageConfig(baseline="none", scale="batch_std"),
        AdvantageConfig(baseline="none", scale="none", batch_normalize=True, outlier_std=3.0),
        AdvantageConfig(combine="per_term", batch_normalize=True),
    ):
        assert compute_advantages(equal, options, {"r": 1.0}) == [(0.0, 0.0)] * 2
    assert compute_advantages([], AdvantageConfig(), {}) == []


def test_no_baseline_and_no_scale_keep_equal_rewards():
    assert one([1.0, 1.0], baseline="none", scale="none") == (1.0, 1.0)
    assert one([1.0, 1.0], baseline="none") == (0.0, 0.0)


def test_outliers_are_dropped_by_z_score_and_the_rest_stay_as_they_are():
    rows = [[0.0] * 10 + [1.0], [0.0] * 9 + [-0.1, 9.0]]
    flat = [a for row in rows for a in row]
    far = [abs(a - statistics.mean(flat)) > 3 * statistics.stdev(flat) for a in flat]
    assert far == [a == 9.0 for a in flat]
    assert zero_outliers(rows, 3.0) == [tuple(rows[0]), (*rows[1][:-1], 0.0)]
    assert zero_outliers(rows, 5.0) == [tuple(row) for row in rows]


def test_terms_by_themselves_as_gdpo():
    """arXiv:2601.05242: as totals (1, 0) and (0, 1) are the same; as terms they are not, once spreads differ."""
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


def test_uncertain_groups_weigh_most():
    doubt = AdvantageConfig(difficulty_weight=DifficultyWeightConfig(term="acc", max_weight=1.8))
    acc, bonus = [1.0] + [0.0] * 7, [0.2] * 8
    (weighed,) = compute_advantages([group(acc=acc, bonus=bonus)], doubt, {})
    assert weighed == pytest.approx([0.7875 * a for a in one([a + 0.2 for a in acc])])
    half = [1.0, 0.0]
    assert compute_advantages([group(acc=half)], doubt, {})[0] == pytest.approx([1.8 * a for a in one(half)])
    with pytest.raises(UserError, match="sample q7 has no such reward term, only bonus"):
        compute_advantages([group(bonus=bonus, name="q7")], doubt, {})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_reward_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="sample q7: a group needs finite rewards"):
        compute_advantages([group([0.0, 1.0]), group([bad, 1.0], name="q7")], GRPO, {})
    empty = Group(prompt=group([0.0]).prompt, rollouts=(), scores=())
    assert compute_advantages([empty, group([0.0, 1.0]), empty], AdvantageConfig(scale="none"), {}) == [
        (),
        (-0.5, 0.5),
        (),
    ]
    assert compute_advantages([empty], GRPO, {}) == [()]


def test_a_single_outlier_is_informative():
    assert rewards_differ([0, 0, 0, 1e-6])
    assert not rewards_differ([0.5])
