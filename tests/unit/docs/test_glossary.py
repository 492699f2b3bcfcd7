"""The glossary's words are those of the code and of the YAML keys."""

import ast
import re
from pathlib import Path

import pytest

from mmrl.config.schema import Config

ROOT = Path(__file__).parents[3]
PRODUCT = ("mmrl", "rewards/mmrl_rewards", "datasets/mmrl_datasets")


def table_rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def product_names() -> set[str]:
    """Classes, and the fields of classes."""
    names = set()
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
    return names


def schema_keys(schema: object) -> set[str]:
    if isinstance(schema, dict):
        own = set(schema.get("properties", {}))
        return own.union(*map(schema_keys, schema.values()))
    if isinstance(schema, list):
        return set().union(*map(schema_keys, schema))
    return set()


@pytest.fixture(scope="module")
def known() -> set[str]:
    return product_names() | schema_keys(Config.model_json_schema())


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[0])
def test_a_word_of_the_glossary_is_one_of_the_code(row, known):
    assert len(row) == 6
    for name in re.findall(r"`([^`]+)`", row[1]):
        assert set(name.split(".")) <= known, f"{row[0]}: there is no {name}"
