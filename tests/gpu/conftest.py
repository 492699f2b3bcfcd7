"""Tests of a CUDA device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


@pytest.fixture(scope="session")
def make_tiny(make_tiny) -> Callable[..., Any]:
    """Make a tiny policy whose heads have 16 channels, the fewest that FlexAttention takes on CUDA."""
    return partial(make_tiny, hidden_size=64)
