"""What draws rollouts: the learner's own model, or vLLM beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveInt, StrictModel
from mmrl.config.schema.custom_rollouts import CustomEngineConfig, find_engine_form

Seconds = Annotated[float, Field(gt=0.0)]
Nats = Annotated[float, Field(gt=0.0)]


EngineChoice = Annotated[
    Annotated[Literal["hf", "vllm", "vllm_server"], Tag("name")] | Annotated[CustomEngineConfig, Tag("function")],
    Discriminator(find_engine_form),
]


class VllmConfig(StrictModel):
    """How a vLLM engine is started; its type, and its longest sequence, follow from `model` and the stages."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Share of a GPU's memory for its weights and caches, where there is a GPU."""
    cpu_kv_cache_mib: PositiveInt = 512
    """Memory for keys and values, where there is none."""
    max_num_seqs: PositiveInt = 256
    """Sequences it decodes at a time."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that a server's replica is spread over."""
    max_restarts: NonNegativeInt = 1
    """An engine in a run's only process that fails is started anew so often, and asked once more."""


class VllmServerConfig(StrictModel):
    """Servers of vLLM (`vllm serve`): started by the run, or running already."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^\s/]+$")], ...] = ()
    """Servers that run already, which docs/vllm.md says how to start; none are started then."""
    replicas: PositiveInt = 1
    """Servers to start; prompts are shared out among them."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each replica, such as ["1", "2,3"]; without it they see what the run sees."""
    weight_transfer: Literal["file", "nccl", "ipc"] = "file"
    """How new weights reach it: files in shared memory (works everywhere, on one machine), NCCL (another GPU, or
    machine), CUDA IPC (the learner's own GPU)."""
    startup_timeout_s: Seconds = 900.0
    """A replica that is not up within this time has failed."""
    timeout_s: Seconds = 600.0
    """An answer that takes longer is a failure."""
    max_restarts: NonNegativeInt = 1
    """A replica that failed is started anew so often, and asked once more what it left unanswered."""

    @model_validator(mode="after")
    def _check_urls_or_replicas(self) -> VllmServerConfig:
        if self.urls and (self.devices or self.replicas > 1):
            raise ValueError("`urls` names servers that run already, `replicas` and `devices` are for those to start")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"`devices` has {len(self.devices)} entries for {self.replicas} replicas")
        return self


class LogprobCheckConfig(StrictModel):
    """How far the engine's log-probabilities are from the learner's: probed as a stage starts, and then on."""

    every: NonNegativeInt = 0
    """Syncs of weights between probes. 0: only as a stage starts, and not at all with the engine `hf`."""
    prompts_per_modality: PositiveInt = 4
    """Prompts of each sort (text alone, with pictures, with video) in a probe."""
    max_new_tokens: PositiveInt = 32
    """Tokens drawn for each, at most."""
    warn_above: Nats = 0.05
    """Mean absolute gap of a token's log-probability, of any sort of prompts, that is warned of."""
    stop_above: Nats = 0.5
    """Gap that ends the run."""


class RolloutConfig(StrictModel):
    """What draws rollouts, in training and evaluation."""

    engine: EngineChoice = "hf"
    """`hf`: transformers, with the learner's own weights; `vllm`: an engine in this process, which takes turns with
    the learner; `vllm_server`: engines in processes of their own, on this machine or others; `{fn: .., args: ..}`: one
    of the user's own, docs/extending/rollout_engine.md."""
    vllm: VllmConfig = VllmConfig()
    """How a vLLM engine is started."""
    server: VllmServerConfig = VllmServerConfig()
    """Of the engine `vllm_server`."""
    logprob_check: LogprobCheckConfig = LogprobCheckConfig()
    """Whether engine and learner agree."""

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> RolloutConfig:
        if self.engine == "vllm" and self.vllm.tensor_parallel_size > 1:
            raise ValueError("`vllm.tensor_parallel` is for the engine vllm_server; in this process it uses one GPU")
        return self

    @property
    def engine_name(self) -> str:
        """The engine in a word: its name, or the function that makes one of the user's own."""
        return self.engine.fn if isinstance(self.engine, CustomEngineConfig) else self.engine
