"""The docs name files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`((?:mmrl|rewards|datasets|tools|tests|examples)/[\w/]+\.py)(?::([\w.]+))?`")


def defined_names(file):
    """Return the functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
    return names


def broken_references(page, text):
    """Return the links and code references of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(text):
        if not target.startswith(("http://", "https://", "mailto:")) and not (page.parent / target).exists():
            broken.append(target)
    for path, name in CODE.findall(text):
        file = ROOT / path
        if not file.is_file() or (name and name not in defined_names(file)):
            broken.append(f"{path}:{name}" if name else path)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names_exist(page):
    assert broken_references(page, page.read_text()) == []


def test_a_wrong_link_and_a_wrong_name_are_found():
    links = "[gone](gone.md) [here](glossary.md#word)"
    text = f"{links} `mmrl/nothing.py` `mmrl/training/rl.py:run_nothing` `mmrl/protocols.py:Sampler.sync`"
    broken = broken_references(ROOT / "docs" / "design.md", text)
    assert broken == ["gone.md", "mmrl/nothing.py", "mmrl/training/rl.py:run_nothing"]
