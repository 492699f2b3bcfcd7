"""Work of a training step, and its seconds by part."""

from __future__ import annotations

from math import ceil

from mmrl.config.schema import RlStage
from mmrl.plan.measure import visible_pairs
from mmrl.plan.stage_plan import Plan
from mmrl.plan.workload import most_groups

_HOST_LINK_GBS = 20.0  # host memory to a GPU, one GPU to another machine's: assumed
_DECODE_BANDWIDTH_FRAC = 0.6  # share of the memory bandwidth that decoding reaches: assumed
# Seconds of a layer for a token of all rows, by the hf engine: the GPU waits for the host. Measured on an H100's host.
HF_LAYER_S = 1.4e-3


def step_tokens(plan: Plan) -> float:
    """Return the prompt and response tokens of a step."""
    return plan.stage.prompts_per_step * (
        plan.workload.mean_prompt + plan.stage.group_size * plan.workload.mean_response
    )


def step_flops(plan: Plan, *passes: str) -> float:
    """Return the FLOPs of one pass over a step's experiences: the measured ones, scaled by tokens, images and pairs."""
    micro, group_size = plan.micro_batch, plan.stage.group_size
    prompt, response = round(plan.workload.mean_prompt), plan.workload.mean_response
    # A group that does not fit into a micro-batch is split, and its prompt runs with each part.
    parts = ceil(group_size / len(micro.responses))
    measured_pairs = visible_pairs(micro.prompt_tokens, micro.responses) * micro.num_groups
    scale = {
        "language": (parts * prompt + group_size * response) / micro.num_tokens,
        "vision": parts * plan.workload.mean_prompt_frac / micro.num_groups,
        "attention": parts * visible_pairs(prompt, (response,) * len(micro.responses)) / measured_pairs,
        "logits": group_size * response / (micro.num_groups * sum(micro.responses)),
    }
    counts = (factor * plan.measurement.total_flops(part, passes=passes) for part, factor in scale.items())
    return plan.stage.prompts_per_step * sum(counts)


def learning_flops(plan: Plan) -> float:
    """Return the FLOPs of a step's learning: forward and backward, in each of its epochs."""
    return plan.stage.ppo_epochs * step_flops(plan, "forward", "backward")


def step_seconds(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by part."""
    stage, gpu_flops = plan.stage, plan.gpu.peak_tflops * 1e12 * plan.efficiency
    # All wait for the GPU that has the most groups.
    share = most_groups(stage, plan.learners) * stage.num_mini_batches / stage.prompts_per_step
    seconds = {"learning": learning_flops(plan) * share / gpu_flops}
    if isinstance(stage, RlStage):
        forward = step_flops(plan, "forward") * share / gpu_flops
        in_reward = stage.loss.kl.coef and stage.loss.kl.apply_to == "reward"
        recomputes = stage.loss.old_logprobs == "recomputed" or stage.loss.routing_replay != "none" or in_reward
        seconds["old log-probs"] = forward * (1 - 1 / stage.num_mini_batches) if recomputes else 0.0
        seconds["reference"] = forward if stage.loss.kl.coef else 0.0
        seconds |= _generating_seconds(plan, stage, gpu_flops)
    # Gradient, master and two moments are read, the last three and the weight written: 30 bytes a number.
    updated = 30 * (plan.ever_trained / plan.learners if plan.zero.zero_stage else plan.trained)
    bandwidth = _HOST_LINK_GBS * 1e9 if plan.zero.offload_optimizer else plan.gpu.bandwidth_tbs * 1e12
    seconds["update"] = stage.ppo_epochs * stage.num_mini_batches * updated / bandwidth
    if isinstance(stage, RlStage) and stage.async_rollouts and plan.config.rollout.engine == "vllm_server":
        # Servers generate for the next step meanwhile.
        generating = seconds["prefill"] + seconds["decoding"]
        learning = sum(seconds.values()) - generating - seconds["weights to the engine"]
        seconds["of these at the same time"] = -min(generating, learning)
    return seconds


def stage_hours(plan: Plan) -> float:
    """Return the hours that a stage takes."""
    return sum(step_seconds(plan).values()) * plan.stage.steps / 3600


def assumptions(plan: Plan) -> str:
    """Return a sentence about what the seconds of a step assume."""
    decoding = f"{_DECODE_BANDWIDTH_FRAC:.0%} of its bandwidth"
    if plan.config.rollout.engine == "hf":
        decoding += f", or {HF_LAYER_S * 1e3} ms a layer and token"
    return (
        f"assumed: learning reaches {plan.efficiency:.0%} of the GPU's peak (--efficiency), decoding {decoding}, "
        f"links {_HOST_LINK_GBS:.0f} GB/s; rewards, tools, validation and stages that do not train take no time"
    )


def _generating_seconds(plan: Plan, stage: RlStage, gpu_flops: float) -> dict[str, float]:
    """Return the seconds of generating responses and of sending weights to the engine; `gpu_flops` are per second."""
    engine, vllm, gpus, rows = plan.config.rollout.engine, plan.config.rollout.vllm, plan.engine_gpus, plan.engine_rows
    prompt, response = plan.workload.mean_prompt, plan.workload.mean_response
    batch = plan.hf_batch if engine == "hf" else min(rows, vllm.max_num_seqs)
    token_flops = plan.measurement.total_flops("language", passes=("forward",)) / plan.micro_batch.num_tokens
    image_flops = plan.measurement.total_flops("vision", passes=("forward",)) / plan.micro_batch.num_groups
    # Arithmetic limits the prefill; a further token reads all weights and keys. Unfinished rows wait for later steps.
    prompt_flops = prompt * token_flops + image_flops * plan.workload.mean_prompt_frac
    seconds = {"prefill": stage.prompts_per_round * prompt_flops / (plan.num_engines * gpus * gpu_flops)}
    key_bytes, state_bytes = plan.model.cache_bytes(plan.width)
    reads = plan.width * plan.parameters + batch * ((prompt + response / 2) * key_bytes + state_bytes)
    read_seconds = reads / (gpus * plan.gpu.bandwidth_tbs * 1e12 * _DECODE_BANDWIDTH_FRAC)
    token_time = max(read_seconds, batch * token_flops / (gpus * gpu_flops))
    if engine == "hf":
        token_time = max(token_time, plan.model.config.text_config.num_hidden_layers * HF_LAYER_S)
    seconds["decoding"] = ceil(rows / batch) * response * token_time * stage.prompts_per_step / stage.prompts_per_round
    if engine != "hf":
        seconds["weights to the engine"] = plan.width * plan.trained / (_HOST_LINK_GBS * 1e9)
    return seconds
