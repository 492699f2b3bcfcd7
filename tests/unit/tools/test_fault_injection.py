"""What the integration tests strike at by name is there: a function that moved fails here, not half an hour later."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

TESTS = Path(__file__).parents[1] / "integration"
STRUCK = sorted(
    {name for file in TESTS.glob("test_*.py") for name in re.findall(r'"(mmrl\.[\w.]*:[\w.]+)"', file.read_text())}
)


def test_something_is_struck_at() -> None:
    assert "mmrl.learner.learner:PolicyLearner.step" in STRUCK


@pytest.mark.parametrize("name", STRUCK)
def test_what_is_struck_at_exists(name: str) -> None:
    assert callable(resolve_name(name))
