"""What draws rollouts: the learner's own model, or vLLM beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import Count, Positive, Strict

Seconds = Annotated[float, Field(gt=0.0)]
Nats = Annotated[float, Field(gt=0.0)]


class Vllm(Strict):
    """How a vLLM engine is started; its type, and its longest sequence, follow from `model` and the stages."""

    gpu_memory: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Share of a GPU's memory for its weights and caches, where there is a GPU."""
    cache_mib: Positive = 512
    """Memory for keys and values, where there is none."""
    max_sequences: Positive = 256
    """Sequences it decodes at a time."""
    tensor_parallel: Positive = 1
    """GPUs that a server's replica is spread over."""
    restarts: Count = 1
    """An engine in a run's only process that fails is started anew so often, and asked once more."""


class Server(Strict):
    """Servers of vLLM (`vllm serve`): started by the run, or running already."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^\s/]+$")], ...] = ()
    """Servers that run already, which docs/vllm.md says how to start; none are started then."""
    replicas: Positive = 1
    """Servers to start; prompts are shared out among them."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each replica, such as ["1", "2,3"]; without it they see what the run sees."""
    transfer: Literal["file", "nccl", "ipc"] = "file"
    """How new weights reach it: files in shared memory (works everywhere, on one machine), NCCL (another GPU, or
    machine), CUDA IPC (the learner's own GPU)."""
    start_s: Seconds = 900.0
    """A replica that is not up within this time has failed."""
    deadline_s: Seconds = 600.0
    """An answer that takes longer is a failure."""
    restarts: Count = 1
    """A replica that failed is started anew so often, and asked once more what it left unanswered."""

    @model_validator(mode="after")
    def _started_or_running(self) -> Server:
        if self.urls and (self.devices or self.replicas > 1):
            raise ValueError("`urls` names servers that run already, `replicas` and `devices` are for those to start")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"`devices` has {len(self.devices)} entries for {self.replicas} replicas")
        return self


class Parity(Strict):
    """How far the engine's log-probabilities are from the learner's: probed as a stage starts, and then on."""

    every: Count = 0
    """Syncs of weights between probes. 0: only as a stage starts, and not at all with the engine `hf`."""
    prompts: Positive = 4
    """Prompts of each sort (text alone, with pictures, with video) in a probe."""
    tokens: Positive = 32
    """Tokens drawn for each, at most."""
    warn: Nats = 0.05
    """Mean absolute gap of a token's log-probability, of any sort of prompts, that is warned of."""
    stop: Nats = 0.5
    """Gap that ends the run."""


class Rollouts(Strict):
    """What draws rollouts, in training and evaluation."""

    engine: Literal["hf", "vllm", "vllm_server"] = "hf"
    """`hf`: transformers, with the learner's own weights; `vllm`: an engine in this process, which takes turns with
    the learner; `vllm_server`: engines in processes of their own, on this machine or others."""
    vllm: Vllm = Vllm()
    """How a vLLM engine is started."""
    server: Server = Server()
    """Of the engine `vllm_server`."""
    parity: Parity = Parity()
    """Whether engine and learner agree."""

    @model_validator(mode="after")
    def _spread_is_of_servers(self) -> Rollouts:
        if self.engine == "vllm" and self.vllm.tensor_parallel > 1:
            raise ValueError("`vllm.tensor_parallel` is for the engine vllm_server; in this process it uses one GPU")
        return self
