"""A run as of one moment: what is saved, and how it is restored.

A checkpoint holds the weights that training changes. The others are those of the model the run was given; a
fingerprint of them tells whether it is given the same again. Several ranks write it together, each its part of the
weights and of what the optimizer keeps of them; every weight is whole in one of the files, so that any number of
ranks can go on from it.
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

WEIGHTS_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.pt"
RNG_FILE: Final = "rng.pt"
STATE_FILE: Final = "state.json"
SCORE_FILE: Final = "score.json"
CONFIG_FILE: Final = "config.yaml"
COMMON_FILES: Final = (RNG_FILE, STATE_FILE, SCORE_FILE, CONFIG_FILE)
"""Written by the first rank, beside the parts of all."""
OPTIMIZER_TABLES: Final = ("moments", "masters", "reference")
"""What `optimizer` may hold by weight: AdamW's moments, float32 masters, a reference that moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """A model's weights by name: those that training changes, and the fingerprint of the others."""

    trained: Mapping[str, torch.Tensor]
    frozen_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a run goes on from: of weights and `optimizer`, tables by weight, this rank's part.

    `score` is what the best checkpoint is chosen by, `config` the settings as YAML.
    """

    weights: CheckpointWeights
    optimizer: Mapping[str, Mapping[Any, Any]]
    rng: Mapping[str, torch.Tensor]
    state: TrainingState
    config_yaml: str = ""
    best_metric: float | None = None


def read_rng_states() -> dict[str, torch.Tensor]:
    """The state of every generator."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def copy_to_cpu(snapshot: Snapshot) -> Snapshot:
    """The same in memory of its own, on the CPU, so that the run may go on while it is written."""
    weights = replace(snapshot.weights, trained=_copy_value_to_cpu(dict(snapshot.weights.trained)))
    state = replace(
        snapshot.state,
        **{field.name: _copy_value_to_cpu(getattr(snapshot.state, field.name)) for field in fields(TrainingState)},
    )
    return replace(snapshot, weights=weights, optimizer=_copy_value_to_cpu(dict(snapshot.optimizer)), state=state)


def fingerprint_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Tells sets of weights apart by names, types, shapes and about a thousand values of each tensor."""
    told = {}
    for name, tensor in tensors:
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // 1000)].float().cpu()
        told[name] = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + values.numpy().tobytes()
    return hashlib.sha256(b"".join(told[name] for name in sorted(told))).hexdigest()


def part_file_names(count: int) -> list[str]:
    """The files that vouch for what each of so many ranks has written, until all have."""
    return [_sharded_file_name("part.json", rank, count) for rank in range(count)]


def write_part(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """Write what is this rank's to write of a checkpoint.

    Raises:
        OSError: the disk is full or not writable.
        UserError: it is, or State holds what cannot be written.
    """
    names = [_sharded_file_name(name, ranks.rank, ranks.size) for name in (WEIGHTS_FILE, OPTIMIZER_FILE)]
    _write_weights(snapshot.weights, folder / names[0])
    _torch_save({table: dict(kept) for table, kept in snapshot.optimizer.items()}, folder / names[1])
    if ranks.rank == 0:
        names += COMMON_FILES
        _torch_save(dict(snapshot.rng), folder / RNG_FILE)
        (folder / STATE_FILE).write_text(json_codec.dumps(snapshot.state))
        (folder / SCORE_FILE).write_text(json.dumps(snapshot.best_metric))
        (folder / CONFIG_FILE).write_text(snapshot.config_yaml)
    write_part_hashes(folder, names, part_file_names(ranks.size)[ranks.rank])


def load_checkpoint(
    folder: Path, *, weights: CheckpointWeights, mmap: bool = False
) -> tuple[TrainingState, dict[str, dict[Any, Any]]]:
    """Restore weights and RNG in place; returns the State and the optimizer's tables. `mapped` as `load_weights`.

    Raises:
        UserError: the model is not the one the run began with, or another version of mmrl has saved it.
    """
    load_weights(folder, weights, mmap=mmap)
    rng = torch.load(folder / RNG_FILE, weights_only=True)
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
    optimizer: dict[str, dict[Any, Any]] = {}
    for path in _list_part_files(folder, OPTIMIZER_FILE):
        # Mapped: processes of one machine share it, and those that take a part read no more than that.
        for table, kept in torch.load(path, weights_only=True, mmap=True).items():
            if table not in OPTIMIZER_TABLES:
                raise UserError(
                    f"{path} holds {table!r}, which this version of mmrl does not know; go on with the version that "
                    "saved it, or begin the run anew in another directory"
                )
            optimizer.setdefault(table, {}).update(kept)
    return load_state(folder), optimizer


def load_state(folder: Path) -> TrainingState:
    """The State alone."""
    return json_codec.loads((folder / STATE_FILE).read_text(), TrainingState)


def read_best_metric(folder: Path) -> float | None:
    """What a checkpoint is judged by; None where the metric had not been recorded, or the file is damaged."""
    try:
        score = json.loads((folder / SCORE_FILE).read_text())
    except (OSError, ValueError):  # reported when somebody wants the checkpoint
        return None
    return score if isinstance(score, float) else None


def save_weights(folder: Path, weights: CheckpointWeights) -> None:
    """Write weights alone at `folder`, or nothing.

    Raises:
        UserError: the disk is full or not writable.
    """
    with atomic_folder(folder) as aside:
        _write_weights(weights, aside / WEIGHTS_FILE)


@torch.no_grad()
def load_weights(folder: Path, weights: CheckpointWeights, *, mmap: bool = False) -> None:
    """Restore weights in place; `mapped` are those of the file itself, whose memory processes share, and not copies.

    Raises:
        UserError: the model is not the one whose weights were saved.
    """
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt")) for path in _list_part_files(folder, WEIGHTS_FILE)
        ]
        holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        saved = {name: tuple(file.get_slice(name).get_shape()) for name, file in holder.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in weights.trained.items()}
        if any(file.metadata()["given"] != weights.frozen_fingerprint for file in files) or saved != expected:
            what = "that are not trained" if saved == expected else "that are trained"
            raise UserError(
                f"{folder} was saved from another model: the weights {what} differ. Restore model.path "
                "as it was, or begin the run anew in another directory"
            )
        for name, tensor in weights.trained.items():
            if mmap:
                tensor.data = holder[name].get_tensor(name)
            else:
                tensor.copy_(holder[name].get_tensor(name))


def _sharded_file_name(name: str, rank: int, count: int) -> str:
    """A file's name where several ranks write one each, as Hugging Face has it."""
    stem, _, kind = name.partition(".")
    return name if count == 1 else f"{stem}-{rank + 1:05d}-of-{count:05d}.{kind}"


def _list_part_files(folder: Path, name: str) -> list[Path]:
    """The files that ranks have written under such names, in their order."""
    stem, _, kind = name.partition(".")
    return sorted(folder.glob(f"{stem}*.{kind}"))


def _write_weights(weights: CheckpointWeights, path: Path) -> None:
    learned = {name: tensor.detach().contiguous() for name, tensor in weights.trained.items()}
    # One entry: safetensors writes several in another order each time.
    save_file(learned, path, metadata={"given": weights.frozen_fingerprint})


def _torch_save(content: object, path: Path) -> None:
    with path.open("wb") as file:  # torch.save, given a path, would not say why it failed
        torch.save(content, file)


def _copy_value_to_cpu(value: Any) -> Any:  # noqa: ANN401 - whatever an optimizer keeps
    """A copy of containers and tensors, whose shape and kind stay; nouns are frozen already."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_value_to_cpu(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy_value_to_cpu(inner) for inner in value]
    if type(value) is tuple:
        return tuple(_copy_value_to_cpu(inner) for inner in value)
    return value
