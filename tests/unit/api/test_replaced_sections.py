"""`rewards=` and `dataset=` of `mmrl.train` replace sections of the config."""

from pathlib import Path

import pytest

import mmrl
from mmrl.api import train as api
from mmrl.config import Config

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture
def trained(monkeypatch, tmp_path) -> list[Config]:
    """The configs of calls to `mmrl.train`, which does not train."""
    configs: list[Config] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_run", lambda loaded, run_dir: configs.append(loaded.config))
    return configs


@pytest.mark.parametrize(
    "source",
    [QUICKSTART, mmrl.load_config(QUICKSTART), {"extends": str(QUICKSTART)}],
    ids=["file", "loaded", "mapping"],
)
def test_a_group_reward_may_be_given_by_its_name(trained, source):
    rare = {"fn": f"{ROOT}/examples/group_reward.py:rare_answer", "args": {"correct": ["number"]}, "weight": 0.5}
    mmrl.train(source, rewards=["number:exact", rare])
    [config] = trained
    assert [term.fn for term in config.rewards.terms] == ["number:exact"]
    assert [(reward.fn, reward.weight) for reward in config.rewards.group_rewards] == [(rare["fn"], 0.5)]


def test_the_file_of_a_group_reward_starts_from_the_config(trained, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "run.yaml").write_text(f"extends: {QUICKSTART}")
    (tmp_path / "deep" / "mine.py").write_text("def rare(group):\n    return ()\n")
    mmrl.train("deep/run.yaml", rewards=["number:exact", "./mine.py:rare"])
    assert trained[0].rewards.group_rewards[0].fn == "./mine.py:rare"


def test_a_path_among_the_arguments_becomes_text(trained):
    mmrl.train(QUICKSTART, dataset={"fn": "mmrl_datasets.readers.table:rows", "args": {"path": Path("a/b.jsonl")}})
    assert trained[0].data.train[0].args == {"path": "a/b.jsonl"}
