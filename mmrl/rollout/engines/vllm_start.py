"""Starts vLLM for a run, in this process or as servers, with the arguments that follow from the config.

Imports without vLLM, which may be missing and takes seconds to import.
"""

from __future__ import annotations

from typing import Any

import torch

from mmrl.config import Config, EvalConfig
from mmrl.config.schema import LoraConfig, VllmConfig
from mmrl.config.schema.rollout_engine import RolloutConfig
from mmrl.policy.families import ModelFamily
from mmrl.policy.policy import PolicyModel
from mmrl.rollout.engines.base import EngineContext, RolloutEngine
from mmrl.types import UserError

_MIN_BATCHED_TOKENS = 8192

_SUPPORTED_LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)  # ranks that vLLM has kernels for


def start_vllm(config: Config | EvalConfig, context: EngineContext) -> RolloutEngine:
    """Start the engine that `rollout.engine` names: `vllm` or `vllm_server`.

    Raises:
        UserError: it does not start, or cannot run this model.
    """
    options, model = config.rollout, context.model_folder()
    takes_adapter = _takes_adapter_files(config, context.policy)
    engine_args: dict[str, Any] = {}
    # Servers that run already have arguments of their own, and perhaps a device that this machine lacks.
    if options.engine == "vllm" or not options.server.urls:
        engine_args = build_engine_args(
            options.vllm,
            dtype=config.model.dtype,
            max_model_len=context.max_model_len,
            cuda=torch.cuda.is_available(),
            lora=config.model.lora if takes_adapter else None,
            family=context.policy.family,
            float32_output_layer=config.model.float32_output_layer,
            return_routes=context.record_routes,
        )
    takes_adapter = takes_adapter and context.adapter is not None
    if options.engine == "vllm_server":
        return start_servers(model, engine_args, options, context, takes_adapter=takes_adapter)
    from mmrl.rollout.engines.vllm_colocated import VllmEngine

    # A restart would gather weights on all ranks, but the others do not notice that one engine has failed.
    restarts = options.vllm.max_restarts if context.ranks.size == 1 else 0
    return VllmEngine(model, engine_args, context, restarts=restarts, takes_adapter=takes_adapter)


def start_servers(
    model: str, engine_args: dict[str, Any], options: RolloutConfig, context: EngineContext, *, takes_adapter: bool
) -> RolloutEngine:
    """Start servers of a model with these arguments, or connect to those of `rollout.server.urls`.

    Raises:
        UserError: a server does not start or answer, or several ranks would have to share servers that one starts.
    """
    from mmrl.rollout.engines.vllm_server import ServerEngine, make_replicas

    if context.ranks.size > 1 and not options.server.urls:
        raise UserError(
            f"rollout.engine vllm_server: {context.ranks.size} processes share servers that run already; start them "
            "as docs/vllm.md says, and name them in rollout.server.urls"
        )
    return ServerEngine(
        make_replicas(model, engine_args, options.server, context.work_dir),
        context,
        workers_per_replica=options.vllm.tensor_parallel_size,
        takes_adapter=takes_adapter,
    )


def _takes_adapter_files(config: Config | EvalConfig, policy: PolicyModel) -> bool:
    """Return True if vLLM gets the adapter's files, False if it gets weights with the adapter merged into them.

    vLLM supports adapters of the language model only, without DoRA and not of fused experts. A server must also be able
    to read the learner's files.
    """
    lora, rollout = config.model.lora, config.rollout
    if lora is None or lora.use_dora or "language.experts" in (lora.targets or ()):
        return False
    # With any adapter, vLLM runs experts with Triton kernels, which do not run on a CPU.
    if policy.routers and not torch.cuda.is_available():
        return False
    sees_files = rollout.engine == "vllm" or rollout.server.weight_transfer == "file"
    return sees_files and config.model.trainable_components == ("language",)


def build_engine_args(
    options: VllmConfig,
    *,
    dtype: str,
    max_model_len: int,
    cuda: bool,
    lora: LoraConfig | None,
    family: ModelFamily,
    float32_output_layer: bool = False,
    return_routes: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`, in this process or as a server.

    `max_model_len` counts tokens, prompt included. `lora` is None if the engine gets no adapter, but merged weights.
    With `return_routes` completions carry the experts that their tokens went to.

    Raises:
        UserError: on a CPU, vLLM cannot run this family in this data type, or cannot return routes.
    """
    if return_routes and not cuda:
        raise UserError(
            "loss.routing_replay: engine: without a GPU vLLM does not return the experts that tokens went to; set "
            "rollout.engine: hf, or loss.routing_replay: learner"
        )
    engine_args: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "worker_extension_cls": "mmrl.rollout.engines.vllm_weight_transfer.WorkerExtension",
        # The patches are normalised already; vLLM would normalise them again. A cache in its processor would keep
        # copies of them in two places.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        # Log-probabilities of the distribution that tokens are drawn from, after temperature and banned tokens.
        "logprobs_mode": "processed_logprobs",
        # Sampling parameters come with each request, and never from the model's generation config.
        "generation_config": "vllm",
    }
    if cuda:
        engine_args["gpu_memory_utilization"] = options.gpu_memory_utilization
    else:
        engine_args |= _cpu_engine_args(options, dtype, max_model_len, family)
    if return_routes:
        # vLLM keeps routes beside the blocks of its prefix cache.
        engine_args |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if float32_output_layer:
        # vLLM reads this from the config of the language model, which is a part of a vision-language model's.
        engine_args["hf_overrides"] = {"head_dtype": "float32", "text_config": {"head_dtype": "float32"}}
    if lora is not None:
        # If vLLM has no kernel for the adapter's rank, the kernel of the next larger rank runs it.
        rank = next((rank for rank in _SUPPORTED_LORA_RANKS if rank >= lora.rank), lora.rank)
        engine_args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return engine_args


def _cpu_engine_args(options: VllmConfig, dtype: str, max_model_len: int, family: ModelFamily) -> dict[str, Any]:
    """Return the arguments that vLLM needs only on a CPU. Raises UserError for a data type without kernels."""
    engine_args = {
        "kv_cache_memory_bytes": options.cpu_kv_cache_mib * 2**20,
        # Blocks of 128 tokens, vLLM's choice on a CPU, would keep short prompts out of the prefix cache.
        "block_size": 32,
        "enforce_eager": True,
        # A seeded request whose prompt is read in chunks ends in "CPU Generator does not use offset", so each prompt
        # must fit into one batch.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, _MIN_BATCHED_TOKENS),
    }
    if family.has_recurrent_layers:
        if dtype != "bfloat16":
            raise UserError(
                f"rollout.engine: on a CPU, vLLM runs the recurrent layers of {family.model_type} only in bfloat16; "
                f"set model.dtype: bfloat16 instead of {dtype}, or rollout.engine: hf"
            )
        # A recurrent state can be cached only at the borders of chunks, and prompts are not read in chunks here.
        engine_args["enable_prefix_caching"] = False
    return engine_args
