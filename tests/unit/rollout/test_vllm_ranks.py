"""Weights that vLLM gets in the process of each rank: what is wrong on one rank ends all of them."""

import errno
from types import SimpleNamespace

import pytest
import torch
from thread_ranks import run_on_ranks

from mmrl.config.schema import LoraConfig, VllmServerConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.rollout.engines.vllm_colocated import VllmEngine
from mmrl.rollout.weight_sync import PolicyWeightStream, WeightStream, fingerprint
from mmrl.types import UserError

NORM, HEAD = "language_model.model.norm.weight", "language_model.lm_head.weight"


class GatheredWeights(WeightStream):
    """Weights that all ranks gather together at each pass, as under ZeRO-3."""

    def __init__(self, weights, ranks):
        self.weights, self.ranks = weights, ranks

    def __iter__(self):
        assert self.ranks.all_gather("pass") == ["pass"] * self.ranks.size
        return iter(self.weights)


class WorkerOfVllm:
    """A vLLM whose worker keeps the weights that it reads, under the learner's names but for the prefixes."""

    def __init__(self, weights, changes, *, resets=True):
        self.changes = changes  # weights that the worker holds otherwise
        self.llm_engine = SimpleNamespace(reset_mm_cache=bool, reset_encoder_cache=bool)
        self.reset_prefix_cache = lambda: resets
        self.load(weights)

    def load(self, weights):
        self.held = {}
        for name, tensor in weights:
            renamed = name.replace("model.language_model.", "language_model.model.").replace("model.visual.", "visual.")
            self.held[renamed.replace("lm_head.", "language_model.lm_head.")] = fingerprint(tensor)

    def collective_rpc(self, method, kwargs=None):
        if method == "reload_weights":
            self.load(kwargs["weights_iterator"])

    def fingerprints(self):
        return self.held | self.changes


def start_engine(llm, ranks, **context):
    """Return an engine of one rank without starting vLLM."""
    engine = object.__new__(VllmEngine)
    engine._llm, engine._asleep, engine._takes_adapter = llm, False, "adapter" in context
    engine._context = SimpleNamespace(ranks=ranks, **context)
    engine._read_fingerprints = llm and llm.fingerprints
    return engine


def test_keys_and_values_of_old_weights_end_the_run(make_tiny):
    """vLLM returns False, and keeps them, while a request holds blocks of the cache."""
    weights = PolicyWeightStream(make_tiny().policy)
    engine = start_engine(WorkerOfVllm(weights, {}, resets=False), SingleProcess())
    with pytest.raises(RuntimeError, match="vLLM kept keys and values of the old weights"):
        engine.load_weights(weights)


@pytest.mark.slow
def test_server_that_keeps_keys_and_values_of_old_weights_has_failed(monkeypatch):
    pytest.importorskip("vllm")
    from mmrl.rollout.engines.vllm_replica import Replica, ReplicaError

    replies = {"reset_prefix_cache": {"success": False}}
    monkeypatch.setattr(Replica, "request_json", lambda self, path, body: replies.get(path, {}))
    replica = Replica("http://127.0.0.1:9", VllmServerConfig())
    with pytest.raises(ReplicaError, match="kept keys and values of the old weights"):
        replica._reset_caches()
    replies["reset_prefix_cache"]["success"] = True
    replica._reset_caches()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "loaded"),
        ({NORM: fingerprint(torch.ones(7))}, "the rollout engine runs another model: "),
        ({HEAD: fingerprint(torch.zeros(330, 48))}, "after a sync of weights the rollout engine holds another lm_head"),
    ],
)
def test_wrong_weights_in_the_engine_of_one_rank_end_all_ranks(make_tiny, changes, message):
    weights = PolicyWeightStream(make_tiny().policy)

    def load(ranks):
        llm = WorkerOfVllm(weights, changes if ranks.rank else {})
        try:
            start_engine(llm, ranks).load_weights(GatheredWeights(weights, ranks))
        except UserError as error:
            return str(error)
        return "loaded"

    rank0, rank1 = run_on_ranks(2, load)
    assert rank0 == rank1 and rank0.startswith(message)


def test_adapter_that_one_rank_cannot_write_ends_all_ranks(make_tiny, tmp_path, monkeypatch):
    model = make_tiny().policy.model
    adapter = LoraAdapter(model, LoraConfig(rank=4), seed=1)
    policy, save = PolicyModel(model), LoraAdapter.save_pretrained

    def save_or_fail(adapter, folder):
        if "rank-1" in str(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(adapter, folder)

    monkeypatch.setattr(LoraAdapter, "save_pretrained", save_or_fail)

    def load(ranks):
        work_dir = tmp_path / f"rank-{ranks.rank}"
        engine = start_engine(None, ranks, adapter=adapter, policy=policy, work_dir=work_dir)
        engine._load_adapter = lambda folder: None
        with pytest.raises(UserError) as caught:
            engine.load_weights(None)
        return str(caught.value)

    rank0, rank1 = run_on_ranks(2, load)
    assert rank0 == rank1 and "No space left on device" in rank0
