"""Code that runs inside vLLM's processes: weight transfer through files, fingerprints of weights, and a server's key.

vLLM brings transfers for GPUs (nccl, ipc). The one registered here needs none: the learner writes the weights to files
of bounded size in shared memory, and the workers of a server on the same machine read each file when they are told to.
vLLM finds `register` by an entry point in pyproject.toml, in each of its processes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mmrl.rollout.weight_sync import TensorFingerprint, WeightStream, fingerprint, iter_with_fingerprints

BACKEND = "mmrl_file"
"""Name of the transfer in vLLM's `weight_transfer_config`."""

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of a server."""

_SHARED_MEMORY_DIR = Path("/dev/shm")


def register() -> None:
    """Register the transfer with vLLM in this process. Calling it again does nothing."""
    for factory, class_name in (
        (WeightTransferEngineFactory, "FileReceiver"),
        (WeightTransferTrainerFactory, "FileSender"),
    ):
        with suppress(ValueError):  # registered already: vLLM may load a plug-in more than once
            factory.register_engine(BACKEND, __name__, class_name)


class RequireKey:
    """Refuses every request to a server that does not carry its key; ASGI middleware for vLLM's `--middleware`.

    vLLM's own check covers generation alone, and leaves weights, caches, sleeping and calls of workers open.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Wrap the application `app`. The key is that of the environment.

        Raises:
            KeyError: it has none.
        """
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: object, send: Callable[..., Awaitable[None]]) -> None:
        """Answer one connection, or let the application answer."""
        # Any other type, such as "lifespan", comes from the server itself.
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                    return
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"this server wants the key of its run"})
                return
        await self._app(scope, receive, send)


class FingerprintExtension:
    """Adds methods to vLLM's workers, whose class vLLM derives from this one."""

    model_runner: Any

    def fingerprints(self) -> dict[str, Any]:
        """Return shape and digest of every weight of this worker, as JSON can hold them."""
        plain: dict[str, Any] = {}
        for name, tensor in self.model_runner.get_model().named_parameters():
            found = fingerprint(tensor)
            plain[name] = [list(found.shape), found.digest]
        return plain

    def logits_dtype(self) -> str:
        """Return the dtype that this worker computes logits in, such as `float32`, or `unknown`."""
        # vLLM goes back to the model's own where a platform lacks the one that it was asked for, and only logs that.
        for module in self.model_runner.get_model().modules():
            if getattr(module, "head_dtype", None) is not None:
                return str(module.head_dtype).removeprefix("torch.")
        return "unknown"

    def repack_experts(self) -> None:
        """Pack reloaded experts as the kernels of a CPU read them."""
        repack_experts(self.model_runner.get_model())


def repack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of experts as the kernels of a CPU read them; vLLM 0.32 does so at the first load alone.

    Without it, reloaded experts are read as packed ones, which gives other numbers and no error.
    """
    # Imported here: vLLM imports this module in processes that have not chosen their platform yet.
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def parse_fingerprints(plain: dict[str, Any]) -> dict[str, TensorFingerprint]:
    """Return what `FingerprintExtension.fingerprints` has sent."""
    return {name: TensorFingerprint(shape=tuple(shape), digest=digest) for name, (shape, digest) in plain.items()}


@dataclass(eq=False)
class FingerprintedSource(WeightSource):
    """A stream of weights as vLLM's senders read it, with the fingerprints of what was last sent."""

    weights: WeightStream
    """Replaced for another transfer: a sender keeps the source that it was created with."""
    fingerprints: dict[str, TensorFingerprint] = field(default_factory=dict)

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each weight."""
        return [ParamMeta(*spec) for spec in self.weights.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""
        self.fingerprints.clear()
        return iter_with_fingerprints(self.weights, self.fingerprints)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Tells a receiver nothing: files need no connection."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Tells a receiver to read one file."""

    path: str
    """A safetensors file with some of the weights."""


class FileReceiver(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads files of weights into a worker's model."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Prepare the model for weights that come in pieces."""
        # vLLM then holds back weights that it fuses (query, key and value, say) until all of them are there, so a file
        # may end between them.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read one file. The sender overwrites it as soon as this returns."""
        # vLLM's own method would synchronize the accelerator as well, which fails where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load the weights of one file into the model."""
        weights = load_file(update_info.path, device=str(self.device))
        self.model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        """Put the weights that were held back in place."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_experts(self.model)

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    """Options of a sender."""

    backend: ClassVar[str] = BACKEND

    piece_bytes: int = 2**28
    """Bytes of one file, and of shared memory at a time. A larger tensor has a file to itself."""


class FileSender(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """Writes the learner's weights to files, one at a time, and tells a server's workers to read each."""

    init_info_cls = FileTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, piece_bytes: int) -> None:
        super().__init__(client=client, source=source)
        self._piece_bytes = piece_bytes

    @classmethod
    def trainer_init(
        cls, init_info: FileTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> FileSender:
        """Create a sender and have the server create its receivers.

        Raises:
            ValueError: there is no source of weights.
        """
        if source is None:
            raise ValueError("there are no weights to send")
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source, piece_bytes=init_info.piece_bytes)

    def send_weights(self) -> None:
        """Send all weights of the source."""
        parent = _SHARED_MEMORY_DIR if _SHARED_MEMORY_DIR.is_dir() else None
        self.client.start_weight_update()
        with tempfile.TemporaryDirectory(prefix="mmrl-", dir=parent) as folder:
            path = Path(folder) / "piece.safetensors"
            for piece in _split_into_pieces(self.source, self._piece_bytes):
                save_file(piece, path)
                self.client.update_weights({"path": str(path)})
        self.client.finish_weight_update()


def _split_into_pieces(source: WeightSource, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights, on the CPU, in pieces of `max_bytes` at most, or of one larger tensor."""
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in source:
        if piece and size + tensor.nbytes > max_bytes:
            yield piece
            piece, size = {}, 0
        # Copied even from the CPU: a tied matrix comes under two names, and safetensors refuses shared memory.
        piece[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if piece:
        yield piece
