"""Names in YAML to functions, and their options."""

import signal
import sys
from enum import StrEnum
from typing import Literal

import pytest

from mmrl.types import UserError
from mmrl.utils import plugins
from mmrl.utils.plugin_args import read_plugin_options, validate_args
from mmrl.utils.plugins import describe_plugin_error, load_function, load_plugin


@pytest.fixture
def file(tmp_path):
    """Writes a Python file below tmp_path."""

    def file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return file


def test_a_module_and_a_file_resolve(tmp_path, file):
    file("mine.py", "def double(x):\n    return 2 * x\n")
    assert load_function("json:loads", tmp_path, role="function")("[1]") == [1]
    assert load_function("./mine.py:double", tmp_path, role="function")(3) == 6
    assert load_function(f"{tmp_path}/mine.py:double", tmp_path / "elsewhere", role="function")(3) == 6
    double = load_function("./mine.py:double", tmp_path, role="function")
    assert load_function("mine.py:double", tmp_path, role="function") is double


def test_two_files_of_one_name_do_not_collide(tmp_path, file):
    file("a/mine.py", "def fn():\n    return 'a'\n")
    file("b/mine.py", "def fn():\n    return 'b'\n")
    assert [load_function(f"{where}/mine.py:fn", tmp_path, role="function")() for where in "ab"] == ["a", "b"]


def test_a_files_module_is_registered_so_that_pickle_finds_what_it_defines(tmp_path, file):
    file("mine.py", "class Thing:\n    pass\n")
    thing = load_function("mine.py:Thing", tmp_path, role="function")
    assert vars(sys.modules[thing.__module__])["Thing"] is thing


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json", "names no function: write `package.module:function`"),
        (":loads", "names no function"),
        ("./mine:fn", "names no function"),  # .py forgotten
        ("json:load_s", "json has no 'load_s'; did you mean 'loads'?"),
        ("mmrl_in_memory.near_0a1b:near", "given to `mmrl.train` from the memory of a Python process, and this one"),
        ("json.no_such_module:fn", "there is no module 'json.no_such_module'"),
        ("absent.py:fn", "there is no file .*absent.py"),
    ],
)
def test_a_wrong_name_is_refused(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        load_function(name, tmp_path, role="function")


@pytest.mark.parametrize("inner", ["unheard_of", "helper"])
def test_an_import_error_inside_a_users_module_names_its_line(tmp_path, file, monkeypatch, inner):
    """`helpers.rewards` imports a missing `helper`: a beginning of its own name, but not its package."""
    file("helpers/__init__.py", "")
    file("helpers/rewards.py", f"import {inner}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "helpers", raising=False)
    with pytest.raises(UserError, match=rf"helpers/rewards.py:1: ModuleNotFoundError: .*{inner}"):
        load_function("helpers.rewards:fn", tmp_path, role="function")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ndef fn(:\n    pass\n", r"mine.py:2: syntax error: "),
        ("x = 1\n\nraise ValueError('no such thing')\n", "mine.py:3: ValueError: no such thing"),
        ("import sys\nsys.exit(3)\n", "mine.py:2: SystemExit: 3"),
        ("\nimport no_such_library\n", "mine.py:2: ModuleNotFoundError: No module named 'no_such_library'"),
        ("import json\njson.loads('{')\n", "mine.py:2: JSONDecodeError: "),  # the file's line, not that in json
        ("import broken\n", "broken.py:1: syntax error: "),
        (
            "from mmrl_rewards.contract import reward\n@reward(name='bad', low=1.0, high=0.0)\ndef fn(a, b): ...\n",
            "mine.py:2: reward 'bad': the range",
        ),
    ],
)
def test_an_error_while_importing_names_file_line_and_cause(tmp_path, file, monkeypatch, code, message):
    file("mine.py", code)
    file("broken.py", "def (\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(UserError, match=message) as caught:
            load_function("mine.py:fn", tmp_path, role="function")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("code", ["import time\ntime.sleep(60)\n", "x = 1\nwhile True:\n    pass\n"])
def test_an_import_that_hangs_is_ended_at_its_deadline(tmp_path, file, monkeypatch, code):
    file("mine.py", code)
    monkeypatch.setattr(plugins, "IMPORT_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match=r"mine.py:[23]: still not imported after 0.2 s"):
        load_function("mine.py:fn", tmp_path, role="function")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_error_in_a_call_names_role_file_line_and_cause(tmp_path, file):
    path = file("mine.py", "import ast\n\ndef fn(text):\n    return ast.literal_eval(text)\n")
    function = load_plugin("./mine.py:fn", tmp_path, {}, role="dataset", parameters=("text",))
    with pytest.raises(ValueError, match="malformed node") as caught:
        function("name")
    explained = describe_plugin_error(caught.value)
    assert explained.startswith("dataset './mine.py:fn' raised ValueError: malformed node")
    assert explained.endswith(f"({path}:4)")


def test_an_error_of_ours_is_not_blamed_on_a_plugin(tmp_path):
    with pytest.raises(UserError) as caught:
        load_function("json:zzz", tmp_path, role="function")
    assert describe_plugin_error(caught.value) is None


def test_a_plugin_has_its_options_bound(tmp_path, file):
    file("mine.py", "def fn(a, b, *, times: int = 1):\n    return (a + b) * times\n")
    fn = load_plugin("mine.py:fn", tmp_path, {"times": 3}, role="sum", parameters=("left", "right"))
    assert fn(1, 2) == 9


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("fn = 3\n", "sum 'mine.py:fn' is not a function, but int 3"),
        ("\ndef fn(a): ...\n", r"mine.py:2: fn: a sum is called with \(left, right\), but .* are \(a\)"),
        ("def fn(a, b, c): ...\n", r"mine.py:1: fn: a sum is called with \(left, right\), but .* are \(a, b, c\)"),
        ("def fn(*, a: int): ...\n", r"mine.py:1: fn: a sum is called with .* are \(none\)"),
        ("def fn(a, b, *, c): ...\n", r"mine.py:1: fn: option 'c' must come after `\*` and have a type"),
        ("def fn(a, b, c: int = 1): ...\n", r"option 'c' must come after `\*` and have a type"),
        ("def fn(a, b, *, c: 'Absent'): ...\n", "mine.py:1: fn: its type hints cannot be read: name 'Absent'"),
        ("def fn(a, b, *, d: int): ...\n", "sum 'mine.py:fn' has no option 'c'; it has 'd'"),
        ("def fn(a, b): ...\n", "sum 'mine.py:fn' has no option 'c'; it has none"),
        ("fn = dict\n", "dict: its parameters cannot be read"),
    ],
)
def test_a_plugin_with_a_wrong_signature_is_refused(tmp_path, file, code, message):
    file("mine.py", code)
    with pytest.raises(UserError, match=message):
        load_plugin("mine.py:fn", tmp_path, {"c": 1}, role="sum", parameters=("left", "right"))


class Color(StrEnum):
    RED = "red"


def plugin(
    place,
    *,
    size: int,
    ratio: float = 0.5,
    span: tuple[float, float] = (0.0, 1.0),
    color: Color = Color.RED,
    mode: Literal["a", "b"] = "a",
    limit: float | None = None,
):
    return place, size, ratio, span, color, mode, limit


OPTIONS = read_plugin_options(plugin, skip=1)


def test_options_are_the_keyword_only_parameters():
    assert list(OPTIONS) == ["size", "ratio", "span", "color", "mode", "limit"]
    assert OPTIONS["size"].required
    assert OPTIONS["ratio"] == (float, 0.5, False)


def test_options_take_the_types_of_the_signature():
    args = {"size": 3, "ratio": 1, "span": [0, 2.5], "color": "red", "mode": "b", "limit": None}
    settled = validate_args("plugin", OPTIONS, args)
    assert settled == args | {"span": (0.0, 2.5), "color": Color.RED}
    assert isinstance(settled["color"], Color)
    infinite = {"size": 3, "limit": float("inf")}
    assert validate_args("plugin", OPTIONS, infinite) == infinite


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "plugin needs the option 'size'"),
        ({"size": 3, "raito": 1.0}, "plugin has no option 'raito'; did you mean 'ratio'?"),
        ({"size": 3, "zzz": 1.0}, "no option 'zzz'; it has 'size', 'ratio'"),
        ({"size": "3"}, "option 'size' = '3': must be a valid integer"),
        ({"size": True}, "option 'size' = True"),
        ({"size": 3, "span": [1]}, r"option 'span' = \[1\]"),
        ({"size": 3, "color": "blue"}, "option 'color' = 'blue': must be 'red'"),
        ({"size": 3, "mode": "c"}, "option 'mode' = 'c': must be 'a' or 'b'"),
    ],
)
def test_wrong_options_are_refused(args, message):
    with pytest.raises(UserError, match=message):
        validate_args("plugin", OPTIONS, args)
