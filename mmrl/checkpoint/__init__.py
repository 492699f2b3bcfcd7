"""Checkpoints: a run is saved, and goes on exactly.

A checkpoint is a folder with weights, optimizer, `TrainingState`, random generators and config. It appears complete or
not at all, whatever happens while it is written.
"""

from mmrl.checkpoint.atomic_folder import Pretrained, export_hf_folder
from mmrl.checkpoint.manager import CheckpointManager, StepId, find_checkpoint, find_latest, prune_checkpoints
from mmrl.checkpoint.snapshot import (
    CONFIG_FILE,
    CheckpointWeights,
    Snapshot,
    copy_to_cpu,
    fingerprint_weights,
    load_checkpoint,
    load_state,
    load_weights,
    read_rng_states,
    save_weights,
)

__all__ = [
    "CONFIG_FILE",
    "CheckpointManager",
    "CheckpointWeights",
    "Pretrained",
    "Snapshot",
    "StepId",
    "copy_to_cpu",
    "export_hf_folder",
    "find_checkpoint",
    "find_latest",
    "fingerprint_weights",
    "load_checkpoint",
    "load_state",
    "load_weights",
    "prune_checkpoints",
    "read_rng_states",
    "save_weights",
]
