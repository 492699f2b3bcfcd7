"""Golden numbers of the recipes of judges and reward models, by the terms that the recipes themselves name."""

import json
from pathlib import Path

import pytest
from factories import make_context, make_group, make_prompt, make_rollout, make_sample, make_score
from ruamel.yaml import YAML
from scoring import make_scorer, rollout, scored
from serving import reply, served

from mmrl.answer import ResponseFormat
from mmrl.config import load_config
from mmrl.scoring.build import load_reward_terms
from mmrl.scoring.group_reward_calls import apply_group_rewards, load_group_rewards
from mmrl.types import AnswerType
from mmrl_datasets.readers import table
from mmrl_rewards.services.judge import sigmoid

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"
THINKING = ResponseFormat(thinking="required")


def load(name, **args):
    """The config of a recipe, and its terms; `args` replace options of terms, by name of the term."""
    config = load_config(str(RECIPES / f"{name}.yaml")).config
    terms = []
    for term in config.rewards.terms:
        terms.append(term.model_copy(update={"args": {**term.args, **args.get(term.name, {})}, "timeout_s": None}))
    config = config.model_copy(update={"rewards": config.rewards.model_copy(update={"terms": tuple(terms)})})
    return config, load_reward_terms(config, RECIPES)


def total(terms, text, sample):
    return scored(make_scorer(*terms), rollout(text, sample, grammar=THINKING)).total


def test_base_reward_pays_1_for_the_answer_and_the_sigmoid_of_a_score_otherwise():
    """Section 5.4.1: R(y) = 1 if y matches, else sigmoid(score(y)), here less the score of the reference."""
    scores = {"B": 0.5}
    with served(lambda handler, body: reply(handler, {"score": scores.get(body["response"], 2.0)})) as (url, requests):
        _, terms = load("base_reward", model={"scorer": {"url": url}, "images": False})
        sample = make_sample("B", AnswerType.TEXT, parts=("Which?",))
        right, wrong = (f"<think>Hm.</think><answer>{answer}</answer>" for answer in "BC")
        assert total(terms, right, sample) == 1.0 and requests == []
        assert total(terms, wrong, sample) == pytest.approx(sigmoid(2.0 - 0.5))
        assert total(terms, "No idea.", sample) == pytest.approx(sigmoid(2.0 - 0.5))
    assert requests[0][0]["response"] == wrong


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("[2, 1, 3, 4, 5]", 2.0), ("[1, 2, 3, 4, 5]", 1.125), ("[5, 4, 3, 1, 2]", 1.008), ("[1, 3]", 1.0)],
)
def test_mm_r5_pays_the_inverse_cube_of_the_rank_and_the_format(answer, expected):
    _, terms = load("mm_r5")
    text = f"<think>Image 1: no.</think><answer>{answer}</answer>"
    assert total(terms, text, make_sample([2], AnswerType.LIST)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>Image 1: 8. Image 2: 6.</think>\n<answer>Image 1 is better</answer>", 2.0),
        ("<think>Image 1: 8. Image 2: 6.</think>\n<answer>Image 2 is better</answer>", 1.0),
        ("<answer>Image 1 is better</answer>", 1.0),
        ("Image 1 is better", 0.0),
    ],
)
def test_unified_reward_think_pays_accuracy_and_format(text, expected):
    """accuracy_reward takes a bare text for the answer; here it must be in its tags."""
    _, terms = load("unified_reward_think")
    assert total(terms, text, make_sample("Image 1 is better", AnswerType.TEXT)) == expected


@pytest.mark.parametrize(("thought", "answer", "expected"), [("So 2.", 2, 2.0), ("So 1.", 2, 1.0), ("So 1.", 1, 0.5)])
def test_video_reward_bench_pays_as_r1_reward(thought, answer, expected):
    _, terms = load("video_reward_bench")
    text = f"<think>{thought}</think><answer>{answer}</answer>"
    assert total(terms, text, make_sample(2)) == expected


@pytest.mark.parametrize(
    ("right", "expected"), [([1, 1, 1], [1.5, 1.0, 0.5]), ([0, 1, 1], [0.0, 1.0, 0.5]), ([1, 1, 0], [1.5, 1.0, -0.5])]
)
def test_kimi_k1_5_pays_for_length_once_the_first_stage_is_over(right, expected):
    """2.3.3: 0.5 for the shortest right response, -0.5 for the longest, 0 for a short wrong one."""
    config, terms = load("kimi_k1_5")
    group_rewards = load_group_rewards(config, RECIPES, terms)
    prompt = make_prompt(make_sample("2", AnswerType.LATEX))
    rollouts = [make_rollout(prompt, index, num_tokens=100 * index + 100) for index in range(3)]
    group = make_group(prompt, rollouts, [make_score(accuracy=value) for value in right])
    stages = {stage.name: stage for stage in config.stages}
    assert stages["easy_to_hard"].steps == 100
    assert apply_group_rewards(group, 99, group_rewards=group_rewards).totals == tuple(map(float, right))
    assert apply_group_rewards(group, 100, group_rewards=group_rewards).totals == pytest.approx(expected)


def test_the_better_reply_of_a_pair_is_where_the_answer_says(tmp_path):
    """In the training pairs and in the benchmark, and in both places."""
    config, _ = load("video_reward_bench")
    tables = YAML(typ="safe").load(RECIPES.parents[1] / "tests/data/recipe_rows/video_reward_bench.yaml")["files"]
    for source, rows in zip([*config.data.train, *config.data.test], tables.values(), strict=True):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"answer_type": "number", "prompt": source.args["prompt"]}
        columns = {"answer": source.args["columns"]["answer"]}
        samples = list(table.rows(make_context(tmp_path), path="pairs.jsonl", columns=columns, **options))
        for sample, row in zip(samples, rows, strict=True):
            question = "".join(part for part in sample.parts if isinstance(part, str))
            is_first = question.index(row["chosen"]) < question.index(row["rejected"])
            assert sample.target.value == (1 if is_first else 2)
        assert {sample.target.value for sample in samples} == {1, 2}
