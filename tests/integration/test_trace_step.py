"""A step of a run calls nothing of the features that the run does not use."""

import re
from pathlib import Path

import pytest
from fork_server import run_forked

TOOL = Path(__file__).parents[2] / "tools" / "dev" / "trace_step.py"


@pytest.mark.slow
def test_a_step_without_an_environment_calls_none_of_their_functions(tmp_path):
    run = run_forked(TOOL, "--list", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    called = re.findall(r"^  (mmrl/\S+\.py: \S+)$", run.stdout, re.MULTILINE)
    assert "mmrl/training/rl.py: run_rl_stage" in called
    assert [name for name in called if re.search("environment|episodes|algo/credit|divide_by_turn", name)] == []
