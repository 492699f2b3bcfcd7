"""docs/models.md: each cell of its table is a test that runs for that family, or a reason."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families import FAMILIES
from mmrl.utils.model_files import UNSUPPORTED

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TEST = re.compile(r"(?:([a-z]) )?`tests/([\w/]+)\.py:(test_\w+)`")


def table(first_cell: str) -> list[list[str]]:
    """The rows of the table whose header begins so, header included, without the rule below it."""
    lines = PAGE[PAGE.index(first_cell) :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


HEADER, *ROWS = table("| capability |")
ROWS += [[capability, *["yes"] * len(FAMILIES), tests] for capability, tests in table("| every family |")[1:]]
REASONS = re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def scenes():
    """The family of each scene that vLLM's tests play."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in {file.parent for file in (ROOT / "tests").rglob("*.py")}:
            patch.syspath_prepend(folder)
        spec = importlib.util.spec_from_file_location("scenes", ROOT / "tests" / "equivalence" / "conftest.py")
        conftest = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(conftest)
        yield {scene: family for process in conftest.PROCESSES for scene, family in process.items()}
        sys.modules.pop("scenes", None)


def with_fixtures(function, module) -> list:
    """A test and the fixtures of its module that it asks for, directly or through others."""
    found = [function]
    for source in found:
        plain = source._get_wrapped_function() if hasattr(source, "_fixture_function_marker") else source
        for name in inspect.signature(plain).parameters:
            fixture = getattr(module, name, None)
            if hasattr(fixture, "_fixture_function_marker") and fixture not in found:
                found.append(fixture)
    return found


def parameters_of(source) -> set[str]:
    """The words that a test or a fixture is parametrised with."""
    values: list[object] = []
    if hasattr(source, "_fixture_function_marker"):
        values += source._fixture_function_marker.params or ()
    for mark in getattr(source, "pytestmark", []):
        if mark.name == "parametrize":
            for given in mark.args[1]:
                value = getattr(given, "values", given)  # of `pytest.param`
                values += value if isinstance(value, tuple) else [value]
    return {value for value in values if isinstance(value, str)}


def words_in(source) -> set[str]:
    """The strings in the code of a test or a fixture."""
    plain = source._get_wrapped_function() if hasattr(source, "_fixture_function_marker") else source
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(plain))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def families_of(path: str, name: str, scenes: dict[str, str]) -> set[str]:
    """The families that a test runs for: those of its parameters, else those that its code names."""
    module = importlib.import_module(path.rpartition("/")[2])
    sources = with_fixtures(getattr(module, name), module)
    for words_of in (parameters_of, words_in):
        words = set().union(*map(words_of, sources))
        families = (words & set(FAMILIES)) | {scenes[word] for word in words & set(scenes)}
        if families:
            return families
    return {FromScratchConfig().family}


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
    routers = families_of("unit/policy/test_expert_routing", "test_a_frozen_router_stays_and_the_experts_learn", scenes)
    exported = families_of(
        "integration/test_export", "test_an_exported_model_generates_and_ends_with_the_tokenizer_of_training", scenes
    )
    served = families_of("equivalence/test_vllm_engine", "test_a_server_says_what_it_computes_logits_in", scenes)
    ranks = families_of("equivalence/test_ranks", "test_two_ranks_learn_what_one_learns", scenes)
    zoomed = families_of("integration/test_zoom_tool", "test_the_policy_calls_the_tool_by_itself", scenes)
    assert (routers, exported) == ({"qwen3_vl_moe", "qwen3_5_moe"}, set(FAMILIES))
    assert served == ranks == zoomed == {"qwen2_5_vl"}


def test_families_that_are_not_supported_are_named():
    assert set(re.findall(r"`(\w+)`", " ".join(row[0] for row in table("| `model_type` |")[1:]))) == set(UNSUPPORTED)
