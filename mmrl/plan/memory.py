"""Memory of a GPU by part and by phase of a step.

Sources: ZeRO, arXiv:1910.02054, sections 3 and 5, for what each stage divides; DeepSpeed's estimators in
deepspeed/runtime/zero/stage3.py. mmrl keeps gradients in the dtype of the weights, and masters in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mmrl.config.schema import RlStage
from mmrl.plan.stage_plan import Plan

PHASES = ("generating", "learning", "updating")
_FIXED_GB = 2.0  # CUDA context, libraries and what the allocator leaves unused: assumed, not computed
_USABLE_FRAC = 0.95  # share of a GPU's memory that a plan may fill
_ENGINE_TOKENS = 2**18  # most tokens of a batch of the hf engine


class MemoryPart(NamedTuple):
    """One part of the memory."""

    name: str  # what it is
    gigabytes: float  # GB on one GPU, or in host memory for one process
    place: str = "gpu"  # `gpu` of the learner, `server` for a GPU of a rollout server, `host`
    phases: tuple[str, ...] = PHASES  # phases of a step in which it is allocated


def memory_parts(plan: Plan) -> list[MemoryPart]:
    """Return all parts of the memory."""
    names = {
        "vision": "activations of the vision tower",
        "language": "activations of the language model",
        "logits": f"logits, {plan.options.logits_chunk_tokens} tokens at a time",
        "rest": "inputs and log-probabilities",
    }
    peak = plan.measurement.peak
    activations = [MemoryPart(name, peak.get(part, 0.0) / 1e9, phases=("learning",)) for part, name in names.items()]
    return [*_state_parts(plan), *activations, *_engine_parts(plan)]


def phase_gigabytes(plan: Plan) -> dict[str, float]:
    """Return the memory of a learner's GPU in each phase, and of one of a server, in GB.

    An sft stage generates nothing.
    """
    parts = memory_parts(plan)
    phases = PHASES if isinstance(plan.stage, RlStage) else PHASES[1:]
    sizes = {phase: _sum_phase(parts, phase) for phase in phases}
    return sizes | {"serving": sum(part.gigabytes for part in parts if part.place == "server")}


def peak_phase(plan: Plan) -> tuple[float, str]:
    """Return the most memory of a phase, in GB of a GPU, and the phase."""
    return max((size, phase) for phase, size in phase_gigabytes(plan).items())


def fits(plan: Plan) -> bool:
    """Return True if every phase leaves some of the GPU's memory free."""
    most = _USABLE_FRAC * plan.gpu.memory_gb
    # Weights, gradients and moments may be too much by themselves. If so, no micro-batch needs to be measured.
    return _sum_phase(_state_parts(plan), "updating") <= most and peak_phase(plan)[0] <= most


def _sum_phase(parts: Iterable[MemoryPart], phase: str) -> float:
    return sum(part.gigabytes for part in parts if part.place == "gpu" and phase in part.phases)


def _state_parts(plan: Plan) -> Iterator[MemoryPart]:
    """Yield the memory held between micro-batches, as the stage of ZeRO divides it among GPUs."""
    deepspeed, lora, trained = plan.config.deepspeed, plan.options.lora, plan.trained / 1e9
    # Stage 1 divides the optimizer's numbers, stage 2 gradients too, stage 3 weights too.
    optimizer_share, gradient_share, weight_share = (
        plan.learners if plan.zero_stage >= stage else 1 for stage in (1, 2, 3)
    )
    weights = plan.width * (plan.parameters - (plan.trained if lora else 0)) / 1e9
    in_host = "host" if deepspeed and deepspeed.offload_parameters else "gpu"
    yield MemoryPart("weights", weights / weight_share, in_host)
    if lora:
        yield MemoryPart("adapter", plan.trained_width * trained / weight_share)
    # DeepSpeed keeps the memory of gradients; torch frees it after the update, or when the update makes them float32.
    phases: tuple[str, ...] = PHASES
    if not plan.zero_stage:
        phases = ("learning", "updating") if plan.trained_width == 4 else ("learning",)
    yield MemoryPart("gradients", plan.trained_width * trained / gradient_share, phases=phases)
    name, width = ("AdamW's moments", 8) if plan.trained_width == 4 else ("float32 weights and AdamW's moments", 12)
    yield MemoryPart(name, width * trained / optimizer_share, "host" if plan.offloads_optimizer else "gpu")
    if plan.trained_width == 2 and not plan.offloads_optimizer:
        yield MemoryPart("gradients in float32", 4 * trained / optimizer_share, phases=("updating",))
    if plan.zero_stage == 3:
        gathered = plan.width * plan.gathered / 1e9
        yield MemoryPart("layers gathered", gathered, phases=("learning", "generating"))
    elif deepspeed and plan.zero_stage:
        bucket = plan.trained_width * min(deepspeed.bucket_elements, plan.trained) / 1e9
        yield MemoryPart("bucket of gradients", bucket, phases=("learning",))
    if plan.has_reference and (deepspeed or not lora):
        # Under DeepSpeed the reference is a full copy. Else it shares frozen weights; with LoRA it takes no memory.
        yield MemoryPart("reference", plan.width * (plan.parameters if deepspeed else plan.trained) / 1e9)
    yield MemoryPart("CUDA, libraries, fragments (assumed)", _FIXED_GB)


def _engine_parts(plan: Plan) -> Iterator[MemoryPart]:
    """Yield the memory of the rollout engine: on the learner's GPU, or on that of a server."""
    if not isinstance(plan.stage, RlStage):
        return
    engine, vllm, gpus = plan.config.rollout.engine, plan.config.rollout.vllm, plan.engine_gpus
    key_bytes, state_bytes = plan.model.cache_bytes(plan.width)
    if engine == "hf":
        tokens = plan.micro_batch.prompt_tokens + plan.workload.longest_response
        rows = min(plan.engine_rows, max(1, _ENGINE_TOKENS // tokens))
        size = rows * (tokens * key_bytes + state_bytes) / 1e9
        yield MemoryPart(f"keys and values of {rows} rows", size, phases=("generating",))
    if engine not in ("vllm", "vllm_server"):
        return
    place, phases = ("server", ()) if engine == "vllm_server" else ("gpu", ("generating",))
    weights, states = plan.width * plan.parameters / gpus / 1e9, vllm.max_num_seqs * state_bytes / gpus / 1e9
    room = max(0.0, plan.gpu.memory_gb * vllm.gpu_memory_utilization - weights - states)
    yield MemoryPart("vLLM: weights", weights, place, phases)
    if states:
        yield MemoryPart("vLLM: recurrent states", states, place, phases)
    yield MemoryPart(f"vLLM: keys and values, {room * 1e6 * gpus / key_bytes:,.0f}k tokens", room, place, phases)
    if place == "gpu":
        yield MemoryPart("vLLM's weights while it sleeps", weights, "host")
