"""Checkpoints: a run is saved, and continues exactly.

A checkpoint is a folder with weights, optimizer, `TrainingState`, random generators and config. It appears complete or
not at all, whatever happens while it is written.
"""

# `X as X` re-exports X, for the reader and for mypy (PEP 484).
from mmrl.checkpoint.atomic_folder import export_hf_folder as export_hf_folder
from mmrl.checkpoint.manager import CheckpointManager as CheckpointManager
from mmrl.checkpoint.manager import StepId as StepId
from mmrl.checkpoint.manager import find_checkpoint as find_checkpoint
from mmrl.checkpoint.manager import find_latest as find_latest
from mmrl.checkpoint.manager import prune_checkpoints as prune_checkpoints
from mmrl.checkpoint.manager import remove_later_stages as remove_later_stages
from mmrl.checkpoint.manager import set_aside_later as set_aside_later
from mmrl.checkpoint.snapshot import CONFIG_FILE as CONFIG_FILE
from mmrl.checkpoint.snapshot import STATE_FILE as STATE_FILE
from mmrl.checkpoint.snapshot import CheckpointWeights as CheckpointWeights
from mmrl.checkpoint.snapshot import Snapshot as Snapshot
from mmrl.checkpoint.snapshot import copy_to_cpu as copy_to_cpu
from mmrl.checkpoint.snapshot import fingerprint_weights as fingerprint_weights
from mmrl.checkpoint.snapshot import load_checkpoint as load_checkpoint
from mmrl.checkpoint.snapshot import load_state as load_state
from mmrl.checkpoint.snapshot import load_weights as load_weights
from mmrl.checkpoint.snapshot import read_rng_states as read_rng_states
from mmrl.checkpoint.snapshot import save_weights as save_weights
