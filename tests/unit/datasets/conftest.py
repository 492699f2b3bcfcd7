"""Where the tests of datasets read and write."""

from pathlib import Path

import pytest
from factories import make_context

from mmrl.types import DatasetContext


@pytest.fixture
def place(tmp_path: Path) -> DatasetContext:
    return make_context(tmp_path)
