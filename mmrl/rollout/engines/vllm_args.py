"""With which arguments a vLLM engine is started, in this process or as a server. Imports without vllm."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from mmrl.config.schema import LoraConfig, VllmConfig

# What an engine must be told to take ready-made media. It would normalise patches, which are normalised, once more; and
# it would keep copies of them in two caches, when the processor has one.
MULTIMODAL_ARGS = MappingProxyType({"mm_device_do_normalize": False, "mm_processor_cache_gb": 0})
# Log-probabilities of the law that tokens are drawn from, banned and tempered; laws come with the requests alone.
_LOGPROB_ARGS = MappingProxyType({"logprobs_mode": "processed_logprobs", "generation_config": "vllm"})
_MIN_BATCHED_TOKENS = 8192
# Ranks that vLLM has kernels for.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)


def build_engine_args(
    options: VllmConfig, *, dtype: str, max_model_len: int, cuda: bool, lora: LoraConfig | None
) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`; sequences have `longest` tokens at most, and `lora` comes as an adapter."""
    place: dict[str, Any] = {"gpu_memory_utilization": options.gpu_memory_utilization}
    if not cuda:
        # Blocks of 128 tokens, its own choice on a CPU, would leave short prompts out of the prefix cache. Prompts are
        # not cut: a seeded request whose prompt is read in parts ends in "CPU Generator does not use offset".
        place = {
            "kv_cache_memory_bytes": options.cpu_kv_cache_mib * 2**20,
            "block_size": 32,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, _MIN_BATCHED_TOKENS),
        }
    adapter: dict[str, Any] = {}
    if lora is not None:
        rank = next((rank for rank in _LORA_RANKS if rank >= lora.rank), lora.rank)
        adapter = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "worker_extension_cls": "mmrl.rollout.engines.vllm_weight_transfer.FingerprintExtension",
        **MULTIMODAL_ARGS,
        **_LOGPROB_ARGS,
        **place,
        **adapter,
    }
