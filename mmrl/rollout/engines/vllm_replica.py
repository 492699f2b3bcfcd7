"""Starts one vLLM server, sends it requests and weights, and restarts it after a failure.

Either this process starts the server, as `python -m vllm.entrypoints.openai.api_server` with its output in a log file,
or the server already runs at an address of `rollout.server.urls` and is never started or ended here. A server that the
run starts gets a key and refuses requests without it: other users of the machine could otherwise read prompts or
replace the weights. The key is passed in the environment because other users could read it among the arguments.
docs/design.md says what happens when a server hangs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import request as http
from urllib.error import HTTPError

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from mmrl.config.schema import VllmServerConfig
from mmrl.distributed.launch import find_free_port
from mmrl.rollout.engines.vllm_requests import START_PROMPT, START_SAMPLING
from mmrl.rollout.engines.vllm_weight_transfer import KEY_VARIABLE, FingerprintedSource, parse_fingerprints, send_files
from mmrl.rollout.engines.vllm_weights import check_same_model, check_weights_arrived
from mmrl.rollout.weight_sync import TensorFingerprint, WeightStream
from mmrl.types import UserError
from mmrl.utils.processes import die_with_parent

ADAPTER_NAME = "policy"

_ENV_VARS = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the endpoints for weights, caches and calls of workers
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_HEALTH_TIMEOUT_S = 5.0  # of one attempt, while a server starts
_POLL_INTERVAL_S = 0.2
_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_CHARS = 3000
START_HINT = "start it as docs/vllm.md says"


class ReplicaError(Exception):
    """A replica did not answer, or answered with an error of its own. A restart may help."""


class Replica:
    """A client of one vLLM server. It owns the server's process if it starts the server itself."""

    def __init__(
        self, url: str, options: VllmServerConfig, *, command: Sequence[str] = (), device: str = "", log: Path = Path()
    ) -> None:
        """Create the client of the server at `url`, without a slash at the end; nothing is started yet.

        `command` starts the server; it is empty for a server that already runs. `device` becomes CUDA_VISIBLE_DEVICES,
        unless it is empty. The server's output is appended to `log`. A server that this client starts gets a new key;
        for one that already runs, the key is the environment variable VLLM_API_KEY, if that is set.
        """
        self.key = secrets.token_urlsafe(32) if command else os.environ.get(KEY_VARIABLE, "")
        self.url = url
        self.adapter_loaded = False
        self._options, self._command, self._device, self._log = options, command, device, log
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._sender: Any = None
        self._source: FingerprintedSource | None = None

    def start(self) -> None:
        """Start the server, if it belongs to the run. It answers when `wait_until_ready` returns."""
        if not self._command:
            return
        visible_devices = {"CUDA_VISIBLE_DEVICES": self._device} if self._device else {}
        self._num_starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **_ENV_VARS, **visible_devices, KEY_VARIABLE: self.key},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach the server: the run ends it after the step
                # A server that outlives a killed run would keep its GPU. One call into the kernel, which takes no lock.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers and, if it belongs to the run, has generated a token.

        Raises:
            UserError: it does not answer in time, has ended, or cannot generate.
        """
        timeout_s = self._options.startup_timeout_s if self._command else self._options.timeout_s
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(ReplicaError):
                self.request("health", timeout=_HEALTH_TIMEOUT_S)
                break
            if self._process is not None and self._process.poll() is not None:
                raise UserError(f"the rollout server {self.url} exited during startup; {self._log_tail()}")
            time.sleep(_POLL_INTERVAL_S)
        else:
            if not self._command:
                raise UserError(
                    f"no rollout server answers at {self.url}; {START_HINT}, or correct rollout.server.urls"
                )
            raise UserError(
                f"the rollout server {self.url} is not up within {timeout_s:g} s (rollout.server.startup_timeout_s); "
                f"{self._log_tail()}"
            )
        if not self._command:
            return
        try:
            request = {"token_ids": START_PROMPT, "sampling_params": START_SAMPLING}
            self.request_json("inference/v1/generate", request)
        except ReplicaError as failure:
            raise UserError(
                f"rollout.engine: vLLM cannot run this model here: {failure}; {self._log_tail()}"
            ) from failure

    def restart(self, failure: ReplicaError) -> None:
        """Restart the server after `failure`. The caller has to load the learner's weights again.

        Raises:
            UserError: it does not belong to the run, or was restarted `max_restarts` times already.
        """
        if self._num_starts == 0 or self._num_starts > self._options.max_restarts:
            hint = self._log_tail() if self._command else f"if it is gone, {START_HINT}"
            raise UserError(f"the rollout server {self.url} failed: {failure}; {hint}") from failure
        self.stop()
        self._sender = self._source = None
        self.adapter_loaded = False
        self.start()
        self.wait_until_ready()

    def stop(self) -> None:
        """End the server and the workers that it has started, if it belongs to the run."""
        if self._process is None:
            return
        # The second signal is sent even if the server has ended: its workers are in its session and may not have.
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_TIMEOUT_S)
        self._process = None

    def request_json(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request as `request` does, and return the reply, read from JSON; {} for an empty one.

        Raises:
            ReplicaError: as `request`, and for a reply that is not JSON.
        """
        reply = self.request(path, body)
        try:
            parsed: dict[str, Any] = json.loads(reply) if reply else {}
        except ValueError as error:
            raise ReplicaError(f"{path} answers {reply[:200]!r}, which is not JSON") from error
        return parsed

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> bytes:
        """POST `body` as JSON, or GET if there is none, and return the reply, within `timeout` or `timeout_s` seconds.

        Raises:
            ReplicaError: no reply in time, or an error of the server's (a status of 500 or above).
            UserError: the server refuses the request (another status that is an error).
        """
        timeout = timeout or self._options.timeout_s
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        outgoing = http.Request(f"{self.url}/{path}", data, headers)
        try:
            # No proxies: urllib would use those of the environment even for servers on this machine.
            with http.build_opener(http.ProxyHandler({})).open(outgoing, timeout=timeout) as response:
                reply: bytes = response.read()
        except HTTPError as error:
            status = f"status {error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code == HTTPStatus.NOT_FOUND:
                raise UserError(f"the rollout server {self.url} has no {path} ({status}); {START_HINT}") from error
            if error.code == HTTPStatus.UNAUTHORIZED:
                hint = f"set {KEY_VARIABLE} to the key that it was started with"
                raise UserError(f"the rollout server {self.url} wants a key for {path}; {hint}") from error
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise UserError(f"the rollout server {self.url} refuses {path}: {status}") from error
            raise ReplicaError(status) from error
        except TimeoutError as error:
            raise ReplicaError(f"no answer to {path} within {timeout:g} s (rollout.server.timeout_s)") from error
        except (OSError, HTTPException) as error:
            raise ReplicaError(f"unreachable ({error})") from error
        return reply

    def load_weights(self, weights: WeightStream, num_workers: int) -> None:
        """Send weights to the server's workers, which load them, and compare fingerprints afterwards.

        Raises:
            UserError: the server runs another model, or holds other weights after the transfer.
            ReplicaError: the server failed during the transfer.
        """
        if self._source is None:
            check_same_model(weights, self._read_fingerprints()[0])
            self._source = FingerprintedSource(weights)
        # A sender keeps the source that it was created with, so the new weights go into that.
        self._source.weights = weights
        if self._options.weight_transfer == "file":
            send_files(self._source, self.call_workers)
        else:
            if self._sender is None:
                self._sender = self._make_sender(self._source, num_workers)
            self._sender.send_weights()
        self._reset_caches()
        for worker_fingerprints in self._read_fingerprints():
            check_weights_arrived(self._source.fingerprints, worker_fingerprints)

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter in `folder`, which the server must be able to read, in place of the one before."""
        # The old adapter is unloaded first, even one left by an earlier run. If the new one replaced it in place, vLLM
        # would read the files again at every decoding step.
        if any(model["id"] == ADAPTER_NAME for model in self.request_json("v1/models")["data"]):
            self.request("v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        self.request("v1/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": str(folder)})
        self.adapter_loaded = True
        self._reset_caches()

    def call_workers(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of `WorkerExtension` in all workers of the server, and return their results.

        Raises:
            ReplicaError: as `request_json`, and for a reply without results.
        """
        reply = self.request_json("collective_rpc", {"method": method, "args": arguments})
        if "results" not in reply:
            raise ReplicaError(f"collective_rpc {method} answers {reply!r:.200}")
        results: list[Any] = reply["results"]
        return results

    def _make_sender(self, source: FingerprintedSource, num_workers: int) -> Any:  # noqa: ANN401  (vLLM's sender)
        init_info: IPCTrainerInitInfo | NCCLTrainerInitInfo = IPCTrainerInitInfo(rank=0)
        if self._options.weight_transfer == "nccl":  # the learner is rank 0 of the transfer
            address, port = socket.gethostname(), find_free_port()
            init_info = NCCLTrainerInitInfo(
                rank=0, master_address=address, master_port=port, world_size=1 + num_workers
            )
        client = _WeightSyncClient(self.request_json)
        return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)

    def _reset_caches(self) -> None:
        # Keys and values, media, and encoded media: old weights have filled these caches.
        for cache in ("prefix", "mm", "encoder"):
            reply = self.request_json(f"reset_{cache}_cache", {})
            # Only the prefix cache, which a request that still runs holds, reports a result.
            if not reply.get("success", True):
                raise ReplicaError("the server kept keys and values of the old weights, since a request still runs")

    def _read_fingerprints(self) -> list[dict[str, TensorFingerprint]]:
        """Return the fingerprints of each worker's weights."""
        return list(map(parse_fingerprints, self.call_workers("fingerprints")))

    def _log_tail(self) -> str:
        return f"end of its log:\n{self._log.read_text(errors='replace')[-_LOG_TAIL_CHARS:]}"


class _WeightSyncClient(HTTPVLLMWeightSyncClient):
    """vLLM's client for weight transfers, with our timeouts and error messages."""

    def __init__(self, request_json: Callable[..., Any]) -> None:
        self._request_json = request_json

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._request_json(path, json or {})
