"""Functions that exist in memory alone: their names in a config, their digests, and their copies for workers."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mmrl.api.functions import name_function, name_rows, replace_functions
from mmrl.utils.plugins import load_function
from mmrl_rewards import number

ROOT = Path(__file__).parents[3]


def make_function(value, *, default=1):
    def score(call, sample, *, bonus: int = default):
        return helper(value) + bonus

    return score


def helper(value):
    return value


def test_a_function_of_a_package_is_named_by_its_module():
    assert name_function(number.exact) == "mmrl_rewards.number:exact"


def test_another_function_is_found_by_its_name_in_memory():
    score = make_function(2)
    name = name_function(score)
    module, _, attribute = name.partition(":")
    assert module.startswith("mmrl_in_memory.score_") and attribute == "score"
    assert load_function(name, Path("/nowhere"), role="tool") is score
    assert name_function(lambda context: []).endswith(":function")
    assert name_function(partial(score, bonus=3)).endswith(":score")


def test_the_name_changes_with_code_and_constants_and_not_with_what_may_change():
    name = name_function(make_function(2))
    assert name_function(make_function(2)) == name
    assert name_function(make_function(3)) != name
    assert name_function(make_function(2, default=4)) != name
    assert name_function(partial(make_function(2), bonus=1)) != name_function(partial(make_function(2), bonus=5))
    assert name_function(make_function([2])) == name_function(make_function([3]))


def test_the_name_changes_with_a_function_of_the_same_module_that_is_called(monkeypatch):
    name = name_function(make_function(2))
    monkeypatch.setitem(globals(), "helper", lambda value: value * 7)
    assert name_function(make_function(2)) != name


SCRIPT = """
from mmrl.api.functions import name_function
LIMIT = 3
WORDS = frozenset({"a", "b", "c", "d"})
class Scale:
    factor = 2
    def times(self, value): return value * self.factor
def score(call, sample):
    return LIMIT * Scale().times(1) if call in {"x", "y", "z", "w"} else 0
print(name_function(score))
"""


@pytest.mark.parametrize(("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("factor = 2", "factor = 5"), ('"w"', '"v"')])
@pytest.mark.slow
def test_each_process_gives_a_function_the_same_name(old, new):
    def run(code, seed):
        command, environment = [sys.executable, "-c", code], {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = run(SCRIPT, "1")
    assert run(f"\n\n{SCRIPT}", "2") == first
    assert run(SCRIPT.replace(old, new), "1") != first


def test_samples_are_yielded_in_their_order():
    rows = ["first", "second"]
    read = load_function(name_rows(rows, "train"), Path(), role="data source")
    assert list(read(None)) == rows
    assert name_rows(rows, "train") != name_rows(rows[:1], "train")


def test_functions_anywhere_in_settings_become_names():
    given = {"data": {"train": ({"fn": make_function(1)},)}, "callbacks": [], "run": {"dir": Path("runs"), "seed": 1}}
    replaced = replace_functions(given)
    assert replaced["data"]["train"][0]["fn"].startswith("mmrl_in_memory.score_")
    assert replaced["run"] == given["run"]


def test_a_worker_loads_a_copy_from_the_path():
    name = name_function(make_function(40), copy_for_workers=True)
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from mmrl.utils.plugins import load_plugin
print(load_plugin({name!r}, Path(), {{"bonus": 2}}, role="tool", parameters=("call", "sample"))({{}}, None))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "42\n", done.stderr
