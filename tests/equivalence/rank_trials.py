"""Starts the processes of `ranks_worker.py` and compares what they learned."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fork_server import run_forked
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
    command = [Path(__file__).with_name("ranks_worker.py"), folder / "trials", folder / "results"]
    env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    with ThreadPoolExecutor(size) as pool:
        ranks = []
        for rank in map(str, range(size)):
            ranks.append(pool.submit(run_forked, *command, env={**env, "RANK": rank, "LOCAL_RANK": rank}))
    for rank in ranks:
        done = rank.result()
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return torch.load(folder / "results", weights_only=False)


def furthest(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).detach().abs().max()) for name in theirs)


def same_metrics(ours, theirs, rel=1e-4):
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        assert here == pytest.approx(there, rel=rel, abs=1e-6)
