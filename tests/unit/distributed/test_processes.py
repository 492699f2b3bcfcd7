"""What happens when a rank fails or hangs: the launcher stops the others, and the watchdog reports what each does."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import TCPStore
from waiting import wait_for

from mmrl.distributed import launch
from mmrl.distributed.ranks import RankLostError
from mmrl.distributed.torch_ranks import RankWatchdog, TorchRanks, join_ranks
from mmrl.types import UserError

# A rank that starts a process. The second kills itself once the first has begun, which then waits for ever.
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)
Path(sys.argv[1] + os.environ['RANK'] + '-child').write_text(str(child.pid))
Path(sys.argv[1] + os.environ['RANK']).write_text(str(os.getpid()))
first = Path(sys.argv[1] + '0')
while os.environ['RANK'] == '0' or not (first.exists() and first.read_text()):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_returns_the_code_of_the_rank_that_failed_and_leaves_no_process(tmp_path, monkeypatch, capfd):
    program = tmp_path / "mmrl" / "__main__.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # `-m` looks here first
    monkeypatch.setattr(launch, "SHUTDOWN_GRACE_S", 0.3)
    assert launch.launch([str(tmp_path / "pid")], 2) == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in capfd.readouterr().err
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
    # The rank that killed itself left nobody who knows what it had started.
    os.kill(int((tmp_path / "pid1-child").read_text()), signal.SIGKILL)
    command_line = Path("/proc") / (tmp_path / "pid0-child").read_text() / "cmdline"
    wait_for(lambda: not command_line.exists() or not command_line.read_bytes())


def test_a_rank_that_waits_reports_its_activity_that_of_the_others_and_its_stacks(capfd):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    slow = RankWatchdog(store, 1, 2, patience_s=600)
    slow.set_activity("learning from boxes-17")
    waiting = RankWatchdog(store.clone(), 0, 2, patience_s=2)
    waiting.set_activity("waiting in gather after: scoring")
    for watchdog in (slow, waiting):
        watchdog.start()
    printed = []

    def has_printed_stacks():
        printed.append(capfd.readouterr().err)
        return "test_a_rank_that_waits" in "".join(printed)  # the innermost frame of this thread, the last line

    wait_for(has_printed_stacks)
    for watchdog in (waiting, slow):
        watchdog.stop()
    report = r"rank 0 is still waiting in gather after: scoring after \d+ s\. rank 1 for \d+ s: learning from boxes-17"
    assert re.search(report, "".join(printed))


def test_a_single_process_that_fails_leaves_no_process_group_behind(monkeypatch):
    """Another run of the same Python process could not make one."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(2):
        with pytest.raises(UserError, match="no samples"), join_ranks(60, force_group=True):
            raise UserError("there are no samples")
        assert not dist.is_initialized()


@pytest.fixture
def single_rank(monkeypatch):
    """The only rank of a process group."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.find_free_port())}
    for name, value in {**address, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ranks = TorchRanks(timeout_s=60)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("error", "raised"), [(torch.OutOfMemoryError, torch.OutOfMemoryError), (RuntimeError, RankLostError)]
)
def test_running_out_of_memory_is_not_a_lost_rank(single_rank, monkeypatch, error, raised):
    def fail(_):
        raise error("failed")

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(raised):
        single_rank.all_reduce([torch.ones(2)])


def test_a_tensor_that_fills_a_bucket_is_summed_without_a_copy(single_rank, monkeypatch):
    summed = []

    def double(flat):
        summed.append(flat.data_ptr())
        flat.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", double)
    monkeypatch.setattr("mmrl.distributed.torch_ranks._BUCKET_BYTES", 16)
    large, transposed, *small = [torch.ones(5), torch.ones(2, 3).T, torch.ones(2), torch.ones(1, 1)]
    single_rank.all_reduce([large, transposed, *small])
    assert all((tensor == 2).all() for tensor in (large, transposed, *small))
    assert summed[0] == large.data_ptr() and len(summed) == 3
