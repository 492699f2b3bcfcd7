"""Every function that integration tests interrupt by name exists: a moved one fails here, not half an hour later."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

INTEGRATION_TESTS = Path(__file__).parents[2] / "integration"
INTERRUPTED = set()
for file in INTEGRATION_TESTS.glob("*.py"):
    INTERRUPTED |= set(re.findall(r'"(mmrl\.[\w.]*:[\w.]+)"', file.read_text()))


def test_interrupted_functions_are_found():
    assert "mmrl.learner.learner:PolicyLearner.step" in INTERRUPTED


@pytest.mark.parametrize("name", sorted(INTERRUPTED))
def test_interrupted_function_exists(name):
    assert callable(resolve_name(name))
