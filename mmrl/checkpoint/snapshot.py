"""The contents of a checkpoint: how they are written, and how a run is restored from them.

A checkpoint is a folder, `checkpoints/00-000100` for example, of these files:

    model.safetensors     the weights that training changes, and a fingerprint of all others, which are the base model's
    optimizer.pt          AdamW's moments, float32 masters, and the weights of a reference that moves
    rng.pt                the states of rank 0's torch generators; all other random numbers derive from seeds
    state.json            the `TrainingState`: stage, step, position in the data, replay buffer, unfinished rollouts ...
    ranking_metric.json   the last value of the metric that the best checkpoint is chosen by
    config.yaml           the run's settings
    hashes.json           the sha256 of every other file

They are written to the partial folder `checkpoints/.00-000100.partial`: `write_part` below writes a rank's files and
their hashes, and `merge_part_hashes` joins the hashes of all ranks. The checkpoint exists, complete, once
`atomic_folder.commit_partial` has run the line `partial_folder.rename(folder)`.

A run continues in its own folder, which has what checkpoints leave out: `metrics.jsonl`, of which `state.json` has the
length; the weights of a reference that does not move, written once; the processor's files; what `sample` and `select`
stages wrote; and pictures that environments have drawn.

Several ranks write a checkpoint together, each its share of weights and optimizer as `model-00001-of-00004.safetensors`
and so on. Every weight is complete in one of the files, so any number of ranks can continue from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mmrl.checkpoint import json_codec
from mmrl.checkpoint.atomic_folder import atomic_folder, write_part_hashes
from mmrl.distributed.ranks import Ranks
from mmrl.types import TrainingState, UserError
from mmrl.utils.torch_digests import sample_bytes

WEIGHTS_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.pt"
RNG_FILE: Final = "rng.pt"
STATE_FILE: Final = "state.json"
RANKING_METRIC_FILE: Final = "ranking_metric.json"
CONFIG_FILE: Final = "config.yaml"
# Rank 0 writes these; every rank writes its own weights and optimizer files.
COMMON_FILES: Final = (RNG_FILE, STATE_FILE, RANKING_METRIC_FILE, CONFIG_FILE)
OPTIMIZER_TABLES: Final = ("moments", "masters", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """Weights of a model, split into what a checkpoint holds and what it only fingerprints."""

    trainable: Mapping[str, torch.Tensor]  # name → weight that training changes; when saving, this rank's share of them
    frozen_fingerprint: str = ""  # result of `fingerprint_weights` for all other weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a run continues from, as one rank holds it."""

    weights: CheckpointWeights
    # Table name → index of a weight → what the optimizer keeps of it; this rank's share.
    optimizer: Mapping[str, Mapping[Any, Any]]
    rng: Mapping[str, torch.Tensor]  # result of `read_rng_states`
    state: TrainingState
    config_yaml: str = ""  # the run's settings
    # Last value of the metric that the best checkpoint is chosen by; None if there is none yet.
    ranking_metric: float | None = None


def read_rng_states() -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators, by device."""
    # Python's and NumPy's are left out: every use makes its own generator from a derived seed.
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def copy_to_cpu(snapshot: Snapshot) -> Snapshot:
    """Return a copy on the CPU that shares no memory with the run."""
    # The run continues while the copy is written, and changes weights, optimizer and state in place.
    weights = replace(snapshot.weights, trainable=_copy_value_to_cpu(dict(snapshot.weights.trainable)))
    copied = {field.name: _copy_value_to_cpu(getattr(snapshot.state, field.name)) for field in fields(TrainingState)}
    state = TrainingState(**copied)
    return replace(snapshot, weights=weights, optimizer=_copy_value_to_cpu(dict(snapshot.optimizer)), state=state)


def fingerprint_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash over the names, dtypes, shapes and about a thousand values of each tensor."""
    descriptions = {}
    for name, tensor in tensors:
        # A sample of the values distinguishes models, without reading every byte of a large one at each start.
        descriptions[name] = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + sample_bytes(tensor)
    digest = hashlib.sha256()
    # Sorted, so that the order in which a model lists its weights does not matter.
    for _, description in sorted(descriptions.items()):
        digest.update(description)
    return digest.hexdigest()


def part_file_names(count: int) -> list[str]:
    """Return the names of the files that the `count` ranks write last, each once its part is complete."""
    return [_sharded_file_name("part.json", rank, count) for rank in range(count)]


def write_part(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """Write this rank's part of a checkpoint; rank 0 writes the common files too.

    Raises:
        OSError: the disk is full or not writable.
        UserError: the state holds a value that cannot be written.
    """
    weights_file = _sharded_file_name(WEIGHTS_FILE, ranks.rank, ranks.size)
    optimizer_file = _sharded_file_name(OPTIMIZER_FILE, ranks.rank, ranks.size)
    names = [weights_file, optimizer_file]
    _write_weights(snapshot.weights, folder / weights_file)
    _torch_save({table: dict(entries) for table, entries in snapshot.optimizer.items()}, folder / optimizer_file)
    if ranks.rank == 0:
        names += COMMON_FILES
        _torch_save(dict(snapshot.rng), folder / RNG_FILE)
        (folder / STATE_FILE).write_text(json_codec.dumps(snapshot.state))
        (folder / RANKING_METRIC_FILE).write_text(json.dumps(snapshot.ranking_metric))
        (folder / CONFIG_FILE).write_text(snapshot.config_yaml)
    # Last, since this file shows the other ranks that the part is complete.
    write_part_hashes(folder, names, part_file_names(ranks.size)[ranks.rank])


def load_checkpoint(
    folder: Path, *, weights: CheckpointWeights, mmap: bool = False
) -> tuple[TrainingState, dict[str, dict[Any, Any]]]:
    """Restore weights (all of them, on every rank) and random generators in place; return state and optimizer tables.

    Raises:
        UserError: the model is not the one that the run began with, or another version of mmrl saved the checkpoint.
    """
    load_weights(folder, weights, mmap=mmap)
    # `weights_only` refuses pickled code: a checkpoint may come from somebody else.
    rng = torch.load(folder / RNG_FILE, weights_only=True)
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
    optimizer: dict[str, dict[Any, Any]] = {}
    for path in _list_part_files(folder, OPTIMIZER_FILE):
        # Mapped, so that the processes of a machine share its memory, and each reads only the share that it uses.
        for table, entries in torch.load(path, weights_only=True, mmap=True).items():
            # Ignoring an unknown table would silently change how the run continues.
            if table not in OPTIMIZER_TABLES:
                raise UserError(
                    f"{path} holds {table!r}, which this version of mmrl does not know; continue with the version that "
                    "saved it, or start over in another directory"
                )
            optimizer.setdefault(table, {}).update(entries)
    return load_state(folder), optimizer


def load_state(folder: Path) -> TrainingState:
    """Return the state that a checkpoint holds, without its weights; raises a UserError as `json_codec.loads`."""
    return json_codec.loads((folder / STATE_FILE).read_text(), TrainingState)


def read_ranking_metric(folder: Path) -> float | None:
    """Return the metric that a checkpoint is ranked by; None if it had no value yet, or the file is damaged."""
    try:
        metric = json.loads((folder / RANKING_METRIC_FILE).read_text())
    except (OSError, ValueError):
        # Damage is reported when the checkpoint is loaded; ranking the others must not fail for it.
        return None
    return metric if isinstance(metric, float) else None


def save_weights(folder: Path, weights: CheckpointWeights) -> None:
    """Write a folder with only weights, which `load_weights` reads. Raises as `atomic_folder`."""
    with atomic_folder(folder) as partial_folder:
        _write_weights(weights, partial_folder / WEIGHTS_FILE)


@torch.no_grad()
def load_weights(folder: Path, weights: CheckpointWeights, *, mmap: bool = False) -> None:
    """Overwrite `weights.trainable` with the weights of a checkpoint, or of a folder that `save_weights` wrote.

    With `mmap` the tensors map the files instead of copying them, so the processes of a machine share the memory.

    Raises:
        UserError: the model is not the one whose weights were saved.
    """
    with ExitStack() as stack:
        file_of, saved = {}, {}
        same_frozen = True
        for path in _list_part_files(folder, WEIGHTS_FILE):
            file = stack.enter_context(safe_open(path, framework="pt"))
            same_frozen = same_frozen and file.metadata()["frozen_fingerprint"] == weights.frozen_fingerprint
            for name in file.keys():  # noqa: SIM118 - no mapping
                file_of[name] = file
                saved[name] = tuple(file.get_slice(name).get_shape())
        expected = {name: tuple(tensor.shape) for name, tensor in weights.trainable.items()}
        # Checked before any weight is touched: a model that does not fit stays as it was.
        if saved != expected or not same_frozen:
            which = "that are not trained" if saved == expected else "that are trained"
            raise UserError(
                f"{folder} was saved from another model: the weights {which} differ. Restore model.path "
                "as it was, or start over in another directory"
            )
        for name, tensor in weights.trainable.items():
            # `copy_` keeps the tensor's own memory; assigning `data` puts the map of the file in its place.
            if mmap:
                tensor.data = file_of[name].get_tensor(name)
            else:
                tensor.copy_(file_of[name].get_tensor(name))


def _sharded_file_name(name: str, rank: int, count: int) -> str:
    # The files of several ranks are numbered like shards of Hugging Face.
    stem, _, suffix = name.partition(".")
    return name if count == 1 else f"{stem}-{rank + 1:05d}-of-{count:05d}.{suffix}"


def _list_part_files(folder: Path, name: str) -> list[Path]:
    """Return the files that ranks have written under `name`, in the order of the ranks."""
    stem, _, suffix = name.partition(".")
    return sorted(folder.glob(f"{stem}*.{suffix}"))


def _write_weights(weights: CheckpointWeights, path: Path) -> None:
    trained = {}
    for name, tensor in weights.trainable.items():
        trained[name] = tensor.detach().contiguous()
    # A single metadata entry: safetensors writes several in another order each time, and files would differ.
    save_file(trained, path, metadata={"frozen_fingerprint": weights.frozen_fingerprint})


def _torch_save(content: object, path: Path) -> None:
    # An open file, since torch.save raises without the cause if it opens a path itself and the disk is full.
    with path.open("wb") as file:
        torch.save(content, file)


def _copy_value_to_cpu(value: Any) -> Any:  # noqa: ANN401 - optimizers keep values of any type
    # Containers and tensors are copied deeply. Other values are immutable, and stay the same objects.
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_value_to_cpu(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(_copy_value_to_cpu, value))
    # NamedTuples are record types here and hold no tensors.
    if type(value) is tuple:
        return tuple(map(_copy_value_to_cpu, value))
    return value
