"""What is public: `import mmrl` is light and complete, and examples and docs need nothing deeper."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmrl

ROOT = Path(__file__).parents[3]
PUBLIC_PACKAGES = ("mmrl", "mmrl_rewards", "mmrl_rewards.adapters", "mmrl_datasets")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Of the tools, only this one is what a user would write: the others measure and test internals.
FOR_USERS = [*EXAMPLES, ROOT / "tools" / "bench" / "vowels_reward.py"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*/README.md")]


def deep_imports(source: str) -> list[str]:
    """Return the modules of ours that are imported from deeper than the public packages."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return [name for name in modules if name.startswith("mmrl") and name not in PUBLIC_PACKAGES]


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda path: path.name)
def test_examples_import_public_names_alone(path):
    assert deep_imports(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path):
    # A whole family of models that is not Qwen's, and a browser, cannot be said in 40 lines.
    limit = {"internvl.py": 110, "miniwob_env.py": 75}.get(path.name, 40)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_pages_imports_public_names_alone(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(("import ", "from "))]
    assert [line for line in lines if not line.endswith("(") and deep_imports(line)] == []


def test_a_deep_import_is_found():
    source = "import mmrl.config\nfrom mmrl.types import Sample\nfrom mmrl import Sample\nimport mmrl_rewards, json"
    assert sorted(deep_imports(source)) == ["mmrl.config", "mmrl.types"]


def test_every_public_name_is_there_at_run_time():
    names = mmrl._modules()
    assert names["Sample"] == "mmrl.types" and all(getattr(mmrl, name) is not None for name in names)
    assert set(names) <= set(dir(mmrl))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mmrl.nothing  # noqa: B018


def test_importing_mmrl_loads_none_of_its_modules():
    code = "import sys, mmrl; print(*sorted(name for name in sys.modules if name.startswith(('mmrl', 'torch'))))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert fresh.stdout.split() == ["mmrl"]
