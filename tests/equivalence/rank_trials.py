"""Starts the processes of `ranks_worker.py` and compares what they learned."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_worker import TrialSet

from mmrl.config.schema import DeepspeedConfig
from mmrl.distributed.launch import find_free_port


def zero(stage, **options):
    return DeepspeedConfig(zero_stage=stage, param_persistence_elements=0, **options)


def launch(folder: Path, trial_sets: list[TrialSet], size: int) -> dict:
    """Return the results of `size` processes to the trials of all sets."""
    for trial_set in trial_sets:
        for module in trial_set.policy.model.modules():
            module.__dict__.pop("forward", None)  # cannot be pickled; each process prepares its model again
    (folder / "trials").write_bytes(pickle.dumps(trial_sets))
    command = [sys.executable, str(Path(__file__).with_name("ranks_worker.py")), str(folder / "trials")]
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"rank{rank}.log" for rank in range(size)]
    processes = []
    for rank, log in enumerate(logs):
        # Not pipes, which would be read one rank after another: the second rank stops once it has written 64 KiB that
        # nobody reads, and the first waits for it in a collective call. DeepSpeed's warnings alone are more than that.
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(folder / "results")],
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for process in processes:
            process.wait(timeout=1200)
    finally:
        for process in processes:
            process.kill()
    said = "\n".join(log.read_text()[-6000:] for log in logs)
    assert [process.returncode for process in processes] == [0] * size, said
    return torch.load(folder / "results", weights_only=False)


def furthest(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).detach().abs().max()) for name in theirs)


def same_metrics(ours, theirs, rel=1e-4):
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        assert here == pytest.approx(there, rel=rel, abs=1e-6)
