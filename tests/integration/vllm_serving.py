"""A server of vLLM that runs already, started as docs/vllm.md says to start one."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib import request as http

DOCUMENTED = Path(__file__).parents[2] / "docs" / "vllm.md"
ON_CPU = ("--kv-cache-memory-bytes", str(2**26), "--block-size", "32", "--enforce-eager", "--no-enable-chunked-prefill")
SMALL = ("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "8192")
ADAPTER = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")


def documented() -> tuple[dict[str, str], list[str]]:
    """Variables and options of the documented command."""
    found = re.search(r"```\n(VLLM_.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    assert found
    words = shlex.split(found[1].replace("\\\n", " "))
    start = words.index("vllm")
    assert words[start : start + 3] == ["vllm", "serve", "MODEL"]
    return dict(word.split("=", 1) for word in words[:start]), words[start + 3 :]


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The URL of a server of `model`, which can take an adapter; it writes to `log`."""
    variables, options = documented()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # What `vllm serve` runs; that command itself does not start in the build for CPUs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    url, here = f"http://127.0.0.1:{port}", {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, *ON_CPU, *SMALL, *ADAPTER, "--host", "127.0.0.1", "--port", port],
            env={**os.environ, **variables, **here, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 600
        while not healthy(url):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy(url: str) -> bool:
    """Whether a server is up."""
    with suppress(OSError), http.build_opener(http.ProxyHandler({})).open(f"{url}/health", timeout=5.0):
        return True
    return False
