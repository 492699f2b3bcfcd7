"""Arguments of `mmrl.train` and `mmrl.evaluate` that are not what they must be: each is named in a UserError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmrl
from mmrl import UserError, reward

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SAMPLE = mmrl.Sample(
    id="a", task="t", parts=("How many?",), target=mmrl.Target(answer_type=mmrl.AnswerType.NUMBER, value=1)
)


@reward(name="near")
def near(response: mmrl.Response, sample: mmrl.Sample) -> float:
    return 1.0


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: mmrl.train(5), "a config is a file, a mapping or what load_config returned, not int"),
    (lambda: mmrl.train(mmrl.load_config("r1_v").config), "a config is .*, not Config"),  # type: ignore[arg-type]
    (lambda: mmrl.load_config(None), "a config is a file, a mapping or what load_config returned, not NoneType"),  # type: ignore[arg-type]
    (lambda: mmrl.load_config(["r1_v"]), "a config is .*, not list"),  # type: ignore[arg-type]
    (lambda: mmrl.load_config(b"r1_v"), "a config is .*, not bytes"),  # type: ignore[arg-type]
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
    (lambda: mmrl.train({}, {"run.seed": 1}), r"overrides must be a list, got \{'run.seed': 1\}"),
    (lambda: mmrl.train({}, None), "overrides must be a list, got None"),  # type: ignore[arg-type]
    (lambda: mmrl.train({}, [3]), "overrides: 3 is not text; write it as"),  # type: ignore[list-item]
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


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(UserError, match=message):
        call()
