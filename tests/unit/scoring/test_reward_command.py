"""`mmrl reward`: what it prints, its exit codes, and that lint finds what is wrong with a reward."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fork_server import run_forked
from PIL import Image

from mmrl.answer import ResponseFormat
from mmrl.cli import main
from mmrl.scoring.lint import lint_reward
from mmrl.scoring.registry import builtin_rewards, load_bound_reward
from mmrl.scoring.trial_responses import build_attacks, make_samples
from mmrl.types import AnswerType, UserError

HEAD = """\
import os, random, re, socket, time
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
NUMBER_ROW = {"fn": "./mine.py:r", "sample": {"answer_type": "number", "value": 3}, "expected": 1, "source": "a rule"}


@pytest.fixture
def write_reward(tmp_path):
    """Write a reward with the given body and return its name."""

    def write(body, declared="answer_types=(AnswerType.NUMBER,)"):
        path = tmp_path / "mine.py"
        path.write_text(HEAD.format(body=body, declared=declared))
        return f"{path}:r"

    return write


@pytest.fixture
def lint(write_reward, monkeypatch):
    """Lint a reward with the given body on one sample; return failed checks and paid attacks with their details."""
    monkeypatch.setattr("mmrl.scoring.lint._HUGE_CHARS", 10_000)

    def lint(body, declared="answer_types=(AnswerType.NUMBER,)"):
        bound = load_bound_reward(write_reward(body, declared), Path(), {})
        report = lint_reward(bound, make_samples((AnswerType.NUMBER,)))
        failed = {finding.check: finding.detail for finding in report.findings if not finding.ok}
        failed |= {attack.attack: attack.reason for attack in report.attacks if not attack.ok}
        assert report.ok == (not failed)
        return failed

    return lint


@pytest.mark.parametrize("answer", ["e", "swer", "E"])
def test_attacks_on_an_answer_that_is_part_of_a_tag_are_read_as_answers(answer):
    response_format = ResponseFormat()
    sample = make_samples((AnswerType.TEXT,))[0]
    target = replace(sample.target, value=answer)
    attacks = build_attacks(replace(sample, target=target), response_format, response_format.render(target))
    assert response_format.parse(attacks["all options"], AnswerType.TEXT).text == "A, B, C, D"
    assert attacks["right, before a wrong one"] == f"<answer>{answer}</answer><answer>nothing</answer>"


def test_list_names_every_reward_and_show_prints_formula_options_and_place(capsys):
    assert main(["reward", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name.removeprefix("mmrl_rewards.") in printed for name in builtin_rewards())
    assert main(["reward", "show", "number:exact"]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("|answer - target| <= tolerance", "option tolerance", "number.py:"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nmber:exact", "there is no reward 'nmber:exact'; did you mean 'number:exact'"),
        ("mmrl_rewards.number:exct", "did you mean 'exact'"),
        ("json:loads", "'json:loads' is not a reward"),
        ("no_colon", "there is no reward 'no_colon'"),
        ("mmrl.algo.group_rewards:kimi_length", "is a group reward, .* in `rewards.group_rewards`"),
        ("./no.py:f", "there is no file"),
    ],
)
def test_a_name_that_is_not_a_rewards_is_refused(name, words, capsys):
    assert main(["reward", "show", name]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_reward_in_a_module_at_the_top_of_the_path_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "mytools.py").write_text(HEAD.format(body="return 1.0", declared=""))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["reward", "show", "mytools:r"]) == 0
    assert capsys.readouterr().out.startswith("mytools:r  (`r`, 0 to 1")


def test_test_runs_the_rows_of_one_reward(capsys):
    assert main(["reward", "test", "number:exact", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "pass number:exact row 0" in printed and "FAIL" not in printed
    table = Path(__file__).parents[3] / "rewards" / "cases" / "number.json"
    num_rows = len(json.loads(table.read_text()))
    assert f"number:exact: {num_rows} of {num_rows} rows pass" in printed


def test_a_new_reward_passes_its_table_and_lint_from_any_folder(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "elsewhere"
    assert main(["reward", "new", "close", "--out", str(folder)]) == 0
    assert main(["reward", "test", str(folder / "close.json")]) == 0
    assert "close.json: 15 of 15 rows pass" in capsys.readouterr().out
    assert main(["reward", "lint", f"{folder}/close.py:close"]) == 0
    monkeypatch.chdir(folder)
    assert main(["reward", "test", "./close.py:close"]) == 0
    assert main(["reward", "new", "close"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["reward", "new", "not-python"]) == 2


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("answer_type", AnswerType)
def test_a_new_reward_of_each_kind_passes_its_table_and_lint(answer_type, looks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.lint._HUGE_CHARS", 10_000)
    options = ["--answer", answer_type, *["--looks"] * looks]
    assert main(["reward", "new", "mine", *options, "--out", str(tmp_path)]) == 0
    assert main(["reward", "test", str(tmp_path / "mine.json")]) == 0, capsys.readouterr().out
    assert len(json.loads((tmp_path / "mine.json").read_text())) >= 12
    assert main(["reward", "lint", f"{tmp_path}/mine.py:mine"]) == 0, capsys.readouterr().out
    code = (tmp_path / "mine.py").read_text()
    assert not re.search(r"NAME|TYPE|DOC|EXPRESSION|STANDARD|IMPORT|LOOKS|PIXELS", code)
    assert len(code.splitlines()) < 30 and f"AnswerType.{answer_type.name}" in code
    assert ("looks=True" in code) == looks == (tmp_path / "mine.png").exists()


def test_a_new_reward_that_looks_is_of_boxes_by_default(tmp_path, capsys):
    assert main(["reward", "new", "mine", "--looks", "--out", str(tmp_path)]) == 0
    assert "AnswerType.BOX" in (tmp_path / "mine.py").read_text()


def test_a_new_reward_of_lists_scores_two_empty_ones(tmp_path, capsys, monkeypatch):
    assert main(["reward", "new", "mine", "--answer", "list", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    sample = {"answer_type": "list", "value": []}
    for response, value in (("<answer>[]</answer>", 1.0), ('<answer>["a"]</answer>', 0.0)):
        assert try_reward(tmp_path, sample, "--response", response, fn="./mine.py:mine") == 0
        assert json.loads(capsys.readouterr().out)["value"] == value


def test_show_draws_a_row_that_names_a_picture(tmp_path, capsys):
    file = tmp_path / "case.png"
    assert main(["reward", "show", "look:likeness", "--png", str(file), "--row", "7"]) == 0
    drawn = Image.open(file).convert("RGB")
    # 80 x 60 pixels, eight times as large: the target's box begins at 40, 20 and the answer's at 41, 20.
    assert drawn.width == 640 and drawn.height > 480
    assert drawn.getpixel((320, 200)) == (0, 158, 115) and drawn.getpixel((328, 200)) == (230, 97, 0)
    for name, row, words in (
        ("look:likeness", "99", "has no row 99"),
        ("look:likeness", "17", "gone.png: no such file"),
        ("box:iou", "0", "names no picture"),
    ):
        assert main(["reward", "show", name, "--png", str(file), "--row", row]) == 2
        assert words in capsys.readouterr().err


def test_a_failing_row_shows_what_came_instead(write_reward, tmp_path, capsys):
    special = '{"None": None, "2": 2.0}.get(response.text, right * 1.0)'
    write_reward(f'if response.text == "boom": raise KeyError("oh")\n    return {special}')
    texts = ["<answer>3</answer>", "<answer>4</answer>", "boom", "None", "2"]
    (tmp_path / "t.json").write_text(json.dumps([NUMBER_ROW | {"response": text} for text in texts]))
    assert main(["reward", "test", str(tmp_path / "t.json")]) == 1
    printed = capsys.readouterr().out
    assert "FAIL t.json row 1 ./mine.py:r: expected 1.0, got 0.0" in printed and "source: a rule" in printed
    for part in ("1 of 5 rows pass", "raised KeyError: 'oh'", "returned None, which is not", "outside its range"):
        assert part in printed


BOX_SAMPLE = {"answer_type": "box", "value": [0, 0, 10, 10], "coordinates": "px_original", "image": [100, 100]}


def try_reward(tmp_path, sample, *words, fn="box:iou"):
    (tmp_path / "s.json").write_bytes(sample if isinstance(sample, bytes) else json.dumps(sample).encode())
    return main(["reward", "try", "--fn", fn, "--sample", str(tmp_path / "s.json"), *words])


def test_try_prints_value_and_reason(tmp_path, capsys):
    assert try_reward(tmp_path, BOX_SAMPLE, "--response", "<answer>[0, 0, 5, 10]</answer>") == 0
    reason = "IoU 0.50: [0, 0, 5, 10] vs [0, 0, 10, 10] px_original"
    assert json.loads(capsys.readouterr().out) == {"value": 0.5, "reason": reason}
    (tmp_path / "r.txt").write_text("<answer>[0, 0, 50, 100]</answer>")
    options = ("--args", '{"threshold": 0.9}', "--case", '{"coordinates": "norm_1000"}')
    assert try_reward(tmp_path, BOX_SAMPLE, "--response", f"@{tmp_path}/r.txt", *options) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 0.0
    assert try_reward(tmp_path, BOX_SAMPLE | {"value": [9, 0, 1, 1]}, "--response", "") == 0
    assert json.loads(capsys.readouterr().out)["value"] == "unscorable"


NUMBER_SAMPLE = {"answer_type": "number", "value": 3}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os; os._exit(0)", "its process died (mine.py:6)"),
        ("while True: pass", "hung for 0.5 s (mine.py:6)"),
        ("return float('nan')", "returned nan, outside its range, 0 to 1"),
    ],
)
def test_a_reward_that_hangs_or_ends_its_process_is_reported(write_reward, tmp_path, capfd, monkeypatch, body, reason):
    monkeypatch.setattr("mmrl.scoring.reward_workers.FIRST_CALL_TIMEOUT_S", 0.5)
    write_reward(f"print('called')\n    {body}")
    monkeypatch.chdir(tmp_path)
    assert try_reward(tmp_path, NUMBER_SAMPLE, "--response", "x", fn="./mine.py:r") == 1
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == {"value": None, "reason": reason}
    (tmp_path / "t.json").write_text(json.dumps([NUMBER_ROW | {"response": "x"}]))
    assert main(["reward", "test", str(tmp_path / "t.json")]) == 1
    assert f"reason: {reason}" in capfd.readouterr().out


@pytest.mark.parametrize("declared", ["answer_types=(AnswerType.NUMBER,)", ""])
def test_lint_names_a_reward_whose_first_call_hangs_and_ends(write_reward, capsys, monkeypatch, declared):
    monkeypatch.setattr("mmrl.scoring.reward_workers.FIRST_CALL_TIMEOUT_S", 0.5)
    name = write_reward("while True: pass", declared)
    started_at = time.monotonic()
    assert main(["reward", "lint", name]) == 2
    assert time.monotonic() - started_at < 15.0  # one deadline, not one for each of the attacks
    assert "reward 'r' (mine.py:6), a number target, an empty answer: hung for 0.5 s" in capsys.readouterr().err


def test_lint_names_a_reward_that_hangs_on_the_correct_answer_and_ends(write_reward, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.reward_workers.FIRST_CALL_TIMEOUT_S", 0.5)
    assert main(["reward", "lint", write_reward("while right: pass\n    return 0.0")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 1 and "first call: the correct answer: hung for 0.5 s (mine.py:6)" in printed


def test_a_reward_may_declare_a_longer_first_call(write_reward, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.reward_workers.FIRST_CALL_TIMEOUT_S", 0.2)
    write_reward("time.sleep(0.6); return 1.0", "answer_types=(AnswerType.NUMBER,), timeout_s=60.0")
    monkeypatch.chdir(tmp_path)
    assert try_reward(tmp_path, NUMBER_SAMPLE, "--response", "x", fn="./mine.py:r") == 0
    assert json.loads(capsys.readouterr().out)["value"] == 1.0


def test_try_gives_file_and_line_of_an_error(write_reward, tmp_path, capsys, monkeypatch):
    write_reward("pass\n    return int('no')")
    monkeypatch.chdir(tmp_path)
    assert try_reward(tmp_path, NUMBER_SAMPLE, "--response", "x", fn="./mine.py:r") == 1
    reason = "raised ValueError: invalid literal for int() with base 10: 'no' (mine.py:11)"
    assert json.loads(capsys.readouterr().out) == {"value": None, "reason": reason}


def test_what_a_reward_prints_is_shown(write_reward, tmp_path, capfd, monkeypatch):
    write_reward("print('called')\n    return 1.0")
    monkeypatch.chdir(tmp_path)
    assert try_reward(tmp_path, NUMBER_SAMPLE, "--response", "x", fn="./mine.py:r") == 0
    assert "called" in capfd.readouterr().out


def test_mistakes_in_names_say_what_to_write(capsys):
    assert main(["reward", "show", "./reward.py"]) == 2
    assert "'./reward.py' names no function; write ./reward.py:FUNCTION" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reward", "new", "mine", "--answer", "word"])
    assert "invalid choice: 'word' (choose from 'text', 'choice', 'number'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sample", "options", "words"),
    [
        (b"{", ["--response", "x"], "s.json: Invalid JSON"),
        (b"\xff\xfe", ["--response", "x"], "s.json: Invalid JSON"),
        (b'{"answer_type": "box"}', ["--response", "x"], "s.json: value: Field required"),
        (BOX_SAMPLE, ["--response", "x", "--sample", "gone.json"], "cannot read the sample gone.json"),
        (BOX_SAMPLE, ["--response", "x", "--case", '{"frmae": 1}'], "--case: unknown key 'frmae'; known keys: fn, "),
        (BOX_SAMPLE, ["--response", "@latin.txt"], "latin.txt: cannot be read: it is not UTF-8 text"),
        (BOX_SAMPLE, ["--response", "@gone.txt"], "@gone.txt: cannot be read: No such file or directory"),
    ],
)
def test_try_refuses_what_it_cannot_read(tmp_path, sample, options, words, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"<answer>\xff\xfe3</answer>")
    assert try_reward(tmp_path, sample, *options) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_every_reward_of_ours_is_fit():
    # A tenth of the size takes a tenth of the time, and what is not linear exceeds its limit with that, too.
    code = "import sys; from mmrl.scoring import lint; lint._HUGE_CHARS //= 10; from mmrl.cli import main"
    done = run_forked("-c", f"{code}; sys.exit(main(['reward', 'lint']))", light=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: fit" in done.stdout for name in builtin_rewards())


@pytest.mark.parametrize(
    ("body", "check", "details"),
    [
        ("return 2.0", "range", ["returned 2.0, not a number from 0 to 1"]),
        ("return 1 / len(response.text)", "range", ["ZeroDivisionError"]),
        ('return os._exit(1) if "347" not in response.text else right * 1.0', "range", ["its process died"]),
        ("CALLS.append(1); return 1 / len(CALLS)", "repeatable", ["gave another value"]),
        (
            "random.random(), random.choice([1, 2]), time.time(), datetime.now(), os.listdir('.')\n"
            "    open(__file__).close(), socket.socket().close()\n"
            "    return right * 1.0",
            "pure",
            ["random.random", "random.getrandbits", "time.time", "now", "os.listdir", "open", "socket."],
        ),
        ("time.sleep(0.06); return right * 1.0", "speed", ["at most 50 ms"]),
    ],
)
def test_lint_finds_a_reward_that_breaks_a_rule(lint, body, check, details):
    found = lint(body)[check]
    assert all(detail in found for detail in details)


def test_a_library_may_read_the_clock_while_it_is_imported(lint, tmp_path, monkeypatch):
    (tmp_path / "slow_library.py").write_text("import os, time\nSTARTED = time.time() + len(os.urandom(4))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert lint("import slow_library; return right * 1.0") == {}


def test_lint_finds_what_cannot_be_pickled(write_reward):
    bound = load_bound_reward(write_reward("return right * 1.0"), Path(), {"factor": 2.0})
    del sys.modules[bound.reward.fn.__module__]
    report = lint_reward(bound, make_samples((AnswerType.NUMBER,)))
    assert [finding.check for finding in report.findings if not finding.ok] == ["picklable"]


def test_a_reward_with_another_signature_is_refused_by_file_and_line(tmp_path):
    (tmp_path / "odd.py").write_text(
        "from mmrl_rewards.contract import reward\n\n"
        "@reward(name='odd')\ndef odd(response, *, credit: float = 0.5):\n    return 0.0\n"
    )
    with pytest.raises(UserError, match=r"odd\.py:3: odd: .*\(response, sample\)"):
        load_bound_reward(f"{tmp_path}/odd.py:odd", Path(), {"credit": 0.5})


@pytest.mark.slow
def test_lint_ends_a_reward_that_hangs(lint, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.lint._TIMEOUT_S", 5.0)
    body = 'return bool(re.match("(a|aa)+$", "a" * 60 + "b")) if response.text[:3] == "999" else right * 1.0'
    assert lint(body) == {"10 MB response": "number: hung for 5 s"}


@pytest.mark.parametrize(
    ("condition", "attacks"),
    [
        ("str(target) in response.text", {"answer in the thinking alone", "right, before a wrong one"}),
        (
            "not response.text or 'Score: 1.0' in response.text or '99, 100' in response.text",
            {"empty", "judge injection", "number dump"},
        ),
        ("len(response.text) > 999_000", {"1 MB of text"}),
    ],
)
def test_lint_finds_a_reward_that_pays_an_attack(lint, condition, attacks):
    assert attacks <= lint(f"return 1.0 if {condition} else right * 1.0").keys()


TOLERANCE = "answer_types=(AnswerType.NUMBER,), attack_tolerance={{'{}': 0.5}}"
PAYS_EMPTY = "return 0.5 if not response.text else right * 1.0"


def test_an_attack_may_earn_the_declared_tolerance(lint):
    assert lint(PAYS_EMPTY, TOLERANCE.format("empty")) == {}


def test_a_tolerance_for_an_unknown_attack_is_refused(lint):
    with pytest.raises(UserError, match="there is no attack 'emtpy'"):
        lint(PAYS_EMPTY, TOLERANCE.format("emtpy"))


def test_lint_takes_samples_from_a_table(write_reward, tmp_path, capsys):
    name = write_reward('if "unit" not in sample.meta: raise Unscorable("no unit")\n    return right * 1.0')
    assert main(["reward", "lint", name]) == 2
    words = "'r' can score no plain sample (no unit), so lint takes samples from its case table: cannot read the case"
    assert words in capsys.readouterr().err
    row = NUMBER_ROW | {"response": "", "sample": {"answer_type": "number", "value": 347, "meta": {"unit": "cm"}}}
    table = tmp_path / "mine.json"
    table.write_text(json.dumps([row | {"expected": "unscorable"}]))
    assert main(["reward", "lint", name, "--cases", str(table)]) == 2
    assert "no row of the case table of reward 'r' expects a value" in capsys.readouterr().err
    table.write_text(json.dumps([row]))
    assert main(["reward", "lint", name]) == 0
    assert ": fit" in capsys.readouterr().out


def test_lint_of_a_reward_that_looks_says_that_its_table_must_name_pictures(write_reward, tmp_path, capsys):
    name = write_reward("sample.image(0); return right * 1.0", "answer_types=(AnswerType.NUMBER,), looks=True")
    assert main(["reward", "lint", name]) == 2
    words = "reward 'r' looks at pictures, so lint takes samples from its case table: cannot read the case table"
    assert words in capsys.readouterr().err
    (tmp_path / "mine.json").write_text(json.dumps([NUMBER_ROW | {"response": ""}]))
    assert main(["reward", "lint", name]) == 2
    error = capsys.readouterr().err
    assert "no row of its case table names one" in error and "--looks` shows how; the first says: " in error


GROUP_REWARDS = """
from mmrl import Group
from mmrl_rewards import reward

def plain(group, *, factor: int = 1): return []
def named_otherwise(rollouts: Group): return []
"""


@pytest.mark.parametrize("command", ["lint", "show", "test"])
@pytest.mark.parametrize("name", ["plain", "named_otherwise"])
def test_a_group_reward_is_sent_to_where_it_belongs(command, name, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(GROUP_REWARDS)
    (tmp_path / "mine.json").write_text(json.dumps([NUMBER_ROW | {"fn": f"./mine.py:{name}", "response": "3"}]))
    target = str(tmp_path / "mine.json") if command == "test" else f"{tmp_path}/mine.py:{name}"
    assert main(["reward", command, target]) == 2
    assert re.search("is a group reward, .*`rewards.group_rewards`.*mmrl train CONFIG", capsys.readouterr().err)


@pytest.mark.parametrize("postponed", ["", "from __future__ import annotations\n"])
def test_a_group_reward_with_the_decorator_of_rewards_is_told_to_leave_it_out(postponed, tmp_path, capsys):
    decorated = '@reward(name="x")\ndef x(rollouts: Group): return []\n'
    (tmp_path / "mine.py").write_text(f"{postponed}{GROUP_REWARDS}\n{decorated}")
    assert main(["reward", "lint", f"{tmp_path}/mine.py:x"]) == 2
    assert "leave out @reward, and name it in `rewards.group_rewards`" in capsys.readouterr().err
