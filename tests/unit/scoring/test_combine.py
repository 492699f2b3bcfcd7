"""From values to totals: transforms, gates, schedules and the three ways to combine, against slow oracles."""

import pytest
from scoring import COUNT, FIND, GRAMMAR, constant, make_scorer, rollout, scored, term

from mmrl.config.schema import WeightScheduleConfig
from mmrl.scoring.terms import combine_terms
from mmrl.types import UserError
from mmrl_rewards import box, number

ANY = rollout("<answer>3</answer>")


def totals(combine, rows, **options):
    """Totals of rows of values, one term a column."""
    terms = [term(constant(0.0, name=str(column)), **options) for column in range(len(rows[0]))]
    return [combine_terms(terms, {str(c): value for c, value in enumerate(row)}, combine, step=0) for row in rows]


@pytest.mark.parametrize(("combine", "expected"), [("sum", 0.25 + 0.5 + 1.0), ("product", 0.125), ("min", 0.25)])
def test_combine_terms_by_hand(combine, expected):
    (got,) = totals(combine, [(0.25, 0.5, 1.0)])
    assert got == pytest.approx(expected)


def test_weights_are_exponents_of_a_product():
    half = term(constant(0.25, name="a"), weight=0.5)
    judge = make_scorer(half, term(constant(0.5, name="b"), weight=2.0), combine="product")
    assert scored(judge, ANY).total == pytest.approx(0.5 * 0.25)
    assert scored(make_scorer(term(constant(0.0), weight=0.0), combine="product"), ANY).total == 1.0


@pytest.mark.parametrize("combine", ["product", "min"])
def test_negative_values_are_refused_except_in_sums(combine):
    penalty = constant(-0.5, low=-1.0, high=0.0)
    with pytest.raises(UserError, match=rf"combine {combine}: values of term 'odd' start at -1; give it"):
        make_scorer(term(penalty), combine=combine)
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
    assert score.terms["odd"].value == value  # what is told is the value itself


def test_a_transform_that_does_not_suit_the_range_is_refused():
    with pytest.raises(UserError, match="term 'odd': its transform makes all values from 0 to 1 equal"):
        term(constant(0.0), transform={"threshold": 2.0})
    with pytest.raises(UserError, match="all values from 0 to 1 equal"):
        term(constant(0.0), transform={"rescale_to": [1.0, 1.0]})


@pytest.mark.parametrize(("value", "above", "expected"), [(0.5, 0.0, 1.5), (0.0, 0.0, 0.0), (0.5, 0.5, 0.5)])
def test_a_term_counts_only_if_its_gate_is_open(value, above, expected):
    gate = term(constant(value, name="gate"))
    judge = make_scorer(term(constant(1.0), requires="gate", requires_above=above), gate)
    assert scored(judge, ANY).total == expected


def test_a_closed_gate_shuts_penalties_out_too():
    penalty = term(constant(-1.0, low=-1.0, high=0.0), requires="gate")
    assert scored(make_scorer(penalty, term(constant(0.0, name="gate"))), ANY).total == 0.0


def test_gates_look_at_values_before_transforms():
    gate = term(constant(0.4, name="gate"), transform={"threshold": 0.5})
    assert scored(make_scorer(term(constant(1.0), requires="gate"), gate), ANY).total == 1.0


def test_gates_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="term 'odd': it requires 'fromat', which is no other term; there are odd"):
        make_scorer(term(constant(1.0), requires="fromat"), term(constant(1.0, name="format")))
    with pytest.raises(UserError, match="it requires 'odd', which is no other term"):
        make_scorer(term(constant(1.0), requires="odd"))
    with pytest.raises(UserError, match="counts in evaluation, but requires 'format', which is training_only"):
        make_scorer(term(constant(1.0), requires="format"), term(constant(1.0, name="format"), training_only=True))
    judge = make_scorer(
        term(number.exact, when={"task": ["count"]}), term(box.iou, requires="number", when={"task": ["find"]})
    )
    with pytest.raises(UserError, match=r"sample 'f1' .*it requires 'number', which does not apply to the same"):
        judge.check_samples([COUNT, FIND], GRAMMAR)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", [1.0, 1.0, 0.75, 0.5, 0.3, 0.1, 0.1]), ("steps", [1.0, 1.0, 1.0, 0.5, 0.5, 0.1, 0.1])],
)
def test_weight_schedules_interpolate_between_points(shape, expected):
    schedule = WeightScheduleConfig(points=((10, 1.0), (20, 0.5), (30, 0.1)), interpolation=shape)
    assert [schedule.factor_at(step) for step in (0, 10, 15, 20, 25, 30, 99)] == pytest.approx(expected)
    assert (
        WeightScheduleConfig(points=((5, 0.5),)).factor_at(0)
        == WeightScheduleConfig(points=((5, 0.5),)).factor_at(9)
        == 0.5
    )


def test_a_schedule_multiplies_the_weight_in_training_alone():
    judge = make_scorer(term(constant(1.0), weight=2.0, schedule={"points": [[0, 0.0], [10, 1.0]]}))
    assert [scored(judge, ANY, step).total for step in (0, 5, 10, 20)] == [0.0, 1.0, 2.0, 2.0]
    assert judge.score_eval([ANY])[0].total == 2.0
