"""docs/models.md: each cell of its table is a test that runs for that family, or a reason."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

from mmrl.policy.families import FAMILIES
from mmrl.utils.model_files import UNSUPPORTED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TEST = re.compile(r"(?:([a-z]) )?`tests/([\w/]+)\.py:(test_\w+)`")


def table(first_cell: str) -> list[list[str]]:
    """The rows of the table whose header begins so, header included, without the rule below it."""
    lines = PAGE[PAGE.index(first_cell) :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


HEADER, *ROWS = table("| capability |")
REASONS = re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def scenes():
    """The family of each scene that vLLM's tests play."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("unit", "integration", "equivalence", ""):
            patch.syspath_prepend(ROOT / "tests" / folder)
        spec = importlib.util.spec_from_file_location("scenes", ROOT / "tests" / "equivalence" / "conftest.py")
        conftest = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(conftest)
        yield {scene: family for process in conftest.PROCESSES for scene, family in process.items()}
        sys.modules.pop("scenes", None)


def values_of(function, module) -> set[str]:
    """What a test is parametrised with, by marks or by fixtures of its module; else the words in its own source."""
    values: set[object] = set()
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            for value in mark.args[1]:
                values.update(value if isinstance(value, tuple) else [value])
    for name in inspect.signature(function).parameters:
        fixture = getattr(getattr(module, name, None), "_fixture_function_marker", None)
        values.update(fixture.params or () if fixture is not None else ())
    words = {value for value in values if isinstance(value, str)}
    if words & set(FAMILIES):
        return words
    sources = [function, *(getattr(module, name, None) for name in inspect.signature(function).parameters)]
    for source in filter(inspect.isfunction, map(inspect.unwrap, filter(None, sources))):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source)))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    return words


def families_of(path: str, name: str, scenes: dict[str, str]) -> set[str]:
    """The families that a test runs for."""
    module = importlib.import_module(path.rpartition("/")[2])
    words = values_of(getattr(module, name), module)
    return (words & set(FAMILIES)) | {scenes[word] for word in words & set(scenes)}


def test_the_tables_have_a_column_for_each_family():
    columns = [f"`{family}`" for family in FAMILIES]
    assert ["capability", *columns, "tests"] == HEADER
    assert table("| | `")[0] == ["", *columns]
    assert [row[0] for row in table("| family |")[1:]] == columns


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_cell_is_a_test_of_that_family_or_a_reason(row, scenes):
    tests = {letter or name: (path, name) for letter, path, name in TEST.findall(row[-1])}
    assert tests and len(row) == len(HEADER)
    for family, cell in zip(FAMILIES, row[1:-1], strict=True):
        if cell.startswith("no "):
            assert cell[3:] in REASONS
            continue
        shown = tests if cell == "yes" else cell
        for key in shown:
            assert family in families_of(*tests[key], scenes), f"{tests[key]} does not run for {family}"


def test_the_families_of_a_test_are_found_in_its_parameters_fixtures_and_scenes(scenes):
    routers = families_of("unit/test_expert_routing", "test_a_frozen_router_stays_and_the_experts_learn", scenes)
    exported = families_of("integration/test_export", "test_generation_ends_where_training_ended", scenes)
    served = families_of("equivalence/test_vllm_engine", "test_a_server_says_what_it_computes_logits_in", scenes)
    assert (routers, exported) == ({"qwen3_vl_moe", "qwen3_5_moe"}, set(FAMILIES))
    assert "qwen2_5_vl" in served


def test_what_is_out_is_named():
    assert set(re.findall(r"`(\w+)`", " ".join(row[0] for row in table("| `model_type` |")[1:]))) == set(UNSUPPORTED)
