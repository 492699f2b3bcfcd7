"""Published numbers: totals of systems made of our terms, and what else their code or paper states."""

import math

import pytest
import torch
from scoring import constant, make_scorer, rollout, scored, term

from mmrl.algo.losses import estimate_kl
from mmrl.algo.select_experiences import rejection_reason
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import UserError
from mmrl_rewards import format, number


def of(value, name, **options):
    """A term whose reward always returns `value`."""
    return term(constant(float(value), name=name, low=-1.0), **options)


def total(*terms):
    return scored(make_scorer(*terms), rollout("")).total


@pytest.mark.parametrize(
    ("valid", "right", "frames", "timestamp", "expected"),
    [(1, 1, 1, 1, 1.52), (1, 1, 1, 0, 1.02), (1, 0, 1, 1, 0.0), (0, 1, 1, 1, 0.0)],
)
def test_frame_thinker_totals(valid, right, frames, timestamp, expected):
    """Accuracy after a gate of validity, and bonuses for actions behind accuracy."""
    got = total(
        of(valid, "valid", weight=0.0),
        of(right, "accuracy", requires="valid"),
        of(frames, "frames", requires="accuracy", weight=0.02),
        of(timestamp, "timestamp", requires="accuracy", weight=0.5),
    )
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(("searched", "expected"), [(1, 0.9), (0, 0.0)])
def test_vrag_totals(searched, expected):
    """0.7 judge + 0.1 format + 0.2 NDCG, if there was a search."""
    terms = {"judge": (1, 0.7), "format": (1, 0.1), "ndcg": (0.5, 0.2)}
    gated = [of(value, name, requires="search", weight=weight) for name, (value, weight) in terms.items()]
    assert total(of(searched, "search", weight=0.0), *gated) == pytest.approx(expected)


@pytest.mark.parametrize(("right", "consistent", "expected"), [(1, 1, 2.0), (1, -1, 1.0), (0, 1, 0.5), (0, -1, 0.5)])
def test_r1_reward_totals(right, consistent, expected):
    """0.5 format + accuracy (1 + 0.5 consistency), consistency from -1 to 1."""
    got = total(
        of(1, "format", weight=0.5),
        of(right, "accuracy"),
        of(consistent, "consistency", requires="accuracy", weight=0.5),
    )
    assert got == pytest.approx(expected)


def test_table2latex_totals():
    """[likeness of the rendered tables > 0.6] + [TEDS of their structure > 0.9]."""
    likeness, structure = (
        of(value, name, transform={"threshold": threshold})
        for value, name, threshold in ((0.61, "likeness", 0.6), (0.89, "structure", 0.9))
    )
    assert total(likeness, structure) == 1.0


def test_gates_in_a_circle_are_refused():
    with pytest.raises(UserError, match="term 'a': its requirements lead in a circle: a -> b -> c -> a"):
        make_scorer(of(1, "a", requires="b"), of(1, "b", requires="c"), of(1, "c", requires="a"))
    with pytest.raises(UserError, match="it requires 'd', which is no other term"):
        make_scorer(of(1, "a", requires="b"), of(1, "b", requires="d"))
    make_scorer(of(1, "a", requires="b"), of(1, "b", requires="c"), of(1, "c"), of(1, "d", requires="c"))


def test_a_log_difference_of_20_is_clamped_to_11_before_exp():
    gap = torch.tensor([20.0], dtype=torch.float64)
    clamped = estimate_kl(torch.zeros_like(gap), gap, "k3", log_ratio_clip=11.0)
    assert clamped.item() == pytest.approx(math.exp(11) - 11 - 1)


def test_a_group_that_differs_in_format_alone_is_left_out_by_a_filter_on_accuracy():
    judge = make_scorer(term(number.exact), term(format.tags, weight=0.5))
    texts = ["<answer>3</answer>", "So <answer>3</answer>"]
    (group,) = judge.score_groups([[rollout(text, index=index) for index, text in enumerate(texts)]], step=0)
    assert group.totals == (1.5, 1.0)
    for term_name, reason in (("number", "number"), ("format", None)):
        ranges = (GroupRewardRangeConfig(term=term_name, require_mixed=True),)
        assert rejection_reason(group, DynamicSamplingConfig(ranges=ranges)) == reason
