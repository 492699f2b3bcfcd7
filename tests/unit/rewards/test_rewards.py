"""Rewards: their case tables, their contract, hostile responses, and the worked example of the README."""

import json
import pickle
import random
import re
from pathlib import Path

import pytest
from factories import make_sample

from mmrl.scoring.registry import builtin_rewards, case_media
from mmrl.types import AnswerType, RewardValue, Unscorable, UserError, use_media_opener
from mmrl.utils.plugins import load_function
from mmrl_rewards import box, gui, number, text
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import bind, reward, target_value

REWARDS = Path(__file__).parents[3] / "rewards"
ALL = builtin_rewards()
TABLES = {path.stem: load_case_table(path) for path in sorted((REWARDS / "cases").glob("*.json"))}
CASES = {name: [case for table in TABLES.values() for case in table if case.fn == name] for name in ALL}
NUMBER_CASE = {"sample": {"answer_type": "number", "value": 3}, "response": "<answer>4</answer>", "source": "s"}


@pytest.fixture(autouse=True)
def open_pictures():
    with use_media_opener(case_media(REWARDS / "cases")):
        yield


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_of_a_case_table_passes(table):
    for row, case in enumerate(table):
        assert case.failure_message(bind(ALL[case.fn], case.args)) == "", f"row {row}"


@pytest.mark.parametrize("name", ALL)
def test_a_reward_states_its_source_pickles_and_repeats_its_value_with_a_short_reason(name):
    fn = ALL[name]
    assert "Source:" in fn.doc and "Departures:" in fn.doc
    assert pickle.loads(pickle.dumps(fn)) is fn
    assert len(CASES[name]) >= 14
    for case in CASES[name]:
        if case.expected != "unscorable":
            bound = bind(fn, case.args)
            assert pickle.loads(pickle.dumps(bound)) == bound
            check_value(bound, bound(*case.build()))
            assert bound(*case.build()) == bound(*case.build())


def check_value(bound, got):
    assert isinstance(got, RewardValue)
    assert bound.reward.low <= got.value <= bound.reward.high
    assert 0 < len(got.reason) < 250
    assert "\n" not in got.reason


NOISE = (
    *("<answer>", "</answer>", "<think>", "</think>", "[", "]", "{", "}", '"', ":", ",", "1", "-", ".", "e9"),
    *("B", "yes", "no", '{"action": "click"', '"coordinate": [1, 2]', "NaN", "null", "\\frac", "\\boxed{", "$"),
    *("%", "cm", "°", "٣"),
    *("\x00", "\ud800", "\u202e", "\U0001f600", "３", "²", "\n", " ", "+", "!", "=", "<", ">"),
)


@pytest.mark.parametrize("name", [name for name, fn in ALL.items() if not fn.uses_service])
def test_a_response_of_noise_gets_a_value(name):
    rng = random.Random(9)
    case = next(case for case in CASES[name] if case.expected != "unscorable")
    bound = bind(ALL[name], case.args)
    for _ in range(100):
        noise = "".join(rng.choices(NOISE, k=rng.randint(0, 12)))
        for response in (noise, f"<answer>{noise}</answer>"):
            check_value(bound, bound(*case.model_copy(update={"response": response, "repeat": 1}).build()))


def test_a_failing_case_says_what_it_expected():
    case = Case.model_validate({"fn": "", "expected": 1, **NUMBER_CASE})
    assert "expected 1.0, got 0.0 (4, expected 3); source: s" in case.failure_message(bind(number.exact, {}))
    unscorable = case.model_copy(update={"expected": "unscorable"})
    assert "expected unscorable, got 0.0" in unscorable.failure_message(bind(number.exact, {}))
    assert "it is unscorable" in case.failure_message(bind(text.exact, {}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"fn": "m:f"}]', "row 0.sample: Field required"),
        ('[{"fn": "m:f", "smaple": 1}]', r"row 0: unknown key 'smaple'.* fn, args, sample, response, .*, tolerance"),
        ('[{"fn": "m:f", "sample": {"kind": "box"}}]', "row 0.sample: unknown key 'kind'.* answer_type, "),
        (json.dumps([NUMBER_CASE | {"fn": "", "expected": 1, "response_format": {"stile": "boxed"}}]), "'stile'"),
        ("[", "Invalid JSON"),
        (None, "cannot read the case table"),
    ],
)
def test_a_broken_table_is_refused_by_file_row_and_key(tmp_path, content, words):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        load_case_table(path)
    assert "table.json" in str(caught.value)


def test_a_case_may_have_several_media_and_any_response_format():
    media = [{"size": [10, 20], "resized": [5, 5]}, {"type": "video", "size": [8, 8], "duration": 4.5}]
    sample = {"answer_type": "number", "value": 3, "media_index": 1, "media": media, "meta": {"unit": "cm"}}
    case = Case.model_validate(
        {
            **{"fn": "", "sample": {**sample, "label": 4, "thinking": "hm"}, "expected": 1, "source": "s"},
            **{"response": r"so \boxed{3}", "response_format": {"style": "boxed"}},
            **{"finish_reason": "length", "tokens": 7},
        }
    )
    response, sample = case.build()
    assert (response.answer.value, response.finish_reason, response.num_tokens) == (3, "length", 7)
    assert [resize.resized for resize in response.resize_maps] == [(5, 5), (8, 8)]
    assert (sample.media[1].end, sample.target.media_index, sample.label.value, sample.thinking) == (4.5, 1, 4, "hm")
    assert sample.meta == {"unit": "cm"}


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (box.iou, {"thresold": 0.5}, "reward 'iou' has no option 'thresold'; did you mean 'threshold'"),
        (gui.action, {"x": 1}, "no option 'x'; it has none"),
        (box.iou, {"threshold": 1.5}, "option 'threshold' = 1.5: .* less than or equal to 1"),
        (len, {}, "is not a reward: decorate"),
    ],
)
def test_bind_refuses_what_is_not_a_reward_or_its_option(fn, args, words):
    with pytest.raises(UserError, match=words):
        bind(fn, args)


def test_options_come_from_the_signature():
    @reward(name="r", low=-1.0)
    def fn(response, sample, *, corner: tuple[int, int], mode: str = "a") -> float:
        return corner[0] + (mode == "b")

    assert (fn.name, fn.low, fn.high) == ("r", -1.0, 1.0)
    assert {name: option.required for name, option in fn.options.items()} == {"corner": True, "mode": False}
    assert bind(fn, {"corner": [0, 1], "mode": "b"})(None, None) == 1


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"low": 1.0, "high": 1.0}, "range"),
        ({"high": float("inf")}, "range"),
        ({"attack_tolerance": {"empty": 1.5}}, "attack_tolerance .* from 0 to 1"),
        *(({"timeout_s": seconds}, f"timeout_s {seconds} ") for seconds in (0.0, -1.0, float("inf"), float("nan"))),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(declared, words):
    with pytest.raises(UserError, match=f"reward 'r': .*{words}"):
        reward(name="r", **declared)


def test_target_value_refuses_another_answer_type():
    sample = make_sample("x", AnswerType.TEXT)
    assert target_value(sample, AnswerType.TEXT) == "x"
    with pytest.raises(Unscorable, match="the target is a text, this reward compares a box"):
        target_value(sample, AnswerType.BOX)


def test_the_example_of_the_readme_works(tmp_path):
    readme = (REWARDS / "README.md").read_text()
    (tmp_path / "my_rewards.py").write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1])
    for row in json.loads(re.search(r"```json\n(.*?)```", readme, re.DOTALL)[1]):
        case = Case.model_validate(row)
        assert case.fn == "./my_rewards.py:close"
        assert case.failure_message(bind(load_function(case.fn, tmp_path, role="function"), case.args)) == ""


def test_the_readme_lists_every_reward_and_its_options():
    readme = (REWARDS / "README.md").read_text()
    for name, fn in ALL.items():
        line = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert set(re.findall(r"`(\w+)`", line.split("|")[2])) == set(fn.options)
