"""examples/reward.py and examples/group_reward.py do what their pages say, through the command line and a config."""

from pathlib import Path

from scoring import make_scorer, rollout, term

from mmrl.cli import main
from mmrl.config.load import load_config
from mmrl.scoring.build import load_reward_terms
from mmrl.scoring.group_rewards import add_group_rewards, load_group_rewards
from mmrl_rewards import number

ROOT = Path(__file__).parents[3]


def test_the_reward_passes_its_case_table(capsys):
    assert main(["reward", "test", str(ROOT / "examples/reward.json")]) == 0
    assert "6 of 6 rows pass" in capsys.readouterr().out


def test_the_reward_is_fit_to_train_with(capsys):
    assert main(["reward", "lint", f"{ROOT}/examples/reward.py:traffic_lights"]) == 0, capsys.readouterr().out


def test_the_reward_that_looks_passes_its_case_table_and_is_fit_to_train_with(capsys):
    assert main(["reward", "test", str(ROOT / "examples/look.json")]) == 0
    assert "16 of 16 rows pass" in capsys.readouterr().out
    assert main(["reward", "lint", f"{ROOT}/examples/look.py:colour"]) == 0, capsys.readouterr().out


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
    assert add_group_rewards(group, 0, group_rewards=group_rewards).totals == (1.25, 1.25, 1.375, 0.0)


def test_the_examples_are_short():
    for name in ("reward.py", "group_reward.py", "look.py"):
        assert len((ROOT / "examples" / name).read_text().splitlines()) <= 40
