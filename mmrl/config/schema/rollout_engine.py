"""Section `rollout`: the engine that generates rollouts, transformers or vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mmrl.config.schema.base import (
    NO_EFFECT,
    BatchSize,
    FunctionConfig,
    NonNegativeInt,
    NumParallel,
    NumTokens,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Seconds,
    StrictModel,
    find_choice_form,
)


class CustomEngineConfig(FunctionConfig):
    """A user's engine: `fn` is called with an `EngineContext` and returns a `RolloutEngine`."""


EngineChoice = Annotated[
    Annotated[Literal["hf", "vllm", "vllm_server"], Tag("name")] | Annotated[CustomEngineConfig, Tag("function")],
    Discriminator(find_choice_form),
]


class VllmConfig(StrictModel):
    """Options of a vLLM engine; its dtype and longest sequence follow from `model` and the stages."""

    gpu_memory_utilization: PositiveFraction = 0.4  # the learner may be on the same GPU
    """Share of a GPU's memory that vLLM takes for its weights and caches."""
    cpu_kv_cache_mib: PositiveInt = 512
    """Size of the KV cache on a machine without a GPU, in MiB."""
    max_num_seqs: BatchSize = 256
    """Sequences generated at a time."""
    tensor_parallel_size: NumParallel = 1
    """GPUs that one replica of a server spans."""
    max_restarts: Annotated[NonNegativeInt, NO_EFFECT] = 1
    """Times that a failed engine is restarted, in a run of one process. After each restart the requests that failed are
    repeated."""


class VllmServerConfig(StrictModel):
    """Servers of vLLM (`vllm serve`), started by the run or running already."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^\s/]+$")], ...] = ()
    """Servers that run already, started as docs/vllm.md says. If any are named, the run starts none."""
    replicas: NumParallel = 1
    """Servers that the run starts; prompts are divided among them."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each replica, such as ["1", "2,3"]; without it each replica can use the run's GPUs."""
    weight_transfer: Literal["file", "nccl", "ipc"] = "file"
    """Transport of new weights: `file` through shared memory (works everywhere, on one machine), `nccl` to
    another GPU or machine, `ipc` on the learner's own GPU."""
    startup_timeout_s: Annotated[Seconds, NO_EFFECT] = 900.0
    """Seconds that a replica may take to start before it counts as failed."""
    # A run that ended because something took too long can only continue with more time.
    timeout_s: Annotated[Seconds, NO_EFFECT] = 600.0
    """Seconds that a request may take before it counts as failed."""
    max_restarts: Annotated[NonNegativeInt, NO_EFFECT] = 1
    """Times that a failed replica is restarted; after each restart its unanswered prompts are sent again."""

    @model_validator(mode="after")
    def _check_urls_or_replicas(self) -> VllmServerConfig:
        if self.urls and (self.devices or self.replicas > 1):
            raise ValueError("`urls` names servers that run already, `replicas` and `devices` are for those to start")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"`devices` has {len(self.devices)} entries for {self.replicas} replicas")
        return self


class LogprobCheckConfig(StrictModel):
    """Comparison of the engine's log-probabilities with the learner's, at the start of a stage and between syncs."""

    every: NonNegativeInt | None = None
    """Weight syncs from one check to the next. 0 checks only at the start of a stage, and the engine `hf` never.
    Null is 0 for the engine `hf`, and 50 for other engines."""
    prompts_per_modality: PositiveInt = 4
    """Prompts of each modality (only text, with images, with video) that a check generates from."""
    max_new_tokens: NumTokens = 32
    """At most this many tokens are generated for each prompt."""
    warn_above: PositiveFloat = 0.05
    """Mean |difference| of a token's log-probability in any modality, in nats, above which a warning is printed."""
    stop_above: PositiveFloat = 0.5
    """Mean |difference|, in nats, above which the run ends."""


class RolloutConfig(StrictModel):
    """The engine that generates rollouts, in training and evaluation."""

    engine: EngineChoice = "hf"
    """`hf`: transformers, with the learner's own weights; `vllm`: an engine in this process, which takes turns with
    the learner; `vllm_server`: engines in their own processes, on this machine or others; `{fn: .., args: ..}`: your
    own, see docs/extending/rollout_engine.md."""
    vllm: VllmConfig = VllmConfig()
    """Options of the engine `vllm`, and of the servers that the run starts."""
    server: VllmServerConfig = VllmServerConfig()
    """Options of the engine `vllm_server`."""
    logprob_check: Annotated[LogprobCheckConfig, NO_EFFECT] = LogprobCheckConfig()
    """Comparison of the engine's log-probabilities with the learner's."""

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> RolloutConfig:
        if self.engine == "vllm" and self.vllm.tensor_parallel_size > 1:
            raise ValueError("`vllm.tensor_parallel_size` is for the engine vllm_server; `vllm` uses one GPU")
        return self

    @property
    def engine_name(self) -> str:
        """Name of the engine, or of the function that makes a user's engine."""
        return self.engine.fn if isinstance(self.engine, CustomEngineConfig) else self.engine
