"""One uninterrupted run for all, and the `mmrl` command inside the test process, where torch is already loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from case_tables import remember_checked_tables
from harness import Command, Done, experiment, undisturbed
from published_rows import export_tiny_model
from zoom_runs import zoom_config

from mmrl.cli import main


@pytest.fixture(scope="session")
def case_tables_once() -> Iterator[None]:
    """Commands in this process run the case table of a reward of ours once."""
    restore = remember_checked_tables()
    yield
    restore()


@pytest.fixture
def in_process(capfd, case_tables_once) -> Command:
    """Runs the command in this process: the same code as `python -m mmrl`, without seconds of imports."""

    def run(*arguments):
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The folder of a tiny Qwen2.5-VL, as a recipe's own model would be."""
    return export_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """The directory of a run nobody disturbed."""
    return undisturbed(tmp_path_factory, "whole", experiment)


@pytest.fixture(scope="session")
def zoomed(tmp_path_factory) -> Path:
    """The directory of such a run, whose policy calls a tool."""
    return undisturbed(tmp_path_factory, "zoomed", zoom_config)
