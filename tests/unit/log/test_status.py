"""status.json: what it says while a run is alive, and how it ended."""

import json
import os
import signal
import subprocess
import sys

import pytest
from waiting import wait_for

from mmrl.log import logger
from mmrl.log.logger import StatusFile
from mmrl.types import RunInterrupted

RUN = """
import sys, time
from pathlib import Path
from mmrl.log.logger import StatusFile

with StatusFile(Path(sys.argv[1])).report():
    time.sleep(60)
"""


def read(path):
    return json.loads(path.read_text())


def test_file_says_where_the_run_is_and_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "HEARTBEAT_S", 0.02)
    path = tmp_path / "status.json"
    file = StatusFile(path)
    with file.report():
        first = read(path)
        assert first["state"] == "running" and first["pid"] == os.getpid() and first["stage"] is None
        file.update(stage="rl", step=3, steps=9)
        wait_for(lambda: read(path)["step"] == 3)
        assert (read(path)["stage"], read(path)["steps"]) == ("rl", 9)
    assert read(path)["state"] == "finished" and read(path)["step"] == 3


@pytest.mark.parametrize(
    ("error", "state"), [(RunInterrupted(), "stopped"), (KeyboardInterrupt(), "stopped"), (ValueError("x"), "failed")]
)
def test_file_says_how_the_run_ended(tmp_path, error, state):
    with pytest.raises(type(error)), StatusFile(tmp_path / "status.json").report():
        raise error
    assert read(tmp_path / "status.json")["state"] == state


def test_killed_run_stays_running_without_a_heartbeat(tmp_path):
    path = tmp_path / "status.json"
    with subprocess.Popen([sys.executable, "-c", RUN, path]) as run:
        wait_for(path.exists)
        run.send_signal(signal.SIGKILL)
    assert read(path)["state"] == "running" and read(path)["pid"] == run.pid


def test_folder_that_is_gone_is_not_made_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with StatusFile(folder / "status.json").report():
        (folder / "status.json").unlink()
        folder.rmdir()
    assert not folder.exists()
