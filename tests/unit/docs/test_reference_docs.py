"""docs/reference and the lists of recipes are what the code says, and every metric that the code writes is declared."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from mmrl.log.metric_registry import METRICS, find_builtin_metric

ROOT = Path(__file__).resolve().parents[3]


def load_tool():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "dev" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GROUPS = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name} - {"<step>"}


GENERATED = (
    *("config.md", "metrics.md", "rewards.md", "commands.md", "types.md"),
    *("../python.md", "../recipes.md", "../papers.md"),
)


@pytest.mark.parametrize("name", GENERATED)
def test_the_reference_is_current(name):
    text = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert load_tool().render_reference()[name] == text, "run `python tools/dev/make_reference.py`"


def strings_in(path):
    """Every string of a module; what an f-string inserts is `*`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("reward/rule/fallback", "reward/<term>/fallback"),
        ("reward/rule/timeouts", "reward/<term>/<failure>"),
        ("reward/task/count", "reward/task/<task>"),
        ("reward/term/fallback", "reward/term/<term>"),
        ("reward/step/maze/errors", "reward/step/<step>/<failure>"),
        ("validation/reward", "validation/<task>"),
        ("test/turns", "test/<task>"),
        ("select/calls", "select/<name>"),
        ("rollout/count", "rollout/count"),
        ("maze/reward", "<step>/reward"),
        ("maze/info/height", "<step>/info/<name>"),
        ("validation/tools/calls", "validation/<step>/<count>"),
        ("test/maze/info/height", "test/<step>/info/<name>"),
        ("reworded/no_majority", "reworded/no_majority"),
        ("my/metric", None),
    ],
)
def test_a_name_has_the_meaning_of_the_closest_declaration(name, declared):
    metric = find_builtin_metric(name)
    assert (metric and metric.name) == declared


def test_every_metric_in_the_code_is_declared():
    undeclared = set()
    for path in (ROOT / "mmrl").rglob("*.py"):
        for text in strings_in(path):
            group, slash, rest = text.partition("/")
            is_metric = slash and rest and group in GROUPS and re.fullmatch(r"[\w*@/]+[\w*@]", text)
            if is_metric and find_builtin_metric(text) is None:
                undeclared.add(f"{path.relative_to(ROOT)}: {text}")
    assert not undeclared
