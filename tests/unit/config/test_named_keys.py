"""Keys that messages, comments of configs and pages name by their path, such as `data.media_roots`, exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_samples import ROOTS, has_key, models_in

from mmrl.config.errors import read_synonyms

ROOT = Path(__file__).parents[3]
# A path of keys: `stages[].loss.kl`, `data.train.0.fn`. Neither an attribute in code nor a call.
PATH = re.compile(r"(?<![\w./:@<>-])[a-z_]\w*(?:\[\d*\])?(?:\.[a-z_0-9]\w*(?:\[\d*\])?)+(?![\w(/])")
PYTHON_BLOCK = re.compile(r"^[ \t]*```py.*?^[ \t]*```", re.DOTALL | re.MULTILINE)
SUFFIXES = ("html", "json", "jsonl", "md", "parquet", "pt", "py", "safetensors", "yaml")
FILES = ("mmrl/**/*.py", "rewards/**/*.py", "datasets/**/*.py", "configs/**/*.yaml", "*.md")
PAGES = ("docs/**/*.md", "datasets/**/*.md", "rewards/**/*.md")
# The changelog names old keys, and docs/coming_from.md those of other frameworks: tests/unit/docs has its first column.
NAMING_OTHERS = ("CHANGELOG.md", "docs/coming_from.md")
CONDITIONS = ("rollout.rethought", "rollout.used_tool", "rollout.turns", "rollout.finish_reason")
# docs/config.md shows what mistakes are answered with, the glossary words of others.
ALLOWED = {
    "docs/config.md": ("run.sed", "stages.0.num_generations"),
    "docs/glossary.md": ("rollout.n", "rollout.name"),
    **dict.fromkeys(("docs/rewards.md", "docs/reference/config.md", "mmrl/config/schema/rewards.py"), CONDITIONS),
}
SECTIONS = {name for model in ROOTS for name, field in model.model_fields.items() if models_in(field.annotation)}
OLD_SECTIONS = {old for name in ("Config", "EvalConfig") for old in read_synonyms()["renamed"].get(name, ())}


def names_code(path: str) -> bool:
    """Return True for a module of mmrl, or a file."""
    *folders, last = path.split(".")
    folder = ROOT.joinpath("mmrl", *folders)
    return last in SUFFIXES or (folder / last).is_dir() or (folder / f"{last}.py").is_file()


def unknown_keys(text: str) -> Iterator[tuple[int, str]]:
    """Yield the unknown keys of a text, each with the number of its line."""
    for match in PATH.finditer(text):
        path = match[0]
        section = re.match(r"\w+", path)[0]
        if section in SECTIONS | OLD_SECTIONS and not has_key(path) and not names_code(path):
            yield text.count("\n", 0, match.start()) + 1, path


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences in the strings of a module, each with the number of its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def comments_of(text: str) -> str:
    """Return a YAML file with nothing but its comments, on their lines."""
    return "\n".join(re.sub(r"^(?:(?!\s#|^#).)*", "", line) for line in text.splitlines())


def pieces_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the parts of a file that people read, each with the number of its first line."""
    if name.endswith(".py"):
        yield from strings_of(text)
    elif name.endswith(".yaml"):
        yield 1, comments_of(text)
    else:
        yield 1, PYTHON_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)


def all_unknown_keys() -> Iterator[str]:
    for pattern in FILES + PAGES:
        for file in ROOT.glob(pattern):
            name = str(file.relative_to(ROOT))
            if name in NAMING_OTHERS:
                continue
            for first_line, piece in pieces_of(name, file.read_text(encoding="utf-8")):
                for line, path in unknown_keys(piece):
                    if path not in ALLOWED.get(name, ()):
                        yield f"{name}:{first_line + line - 1}: {path}"


def test_every_key_that_a_text_names_is_one_of_the_schema():
    assert sorted(all_unknown_keys()) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", 'raise UserError(f"{path} lies outside data.roots ({listed})")', [(1, "data.roots")]),
        ("a.yaml", "a: 1\nb: model.x # answer.think=none is its variant", [(2, "answer.think")]),
        ("a.md", "turn\n`answer.instruct` off", [(2, "answer.instruct")]),
        ("a.md", "`stages[].loss.kl.coef`, `stages[].lr`, `rewards.terms[0].args.mine`", [(1, "stages[].lr")]),
        ("a.md", "`data.train.scenes.fn`, `data.jsonl`\n```python\nmodel.mine\n```\n`data.x`", [(5, "data.x")]),
    ],
)
def test_an_unknown_key_is_found_with_its_line(name, text, found):
    seen = [(start + line - 1, path) for start, piece in pieces_of(name, text) for line, path in unknown_keys(piece)]
    assert seen == found
