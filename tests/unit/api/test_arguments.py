"""Arguments of `mmrl.train` and `mmrl.evaluate` that are not what they must be: each is named in a UserError."""

from collections.abc import Callable
from typing import Any

import pytest

import mmrl
from mmrl import UserError, reward

SAMPLE = mmrl.Sample(
    id="a", task="t", parts=("How many?",), target=mmrl.Target(answer_type=mmrl.AnswerType.NUMBER, value=1)
)


@reward(name="near")
def near(response: mmrl.Response, sample: mmrl.Sample) -> float:
    return 1.0


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: mmrl.train(5), "a config is a file, a mapping or what load_config returned, not int"),
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
