"""Rewards: their case tables, their contract, and the worked example of the README."""

import json
import pickle
import re
from pathlib import Path

import pytest

from mmrl.scoring.registry import builtin_rewards
from mmrl.types import AnswerType, RewardValue, Sample, Target, Unscorable, UserError
from mmrl.utils.plugins import load_object
from mmrl_rewards import box, choice, number, text
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import bind, reward, target_value

REWARDS = Path(__file__).parents[3] / "rewards"
TABLES = sorted((REWARDS / "cases").glob("*.json"))
ALL = builtin_rewards()
ROWS = [(table.stem, index, case) for table in TABLES for index, case in enumerate(load_case_table(table))]


@pytest.mark.parametrize(("table", "index", "case"), ROWS, ids=[f"{table}-{index}" for table, index, _ in ROWS])
def test_case_table_row(table, index, case):
    failure = case.failure_message(bind(ALL[case.fn], case.args))
    assert not failure, f"{table}.json, row {index}: {failure}"


def test_every_reward_has_at_least_twelve_rows():
    counts = {fn: sum(case.fn == fn for _, _, case in ROWS) for fn in ALL}
    assert len(ALL) > 20
    assert {fn: count for fn, count in counts.items() if count < 12} == {}


@pytest.mark.parametrize("fn", ALL.values(), ids=ALL)
def test_every_row_gives_the_same_value_in_range_with_a_reason(fn):
    for _, _, case in ROWS:
        if ALL[case.fn] is fn and case.expected != "unscorable":
            first, second = (bind(fn, case.args)(*case.build()) for _ in range(2))
            assert isinstance(first, RewardValue)
            assert first == second
            assert fn.low <= first.value <= fn.high
            assert 0 < len(first.reason) < 250
            assert "\n" not in first.reason


@pytest.mark.parametrize("fn", ALL.values(), ids=ALL)
def test_every_docstring_names_source_and_departures(fn):
    assert "Source:" in fn.doc or "Source" in fn.doc
    assert "Departures:" in fn.doc


@pytest.mark.parametrize("fn", ALL.values(), ids=ALL)
def test_a_reward_survives_pickling(fn):
    assert pickle.loads(pickle.dumps(fn)) is fn
    assert pickle.loads(pickle.dumps(bind(fn, {}))) == bind(fn, {})


def test_a_failing_case_says_what_it_expected():
    case = Case.model_validate(
        {
            "fn": "",
            "sample": {"answer_type": "number", "value": 3},
            "response": "<answer>4</answer>",
            "expected": 1,
            "source": "s",
        }
    )
    assert "expected 1.0, got 0.0 (4, expected 3); source: s" in case.failure_message(bind(number.exact, {}))
    unscorable = case.model_copy(update={"expected": "unscorable"})
    assert "expected unscorable, got 0.0" in unscorable.failure_message(bind(number.exact, {}))
    assert "it is unscorable" in case.failure_message(bind(text.exact, {}))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('[{"fn": "m:f"}]', r"row 0.sample: Field required"),
        ('[{"fn": "m:f", "smaple": 1}]', r"row 0: unknown key 'smaple'; known keys: fn, args, sample, response, "),
        ('[{"fn": "m:f", "tol": 1}]', r"row 0: unknown key 'tol'; .*, tolerance, source"),
        ('[{"fn": "m:f", "sample": {"kind": "box"}}]', r"row 0.sample: unknown key 'kind'; known keys: answer_type, "),
        ("[", "Invalid JSON"),
        (None, "cannot read the case table"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, content, complaint):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=complaint) as caught:
        load_case_table(path)
    assert "table.json" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "args", "complaint"),
    [
        (box.iou, {"thresold": 0.5}, "reward 'iou' has no option 'thresold'; did you mean 'threshold'"),
        (box.iou, {"x": 1}, "no option 'x'; it has 'threshold'"),
        (choice.exact, {"x": 1}, "no option 'x'; it has none"),
        (box.iou, {"threshold": "0.5"}, "option 'threshold' = '0.5': must be a valid number"),
        (box.iou, {"threshold": 1.5}, "option 'threshold' = 1.5: .* less than or equal to 1"),
        (number.exact, {"tolerance": -1}, "greater than or equal to 0"),
        (number.exact, {"tolerance": True}, "valid number"),
        (len, {}, "is not a reward: decorate"),
    ],
)
def test_bind_refuses(fn, args, complaint):
    with pytest.raises(UserError, match=complaint):
        bind(fn, args)


def test_options_come_from_the_signature():
    @reward(name="r", low=-1.0)
    def fn(response, sample, *, corner: tuple[int, int], mode: str = "a") -> float:
        return corner[0] + (mode == "b")

    assert (fn.name, fn.low, fn.high) == ("r", -1.0, 1.0)
    assert {name: option.required for name, option in fn.options.items()} == {"corner": True, "mode": False}
    assert bind(fn, {"corner": [0, 1], "mode": "b"})(None, None) == 1
    with pytest.raises(UserError, match="needs the option 'corner'"):
        bind(fn, {})


def test_declaring_refuses_a_range_or_an_option_that_means_nothing():
    with pytest.raises(UserError, match="range"):
        reward(name="r", low=1.0, high=1.0)
    with pytest.raises(UserError, match="range"):
        reward(name="r", high=float("inf"))
    with pytest.raises(UserError, match="option 'x' must come after"):

        @reward(name="r")
        def positional(response, sample, x: int = 1) -> float:
            return 0.0

    with pytest.raises(UserError, match="option 'x' must"):

        @reward(name="r")
        def untyped(response, sample, *, x=1) -> float:
            return 0.0


def test_target_value_refuses_another_answer_type():
    sample = Sample(id="s", task="t", parts=("q",), target=Target(answer_type=AnswerType.TEXT, value="x"))
    assert target_value(sample, AnswerType.TEXT) == "x"
    with pytest.raises(Unscorable, match="the target is a text, this reward compares a box"):
        target_value(sample, AnswerType.BOX)


def test_the_example_of_the_readme_works(tmp_path):
    readme = (REWARDS / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    rows = json.loads(re.search(r"```json\n(.*?)```", readme, re.DOTALL)[1])
    (tmp_path / "my_rewards.py").write_text(code)
    cases = [Case.model_validate(row) for row in rows]
    assert [case.fn for case in cases] == ["./my_rewards.py:close"]
    for case in cases:
        bound = bind(load_object(case.fn, tmp_path), case.args)
        assert case.failure_message(bound) == ""
        assert pickle.loads(pickle.dumps(bound)) == bound


def test_the_readme_lists_every_reward_and_its_options():
    readme = (REWARDS / "README.md").read_text()
    for name, fn in ALL.items():
        line = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert set(re.findall(r"`(\w+)`", line.split("|")[2])) == set(fn.options)
