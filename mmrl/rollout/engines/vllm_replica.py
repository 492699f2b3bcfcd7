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

from mmrl.config.schema import VllmServerConfig
from mmrl.rollout.engines.vllm_weight_transfer import FileTrainerInitInfo, FingerprintedSource, parse_fingerprints
from mmrl.rollout.weight_sync import WeightStream, check_same_model, check_weights_arrived
from mmrl.types import UserError

ADAPTER_NAME = "policy"
_ENV_VARS = {
    "VLLM_SERVER_DEV_MODE": "1",  # weights, caches and workers can be reached
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_PR_SET_PDEATHSIG = 1
_START_HINT = "start it as docs/vllm.md says"


class ReplicaError(Exception):
    """A replica did not answer, or answered that it is broken."""


class Replica:
    """One server, at a URL; ours to start again where `command` says how."""

    def __init__(
        self, url: str, options: VllmServerConfig, *, command: Sequence[str] = (), device: str = "", log: Path = Path()
    ) -> None:
        self.url = url
        self._options, self._command, self._device, self._log = options, command, device, log
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._sender: Any = None
        self._source: FingerprintedSource | None = None
        self.adapter_loaded = False

    def start(self) -> None:
        """Start it, if it is ours; `wait` until it answers."""
        if not self._command:
            return
        chosen = {"CUDA_VISIBLE_DEVICES": self._device} if self._device else {}
        self._num_starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **_ENV_VARS, **chosen},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the run's business, which ends its servers itself
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call into the kernel, which takes no lock
            )

    def wait_until_ready(self) -> None:
        """Return once it is up and, if it is ours, has drawn a token: what kernels cannot do, they say as they run.

        Raises:
            UserError: it is not, within the deadline, or cannot.
        """
        deadline = time.monotonic() + (self._options.startup_timeout_s if self._command else self._options.timeout_s)
        while time.monotonic() < deadline:
            with suppress(ReplicaError):
                self.request_json("health", timeout=5.0)
                return self._generate_test_token()
            if self._process is not None and self._process.poll() is not None:
                raise UserError(
                    f"the rollout server {self.url} ended as it started; its last words:\n{self._log_tail()}"
                )
            time.sleep(0.2)
        if self._command:
            raise UserError(
                f"the rollout server {self.url} is not up within {self._options.startup_timeout_s:g} s (rollout.server.start_s); "
                f"its last words:\n{self._log_tail()}"
            )
        raise UserError(f"no rollout server answers at {self.url}; {_START_HINT}, or correct rollout.server.urls")

    def _generate_test_token(self) -> None:
        if not self._command:
            return
        try:
            self.request_json("inference/v1/generate", {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
        except ReplicaError as failure:
            raise UserError(
                f"rollout.engine: vLLM cannot run this model here: {failure}; its last words:\n{self._log_tail()}"
            ) from failure

    def restart(self, failure: ReplicaError) -> None:
        """Start it again.

        Raises:
            UserError: it is not ours, or has been started often enough.
        """
        if self._num_starts == 0 or self._num_starts > self._options.max_restarts:
            words = f"its last words:\n{self._log_tail()}" if self._command else f"if it is gone, {_START_HINT}"
            raise UserError(f"the rollout server {self.url} failed: {failure}; {words}") from failure
        self.stop()
        self._sender = None
        self.adapter_loaded = False
        self.start()
        self.wait_until_ready()

    def stop(self) -> None:
        """End it, and the workers it has started."""
        if self._process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10.0)
        self._process = None

    def request_json(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """POST `body` as JSON, or GET where there is none; the reply, from JSON. Raises as `tell`, and Failed where it
        is no JSON.
        """
        text = self.request(path, body, timeout=timeout)
        try:
            found: dict[str, Any] = json.loads(text) if text else {}
        except ValueError as error:
            raise ReplicaError(f"{path} answers {text[:200]!r}, which is no JSON") from error
        return found

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> bytes:
        """POST `body` as JSON, or GET where there is none; the reply as it is.

        Raises:
            Failed: no reply within the deadline, or an error of the server's.
            UserError: the server refuses the request.
        """
        timeout = timeout or self._options.timeout_s
        data = None if body is None else json.dumps(body).encode()
        asked = http.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with http.build_opener(http.ProxyHandler({})).open(asked, timeout=timeout) as reply:
                text: bytes = reply.read()
        except HTTPError as error:
            said = f"status {error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code == HTTPStatus.NOT_FOUND:
                raise UserError(f"the rollout server {self.url} has no {path} ({said}); {_START_HINT}") from error
            if error.code < 500:
                raise UserError(f"the rollout server {self.url} refuses {path}: {said}") from error
            raise ReplicaError(said) from error
        except TimeoutError as error:
            raise ReplicaError(f"no answer to {path} within {timeout:g} s (rollout.server.deadline_s)") from error
        except (OSError, HTTPException) as error:
            raise ReplicaError(f"unreachable ({error})") from error
        return text

    def max_model_len(self) -> int:
        """Tokens of the longest sequence that it takes.

        Raises:
            UserError: it does not say.
        """
        try:
            return int(self.request_json("v1/models")["data"][0]["max_model_len"])
        except (ReplicaError, LookupError, TypeError) as error:
            raise UserError(
                f"the rollout server {self.url} does not say how long a sequence it takes ({error!r}); {_START_HINT}"
            ) from error

    def load_weights(self, weights: WeightStream, num_workers: int) -> None:
        """Send it weights by the transfer that the options name, and compare prints.

        Raises:
            UserError: they are another model's.
            Failed: it died of it.
            RuntimeError: they did not arrive.
        """
        if self._sender is None or self._source is None:
            check_same_model(weights, self._read_fingerprints())
            self._source = FingerprintedSource(weights)
            client = _WeightSyncClient(self.request_json)
            self._sender = WeightTransferTrainerFactory.trainer_init(
                _transfer_init_info(self._options, num_workers), client=client, source=self._source
            )
        self._source.weights = weights
        self._sender.send_weights()
        self._reset_caches()
        check_weights_arrived(self._source.fingerprints, self._read_fingerprints())

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter in `folder`, which it must be able to read; the one before, of another run perhaps, goes.

        Loaded in place of that one it would be read from the files again for every step of decoding.
        """
        if any(model["id"] == ADAPTER_NAME for model in self.request_json("v1/models")["data"]):
            self.request("v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        self.request("v1/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": str(folder)})
        self.adapter_loaded = True
        self._reset_caches()

    def _reset_caches(self) -> None:
        for cache in ("prefix", "mm", "encoder"):
            self.request_json(f"reset_{cache}_cache", {})

    def _read_fingerprints(self) -> dict[str, Any]:
        (plain, *_) = self.request_json("collective_rpc", {"method": "fingerprints"})["results"]
        return parse_fingerprints(plain)

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


class _WeightSyncClient(HTTPVLLMWeightSyncClient):
    """vLLM's own, with our deadlines and words for failures."""

    def __init__(self, request_json: Callable[..., Any]) -> None:
        self._request_json = request_json

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._request_json(path, json or {})


def _transfer_init_info(options: VllmServerConfig, num_workers: int) -> TrainerInitInfo:
    match options.weight_transfer:
        case "file":
            return FileTrainerInitInfo(rank=0)
        case "ipc":
            return IPCTrainerInitInfo(rank=0)
        case "nccl":
            return NCCLTrainerInitInfo(
                rank=0, master_address=socket.gethostname(), master_port=find_free_port(), world_size=1 + num_workers
            )


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that may be: a server would keep its GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def find_free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
