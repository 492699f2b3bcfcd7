"""Memory of a GPU by part, and time of a training step by part, from what `measure` counted.

Sources: ZeRO, arXiv:1910.02054, sections 3 and 5, for what each stage divides; DeepSpeed's estimators in
deepspeed/runtime/zero/stage3.py. mmrl keeps gradients in the dtype of the weights, and masters in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

from mmrl.config import Config
from mmrl.config.schema import ModelConfig, RlStage, SftStage
from mmrl.plan.measure import Measurement, make_policy, measure, visible_pairs
from mmrl.plan.shapes import ModelShapes, read_shapes
from mmrl.plan.workload import MicroBatchSizes, StepGroups, Workload
from mmrl.policy.build import ComponentSummary, summarize_components
from mmrl.types import UserError

FIXED_GB = 2.0  # CUDA context, libraries and what the allocator leaves unused: assumed, not computed
USABLE_FRAC = 0.95  # share of a GPU's memory that a plan may fill
HOST_LINK_GBS = 20.0  # host memory to a GPU, one GPU to another machine's: assumed
DECODE_BANDWIDTH_FRAC = 0.6  # share of the memory bandwidth that decoding reaches: assumed
# Seconds of a layer for a token of all rows, by the hf engine: the GPU waits for the host. Measured on an H100's host.
HF_LAYER_S = 1.4e-3
PHASES = ("generating", "learning", "updating")
_ENGINE_TOKENS = 2**18  # most tokens of a batch of the hf engine
_measured: dict[tuple[str, MicroBatchSizes], Measurement] = {}


class Gpu(NamedTuple):
    """A kind of GPU."""

    memory_gb: float  # memory, in GB
    peak_tflops: float  # dense bfloat16 multiply-adds with float32 sums, in TFLOP/s, each multiply-add as two
    bandwidth_tbs: float  # memory bandwidth, in TB/s


# Source: NVIDIA's data sheets of A100, H100, H200, L20, L40S, RTX 4090 and H20; dense, where a sheet has sparse numbers
# beside them. H800 computes as H100. The peaks agree with EasyR1's verl/utils/flops_counter.py where that has them.
GPUS = {
    "a100-40gb": Gpu(40.0, 312.0, 1.555),
    "a100-80gb": Gpu(80.0, 312.0, 2.039),
    "h100-80gb": Gpu(80.0, 989.0, 3.35),
    "h800-80gb": Gpu(80.0, 989.0, 3.35),
    "h200-141gb": Gpu(141.0, 989.0, 4.8),
    "h20-96gb": Gpu(96.0, 148.0, 4.0),
    "l20-48gb": Gpu(48.0, 119.5, 0.864),
    "l40s-48gb": Gpu(48.0, 362.0, 0.864),
    "rtx4090-24gb": Gpu(24.0, 165.2, 1.008),
}


class MemoryPart(NamedTuple):
    """One part of the memory."""

    name: str  # what it is
    gigabytes: float  # GB on one GPU, or in host memory for one process
    place: str = "gpu"  # `gpu` of the learner, `server` for a GPU of a rollout server, `host`
    phases: tuple[str, ...] = PHASES  # phases of a step in which it is allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A stage on a number of GPUs, with the sizes and counts from which its memory and time follow."""

    config: Config
    stage: SftStage | RlStage
    model: ModelShapes
    gpu: Gpu
    num_gpus: int  # all GPUs, those of rollout servers included
    server_gpus: int  # GPUs of rollout servers
    learners: int  # GPUs that learn
    efficiency: float  # share of a GPU's peak that learning reaches
    workload: Workload
    micro_batch: MicroBatchSizes  # the fullest micro-batch
    components: tuple[ComponentSummary, ...]  # parameters by component
    trained_width: int  # bytes of a trained parameter: 4 for an adapter, which is float32
    gathered: int  # parameters that ZeRO-3 gathers at a time: two blocks, embeddings and output matrix

    @property
    def options(self) -> ModelConfig:
        """The section `model` of the config, with what the stage freezes."""
        return self.config.model.with_freeze(self.stage.freeze)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(component.num_parameters for component in self.components)

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(component.num_trained for component in self.components)

    @property
    def width(self) -> int:
        """Bytes of a parameter of the model."""
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of a step; an sft stage generates nothing."""
        return PHASES if isinstance(self.stage, RlStage) else PHASES[1:]

    @property
    def has_reference(self) -> bool:
        """True if a KL penalty compares the policy with a reference model."""
        return isinstance(self.stage, RlStage) and self.stage.loss.kl.coef > 0

    @property
    def groups(self) -> StepGroups:
        """Groups of a step."""
        return StepGroups.of_stage(self.stage)

    @property
    def gpu_flops(self) -> float:
        """FLOPs that a GPU is assumed to do in a second."""
        return self.gpu.peak_tflops * 1e12 * self.efficiency

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO; 0 without DeepSpeed."""
        return self.config.deepspeed.zero_stage if self.config.deepspeed else 0

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer's numbers are in host memory."""
        return self.config.deepspeed is not None and self.config.deepspeed.offload_optimizer

    def memory_parts(self) -> list[MemoryPart]:
        """Return all parts of the memory."""
        return [*_state_parts(self), *_learning_parts(self), *_engine_parts(self)]

    def phase_gigabytes(self) -> dict[str, float]:
        """Return the memory of a learner's GPU in each phase, and of one of a server, in GB."""
        parts = self.memory_parts()
        phases = {
            phase: sum(part.gigabytes for part in parts if part.place == "gpu" and phase in part.phases)
            for phase in self.phases
        }
        return phases | {"serving": sum(part.gigabytes for part in parts if part.place == "server")}

    @property
    def measurement(self) -> Measurement:
        """Work and memory of `micro_batch`. Measuring takes seconds, so each result is kept while the process lives."""
        key = self.options.model_dump_json(), self.micro_batch
        if key not in _measured:
            _measured[key] = measure(self.model, self.options, self.micro_batch)
        return _measured[key]

    @property
    def peak(self) -> tuple[float, str]:
        """The most memory of a phase, in GB of a GPU, and the phase."""
        return max((size, phase) for phase, size in self.phase_gigabytes().items())

    @property
    def fits(self) -> bool:
        """True if every phase leaves some of the GPU's memory free."""
        most = USABLE_FRAC * self.gpu.memory_gb
        # Weights, gradients and moments may be too much by themselves, whatever a micro-batch adds.
        held = sum(part.gigabytes for part in _state_parts(self) if part.place == "gpu" and "updating" in part.phases)
        return held <= most and self.peak[0] <= most

    @property
    def step_tokens(self) -> float:
        """Prompt and response tokens of a step."""
        prompt = self.micro_batch.prompt_tokens * self.workload.mean_prompt_frac
        return self.groups.num_groups * (prompt + self.groups.group_size * self.workload.mean_response)


def make_plan(
    config: Config, stage: SftStage | RlStage, workload: Workload, gpu: Gpu, num_gpus: int, efficiency: float
) -> Plan:
    """Return what a stage needs on so many GPUs. `efficiency` is the share of a GPU's peak that learning reaches.

    Raises:
        UserError: the model is unknown, or this torch cannot pretend a device.
    """
    model, options = read_shapes(config.model), config.model.with_freeze(stage.freeze)
    module = make_policy(model, options).model
    blocks = sorted(sum(map(torch.numel, block.parameters())) for block in module.get_decoder().layers)
    tables = {module.get_input_embeddings().weight, module.get_output_embeddings().weight}
    server_gpus, server = 0, config.rollout.server
    if config.rollout.engine == "vllm_server":
        server_gpus = (len(server.urls) or server.replicas) * config.rollout.vllm.tensor_parallel_size
    learners = max(1, num_gpus - server_gpus)
    return Plan(
        config=config,
        stage=stage,
        model=model,
        gpu=gpu,
        num_gpus=num_gpus,
        server_gpus=server_gpus,
        learners=learners,
        efficiency=efficiency,
        workload=workload,
        micro_batch=workload.micro_batch(StepGroups.of_stage(stage), stage.micro_batch_tokens, learners),
        components=tuple(summarize_components(module, model.family)),
        trained_width=next(each for each in module.parameters() if each.requires_grad).element_size(),
        gathered=sum(blocks[-2:]) + sum(map(torch.numel, tables)),
    )


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name.

    Raises:
        UserError: the name is not in the table.
    """
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: unknown; known are {', '.join(GPUS)}")
    return GPUS[name.lower()]


def _state_parts(plan: Plan) -> Iterator[MemoryPart]:
    """Yield the memory held between micro-batches, as the stage of ZeRO divides it among GPUs."""
    deepspeed, lora, trained = plan.config.deepspeed, plan.config.model.lora, plan.trained / 1e9
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
    in_host = "host" if plan.offloads_optimizer else "gpu"
    yield MemoryPart(name, width * trained / optimizer_share, in_host)
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
    yield MemoryPart("CUDA, libraries, fragments (assumed)", FIXED_GB)


def _learning_parts(plan: Plan) -> Iterator[MemoryPart]:
    """Yield what the fullest micro-batch takes at its peak."""
    names = {
        "vision": "activations of the vision tower",
        "language": "activations of the language model",
        "logits": f"logits, {plan.config.model.logits_chunk_tokens} tokens at a time",
        "rest": "inputs and log-probabilities",
    }
    for part, name in names.items():
        yield MemoryPart(name, plan.measurement.peak.get(part, 0.0) / 1e9, phases=("learning",))


def _engine_parts(plan: Plan) -> Iterator[MemoryPart]:
    """Yield the memory of the rollout engine: on the learner's GPU, or on that of a server."""
    if not isinstance(plan.stage, RlStage):
        return
    engine, vllm = plan.config.rollout.engine, plan.config.rollout.vllm
    key_bytes, state_bytes = cache_bytes(plan)
    if engine == "hf":
        tokens = plan.micro_batch.prompt_tokens + plan.workload.longest_response
        rows = min(_rows_of_engine(plan), max(1, _ENGINE_TOKENS // tokens))
        size = rows * (tokens * key_bytes + state_bytes) / 1e9
        yield MemoryPart(f"keys and values of {rows} rows", size, phases=("generating",))
    if engine not in ("vllm", "vllm_server"):
        return
    is_server = engine == "vllm_server"
    gpus = vllm.tensor_parallel_size if is_server else 1
    place, phases = ("server", ()) if is_server else ("gpu", ("generating",))
    weights, states = plan.width * plan.parameters / gpus / 1e9, vllm.max_num_seqs * state_bytes / gpus / 1e9
    room = max(0.0, plan.gpu.memory_gb * vllm.gpu_memory_utilization - weights - states)
    yield MemoryPart("vLLM: weights", weights, place, phases)
    if states:
        yield MemoryPart("vLLM: recurrent states", states, place, phases)
    yield MemoryPart(f"vLLM: keys and values, {room * 1e6 * gpus / key_bytes:,.0f}k tokens", room, place, phases)
    if not is_server:
        yield MemoryPart("vLLM's weights while it sleeps", weights, "host")


def _rows_of_engine(plan: Plan) -> int:
    """Return the most responses that an engine generates at a time."""
    vllm, num_engines = plan.config.rollout.vllm, plan.learners
    if plan.server_gpus:
        num_engines = plan.server_gpus // vllm.tensor_parallel_size
    return ceil(plan.stage.prompts_per_round * plan.groups.group_size / num_engines)


def cache_bytes(plan: Plan) -> tuple[float, float]:
    """Return the bytes that a token's keys and values take, and a row's recurrent states."""
    text, recurrent = plan.model.text, plan.model.num_recurrent_layers
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys = 2.0 * plan.width * (text.num_hidden_layers - recurrent) * text.num_key_value_heads * width
    states = 0.0
    if recurrent:
        states = 4.0 * recurrent * text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    return keys, states


def step_flops(plan: Plan, *passes: str) -> float:
    """Return the FLOPs of one pass over a step's experiences: those measured, scaled by tokens, images and pairs."""
    num_groups, group_size = plan.groups.num_groups, plan.groups.group_size
    work, micro = plan.workload, plan.micro_batch
    prompt, response = round(micro.prompt_tokens * work.mean_prompt_frac), work.mean_response
    # A group that does not fit into a micro-batch is split, and its prompt runs with each part.
    parts = ceil(group_size / len(micro.responses))
    measured_pairs = visible_pairs(micro.prompt_tokens, micro.responses) * micro.num_groups
    scale = {
        "language": (parts * prompt + group_size * response) / micro.num_tokens,
        "vision": parts * work.mean_prompt_frac / micro.num_groups,
        "attention": parts * visible_pairs(prompt, (response,) * len(micro.responses)) / measured_pairs,
        "logits": group_size * response / (micro.num_groups * sum(micro.responses)),
    }
    counts = (factor * plan.measurement.total_flops(part, passes=passes) for part, factor in scale.items())
    return num_groups * sum(counts)


def learning_flops(plan: Plan) -> float:
    """Return the FLOPs by which a step learns: forward and backward, in each of its epochs."""
    return plan.groups.epochs * step_flops(plan, "forward", "backward")


def step_seconds(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by part."""
    groups = plan.groups
    # All wait for the GPU that has most groups.
    share = groups.of_one_gpu(plan.learners) * groups.mini_batches / groups.num_groups
    seconds = {"learning": learning_flops(plan) * share / plan.gpu_flops}
    if isinstance(plan.stage, RlStage):
        forward = step_flops(plan, "forward") * share / plan.gpu_flops
        recomputes = plan.stage.loss.old_logprobs == "recomputed"
        seconds["old log-probs"] = forward * (1 - 1 / groups.mini_batches) if recomputes else 0.0
        seconds["reference"] = forward if plan.has_reference else 0.0
        seconds |= _generating_seconds(plan, plan.stage)
    # Gradient, master and two moments are read, the last three and the weight written: 30 bytes a number.
    updated = 30 * plan.trained / (plan.learners if plan.zero_stage else 1)
    seconds["update"] = updated / (HOST_LINK_GBS * 1e9 if plan.offloads_optimizer else plan.gpu.bandwidth_tbs * 1e12)
    return seconds


def _generating_seconds(plan: Plan, stage: RlStage) -> dict[str, float]:
    """Return the seconds in which a step's responses are generated, and weights sent to the engine, by part."""
    engine, vllm = plan.config.rollout.engine, plan.config.rollout.vllm
    prompt, response = plan.micro_batch.prompt_tokens * plan.workload.mean_prompt_frac, plan.workload.mean_response
    gpus, rows = (vllm.tensor_parallel_size if plan.server_gpus else 1), _rows_of_engine(plan)
    batch = rows if engine == "hf" else min(rows, vllm.max_num_seqs)
    token_flops = plan.measurement.total_flops("language", passes=("forward",)) / plan.micro_batch.num_tokens
    image_flops = plan.measurement.total_flops("vision", passes=("forward",)) / plan.micro_batch.num_groups
    # Arithmetic limits the prefill; each further token reads all weights and the keys of all rows.
    engine_flops = (plan.server_gpus or plan.learners) * plan.gpu_flops
    prompt_flops = prompt * token_flops + image_flops * plan.workload.mean_prompt_frac
    seconds = {"prefill": stage.prompts_per_step * prompt_flops / engine_flops}
    key_bytes, state_bytes = cache_bytes(plan)
    reads = plan.width * plan.parameters + batch * ((prompt + response / 2) * key_bytes + state_bytes)
    token_seconds = max(
        reads / (gpus * plan.gpu.bandwidth_tbs * 1e12 * DECODE_BANDWIDTH_FRAC),
        batch * token_flops / (gpus * plan.gpu_flops),
    )
    if engine == "hf":
        token_seconds = max(token_seconds, plan.model.text.num_hidden_layers * HF_LAYER_S)
    seconds["decoding"] = ceil(rows / batch) * response * token_seconds
    if engine != "hf":
        seconds["weights to the engine"] = plan.width * plan.trained / (HOST_LINK_GBS * 1e9)
    return seconds


def stage_hours(plan: Plan) -> float:
    """Return the hours that a stage takes."""
    return sum(step_seconds(plan).values()) * plan.stage.steps / 3600
