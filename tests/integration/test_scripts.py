"""The scripts in tools/ start, and tools/exactness.py finds the two layouts equal and planted errors far apart."""

import sys
from pathlib import Path

import pytest
from fork_server import run_forked

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import exactness  # noqa: E402
from rounding import GRADIENTS, LOGPROBS  # noqa: E402

SCRIPTS = sorted(path.stem for path in TOOLS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tool_prints_its_help(script):
    done = run_forked(TOOLS / f"{script}.py", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("usage:")


@pytest.mark.slow
@pytest.mark.parametrize("family", exactness.FAMILIES)
def test_layouts_agree_in_every_family(family):
    rows = list(exactness.compare_model(exactness.make_tiny_model(family)))
    assert len(rows) == 2 * len(exactness.MEDIA_BY_PROMPT) + 2
    for name, _, logprobs, gradient in rows:
        if name.startswith("wrong"):
            assert min(float(logprobs), float(gradient)) > 1e-3
        else:
            assert float(logprobs) <= LOGPROBS and float(gradient) <= GRADIENTS
