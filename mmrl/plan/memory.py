"""Memory of a GPU by part and by phase of a step.

Sources: ZeRO, arXiv:1910.02054, sections 3 and 5, for what each stage divides; DeepSpeed's estimators in
deepspeed/runtime/zero/stage3.py. mmrl keeps gradients in the dtype of the weights, and masters in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import NamedTuple

from mmrl.config.schema import RlStage
from mmrl.plan.stage_plan import Plan
from mmrl.policy.vision_cache import VISION_CACHE_BYTES

PHASES = ("generating", "learning", "updating")
_FIXED_GB = 2.0  # CUDA context, libraries and what the allocator leaves unused: assumed, not computed
_USABLE_FRAC = 0.95  # share of a GPU's memory that a plan may fill


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
    """Return the GB of a learner's GPU in each phase that the stage has, and of a server's GPU."""
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
    zero, lora = plan.zero, plan.options.lora
    # DeepSpeed keeps gradients and optimizer state for every weight that some stage trains.
    trained = (plan.ever_trained if plan.config.deepspeed else plan.trained) / 1e9
    # Stage 1 divides the optimizer's state, stage 2 gradients too, stage 3 weights too.
    shares = [plan.learners if zero.zero_stage >= stage else 1 for stage in range(4)]
    weights = plan.width * (plan.parameters - (plan.trained if lora else 0)) / 1e9
    yield MemoryPart("weights", weights / shares[3], "host" if zero.offload_parameters else "gpu")
    if lora:
        yield MemoryPart("adapter", plan.trained_width * trained / shares[3])
    # DeepSpeed keeps the memory of gradients; torch frees it after the update, or when the update makes them float32.
    phases = PHASES if zero.zero_stage else ("learning", "updating") if plan.trained_width == 4 else ("learning",)
    place = "host" if zero.offload_optimizer else "gpu"
    gradients = plan.trained_width * trained / shares[2]
    yield MemoryPart("gradients", gradients, place if zero.zero_stage > 1 else "gpu", phases)
    name, width = ("AdamW's moments", 8) if plan.trained_width == 4 else ("float32 weights and AdamW's moments", 12)
    yield MemoryPart(name, width * trained / shares[1], place)
    if plan.trained_width == 2 and not zero.offload_optimizer:
        yield MemoryPart("gradients in float32", 4 * trained / shares[1], phases=("updating",))
    if zero.zero_stage == 3:
        phases = ("learning",) if plan.config.rollout.engine == "hf" else ("learning", "generating")
        yield MemoryPart("layers gathered", plan.width * plan.gathered / 1e9, phases=phases)
    if zero.zero_stage:
        # As large however few weights are trained. ZeRO-3 keeps it between passes.
        phases = PHASES if zero.zero_stage == 3 else ("learning",)
        yield MemoryPart("bucket of gradients", plan.trained_width * zero.bucket_elements / 1e9, phases=phases)
    if isinstance(plan.stage, RlStage) and plan.stage.loss.kl.coef:
        yield from _reference_parts(plan, plan.stage)
    if zero.zero_stage < 3 and {"vision", "projector"} <= set(plan.options.freeze):
        # Each image adds its features to the kept ones, until they are full.
        vision, tokens = plan.model.config.vision_config, plan.model.image_tokens(plan.micro_batch.grids)
        layers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
        features = plan.width * tokens * plan.model.config.text_config.hidden_size * layers
        kept = min(VISION_CACHE_BYTES, features * plan.stage.steps * plan.stage.prompts_per_step)
        yield MemoryPart("features of images that are kept", kept / 1e9)
    yield MemoryPart("CUDA, libraries, fragments (assumed)", _FIXED_GB)


def _reference_parts(plan: Plan, stage: RlStage) -> Iterator[MemoryPart]:
    """Yield the memory of the reference of a KL penalty. It moves if `reference.update` says so."""
    moves, is_first = stage.reference.update != "never", stage.name == plan.config.training_stages[0].name
    if plan.config.deepspeed:
        yield MemoryPart("reference", plan.width * plan.parameters / 1e9)
    elif not plan.options.lora or moves or not (is_first or stage.reference.init_from == "base"):
        # It shares the weights that no stage trains. The model without its first adapter would share all.
        yield MemoryPart("reference", plan.trained_width * plan.ever_trained / 1e9)
    if moves and plan.trained_width == 2:
        yield MemoryPart("reference in float32", 4 * plan.ever_trained / 1e9)


def _engine_parts(plan: Plan) -> Iterator[MemoryPart]:
    """Yield the memory of the rollout engine: on the learner's GPU, or on a server's."""
    if not isinstance(plan.stage, RlStage):
        return
    engine, vllm, gpus = plan.config.rollout.engine, plan.config.rollout.vllm, plan.engine_gpus
    key_bytes, state_bytes = plan.model.cache_bytes(plan.width)
    phases: tuple[str, ...] = PHASES if plan.stage.async_rollouts else PHASES[:1]
    if engine == "hf":
        prompt, response, rows = plan.workload.prompt_tokens, plan.workload.longest_response, plan.hf_batch
        # A group stores the keys of its prompt once.
        tokens = ceil(rows / plan.stage.group_size) * prompt + rows * response
        size = (tokens * key_bytes + rows * state_bytes) / 1e9
        yield MemoryPart(f"keys and values of {rows} rows", size, phases=phases)
        if plan.stage.async_rollouts:
            yield MemoryPart("copy of trained weights that generates", plan.trained_width * plan.ever_trained / 1e9)
        if plan.zero.zero_stage == 3:
            yield MemoryPart("weights gathered", plan.width * plan.parameters / 1e9, phases=phases)
    if engine not in ("vllm", "vllm_server"):
        return
    place, phases = ("server", ()) if engine == "vllm_server" else ("gpu", phases)
    weights, states = plan.width * plan.parameters / gpus / 1e9, vllm.max_num_seqs * state_bytes / gpus / 1e9
    room = max(0.0, plan.gpu.memory_gb * vllm.gpu_memory_utilization - weights - states)
    yield MemoryPart("vLLM: weights", weights, place, phases)
    if states:
        yield MemoryPart("vLLM: recurrent states", states, place, phases)
    yield MemoryPart(f"vLLM: keys and values, {room * 1e6 * gpus / key_bytes:,.0f}k tokens", room, place, phases)
    if place == "gpu":
        yield MemoryPart("vLLM's weights while it sleeps", weights, "host")
