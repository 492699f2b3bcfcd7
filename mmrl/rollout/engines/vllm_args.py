"""Arguments that vLLM engines are started with, in this process or as servers. Imports without vLLM."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from mmrl.config.schema import LoraConfig, VllmConfig

# vLLM would normalise patches a second time that are normalised already. And if its processor had a cache, it would
# keep copies of the patches in two places.
MULTIMODAL_ARGS = MappingProxyType({"mm_device_do_normalize": False, "mm_processor_cache_gb": 0})

# Log-probabilities of the distribution that tokens are drawn from, after temperature and banned tokens. Sampling
# parameters come with each request, and never from the model's generation config.
_LOGPROB_ARGS = MappingProxyType({"logprobs_mode": "processed_logprobs", "generation_config": "vllm"})

_MIN_BATCHED_TOKENS = 8192

_SUPPORTED_LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks that vLLM has kernels for; an adapter of another rank runs with the next larger one."""


def build_engine_args(
    options: VllmConfig, *, dtype: str, max_model_len: int, cuda: bool, lora: LoraConfig | None
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`.

    Args:
        options: the user's options.
        dtype: the model's, as transformers calls it.
        max_model_len: tokens of the longest sequence, prompt included.
        cuda: True if the engine runs on a GPU.
        lora: options of the adapter, if the engine gets it as an adapter and not merged into the weights.
    """
    return {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "worker_extension_cls": "mmrl.rollout.engines.vllm_weight_transfer.FingerprintExtension",
        **MULTIMODAL_ARGS,
        **_LOGPROB_ARGS,
        **_device_args(options, max_model_len, cuda=cuda),
        **_lora_args(lora),
    }


def _device_args(options: VllmConfig, max_model_len: int, *, cuda: bool) -> dict[str, Any]:
    if cuda:
        return {"gpu_memory_utilization": options.gpu_memory_utilization}
    return {
        "kv_cache_memory_bytes": options.cpu_kv_cache_mib * 2**20,
        "block_size": 32,  # blocks of 128 tokens, vLLM's choice on a CPU, keep short prompts out of the prefix cache
        "enforce_eager": True,
        # A seeded request whose prompt is read in chunks ends in "CPU Generator does not use offset", so each prompt
        # must fit into one batch.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, _MIN_BATCHED_TOKENS),
    }


def _lora_args(lora: LoraConfig | None) -> dict[str, Any]:
    if lora is None:
        return {}
    rank = next((rank for rank in _SUPPORTED_LORA_RANKS if rank >= lora.rank), lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
