"""What vLLM's own processes need of us: weights through files in shared memory, and prints of the weights they hold.

vLLM brings transfers of its own for GPUs (nccl, ipc). This one, registered beside them, needs none: the learner writes
the weights in pieces of bounded size, and the workers of a server on the same machine read each as they are told of it.
vLLM finds `register` by an entry point of pyproject.toml, in each of its processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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
_SHARED_MEMORY_DIR = Path("/dev/shm")


def register() -> None:
    """Make the transfer known to vLLM, in this process; once or more often."""
    for factory, name in (
        (WeightTransferEngineFactory, "FileReceiver"),
        (WeightTransferTrainerFactory, "FileSender"),
    ):
        with suppress(ValueError):  # it is known: plug-ins may be called twice
            factory.register_engine(BACKEND, __name__, name)


class FingerprintExtension:
    """Mixed into vLLM's workers."""

    model_runner: Any

    def fingerprints(self) -> dict[str, Any]:
        """The print of every weight that the worker holds, as plain data."""
        held = ((name, fingerprint(tensor)) for name, tensor in self.model_runner.get_model().named_parameters())
        return {name: [list(found.shape), found.digest] for name, found in held}


def parse_fingerprints(plain: dict[str, Any]) -> dict[str, TensorFingerprint]:
    """What `Prints.prints` made plain."""
    return {name: TensorFingerprint(shape=tuple(sizes), digest=digest) for name, (sizes, digest) in plain.items()}


class FingerprintedSource(WeightSource):
    """Our weights as vLLM's senders take them; each pass leaves prints of what it brought.

    A sender keeps the source it was made with, so it is here that `weights` change.
    """

    def __init__(self, weights: WeightStream) -> None:
        self.weights = weights
        self.fingerprints: dict[str, TensorFingerprint] = {}

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes."""
        return [ParamMeta(*shape) for shape in self.weights.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        self.fingerprints.clear()
        return iter_with_fingerprints(self.weights, self.fingerprints)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A piece: a file of safetensors."""

    path: str


class FileReceiver(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """In a worker: reads pieces into the model, as vLLM's own receivers do with what comes over NCCL."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Keep what belongs together (query, key and value, say) until it is complete, however pieces are cut."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read one piece. The tensors outlive the file, which is gone when the call returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Read one piece."""
        weights = load_file(update_info.path, device=str(self.device))
        self.model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        """Put in place what was kept."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to do."""


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    """`piece_bytes` bounds what lies in shared memory at a time; a larger tensor goes alone."""

    backend: ClassVar[str] = BACKEND

    piece_bytes: int = 2**28


class FileSender(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """In the learner: writes pieces."""

    init_info_cls = FileTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, piece_bytes: int) -> None:
        super().__init__(client=client, source=source)
        self._piece_bytes = piece_bytes

    @classmethod
    def trainer_init(
        cls, init_info: FileTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> FileSender:
        """Introduce the two sides to each other."""
        if source is None:
            raise ValueError("there are no weights to send")
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source, piece_bytes=init_info.piece_bytes)

    def send_weights(self) -> None:
        """Send all of them."""
        where = _SHARED_MEMORY_DIR if _SHARED_MEMORY_DIR.is_dir() else None
        self.client.start_weight_update()
        with tempfile.TemporaryDirectory(prefix="mmrl-", dir=where) as folder:
            path = Path(folder) / "piece.safetensors"
            for piece in _split_into_pieces(self.source, self._piece_bytes):
                save_file(piece, path)
                self.client.update_weights({"path": str(path)})
        self.client.finish_weight_update()


def _split_into_pieces(source: WeightSource, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in source:
        if piece and size + tensor.nbytes > max_bytes:
            yield piece
            piece, size = {}, 0
        # A copy: a tied matrix comes twice, and a file holds no tensor under two names.
        piece[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if piece:
        yield piece
