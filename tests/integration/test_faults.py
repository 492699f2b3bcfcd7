"""A handful of the faults that tools/faults.py tries by the dozen: real runs, damaged at random moments.

What befalls several processes is tried in test_launch.py and test_verify_resume.py; SIGKILL, SIGTERM, a full disk,
damaged checkpoints and another config in test_resume.py and test_bad_input.py.
"""

from pathlib import Path

import pytest
from fork_server import run_forked

TOOL = Path(__file__).parents[2] / "tools" / "faults.py"
FAULTS = ["episodes", "read_only", "not_a_number", "clock"]


@pytest.mark.slow
def test_nothing_is_lost():
    done = run_forked(TOOL, "--kills", 2, "--only", *FAULTS, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|") and line.endswith("| nothing |")]
    assert len(rows) == len(FAULTS)
