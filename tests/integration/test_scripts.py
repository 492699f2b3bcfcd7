"""The scripts in tools/ start; those that check exactness, calls of a step and faults find what they must."""

import re
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


@pytest.mark.slow
def test_a_step_without_an_environment_calls_none_of_their_functions(tmp_path):
    run = run_forked(TOOLS / "dev" / "trace_step.py", "--list", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    called = re.findall(r"^  (mmrl/\S+\.py: \S+)$", run.stdout, re.MULTILINE)
    assert "mmrl/training/rl.py: train_rl" in called
    assert [name for name in called if re.search("environment|episodes|algo/credit|divide_by_turn", name)] == []


# What befalls several processes is tried in test_launch.py and test_verify_resume.py; SIGKILL, SIGTERM, a full disk,
# damaged checkpoints and another config in test_resume.py and test_bad_input.py.
FAULTS = ["episodes", "read_only", "not_a_number", "clock"]


@pytest.mark.slow
def test_a_run_with_faults_loses_nothing():
    done = run_forked(TOOLS / "faults.py", "--kills", 2, "--only", *FAULTS, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|") and line.endswith("| nothing |")]
    assert len(rows) == len(FAULTS)
