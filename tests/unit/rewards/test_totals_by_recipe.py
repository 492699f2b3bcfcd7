"""Published totals by the terms of the recipes themselves: a judge of answers, counting."""

import pytest
from factories import make_sample
from scoring import recipe_totals

from mmrl.types import AnswerType


@pytest.fixture(scope="module")
def total():
    with recipe_totals() as total:
        yield total


@pytest.mark.parametrize(
    ("thought", "verdict", "expected"),
    [("Response 2 is better.", 2, 2.0), ("Response 1 is better.", 2, 1.0), ("Response 1 is better.", 1, 0.5)],
)
def test_r1_reward_pays_for_a_thought_that_leads_to_its_verdict(total, thought, verdict, expected):
    """0.5 format + accuracy (1 + 0.5 consistency): math_verifier_mllm.py at commit 3693413."""
    sample = make_sample(2, AnswerType.NUMBER, task="judge")
    text = f"<think>{thought}</think><answer>{verdict}</answer>"
    assert total("r1_reward", text, sample) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("r1_v", "<think>One, two.</think>\n<answer> 2 </answer>", 2.0),
        ("r1_v", "<answer>2</answer>", 1.0),
        ("r1_v", "<think>One.</think><answer>1</answer>", 1.0),
        ("ton", "<answer>2</answer>", 2.0),
    ],
)
def test_counting_pays_for_the_number_and_the_format(total, name, text, expected):
    assert total(name, text, make_sample(2, AnswerType.NUMBER, task="count")) == pytest.approx(expected)
