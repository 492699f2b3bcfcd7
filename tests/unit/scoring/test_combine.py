"""From values to totals: transforms, requirements, schedules and the three ways to combine, against slow oracles."""

import pytest
from scoring import COUNT, FIND, GRAMMAR, check_samples, constant, make_scorer, rollout, scored, term

from mmrl.config.schema import WeightScheduleConfig
from mmrl.scoring.term_checks import check_terms
from mmrl.types import UserError
from mmrl_rewards import box, number

ANY = rollout("<answer>3</answer>")


@pytest.mark.parametrize(("combine", "expected"), [("sum", 0.25 + 0.5 + 1.0), ("product", 0.125), ("min", 0.25)])
def test_values_are_combined_by_sum_product_or_minimum(combine, expected):
    terms = [term(constant(value, name=str(value))) for value in (0.25, 0.5, 1.0)]
    assert scored(make_scorer(*terms, combine=combine), ANY).total == pytest.approx(expected)


@pytest.mark.parametrize(
    ("combine", "shares"), [("sum", [0.5, 0.0, -3.0]), ("product", [0.25, 0.0, 0.125]), ("min", [None] * 3)]
)
def test_each_term_says_what_it_contributed(combine, shares):
    low = 0.0 if combine != "sum" else -1.0
    terms = [
        term(constant(0.5, name="half"), transform={"clip": [0.0, 0.25]}, weight=2.0 if combine == "sum" else 1.0),
        term(constant(1.0, name="gated"), requires="none"),
        term(constant(0.5 if combine != "sum" else -1.0, low=low, name="last"), weight=3.0),
        term(constant(0.0, name="none"), weight=0.0),
    ]
    score = scored(make_scorer(*terms, combine=combine), ANY)
    contributions = [score.contributions[name] for name in ("half", "gated", "last")]
    assert [each.share for each in contributions] == pytest.approx(shares)
    assert [each.is_counted for each in contributions] == [True, False, True]
    assert contributions[0].transformed == 0.25 and contributions[2].weight == 3.0
    if combine == "sum":
        assert score.total == pytest.approx(sum(shares))


def test_weights_are_exponents_of_a_product():
    half = term(constant(0.25, name="a"), weight=0.5)
    scorer = make_scorer(half, term(constant(0.5, name="b"), weight=2.0), combine="product")
    assert scored(scorer, ANY).total == pytest.approx(0.5 * 0.25)
    assert scored(make_scorer(term(constant(0.0), weight=0.0), combine="product"), ANY).total == 1.0


@pytest.mark.parametrize("combine", ["product", "min"])
def test_negative_values_are_refused_except_in_sums(combine):
    penalty = constant(-0.5, low=-1.0, high=0.0)
    with pytest.raises(UserError, match=rf"combine {combine}: values of term 'odd' start at -1; give it"):
        check_terms([term(penalty)], combine)
    assert scored(make_scorer(term(penalty, transform={"rescale_to": [0.0, 1.0]}), combine=combine), ANY).total == 0.5


@pytest.mark.parametrize(
    ("transform", "value", "expected"),
    [
        ({}, 0.3, 0.3),
        ({"clip": [0.2, 0.8]}, 0.1, 0.2),
        ({"clip": [0.2, 0.8]}, 0.9, 0.8),
        ({"threshold": 0.5}, 0.5, 1.0),
        ({"threshold": 0.5}, 0.49, 0.0),
        ({"rescale_to": [-1.0, 1.0]}, 0.25, -0.5),
        ({"rescale_to": [1.0, 0.0]}, 0.25, 0.75),
        ({"threshold": 0.5, "rescale_to": [-1.0, 0.0]}, 0.1, -1.0),
        ({"clip": [0.2, 0.8], "rescale_to": [0.0, 1.0]}, 0.35, 0.25),
    ],
)
def test_transforms_change_the_total_not_the_value(transform, value, expected):
    score = scored(make_scorer(term(constant(value), transform=transform)), ANY)
    assert score.total == pytest.approx(expected)
    assert score.terms["odd"].value == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transform": {"threshold": 2.0}}, "its transform makes all values from 0 to 1 equal"),
        ({"transform": {"rescale_to": [1.0, 1.0]}}, "its transform makes all values from 0 to 1 equal"),
        ({"fallback": 2.0}, "fallback 2 is outside the range 0 to 1"),
    ],
)
def test_a_transform_or_fallback_that_does_not_suit_the_range_is_refused(options, words):
    with pytest.raises(UserError, match=f"term 'odd': {words}"):
        term(constant(0.0), **options)


@pytest.mark.parametrize(("value", "above", "expected"), [(0.5, 0.0, 1.5), (0.0, 0.0, 0.0), (0.5, 0.5, 0.5)])
def test_a_term_counts_only_if_what_it_requires_exceeds_the_bound(value, above, expected):
    required = term(constant(value, name="required"))
    scorer = make_scorer(term(constant(1.0), requires="required", requires_above=above), required)
    assert scored(scorer, ANY).total == expected


def test_a_penalty_counts_only_if_its_requirement_is_met():
    penalty = term(constant(-1.0, low=-1.0, high=0.0), requires="required")
    assert scored(make_scorer(penalty, term(constant(0.0, name="required"))), ANY).total == 0.0


def test_a_requirement_is_compared_before_its_transform():
    required = term(constant(0.4, name="required"), transform={"threshold": 0.5})
    assert scored(make_scorer(term(constant(1.0), requires="required"), required), ANY).total == 1.0


@pytest.mark.parametrize(
    ("requires", "options", "words"),
    [
        ("fromat", {}, "it requires 'fromat', which is not another term; there are odd"),
        ("odd", {}, "it requires 'odd', which is not another term"),
        ("format", {"training_only": True}, "counts in evaluation, but requires 'format', which is training_only"),
        ("format", {"requires": "odd"}, "its requirements form a cycle: odd -> format -> odd"),
    ],
)
def test_a_requirement_that_cannot_work_is_refused(requires, options, words):
    with pytest.raises(UserError, match=words):
        check_terms([term(constant(1.0), requires=requires), term(constant(1.0, name="format"), **options)], "sum")


def test_a_required_term_applies_to_the_same_samples():
    scorer = make_scorer(
        term(number.exact, when={"task": ["count"]}), term(box.iou, requires="number", when={"task": ["find"]})
    )
    with pytest.raises(UserError, match=r"sample 'f1' .*it requires 'number', which does not apply to the same"):
        check_samples(scorer, [COUNT, FIND], GRAMMAR)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", [1.0, 1.0, 0.75, 0.5, 0.3, 0.1, 0.1]), ("steps", [1.0, 1.0, 1.0, 0.5, 0.5, 0.1, 0.1])],
)
def test_weight_schedules_interpolate_between_points(shape, expected):
    schedule = WeightScheduleConfig(points=((10, 1.0), (20, 0.5), (30, 0.1)), interpolation=shape)
    assert [schedule.factor_at(step) for step in (0, 10, 15, 20, 25, 30, 99)] == pytest.approx(expected)
    assert [WeightScheduleConfig(points=((5, 0.5),)).factor_at(step) for step in (0, 9)] == [0.5, 0.5]


def test_a_schedule_multiplies_the_weight_in_training_alone():
    scorer = make_scorer(term(constant(1.0), weight=2.0, schedule={"points": [[0, 0.0], [10, 1.0]]}))
    assert [scored(scorer, ANY, step).total for step in (0, 5, 10, 20)] == [0.0, 1.0, 2.0, 2.0]
    assert scorer.score_eval([ANY])[0].total == 2.0
