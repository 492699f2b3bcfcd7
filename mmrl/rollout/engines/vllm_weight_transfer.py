"""Code that runs inside vLLM's processes, and what is sent to it: weights, fingerprints, and a server's key.

vLLM can transfer weights between GPUs (nccl, ipc). `send_files` needs no GPU: the learner writes the weights to files
of bounded size in shared memory, one at a time, and the workers of a server on the same machine read each of them.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mmrl.rollout.weight_sync import TensorFingerprint, WeightStream, fingerprint, iter_with_fingerprints

KEY_VARIABLE = "VLLM_API_KEY"  # environment variable with the key of a server

_SHARED_MEMORY_DIR = Path("/dev/shm")
_FILE_BYTES = 2**28


class RequireKey:
    """ASGI middleware for vLLM's `--middleware` that refuses every request without the server's key.

    vLLM's own check covers only generation, and leaves weights, caches, sleeping and calls of workers open.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Wrap the application `app`. The key is the environment variable VLLM_API_KEY.

        Raises:
            KeyError: the variable is not set.
        """
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: object, send: Callable[..., Awaitable[None]]) -> None:
        """Refuse one connection, or pass it on to the application."""
        # Any other type, such as "lifespan", comes from the server itself.
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                    return
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"this server requires the key of its run"})
                return
        await self._app(scope, receive, send)


class WorkerExtension:
    """Adds methods to vLLM's workers, whose class vLLM derives from this one."""

    model_runner: Any
    vllm_config: Any

    def fingerprints(self) -> dict[str, Any]:
        """Return shape and digest of every weight of this worker, as JSON can hold them."""
        return {name: list(fingerprint(tensor)) for name, tensor in self.model_runner.get_model().named_parameters()}

    def logits_dtype(self) -> str:
        """Return the dtype that this worker computes logits in, such as `float32`, or `unknown`."""
        # If the platform lacks the requested dtype, vLLM falls back to the model's own, and only logs that.
        for module in self.model_runner.get_model().modules():
            if getattr(module, "head_dtype", None) is not None:
                return str(module.head_dtype).removeprefix("torch.")
        return "unknown"

    def begin_load(self) -> None:
        """Prepare the model for weights that come in files."""
        # vLLM then holds back the parts of a fused weight (query, key and value, say) until all of them have arrived,
        # so a file may end between them.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def load_weights_file(self, path: str) -> None:
        """Load the weights of one file. The sender overwrites it as soon as this returns."""
        with set_current_vllm_config(self.vllm_config):
            weights = load_file(path, device=str(self.model_runner.device))
            self.model_runner.get_model().load_weights(weights.items())

    def end_load(self) -> None:
        """Put the weights that were held back in place."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)
        self.repack_experts()
        self.model_runner.reset_lora_state()

    def repack_experts(self) -> None:
        """Pack loaded experts into the layout of the CPU kernels; vLLM 0.32 does so only when it starts.

        Otherwise these kernels would read unpacked experts as packed ones: wrong numbers, and no error.
        """
        # Imported here: vLLM imports this module in processes that have not chosen their platform yet.
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, RoutedExperts) and layer.w13_weight.device.type == "cpu":
                layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def parse_fingerprints(plain: dict[str, Any]) -> dict[str, TensorFingerprint]:
    """Return the fingerprints, by weight name, from the JSON that `WorkerExtension.fingerprints` sent."""
    return {name: TensorFingerprint(tuple(shape), digest) for name, (shape, digest) in plain.items()}


@dataclass(eq=False)
class FingerprintedSource(WeightSource):
    """A stream of weights for vLLM's senders, which also records the fingerprints of the weights it last sent."""

    weights: WeightStream  # replaced before each transfer: a sender keeps the source that it was created with
    fingerprints: dict[str, TensorFingerprint] = field(default_factory=dict)

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each weight."""
        return [ParamMeta(*spec) for spec in self.weights.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""
        self.fingerprints.clear()
        return iter_with_fingerprints(self.weights, self.fingerprints)


def send_files(
    weights: Iterable[tuple[str, torch.Tensor]], call_workers: Callable[..., object], *, file_bytes: int = _FILE_BYTES
) -> None:
    """Write weights to one file after another, and have a server's workers read each.

    `call_workers` calls a method of `WorkerExtension` in all workers. A file has at most `file_bytes`, unless a
    single tensor is larger. Each overwrites the one before, so this also bounds the shared memory of a transfer.
    """
    parent = _SHARED_MEMORY_DIR if _SHARED_MEMORY_DIR.is_dir() else None
    call_workers("begin_load")
    with tempfile.TemporaryDirectory(prefix="mmrl-", dir=parent) as folder:
        path = Path(folder) / "weights.safetensors"
        for tensors in _split_by_size(weights, file_bytes):
            save_file(tensors, path)
            call_workers("load_weights_file", str(path))
    call_workers("end_load")


def _split_by_size(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights, on the CPU, in parts of `max_bytes` at most, or of one larger tensor."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        # Copied even from the CPU: a tied matrix comes under two names, and safetensors refuses shared memory.
        part[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    yield part
