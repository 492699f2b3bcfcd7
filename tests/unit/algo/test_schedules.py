"""Schedules by hand."""

import pytest

from mmrl.algo.schedules import coefficient, learning_rate
from mmrl.config.schema import LossCoefficientConfig, OptimizerConfig


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4] * 5),
        ({"schedule": "linear", "final_frac": 0.5}, [0.4, 0.35, 0.3, 0.25, 0.2]),
        ({"schedule": "linear", "decay_steps": 3}, [0.4, 0.2, 0.0, 0.0, 0.0]),
    ],
)
def test_coefficients_by_hand(options, expected):
    config = LossCoefficientConfig(coef=0.4, **options)
    assert [coefficient(step, total=5, options=config) for step in range(5)] == pytest.approx(expected)


def rates(total, **options):
    config = OptimizerConfig(lr=0.5, **options)
    return [learning_rate(step, total=total, options=config) for step in range(total)]


@pytest.mark.parametrize(
    ("total", "options", "expected"),
    [
        (3, {}, [0.5, 0.5, 0.5]),
        (5, {"warmup_steps": 4}, [0.125, 0.25, 0.375, 0.5, 0.5]),
        (5, {"lr_schedule": "linear"}, [0.5, 0.375, 0.25, 0.125, 0.0]),
        (5, {"lr_schedule": "linear", "final_lr_frac": 0.5}, [0.5, 0.4375, 0.375, 0.3125, 0.25]),
        (5, {"lr_schedule": "cosine"}, [0.5, 0.25 + 0.25 * 0.5**0.5, 0.25, 0.25 - 0.25 * 0.5**0.5, 0.0]),
        (6, {"lr_schedule": "linear", "warmup_steps": 2}, [0.25, 0.5, 0.375, 0.25, 0.125, 0.0]),
        (4, {"lr_schedule": "linear", "decay_steps": 3}, [0.5, 0.25, 0.0, 0.0]),
    ],
)
def test_learning_rates_by_hand(total, options, expected):
    assert rates(total, **options) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("curve", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (2, 0), (2, 2), (9, 3), (3, 9)])
def test_learning_rates_rise_then_fall_within_bounds(curve, total, warmup):
    falls = {} if curve == "constant" else {"final_lr_frac": 0.1}
    values = rates(total, warmup_steps=warmup, lr_schedule=curve, **falls)
    top = min(max(warmup - 1, 0), total - 1)
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(0 < value <= 0.5 for value in values)
