"""Start `mmrl` commands in a tenth of a second: fork them from a process that has already imported torch and mmrl.

`python -m mmrl` spends some eight seconds of CPU on imports, and the tests start it more than a hundred times. This
server imports once. For each command it forks a child, which does what `python WORDS` does, at its top level: with the
environment, directory, standard streams and signals that subprocess would give it, and it ends as an interpreter does.
What such a child starts in its turn (ranks, verify-resume, the sides of a benchmark) is forked too.

The test talks to the server through a pair of sockets, and `Forked` looks like subprocess.Popen. What forking could
hide (a missing import, an import that takes too long, how a fresh interpreter starts) is tried by the tests that start
a real process; `harness.run_mmrl(…, fresh=True)` does.
"""

import atexit
import gc
import importlib
import inspect
import io
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.util
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PRELOADED = ("mmrl", "mmrl_rewards", "mmrl_datasets")
LIGHT = ("mmrl.cli.main", "mmrl.training.preflight", "mmrl.evaluation.eval_settings", "mmrl_rewards.number")
"""Commands import these before torch. The second server, for commands without torch, imports nothing else."""
LEFT_OUT = ["vllm", "__main__", "megabench"]
"""Modules whose names contain one of these stay out: they need vLLM, or importing them is running them."""
if find_spec("deepspeed") is None:
    LEFT_OUT.append("deepspeed")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""A process with more threads than one cannot be forked safely, and OpenMP and OpenBLAS start theirs when imported."""
COMMON_REWARDS = ("mmrl_rewards.number:exact", "mmrl_rewards.format:tags")
_ASKING = threading.Lock()
_get_context = multiprocessing.get_context


class Forked:
    """A command that the server forked: what the tests use of subprocess.Popen, its two pipes read as text."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        session: bool = False,
        light: bool = False,
    ) -> None:
        """Start `python COMMAND`; `env` is added to the environment of this process.

        `session` starts a new session, and `light` a process without torch.
        """
        self.returncode: int | None = None
        out, out_there = os.pipe()
        errors, errors_there = os.pipe()
        self._status, status_there = os.pipe()
        environment = {**os.environ, **ONE_THREAD, **(env or {})}
        request = dict(command=[*map(str, command)], cwd=str(cwd or Path.cwd()), env=environment, session=session)
        sent = json.dumps(request).encode()
        with _ASKING:
            server = _server(light)
            socket.send_fds(server, [len(sent).to_bytes(4, "little")], [out_there, errors_there, status_there])
            server.sendall(sent)
        for there in (out_there, errors_there, status_there):
            os.close(there)
        self.pid = int.from_bytes(_exactly(self._status, 4), "little")
        self._pipes = (out, errors)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Read both pipes to their end, then wait.

        Raises:
            subprocess.TimeoutExpired: the command has not ended in time. It is killed first.
        """
        texts: list[bytes] = [b"", b""]

        def read(which: int) -> None:
            with open(self._pipes[which], "rb") as pipe:
                texts[which] = pipe.read()

        readers = [threading.Thread(target=read, args=(which,), daemon=True) for which in range(2)]
        for reader in readers:
            reader.start()
        if not select.select([self._status], [], [], timeout)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired("mmrl", timeout)
        self.returncode = int.from_bytes(_exactly(self._status, 4), "little", signed=True)
        os.close(self._status)
        for reader in readers:
            reader.join()
        return texts[0].decode(), texts[1].decode()


def run_forked(*command: object, timeout: float = 1200.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Do what `python COMMAND` does, with options of `Forked`, and return its exit code and what it printed."""
    forked = Forked(command, **options)
    output, errors = forked.communicate(timeout)
    assert forked.returncode is not None
    return subprocess.CompletedProcess(command, forked.returncode, output, errors)


def _exactly(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            raise RuntimeError("the fork server is gone; its traceback is above")
        data += part
    return data


@cache
def _server(light: bool) -> socket.socket:
    """Start this file in another process; it ends when the test process closes its socket by ending."""
    here, there = socket.socketpair()
    subprocess.Popen(
        [sys.executable, __file__, str(there.fileno()), *["light"] * light],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **ONE_THREAD},
    )
    there.close()
    return here


def preload(light: bool) -> None:
    """Import what commands import, and nothing that starts a thread."""
    for name in LIGHT:
        importlib.import_module(name)
    assert "torch" not in sys.modules
    for package in () if light else PRELOADED:
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            if not any(word in found.name for word in LEFT_OUT):
                importlib.import_module(found.name)
    for family in () if light else ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for family in () if light else ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        importlib.import_module(f"transformers.models.{family}.processing_{family}")
    if not light:
        do_what_runs_repeat()
    tasks = list(Path("/proc/self/task").iterdir())
    # pyarrow's allocator has a thread, which it starts again in a forked process.
    others = [name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]
    assert len(others) == 1, f"a forked process would lack the threads {others}"


def do_what_runs_repeat() -> None:
    """Do what every run would do again and keep in its process, a third of the time of a short one."""
    # Making any processor asks for it, and imports mistral_common.
    importlib.import_module("transformers.tokenization_mistral_common")
    # Saving a model compiles the patterns by which transformers renames the weights of all models.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2_5_vl")
    importlib.import_module("case_tables").remember_checked_tables()
    registry, schema = map(importlib.import_module, ("mmrl.scoring.registry", "mmrl.config.schema"))
    registry.check_case_tables(COMMON_REWARDS, Path(), schema.ScoringConfig())


def serve(requests: socket.socket) -> list[str]:
    """Fork a child for each request and report its end. Returns only in a child: the command that it is to run."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for pytest, whose end ends us
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _report_ended(running)
        if requests not in ready:
            continue
        head, fds, _, _ = socket.recv_fds(requests, 4, 3)
        if not head:
            os._exit(0)
        request = json.loads(_exactly(requests.fileno(), int.from_bytes(head, "little")))
        out, errors, status = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(out, 1)
            os.dup2(errors, 2)
            for fd in (*fds, *running.values(), wake, woken, requests.detach()):
                os.close(fd)
            if request["session"]:
                os.setsid()
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            return list(request["command"])
        os.write(status, pid.to_bytes(4, "little"))
        os.close(out)
        os.close(errors)
        running[pid] = status


def _report_ended(running: dict[int, int]) -> None:
    for pid, status in list(running.items()):
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(how)
            with suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(status, code.to_bytes(4, "little", signed=True))
            os.close(running.pop(pid))


def run(command: Sequence[str]) -> None:
    """Do what `python COMMAND` does: `-m MODULE WORDS`, `-c CODE WORDS`, or a script and its words."""
    subprocess.Popen = PopenByFork  # type: ignore[misc]
    sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")
    if command[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[1:] = command[2:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        multiprocessing.get_context = _fork_context  # type: ignore[assignment]
        sys.path[0] = str(Path(command[0]).parent)
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")


def _fork_context(method: str | None = None) -> multiprocessing.context.BaseContext:
    """Replace `multiprocessing.get_context`: processes that would be spawned are forked."""
    return _get_context("fork" if method == "spawn" else method)


def _stream(fd: int, errors: str) -> io.TextIOWrapper:
    """Standard output or error as a new interpreter makes it when it is not a terminal."""
    return open(fd, "w", encoding="utf-8", errors=errors, buffering=1 if fd == 2 else -1, closefd=False)


class PopenByFork(subprocess.Popen[Any]):
    """A script, mmrl or pytest, started by a command that was itself forked, is forked from it; all else is started."""

    PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]

    def _execute_child(self, *arguments: Any) -> None:
        given = self.PARAMETERS.bind(self, *arguments).arguments
        args = given["args"]
        words = [*map(str, args)] if isinstance(args, (list, tuple)) else [str(args), ""]
        ours = words[1:3] in (["-m", "mmrl"], ["-m", "pytest"]) or (words[1:2] and words[1].endswith(".py"))
        if words[0] != sys.executable or not ours or given["preexec_fn"] is not None or threading.active_count() > 1:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = given["p2cread"], given["c2pwrite"], given["errwrite"]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(words[1:], streams, given["cwd"], given["env"], session=given["start_new_session"])
        self._child_created = True
        for fd in {*streams, getattr(self, "_devnull", -1)} - {-1}:
            os.close(fd)
        self._closed_child_pipe_fds = True


def _become(command: list[str], streams: tuple[int, ...], cwd: Any, env: Any, *, session: bool) -> None:
    """Be a new process as far as a command can tell, and end without returning to what was running here."""
    code = 1
    try:
        # What the process that forked us wants done at its end (temporary folders deleted, workers stopped) is its own.
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if session:
            os.setsid()
        for fd, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, fd)
        os.closerange(3, 4096)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        run(command)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001, as at the top of an interpreter
        traceback.print_exc()
    finally:
        # The frames below are those of the process that forked: unwinding into them would stop its other ranks.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    preload("light" in sys.argv)
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
