"""examples/advantage.py, through the real selection: what it returns is what the step trains on."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from factories import make_group, make_prompt, make_rollout, make_score
from selection import select_all

from mmrl.algo.advantages import compute_advantages
from mmrl.config.schema import AdvantageConfig
from mmrl.training.functions import load_custom_advantage
from mmrl.types import TrainingState, UserError

EXAMPLES = Path(__file__).parents[3] / "examples"
RANK = "./advantage.py:rank_advantage"


def scored_group(totals, form):
    prompt = make_prompt()
    rollouts = [make_rollout(prompt, index) for index in range(len(totals))]
    scores = [replace(make_score(format=value), total=total) for total, value in zip(totals, form, strict=True)]
    return make_group(prompt, rollouts, scores)


def select(options, *groups, base_dir=EXAMPLES):
    custom_advantage = load_custom_advantage(options, base_dir)
    compute = partial(compute_advantages, options=options, weights={}, custom_advantage=custom_advantage)
    return select_all(compute).select(groups, TrainingState())


@pytest.mark.parametrize(
    ("args", "advantages"),
    [({}, [1.0, -2 / 3, -2 / 3, 1 / 3]), ({"tie_breaker": "format"}, [1.0, -1.0, -1 / 3, 1 / 3])],
)
def test_a_step_trains_on_what_the_function_returns(args, advantages):
    options = AdvantageConfig(fn=RANK, args=args)
    selected = select(options, scored_group([9.0, 0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]))
    assert [experience.advantage for experience in selected.experiences] == pytest.approx(advantages)
    assert selected.advantages[0] == pytest.approx(advantages)


def test_steps_of_the_formula_that_follow_still_apply():
    options = AdvantageConfig(fn=RANK, outlier_std=1.0)
    selected = select(options, scored_group([3.0, 2.0, 1.0], [0.0] * 3))
    assert selected.advantages == ((1.0, 0.0, -1.0),)
    halved = AdvantageConfig(fn=RANK, difficulty_weight={"term": "format", "max_weight": 0.5})
    assert select(halved, scored_group([3.0, 1.0], [0.5, 0.5])).advantages == ((0.5, -0.5),)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return totals[1:]", "sample s: it returned 1 advantages for a group of 2 rollouts"),
        ("return None", "sample s: it returned None, not a list of numbers"),
        ("return ['high', None]", r"sample s: it returned \['high', None\], not a list of numbers"),
        ("return [float('nan')] * len(totals)", r"sample s: an advantage is not finite: \[nan, nan\]"),
    ],
)
def test_a_wrong_return_value_names_function_and_sample(tmp_path, body, complaint):
    (tmp_path / "mine.py").write_text(f"def mine(totals, terms):\n    {body}\n")
    with pytest.raises(UserError, match=f"advantage.fn './mine.py:mine': {complaint}"):
        select(AdvantageConfig(fn="./mine.py:mine"), scored_group([1.0, 0.0], [0.0, 0.0]), base_dir=tmp_path)


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="`fn` computes the advantages, so `scale: none` would have no effect"):
        AdvantageConfig(fn=RANK, scale="none")
    with pytest.raises(ValueError, match="`args` are the options of `fn`"):
        AdvantageConfig(args={"tie_breaker": "format"})
