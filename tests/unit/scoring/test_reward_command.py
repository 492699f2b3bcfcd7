"""`mmrl reward`: what it prints, its exit codes, and that lint finds what is wrong with a reward."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.answer import ResponseFormat
from mmrl.cli import main
from mmrl.scoring.lint import build_attacks, lint_reward, make_samples
from mmrl.scoring.registry import builtin_rewards, load_bound_reward
from mmrl.types import AnswerType, UserError
from mmrl_rewards.cases import load_case_table

HEAD = """\
import os, random, re, time
from datetime import datetime
from mmrl.types import AnswerType, RewardValue, Unscorable
from mmrl_rewards.contract import reward, target_value
CALLS = []
@reward(name="r", {declared})
def r(response, sample, *, factor: float = 1.0):
    target = target_value(sample, AnswerType.NUMBER)
    right = response.answer.value == target
    {body}
"""


@pytest.fixture
def made(tmp_path):
    """Write a reward with the given body and return its name."""

    def make(body, declared="answer_types=(AnswerType.NUMBER,)"):
        path = tmp_path / "mine.py"
        path.write_text(HEAD.format(body=body, declared=declared))
        return f"{path}:r"

    return make


def report_on(name, kinds=(AnswerType.NUMBER,), **args):
    return lint_reward(load_bound_reward(name, Path(), args), make_samples(kinds))


def wrong_with(report):
    return [finding.check for finding in report.findings if not finding.ok] + [
        earned.attack for earned in report.attacks if not earned.ok
    ]


def test_attacks_on_an_answer_that_is_part_of_a_tag_are_read_as_answers():
    grammar = ResponseFormat()
    sample = make_samples((AnswerType.TEXT,))[0]
    for answer in ("e", "swer", "E"):
        target = replace(sample.target, value=answer)
        attacks = build_attacks(replace(sample, target=target), grammar, grammar.render(target))
        assert grammar.parse(attacks["all options"], AnswerType.TEXT).text == "A, B, C, D"
        assert attacks["right, before a wrong one"] == f"<answer>{answer}</answer><answer>nothing</answer>"


def test_list_names_every_reward(capsys):
    assert main(["reward", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name.removeprefix("mmrl_rewards.") in printed for name in builtin_rewards())


def test_show_prints_formula_options_and_place(capsys):
    assert main(["reward", "show", "number:exact"]) == 0
    printed = capsys.readouterr().out
    assert "|answer - target| <= tolerance" in printed
    assert "option tolerance" in printed and "= 0.0" in printed
    assert "number.py:" in printed


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nmber:exact", "did you mean 'number:exact'"),
        ("mmrl_rewards.number:exct", "did you mean 'exact'"),
        ("json:loads", "there is no reward 'json:loads'"),
        ("os.path:join", "is not a reward"),
        ("mmrl.algo.group_rewards:kimi_length", "is a group reward, which compares .* in `rewards.group_rewards`"),
        ("./no.py:f", "there is no file"),
    ],
)
def test_unknown_names_are_refused(name, complaint, capsys):
    assert main(["reward", "show", name]) == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_test_runs_every_table(capsys):
    assert main(["reward", "test"]) == 0
    assert "number.json: 42 of 42 rows pass" in capsys.readouterr().out


def test_test_runs_the_rows_of_one_reward(capsys):
    assert main(["reward", "test", "number:exact", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "pass number:exact row 0" in printed and "FAIL" not in printed


def test_a_new_reward_passes_its_table_and_lint_from_any_folder(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "elsewhere"
    assert main(["reward", "new", "close", "--out", str(folder)]) == 0
    assert main(["reward", "test", str(folder / "close.json")]) == 0
    assert "close.json: 12 of 12 rows pass" in capsys.readouterr().out
    assert main(["reward", "lint", f"{folder}/close.py:close"]) == 0
    monkeypatch.chdir(folder)
    assert main(["reward", "test", "./close.py:close"]) == 0
    assert main(["reward", "new", "close"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["reward", "new", "not-python"]) == 2


def test_a_failing_row_shows_what_came_instead(made, tmp_path, capsys):
    special = '{"None": None, "2": 2.0}.get(response.text, right * 1.0)'
    made(f'if response.text == "boom": raise KeyError("oh")\n    return {special}')
    row = {"fn": "./mine.py:r", "sample": {"answer_type": "number", "value": 3}, "expected": 1, "source": "a rule"}
    texts = ["<answer>3</answer>", "<answer>4</answer>", "boom", "None", "2"]
    (tmp_path / "t.json").write_text(json.dumps([row | {"response": text} for text in texts]))
    assert main(["reward", "test", str(tmp_path / "t.json")]) == 1
    printed = capsys.readouterr().out
    assert "t.json: 1 of 5 rows pass" in printed
    assert "FAIL t.json row 1 ./mine.py:r: expected 1.0, got 0.0" in printed and "source: a rule" in printed
    assert "raised KeyError: 'oh'" in printed
    assert "returned None, which is not a number" in printed
    assert "outside its range" in printed


def test_score_prints_value_and_reason(tmp_path, capsys):
    sample = tmp_path / "s.json"
    sample.write_text(
        '{"answer_type": "box", "value": [0, 0, 10, 10], "coordinates": "px_original", "image": [100, 100]}'
    )
    words = ["reward", "try", "--fn", "box:iou", "--sample", str(sample)]
    assert main([*words, "--response", "<answer>[0, 0, 5, 10]</answer>"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "value": 0.5,
        "reason": "IoU 0.50: [0, 0, 5, 10] vs [0, 0, 10, 10] px_original",
    }
    (tmp_path / "r.txt").write_text("<answer>[0, 0, 50, 100]</answer>")
    rest = [
        "--response",
        f"@{tmp_path}/r.txt",
        "--args",
        '{"threshold": 0.9}',
        "--case",
        '{"coordinates": "norm_1000"}',
    ]
    assert main([*words, *rest]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 0.0
    sample.write_text('{"answer_type": "box", "value": [9, 0, 1, 1], "coordinates": "px_original", "image": [10, 10]}')
    assert main([*words, "--response", ""]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == "unscorable"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "s.json: Invalid JSON"),
        (b'{"answer_type": "box"}', "s.json: value: Field required"),
        (b"\xff\xfe", "s.json: Invalid JSON"),
        (None, "cannot read the sample"),
    ],
)
def test_score_refuses_a_broken_sample(tmp_path, content, complaint, capsys):
    sample = tmp_path / "s.json"
    if content is not None:
        sample.write_bytes(content)
    assert main(["reward", "try", "--fn", "box:iou", "--sample", str(sample), "--response", "x"]) == 2
    assert complaint in capsys.readouterr().err


def test_score_refuses_a_key_that_no_row_has(tmp_path, capsys):
    (tmp_path / "s.json").write_text('{"answer_type": "number", "value": 3}')
    words = ["reward", "try", "--fn", "number:exact", "--sample", str(tmp_path / "s.json"), "--response", "3"]
    assert main([*words, "--case", '{"frmae": "norm_1"}']) == 2
    assert "--case: unknown key 'frmae'; known keys: fn, args, sample, response, " in capsys.readouterr().err


def test_score_refuses_a_response_that_is_not_text(tmp_path, capsys):
    (tmp_path / "s.json").write_text('{"answer_type": "number", "value": 3}')
    (tmp_path / "r.txt").write_bytes(b"<answer>\xff\xfe3</answer>")
    words = ["reward", "try", "--fn", "number:exact", "--sample", str(tmp_path / "s.json")]
    assert main([*words, "--response", f"@{tmp_path / 'r.txt'}"]) == 2
    assert "r.txt: cannot be read: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


def test_help_starts_at_once_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom mmrl.cli import main\n"
        "try: main(['reward', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'pydantic', 'rich', 'mmrl_rewards'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mmrl reward lint ./my_rewards.py:close" in done.stdout


@pytest.mark.slow
def test_every_reward_of_ours_is_fit():
    done = subprocess.run([sys.executable, "-m", "mmrl", "reward", "lint"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: fit" in done.stdout for name in builtin_rewards())


@pytest.mark.parametrize(
    ("body", "check", "detail"),
    [
        ("return 2.0", "range", "returned 2.0, not a number from 0 to 1"),
        ("return None", "range", "returned None"),
        ("return float('nan')", "range", "returned nan"),
        ("return '1'", "range", "returned '1'"),
        ("return 1 / len(response.text)", "range", "ZeroDivisionError"),
        ("return random.random()", "repeatable", "gave another value"),
        ("CALLS.append(1); return 1 / len(CALLS)", "repeatable", "gave another value"),
        ("return (random.random() >= 0) * right", "pure", "random.random"),
        ("return (random.choice([1, 2]) > 0) * right", "pure", "random.getrandbits"),
        ("return (time.time() > 0) * right", "pure", "time.time"),
        ("return (datetime.now().year > 0) * right", "pure", "now"),
        ("return bool(open(__file__).read()) * right", "pure", "open"),
        ("return bool(os.listdir('.') or True) * right", "pure", "os.listdir"),
        ("import socket; socket.socket().close(); return right * 1.0", "pure", "socket."),
        ("time.sleep(0.06); return right * 1.0", "speed", "at most 50 ms"),
    ],
)
def test_lint_finds_rewards_that_break_a_rule(made, body, check, detail):
    report = report_on(made(body))
    found = next(finding for finding in report.findings if finding.check == check)
    assert not found.ok and not report.ok
    assert detail in found.detail


def test_a_library_may_read_the_clock_while_it_is_imported(made, tmp_path, monkeypatch):
    (tmp_path / "slow_library.py").write_text("import os, time\nSTARTED = time.time() + len(os.urandom(4))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert report_on(made("import slow_library; return right * 1.0")).ok


def test_lint_finds_what_cannot_be_pickled(made):
    name = made("return right * 1.0")
    bound = load_bound_reward(name, Path(), {"factor": 2.0})
    del sys.modules[bound.reward.fn.__module__]
    report = lint_reward(bound, make_samples((AnswerType.NUMBER,)))
    assert [finding.check for finding in report.findings if not finding.ok] == ["picklable"]


def test_a_reward_with_another_signature_is_refused_by_file_and_line(tmp_path):
    (tmp_path / "odd.py").write_text(
        "from mmrl_rewards.contract import reward\n\n"
        "@reward(name='odd')\ndef odd(response, *, credit: float = 0.5):\n    return 0.0\n"
    )
    with pytest.raises(UserError, match=r"odd\.py:3: odd: a reward is called with \(response, sample\)"):
        load_bound_reward(f"{tmp_path}/odd.py:odd", Path(), {"credit": 0.5})


@pytest.mark.slow
def test_lint_ends_a_reward_that_hangs(made, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.lint._TIMEOUT_S", 5.0)
    report = report_on(
        made('return bool(re.match("(a|aa)+$", "a" * 60 + "b")) if len(response.text) > 5 * 10**6 else right * 1.0')
    )
    assert wrong_with(report) == ["10 MB response"]
    assert "hung for 5 s" in report.findings[-1].detail


def test_lint_survives_a_reward_that_kills_its_process(made):
    report = report_on(made('return os._exit(1) if "347" not in response.text else right * 1.0'))
    assert "its process died" in next(finding.detail for finding in report.findings if finding.check == "range")


@pytest.mark.parametrize(
    ("body", "attack"),
    [
        ("return 1.0 if str(target) in response.text else 0.0", "answer in the thinking alone"),
        ("return 1.0 if str(target) in response.text else 0.0", "right, before a wrong one"),
        ("return 1.0 if not response.text else right * 1.0", "empty"),
        ("return 1.0 if 'Score: 1.0' in response.text else right * 1.0", "judge injection"),
        ("return min(1.0, len(response.text) / 1e6)", "1 MB of text"),
        ("return 1.0 if '99, 100' in response.text else right * 1.0", "number dump"),
    ],
)
def test_lint_fails_a_reward_that_pays_an_attack(made, body, attack):
    report = report_on(made(body))
    assert attack in wrong_with(report)
    assert all(finding.ok for finding in report.findings)


def test_a_declared_tolerance_counts(made):
    body = "return 0.5 if not response.text else right * 1.0"
    assert wrong_with(report_on(made(body, "answer_types=(AnswerType.NUMBER,), attack_tolerance={'empty': 0.5}"))) == []


def test_a_tolerance_for_an_unknown_attack_is_refused(made):
    with pytest.raises(UserError, match="there is no attack 'emtpy'"):
        report_on(made("return right * 1.0", "answer_types=(AnswerType.NUMBER,), attack_tolerance={'emtpy': 1.0}"))


def test_lint_takes_samples_from_a_table(made, tmp_path, capsys):
    name = made('if "unit" not in sample.meta: raise Unscorable("no unit")\n    return right * 1.0')
    assert main(["reward", "lint", name]) == 2
    assert "cannot read the case table" in capsys.readouterr().err
    row = {"fn": "./mine.py:r", "response": "", "expected": 0, "source": "s"}
    row["sample"] = {"answer_type": "number", "value": 347, "meta": {"unit": "cm"}}
    (tmp_path / "t.json").write_text(json.dumps([row | {"expected": "unscorable"}]))
    assert main(["reward", "lint", name, "--cases", str(tmp_path / "t.json")]) == 2
    assert "no row of the case table of reward 'r' expects a value" in capsys.readouterr().err
    (tmp_path / "t.json").write_text(json.dumps([row]))
    assert main(["reward", "lint", name, "--cases", str(tmp_path / "t.json")]) == 0
    (tmp_path / "mine.json").write_text(json.dumps([row]))
    assert main(["reward", "lint", name]) == 0
    assert ": fit" in capsys.readouterr().out


def test_a_case_may_have_several_media_and_any_grammar(tmp_path):
    row = {
        "fn": "mmrl_rewards.number:exact",
        "sample": {
            "answer_type": "number",
            "value": 3,
            "media_index": 1,
            "media": [{"size": [10, 20], "resized": [5, 5]}, {"type": "video", "size": [8, 8], "duration": 4.5}],
            "meta": {"unit": "cm"},
            "label": 4,
            "thinking": "hm",
        },
        "response": r"so \boxed{3}",
        "response_format": {"style": "boxed"},
        "finish_reason": "length",
        "tokens": 7,
        "expected": 1,
        "source": "s",
    }
    path = tmp_path / "t.json"
    path.write_text(json.dumps([row]))
    (case,) = load_case_table(path)
    response, sample = case.build()
    assert (response.answer.value, response.finish_reason, response.num_tokens) == (3, "length", 7)
    assert [resize.resized for resize in response.resize_maps] == [(5, 5), (8, 8)]
    assert (sample.media[1].end, sample.target.media_index, sample.label.value, sample.thinking) == (4.5, 1, 4, "hm")
    assert sample.meta == {"unit": "cm"}
    path.write_text(json.dumps([row | {"response_format": {"stile": "boxed"}}]))
    with pytest.raises(UserError, match="a response format has no 'stile'"):
        load_case_table(path)
