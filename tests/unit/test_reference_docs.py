"""docs/reference is what the code says, and every metric that the code writes is listed."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "dev" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METRIC_MEANINGS = load_tool().METRIC_MEANINGS
GROUPS = {name.partition("/")[0] for name in METRIC_MEANINGS if "/" in name} - {"<step>"}


@pytest.mark.parametrize("name", ["config.md", "metrics.md", "rewards.md", "commands.md", "types.md"])
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


def is_listed(metric):
    for name in METRIC_MEANINGS:
        pattern = re.sub(r"<[^>]*>", "[^/]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))
        if re.fullmatch(pattern, metric):
            return True
    return False


def test_every_metric_in_the_code_is_listed():
    unlisted = set()
    for path in (ROOT / "mmrl").rglob("*.py"):
        for text in strings_in(path):
            group, slash, rest = text.partition("/")
            if slash and rest and group in GROUPS and re.fullmatch(r"[\w*@/]+[\w*@]", text) and not is_listed(text):
                unlisted.add(f"{path.relative_to(ROOT)}: {text}")
    assert not unlisted
