"""Saving a run and going on exactly: weights, optimizer, State, RNG, config; whole or absent, whatever happens."""

from mmrl.checkpoint.atomic_folder import Exportable, export_hf
from mmrl.checkpoint.manager import Place, Shelf, find, latest, prune
from mmrl.checkpoint.snapshot import (
    CONFIG,
    Snapshot,
    Weights,
    fingerprint,
    load,
    load_state,
    load_weights,
    rng_states,
    save_weights,
    still,
)

__all__ = [
    "CONFIG",
    "Exportable",
    "Place",
    "Shelf",
    "Snapshot",
    "Weights",
    "export_hf",
    "find",
    "fingerprint",
    "latest",
    "load",
    "load_state",
    "load_weights",
    "prune",
    "rng_states",
    "save_weights",
    "still",
]
