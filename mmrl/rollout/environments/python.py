"""Python for the model, with variables that stay: `fn: "mmrl.rollout.environments.python:make"`, `action: call`.

The call is `{"name": "python", "arguments": {"code": ..}}`; it answers with what the code printed and the value of its
last expression, as a notebook does. A turn without a call ends the episode.

Each episode has its own process, without network or other processes, with limits of time, memory and file size,
and an empty folder as its working directory. It may read and write the files that the user of this run may.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated

from pydantic import Field, PositiveInt

from mmrl.types import Action, Observation, Sample, StepResult

_SCRIPT = Path(__file__).with_name("python_process.py")
_REMINDER = 'There is one call: {"name": "python", "arguments": {"code": "..."}}.'
# With PYTHONHASHSEED, sets of strings have the same order in every process, so an episode can be played again. Python
# ignores it in isolated mode (-I); -P and -s likewise keep the folder of the script and the user's out of imports.
_ENVIRONMENT = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
_START_S = 30.0
_missing_protections: set[str] = set()  # of this machine; each is printed once


@dataclass(kw_only=True)
class PythonEnvironment:
    """Runs code of one episode in a process.

    Options:
        timeout_s: seconds that a call may take; less than `timeout_s` of the step.
        memory_mib: address space of the process.
        file_mib: size of a file that it may write.
        max_chars: characters of output that are kept.
    """

    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 5.0
    memory_mib: PositiveInt = 1024
    file_mib: PositiveInt = 16
    max_chars: PositiveInt = 4000

    def __post_init__(self) -> None:
        """Make the folder of the process, which starts with the first call."""
        self.folder = tempfile.TemporaryDirectory(prefix="mmrl-python-", ignore_cleanup_errors=True)
        self.process: subprocess.Popen[bytes] | None = None

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin without variables. The observation is empty, since the sample states the question."""
        return Observation()

    def step(self, action: str | Action) -> StepResult:
        """Run the code of a call, or end the episode."""
        if not isinstance(action, Action):
            return StepResult(terminated=True)
        code = action.arguments.get("code")
        if action.name != "python" or not isinstance(code, str) or len(action.arguments) != 1:
            return StepResult(observation=Observation(text=_REMINDER), valid=False)
        return StepResult(observation=Observation(text=self._run(code)))

    def close(self) -> None:
        """End the process and delete its folder."""
        self._kill()
        self.folder.cleanup()

    def _run(self, code: str) -> str:
        process = self.process or self._start()
        try:
            process.stdin.write(json.dumps(code).encode() + b"\n")  # type: ignore[union-attr]  # a pipe
            return self._read_answer(self.timeout_s)
        except TimeoutError:
            end = f"Stopped after {self.timeout_s:g} s"
        except (BrokenPipeError, ValueError):
            end = "The code ended the process"
        self._kill()
        return f"{end}; all variables are lost."

    def _start(self) -> subprocess.Popen[bytes]:
        limits = map(str, (self.memory_mib, self.file_mib, self.max_chars))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", str(_SCRIPT), *limits],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder.name,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        weakness = self._read_answer(_START_S)
        if weakness and weakness not in _missing_protections:
            _missing_protections.add(weakness)
            print(f"mmrl.rollout.environments.python: {weakness}", file=sys.stderr, flush=True)
        return self.process

    def _read_answer(self, timeout_s: float) -> str:
        """Return the next answer; raises TimeoutError, or ValueError if the process ended or wrote something else."""
        pipe = self.process.stdout.fileno()  # type: ignore[union-attr]  # the process runs, and this is a pipe
        line, ends_at = b"", monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, ends_at - monotonic()))[0]:
                raise TimeoutError
            if not (part := os.read(pipe, 2**16)):
                break
            line += part
        # Code that finds the pipe can write anything into it.
        return str(json.loads(line))

    def _kill(self) -> None:
        if self.process is not None:
            with self.process, suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None


make = PythonEnvironment
