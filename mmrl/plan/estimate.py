"""Memory of a GPU by part, and time of a training step by part, from what `measure` counted.

Sources: ZeRO, arXiv:1910.02054, sections 3 and 5, for what each stage divides; DeepSpeed's estimators in
deepspeed/runtime/zero/stage3.py. mmrl keeps gradients in the dtype of the weights, and masters in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

from mmrl.config import Config
from mmrl.config.schema import RlStage
from mmrl.plan.hardware import Gpu
from mmrl.plan.measure import LearnerOptions, Measurement, MicroBatchShape, make_policy, measure, visible_pairs
from mmrl.plan.shapes import read_shapes
from mmrl.plan.workload import Workload
from mmrl.policy.batch import PrefixGroup
from mmrl.policy.build import ComponentSummary, summarize_components

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FIXED_GB = 2.0  # CUDA context, libraries and what the allocator leaves unused: assumed, not computed
HOST_LINK_GBS = 20.0  # host memory to a GPU, one GPU to another machine's: assumed
DECODE_BANDWIDTH_FRAC = 0.6  # share of the memory bandwidth that decoding reaches: assumed
_PHASES = ("generating", "learning", "updating")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a GPU's memory."""

    name: str  # what it is
    gigabytes: float  # GB on one GPU, or in host memory for one process
    phases: tuple[str, ...]  # when it is there: `generating`, `learning`, `updating`
    place: str = "gpu"  # `gpu` of the learner, `server` for a GPU of a rollout server, `host`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will need."""

    components: tuple[ComponentSummary, ...]  # parameters by component
    measurement: Measurement  # of the fullest micro-batch
    micro_batch: MicroBatchShape  # that micro-batch
    memory: tuple[MemoryPart, ...]  # memory by part
    seconds: dict[str, float]  # time of a step by part
    num_learners: int  # GPUs that learn
    num_gpus: int  # all GPUs
    tokens: float  # prompt and response tokens of a step
    flops: float  # FLOPs of learning in a step, on all GPUs

    def phase_gigabytes(self) -> dict[str, float]:
        """Return the memory of a learner's GPU in each phase, in GB."""
        on_gpu = [part for part in self.memory if part.place == "gpu"]
        return {phase: sum(part.gigabytes for part in on_gpu if phase in part.phases) for phase in _PHASES}

    def peak_gigabytes(self) -> float:
        """Return the most memory of a GPU, in GB."""
        servers = sum(part.gigabytes for part in self.memory if part.place == "server")
        return max(*self.phase_gigabytes().values(), servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Everything that parts of memory and time are computed from."""

    config: Config
    stage: RlStage
    shapes: PretrainedConfig  # of the model
    gpu: Gpu
    workload: Workload
    learners: int  # GPUs that learn
    efficiency: float  # share of a GPU's peak that learning reaches
    measurement: Measurement  # of `micro_batch`
    micro_batch: MicroBatchShape  # the fullest micro-batch
    parameters: int  # numbers of the whole model
    trained: int  # numbers that are trained
    width: int  # bytes of a number of the model
    trained_width: int  # bytes of a trained number: an adapter is float32
    gathered: int  # numbers that are whole at a time under ZeRO-3: two blocks, embeddings and output matrix

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.workload.prompt_tokens(self.shapes.vision_config.spatial_merge_size)


def make_plan(config: Config, stage: RlStage, workload: Workload, gpu: Gpu, num_gpus: int, efficiency: float) -> Plan:
    """Return what a stage needs on so many GPUs. `efficiency` is the share of a GPU's peak that learning reaches.

    Raises:
        UserError: the model is unknown, or this torch cannot pretend a device.
    """
    family, shapes = read_shapes(config)
    options = LearnerOptions(model=config.model, freeze=config.model.with_freeze(stage.freeze).freeze)
    model = make_policy(family, shapes, options).model
    components = tuple(summarize_components(model, family))
    blocks = sorted(sum(map(torch.numel, block.parameters())) for block in model.get_decoder().layers)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    micro_batch = workload.micro_batch(stage, shapes.vision_config.spatial_merge_size)
    case = _Case(
        config=config,
        stage=stage,
        shapes=shapes,
        gpu=gpu,
        workload=workload,
        learners=max(1, num_gpus - _count_server_gpus(config)),
        efficiency=efficiency,
        measurement=measure(family, shapes, options, micro_batch),
        micro_batch=micro_batch,
        parameters=sum(component.num_parameters for component in components),
        trained=sum(map(torch.numel, trained)),
        width=4 if config.model.dtype == "float32" else 2,
        trained_width=trained[0].element_size(),
        gathered=sum(blocks[-2:]) + sum(map(torch.numel, tables)),
    )
    memory = (*_state_parts(case), *_learning_parts(case), *_engine_parts(case))
    seconds, flops = _step_seconds(case)
    tokens = stage.prompts_per_step * (
        case.prompt_tokens * workload.mean_prompt_frac + stage.group_size * workload.mean_response
    )
    return Plan(
        components=components,
        measurement=case.measurement,
        micro_batch=micro_batch,
        memory=memory,
        seconds=seconds,
        num_learners=case.learners,
        num_gpus=num_gpus,
        tokens=tokens,
        flops=flops,
    )


def _count_server_gpus(config: Config) -> int:
    if config.rollout.engine != "vllm_server":
        return 0
    servers = len(config.rollout.server.urls) or config.rollout.server.replicas
    return servers * config.rollout.vllm.tensor_parallel_size


def _state_parts(case: _Case) -> Iterator[MemoryPart]:
    """Yield what is held between micro-batches, as ZeRO divides it."""
    deepspeed = case.config.deepspeed
    zero = deepspeed.zero_stage if deepspeed else 0
    # Stage 1 divides the optimizer's numbers, stage 2 gradients too, stage 3 weights too.
    optimizer_share, gradient_share, weight_share = (case.learners if zero >= stage else 1 for stage in (1, 2, 3))
    offloads = deepspeed is not None and deepspeed.offload_parameters
    weights = case.width * (case.parameters - (case.trained if case.config.model.lora else 0))
    yield MemoryPart(
        name="weights", gigabytes=weights / weight_share / 1e9, phases=_PHASES, place="host" if offloads else "gpu"
    )
    trained = case.trained / 1e9
    if case.config.model.lora:
        yield MemoryPart(name="adapter", gigabytes=case.trained_width * trained, phases=_PHASES)
    # DeepSpeed keeps the memory of gradients; torch gives it back after the update.
    phases = _PHASES if zero else ("learning",)
    yield MemoryPart(name="gradients", gigabytes=case.trained_width * trained / gradient_share, phases=phases)
    moments = trained * (8 if case.trained_width == 4 else 12) / optimizer_share
    is_on_host = deepspeed is not None and deepspeed.offload_optimizer
    name = "AdamW's moments" if case.trained_width == 4 else "float32 weights and AdamW's moments"
    yield MemoryPart(name=name, gigabytes=moments, phases=_PHASES, place="host" if is_on_host else "gpu")
    if case.trained_width == 2 and not is_on_host:
        yield MemoryPart(name="gradients in float32", gigabytes=4 * trained / optimizer_share, phases=("updating",))
    if zero == 3:
        yield MemoryPart(
            name="layers gathered", gigabytes=case.width * case.gathered / 1e9, phases=("learning", "generating")
        )
    elif zero:
        bucket = min(deepspeed.bucket_elements, case.trained) if deepspeed else 0
        yield MemoryPart(name="bucket of gradients", gigabytes=case.width * bucket / 1e9, phases=("learning",))
    if case.stage.loss.kl.coef and not case.config.model.lora:
        # A sharded policy has a whole copy, else the frozen weights are shared.
        numbers = case.parameters if deepspeed else case.trained
        yield MemoryPart(name="reference", gigabytes=case.width * numbers / 1e9, phases=_PHASES)
    yield MemoryPart(name="CUDA, libraries, fragments (assumed)", gigabytes=FIXED_GB, phases=_PHASES)


def _learning_parts(case: _Case) -> Iterator[MemoryPart]:
    """Yield what the fullest micro-batch takes at its peak."""
    names = {
        "vision": "activations of the vision tower",
        "language": "activations of the language model",
        "logits": f"logits, {case.config.model.logits_chunk_tokens} tokens at a time",
        "rest": "inputs and log-probabilities",
    }
    for part, name in names.items():
        size = case.measurement.peak.get(part, 0.0) / 1e9
        yield MemoryPart(name=name, gigabytes=size, phases=("learning",))


def _engine_parts(case: _Case) -> Iterator[MemoryPart]:
    """Yield what the rollout engine takes: beside the learner's weights, or of a server's GPU."""
    engine, vllm = case.config.rollout.engine, case.config.rollout.vllm
    key_bytes, state_bytes = _cache_bytes(case)
    if engine == "hf":
        rows = ceil(case.stage.prompts_per_round * case.stage.group_size / case.learners)
        tokens = case.prompt_tokens + case.workload.longest_response
        rows = min(rows, max(1, 2**18 // tokens))  # the engine's own bound on a batch
        size = rows * (tokens * key_bytes + state_bytes) / 1e9
        yield MemoryPart(name=f"keys and values of {rows} rows", gigabytes=size, phases=("generating",))
    elif engine in ("vllm", "vllm_server"):
        is_server = engine == "vllm_server"
        gpus = vllm.tensor_parallel_size if is_server else 1
        place, phases = ("server", ()) if is_server else ("gpu", ("generating",))
        total = case.gpu.memory_gb * vllm.gpu_memory_utilization
        weights, states = case.width * case.parameters / gpus / 1e9, vllm.max_num_seqs * state_bytes / gpus / 1e9
        room = total - weights - states
        yield MemoryPart(name="vLLM: weights", gigabytes=weights, phases=phases, place=place)
        if states:
            yield MemoryPart(name="vLLM: recurrent states", gigabytes=states, phases=phases, place=place)
        name = f"vLLM: keys and values of {max(0.0, room) * 1e9 / key_bytes * gpus / 1e3:,.0f},000 tokens"
        yield MemoryPart(name=name, gigabytes=max(0.0, room), phases=phases, place=place)
        if not is_server:
            yield MemoryPart(
                name="vLLM's weights while it sleeps", gigabytes=weights, phases=("learning",), place="host"
            )


def _cache_bytes(case: _Case) -> tuple[float, float]:
    """Return the bytes that a token's keys and values take, and a row's recurrent states."""
    text = case.shapes.text_config
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    recurrent = kinds.count("linear_attention")
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys = 2.0 * case.width * (layers - recurrent) * text.num_key_value_heads * width
    states = 0.0
    if recurrent:
        states = 4.0 * recurrent * text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    return keys, states


def _step_seconds(case: _Case) -> tuple[dict[str, float], float]:
    """Return the seconds of a step by part, and the FLOPs of learning on all GPUs."""
    stage, work, gpu = case.stage, case.workload, case.gpu
    prompt, groups = case.prompt_tokens * work.mean_prompt_frac, stage.prompts_per_step
    forward, both = (_step_flops(case, passes) for passes in (("forward",), ("forward", "backward")))
    # What follows is the work of one pass over all experiences.
    flops = both * stage.ppo_epochs
    peak = case.learners * gpu.peak_tflops * 1e12 * case.efficiency
    is_recomputed = stage.loss.old_logprobs == "recomputed" and stage.num_mini_batches > 1
    seconds = {"prefill": 0.0, "decoding": 0.0}
    seconds["learning"] = flops / peak
    seconds["old log-probs"] = is_recomputed * forward * (1 - 1 / stage.num_mini_batches) / peak
    seconds["reference"] = bool(stage.loss.kl.coef) * forward / peak
    key_bytes, state_bytes = _cache_bytes(case)
    vllm, engine = case.config.rollout.vllm, case.config.rollout.engine
    num_engines, gpus = case.learners, 1
    if engine == "vllm_server":
        gpus = vllm.tensor_parallel_size
        num_engines = max(1, _count_server_gpus(case.config) // gpus)
    rows = ceil(stage.prompts_per_round * stage.group_size / num_engines)
    batch = min(rows, vllm.max_num_seqs) if engine != "hf" else rows
    per_token = case.measurement.total_flops("language", passes=("forward",)) / _language_tokens(case)
    bandwidth = gpus * gpu.bandwidth_tbs * 1e12 * DECODE_BANDWIDTH_FRAC
    arithmetic = batch * per_token / (gpus * gpu.peak_tflops * 1e12 * case.efficiency)
    # A token more reads all weights once, and the keys and values of all rows.
    reads = case.width * case.parameters + batch * ((prompt + work.mean_response / 2) * key_bytes + state_bytes)
    seconds["decoding"] = ceil(rows / batch) * work.mean_response * max(arithmetic, reads / bandwidth)
    share = groups * prompt / (case.micro_batch.num_groups * case.prompt_tokens)
    vision = case.measurement.total_flops("vision", passes=("forward",)) * share
    seconds["prefill"] = (vision + groups * prompt * per_token) / (peak / case.learners * num_engines * gpus)
    deepspeed = case.config.deepspeed
    is_on_host = deepspeed is not None and deepspeed.offload_optimizer
    # Gradient, master and two moments are read, the last three and the weight written: 30 bytes a number.
    updated = 30 * case.trained / (case.learners if deepspeed and deepspeed.zero_stage else 1)
    seconds["update"] = updated / (HOST_LINK_GBS * 1e9 if is_on_host else gpu.bandwidth_tbs * 1e12)
    if engine != "hf":
        seconds["weights to the engine"] = case.width * case.trained / (HOST_LINK_GBS * 1e9)
    return seconds, flops


def _language_tokens(case: _Case) -> int:
    """Return the tokens of the micro-batch that was measured."""
    return case.micro_batch.num_groups * (case.prompt_tokens + sum(case.micro_batch.responses))


def _step_flops(case: _Case, passes: tuple[str, ...]) -> float:
    """Return the FLOPs of one pass over a step's experiences: those measured, scaled by tokens, images and pairs."""
    stage, work, micro = case.stage, case.workload, case.micro_batch
    prompt, response = round(case.prompt_tokens * work.mean_prompt_frac), work.mean_response
    # A group that does not fit into a micro-batch is split, and its prompt runs with each part.
    parts = ceil(stage.group_size / len(micro.responses))
    sizes = (response,) * len(micro.responses)
    pairs = parts * visible_pairs((PrefixGroup(prompt, sizes),))
    measured_pairs = visible_pairs((PrefixGroup(case.prompt_tokens, micro.responses),)) * micro.num_groups
    tokens = parts * prompt + stage.group_size * response
    images = parts * prompt / case.prompt_tokens
    scale = {
        "language": tokens / _language_tokens(case),
        "vision": images / micro.num_groups,
        "attention": pairs / measured_pairs,
        "logits": stage.group_size * response / (micro.num_groups * sum(micro.responses)),
    }
    return stage.prompts_per_step * sum(
        factor * case.measurement.total_flops(part, passes=passes) for part, factor in scale.items()
    )
