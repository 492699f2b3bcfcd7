"""Arguments of `mmrl.train` and `mmrl.evaluate`: wrong ones are named, `rewards=` and `dataset=` replace sections."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmrl
from mmrl import UserError, reward
from mmrl.api import train as api
from mmrl.config import Config

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "quickstart.yaml"
SAMPLE = mmrl.Sample(
    id="a", task="t", parts=("How many?",), target=mmrl.Target(answer_type=mmrl.AnswerType.NUMBER, value=1)
)


@reward(name="near")
def near(response: mmrl.Response, sample: mmrl.Sample) -> float:
    return 1.0


WRONG_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: mmrl.train(5), "a config is a file, a mapping or what load_config returned, not int"),
    (lambda: mmrl.train(mmrl.load_config("r1_v").config), "a config is .*, not Config"),  # type: ignore[arg-type]
    (lambda: mmrl.load_config(None), "a config is a file, a mapping or what load_config returned, not NoneType"),  # type: ignore[arg-type]
    (lambda: mmrl.load_config("r1_v", None), "overrides must be a list, got None"),  # type: ignore[arg-type]
    (lambda: mmrl.load_config("r1_v", "run.seed=1"), "overrides must be a list, got 'run.seed=1'"),
    (lambda: mmrl.load_config("r1_v", [3]), "overrides: 3 is not text; write it as"),  # type: ignore[list-item]
    (lambda: mmrl.train({}, resume="no"), "resume must be True or False, got 'no'"),  # type: ignore[arg-type]
    (lambda: mmrl.train({}, rewards=[3]), "rewards: 3 is neither a function nor the name of one"),  # type: ignore[list-item]
    (lambda: mmrl.train(CONFIG, rewards=[int]), "argument `rewards`: rewards.terms.0.fn: .* is not a reward"),
    (lambda: mmrl.train(CONFIG, rewards=["nope"]), "argument `rewards`: rewards.terms.0.fn: there is no reward"),
    (lambda: mmrl.train(CONFIG, rewards=[{"fn": near, "weigth": 2}]), "argument `rewards`: rewards.terms.0.weigth"),
    (lambda: mmrl.train(CONFIG, dataset={"trian": [SAMPLE]}), "argument `dataset`: data.trian: unknown key"),
    (lambda: mmrl.train(CONFIG, dataset={"fn": "a:b", "args": {"x": object()}}), "argument `dataset`: settings are"),
    (lambda: mmrl.train(CONFIG, callbacks=["nope"]), "argument `callbacks`: callbacks.0.fn: 'nope' names no"),
    (lambda: mmrl.train({}, "run.seed=1"), r"overrides must be a list, got 'run.seed=1'; put it in brackets"),
    (lambda: mmrl.train({}, rewards=near), "rewards must be a list, got"),
    (lambda: mmrl.train({}, rewards="number:exact"), "rewards must be a list, got 'number:exact'"),
    (lambda: mmrl.train({}, callbacks=near), "callbacks must be a list, got"),
    (lambda: mmrl.train({}, dataset=SAMPLE), r"dataset, split 'train': Sample\(id='a'.* holds only mmrl.Sample"),
    (lambda: mmrl.train({}, dataset=[SAMPLE, 5]), r"dataset, split 'train': Sample\(id='a'.* holds only mmrl.Sample"),
    (lambda: mmrl.train({}, dataset=(row for row in [SAMPLE])), "dataset, split 'train': <generator"),
    (lambda: mmrl.train({}, dataset=[{"question": "q"}]), r"dataset, split 'train': \{'question': 'q'\} is neither"),
    (lambda: mmrl.evaluate("model", "mathvista", overrides="run.seed=1"), "overrides must be a list"),
    (lambda: mmrl.evaluate("model", 5), "benchmark must be a name, an mmrl.Benchmark or a function .*, not 5"),
    (lambda: mmrl.Policy.from_run("model", overrides="run.seed=1"), "overrides must be a list"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS, ids=[message[:40] for _, message in WRONG_CALLS])
def test_a_wrong_argument_of_a_call_is_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


MINE = mmrl.Benchmark(name="mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": None}, "data must be a list, got None"),
        ({"data": [3]}, "data: 3 is not a path"),
        ({"model": 3}, "model: 3 is not a path"),
        ({"out_dir": 3}, "out_dir: 3 is not a path"),
        ({"media_root": 3}, "media_root=3: must be str"),
        ({"allow_missing": "no"}, "allow_missing='no': must be bool"),
        ({"coordinate_system": "pixels"}, "coordinate_system='pixels': must be CoordinateSystem"),
        ({"overide": []}, "'overide' is not an option; did you mean 'overrides'"),
        ({"temperature": 1}, "'temperature' is not an option; there are checkpoint, split"),
        ({"data": "--out/gone.jsonl"}, "^data: .*--out/gone.jsonl: no such file"),
        ({"benchmark": mmrl.Benchmark(name="")}, "benchmark named ''; its name must be a valid file name"),
        ({"benchmark": mmrl.Benchmark(name="b/../8")}, "benchmark named 'b/../8'; its name must"),
    ],
)
def test_a_wrong_argument_of_an_evaluation_is_named(arguments, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        mmrl.evaluate(
            **{"model": tmp_path, "benchmark": MINE, "data": tmp_path, "out_dir": tmp_path / "out", **arguments}
        )


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).touch()
    with pytest.raises(UserError, match=f"out holds '{name}' but is not an evaluation; choose another folder"):
        mmrl.evaluate(tmp_path / "model", MINE, tmp_path, out_dir=tmp_path / "out")


@pytest.fixture
def trained(monkeypatch, tmp_path) -> list[Config]:
    """The configs of calls to `mmrl.train`, which does not train."""
    configs: list[Config] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_run", lambda loaded, run_dir: configs.append(loaded.config))
    return configs


@pytest.mark.parametrize(
    "source",
    [CONFIG, mmrl.load_config(CONFIG), {"extends": str(CONFIG)}],
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
    (tmp_path / "deep" / "run.yaml").write_text(f"extends: {CONFIG}")
    (tmp_path / "deep" / "mine.py").write_text("def rare(group):\n    return ()\n")
    mmrl.train("deep/run.yaml", rewards=["number:exact", "./mine.py:rare"])
    assert trained[0].rewards.group_rewards[0].fn == "./mine.py:rare"


def test_a_path_among_the_arguments_becomes_text(trained):
    mmrl.train(CONFIG, dataset={"fn": "mmrl_datasets.readers.table:rows", "args": {"path": Path("a/b.jsonl")}})
    assert trained[0].data.train[0].args == {"path": "a/b.jsonl"}
