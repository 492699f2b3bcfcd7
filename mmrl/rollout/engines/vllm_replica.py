"""One server of vLLM: started, asked, given weights, started again."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import request as http
from urllib.error import HTTPError

from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from mmrl.config.schema import Server
from mmrl.rollout.engines.vllm_weight_transfer import FileSend, Recorded, read_prints
from mmrl.rollout.weight_sync import Weights, check_arrival, check_model
from mmrl.types import UserError

ADAPTER = "policy"
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # weights, caches and workers can be reached
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_PR_SET_PDEATHSIG = 1
_STARTED_SO = "start it as docs/vllm.md says"


class Failed(Exception):
    """A replica did not answer, or answered that it is broken."""


class Replica:
    """One server, at a URL; ours to start again where `command` says how."""

    def __init__(
        self, url: str, options: Server, *, command: Sequence[str] = (), device: str = "", log: Path = Path()
    ) -> None:
        self.url = url
        self._options, self._command, self._device, self._log = options, command, device, log
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._sender: Any = None
        self._source: Recorded | None = None
        self.adapted = False

    def start(self) -> None:
        """Start it, if it is ours; `wait` until it answers."""
        if not self._command:
            return
        chosen = {"CUDA_VISIBLE_DEVICES": self._device} if self._device else {}
        self._starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **_ENVIRONMENT, **chosen},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the run's business, which ends its servers itself
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one call into the kernel, which takes no lock
            )

    def wait(self) -> None:
        """Return once it is up and, if it is ours, has drawn a token: what kernels cannot do, they say as they run.

        Raises:
            UserError: it is not, within the deadline, or cannot.
        """
        deadline = time.monotonic() + (self._options.start_s if self._command else self._options.deadline_s)
        while time.monotonic() < deadline:
            with suppress(Failed):
                self.ask("health", timeout=5.0)
                return self._try_out()
            if self._process is not None and self._process.poll() is not None:
                raise UserError(f"the rollout server {self.url} ended as it started; its last words:\n{self._words()}")
            time.sleep(0.2)
        if self._command:
            raise UserError(
                f"the rollout server {self.url} is not up within {self._options.start_s:g} s (rollout.server.start_s); "
                f"its last words:\n{self._words()}"
            )
        raise UserError(f"no rollout server answers at {self.url}; {_STARTED_SO}, or correct rollout.server.urls")

    def _try_out(self) -> None:
        if not self._command:
            return
        try:
            self.ask("inference/v1/generate", {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
        except Failed as failure:
            raise UserError(
                f"rollout.engine: vLLM cannot run this model here: {failure}; its last words:\n{self._words()}"
            ) from failure

    def revive(self, failure: Failed) -> None:
        """Start it again.

        Raises:
            UserError: it is not ours, or has been started often enough.
        """
        if self._starts == 0 or self._starts > self._options.restarts:
            words = f"its last words:\n{self._words()}" if self._command else f"if it is gone, {_STARTED_SO}"
            raise UserError(f"the rollout server {self.url} failed: {failure}; {words}") from failure
        self.end()
        self._sender = None
        self.adapted = False
        self.start()
        self.wait()

    def end(self) -> None:
        """End it, and the workers it has started."""
        if self._process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10.0)
        self._process = None

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """POST `body` as JSON, or GET where there is none; the reply, from JSON. Raises as `tell`, and Failed where it
        is no JSON.
        """
        text = self.tell(path, body, timeout=timeout)
        try:
            found: dict[str, Any] = json.loads(text) if text else {}
        except ValueError as error:
            raise Failed(f"{path} answers {text[:200]!r}, which is no JSON") from error
        return found

    def tell(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> bytes:
        """POST `body` as JSON, or GET where there is none; the reply as it is.

        Raises:
            Failed: no reply within the deadline, or an error of the server's.
            UserError: the server refuses the request.
        """
        timeout = timeout or self._options.deadline_s
        data = None if body is None else json.dumps(body).encode()
        asked = http.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with http.build_opener(http.ProxyHandler({})).open(asked, timeout=timeout) as reply:
                text: bytes = reply.read()
        except HTTPError as error:
            said = f"status {error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code == HTTPStatus.NOT_FOUND:
                raise UserError(f"the rollout server {self.url} has no {path} ({said}); {_STARTED_SO}") from error
            if error.code < 500:
                raise UserError(f"the rollout server {self.url} refuses {path}: {said}") from error
            raise Failed(said) from error
        except TimeoutError as error:
            raise Failed(f"no answer to {path} within {timeout:g} s (rollout.server.deadline_s)") from error
        except (OSError, HTTPException) as error:
            raise Failed(f"unreachable ({error})") from error
        return text

    def longest(self) -> int:
        """Tokens of the longest sequence that it takes.

        Raises:
            UserError: it does not say.
        """
        try:
            return int(self.ask("v1/models")["data"][0]["max_model_len"])
        except (Failed, LookupError, TypeError) as error:
            raise UserError(
                f"the rollout server {self.url} does not say how long a sequence it takes ({error!r}); {_STARTED_SO}"
            ) from error

    def load(self, weights: Weights, spread: int) -> None:
        """Send it weights by the transfer that the options name, and compare prints.

        Raises:
            UserError: they are another model's.
            Failed: it died of it.
            RuntimeError: they did not arrive.
        """
        if self._sender is None or self._source is None:
            check_model(weights, self._prints())
            self._source = Recorded(weights)
            client = _Client(self.ask)
            self._sender = WeightTransferTrainerFactory.trainer_init(
                _sending(self._options, spread), client=client, source=self._source
            )
        self._source.weights = weights
        self._sender.send_weights()
        self._forget()
        check_arrival(self._source.prints, self._prints())

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter in `folder`, which it must be able to read; the one before, of another run perhaps, goes.

        Loaded in place of that one it would be read from the files again for every step of decoding.
        """
        if any(model["id"] == ADAPTER for model in self.ask("v1/models")["data"]):
            self.tell("v1/unload_lora_adapter", {"lora_name": ADAPTER})
        self.tell("v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)})
        self.adapted = True
        self._forget()

    def _forget(self) -> None:
        for cache in ("prefix", "mm", "encoder"):
            self.ask(f"reset_{cache}_cache", {})

    def _prints(self) -> dict[str, Any]:
        (plain, *_) = self.ask("collective_rpc", {"method": "prints"})["results"]
        return read_prints(plain)

    def _words(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


class _Client(HTTPVLLMWeightSyncClient):
    """vLLM's own, with our deadlines and words for failures."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._ask(path, json or {})


def _sending(options: Server, spread: int) -> TrainerInitInfo:
    match options.transfer:
        case "file":
            return FileSend(rank=0)
        case "ipc":
            return IPCTrainerInitInfo(rank=0)
        case "nccl":
            return NCCLTrainerInitInfo(
                rank=0, master_address=socket.gethostname(), master_port=free_port(), world_size=1 + spread
            )


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that may be: a server would keep its GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
