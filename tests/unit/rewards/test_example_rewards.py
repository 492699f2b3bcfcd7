"""The examples of rewards do what their pages say, through the command line and a config."""

from pathlib import Path

import pytest
from factories import make_sample
from scoring import make_scorer, rollout, term
from serving import reply, served

from mmrl.cli import main
from mmrl.config.load import load_config
from mmrl.scoring.build import load_reward_terms
from mmrl.scoring.group_reward_calls import apply_group_rewards, load_group_rewards
from mmrl.scoring.outcomes import call_reward, is_unscorable
from mmrl.scoring.registry import load_bound_reward
from mmrl.scoring.scorer import make_response
from mmrl.types import AnswerType
from mmrl_rewards import number

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "rows"), [("reward.py:traffic_lights", 6), ("service_reward.py:served", 5), ("look.py:colour", 16)]
)
def test_an_example_passes_its_case_table_and_is_fit_to_train_with(capsys, name, rows):
    path = f"{ROOT}/examples/{name}"
    assert main(["reward", "test", path.partition(".py")[0] + ".json"]) == 0
    assert f"{rows} of {rows} rows pass" in capsys.readouterr().out
    assert main(["reward", "lint", path]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply_body", "value"),
    [({"score": 0.25}, 0.25), ({"score": 1}, 1.0), *((bad, None) for bad in (b'{"score": NaN}', b"<html>", b"", []))],
)
def test_the_service_reward_asks_a_real_server(reply_body, value):
    sample = make_sample("A red kite", AnswerType.TEXT)
    with served(lambda handler, _: reply(handler, reply_body)) as (url, requests):
        service = {"url": url, "retries": 0}
        bound = load_bound_reward("./service_reward.py:served", ROOT / "examples", {"service": service})
        outcome = call_reward(bound, make_response(rollout("<answer>A kite</answer>", sample)), sample)
    assert requests[0][0] == {"answer": "A kite", "reference": "A red kite"}
    if value is None:
        assert is_unscorable(outcome) and "no usable reply" in outcome.reason
    else:
        assert outcome == (value, f"the service says {value:.3g}")


def test_the_group_reward_favours_answers_that_few_others_gave():
    line = "{fn: './group_reward.py:rare_answer', args: {correct: [number]}, weight: 0.5}"
    loaded = load_config(
        ROOT / "configs/quickstart.yaml",
        ["rewards.terms=[{fn: 'mmrl_rewards.number:exact'}]", f"rewards.group_rewards=[{line}]"],
    )
    terms = load_reward_terms(loaded.config, ROOT / "examples")
    group_rewards = load_group_rewards(loaded.config, ROOT / "examples", terms)
    texts = ["<answer>3</answer>", "<answer>3</answer>", "so <answer>3</answer>", "<answer>4</answer>"]
    scorer = make_scorer(term(number.exact))
    (group,) = scorer.score_groups([[rollout(text, index=index) for index, text in enumerate(texts)]], step=0)
    assert apply_group_rewards(group, 0, group_rewards=group_rewards).totals == (1.25, 1.25, 1.375, 0.0)
