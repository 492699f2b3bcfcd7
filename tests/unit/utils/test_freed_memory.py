"""The allocator keeps freed memory for a model on a CPU."""

import subprocess
import sys

import pytest

PASSES = """
import resource, sys
from mmrl.utils.processes import keep_freed_memory

def run_pass():
    activations = [bytearray(b"x") * 2**24 for _ in range(8)]

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run_pass()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(setting: str) -> int:
    """Return the page faults of the last of three passes that each allocate and free 128 MiB."""
    command = [sys.executable, "-c", PASSES, setting]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
def test_freed_memory_is_used_again_without_page_faults():
    assert 10 * count_page_faults("kept") < count_page_faults("default")
