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


def test_every_metric_in_the_code_is_declared():
    undeclared = set()
    for path in (ROOT / "mmrl").rglob("*.py"):
        for text in strings_in(path):
            group, slash, rest = text.partition("/")
            is_metric = slash and rest and group in GROUPS and re.fullmatch(r"[\w*@/]+[\w*@]", text)
            if is_metric and find_builtin_metric(text) is None:
                undeclared.add(f"{path.relative_to(ROOT)}: {text}")
    assert not undeclared
