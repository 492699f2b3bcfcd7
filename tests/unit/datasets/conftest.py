"""Where the tests of datasets read and write."""

from collections.abc import Callable

import pytest
from factories import make_context

from mmrl.types import DatasetContext, RejectedRow, Sample
from mmrl_datasets.readers import table


@pytest.fixture
def context(tmp_path) -> DatasetContext:
    (tmp_path / "home").mkdir()
    return make_context(tmp_path / "home")


@pytest.fixture
def read_table(context) -> Callable[..., list[Sample | RejectedRow]]:
    """Return a function that writes a file and reads it: a question `q` and a number `a` in each row."""

    def read(name, content, **options):
        (context.base_dir / name).write_bytes(content)
        defaults = {"path": name, "columns": {"question": "q", "answer": "a"}, "answer_type": "number"}
        return list(table.rows(context, **(defaults | options)))

    return read
