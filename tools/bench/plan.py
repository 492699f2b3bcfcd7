"""`mmrl plan` against what is measured on this CPU, and against what others published of their GPUs.

    python tools/bench/plan.py                                  # both tables
    python tools/bench/plan.py --cells qwen3_vl,25M,LoRA,kept   # one cell of the first
    python tools/bench/plan.py --rows                           # the second
    python tools/bench/plan.py --rows 9                         # rows of it by number

A cell runs a forward and backward pass of a new model in float32, on the CPU: torch's counter counts its FLOPs, its
profiler the allocator's bytes. The plan runs the same on the pretended device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from learner_vs_trl import MODEL, make_spec
from results import make_parser, write_results
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from mmrl.config import load_config
from mmrl.config.schema import FromScratchConfig, LoraConfig, ModelConfig, RlStage
from mmrl.plan.measure import make_batch, make_policy, measure
from mmrl.plan.memory import memory_parts, phase_gigabytes
from mmrl.plan.shapes import read_shapes
from mmrl.plan.stage_plan import Plan, find_gpu, make_plan
from mmrl.plan.step_time import step_seconds
from mmrl.plan.workload import MicroBatchSizes, Workload

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "grounding_3b.yaml"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
SIZES = {
    "tiny": (
        FromScratchConfig(),
        MicroBatchSizes(num_groups=2, prompt_tokens=100, grids=((1, 16, 16),), responses=(48,) * 4),
    ),
    "25M": (MODEL, MicroBatchSizes(num_groups=2, prompt_tokens=300, grids=((1, 30, 30),), responses=(100,) * 4)),
}
CELLS = [",".join(cell) for cell in product(FAMILIES, SIZES, ("full", "LoRA"), ("kept", "recomputed"))]


def compare_cell(cell: str) -> dict[str, float]:
    """Return FLOPs and peak bytes of one micro-batch, planned and measured."""
    family, size, weights, activations = cell.split(",")
    spec, micro_batch = SIZES[size]
    options = ModelConfig(
        from_scratch=make_spec(spec, family),
        dtype="float32",
        lora=LoraConfig() if weights == "LoRA" else None,
        gradient_checkpointing=("vision", "language") if activations == "recomputed" else (),
        logits_chunk_tokens=128,
    )
    model = read_shapes(options)
    planned = measure(model, options, micro_batch)
    policy, batch = make_policy(model, options, "cpu"), make_batch(model, micro_batch)
    for parameter in policy.trainable.values():
        parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        # A copy, as on a GPU: nobody else holds it.
        policy.compute_logprobs(copy.deepcopy(batch)).logprobs_N.sum().backward()

    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with counter:
        run()
    return {
        "planned FLOPs": planned.total_flops(),
        "measured FLOPs": counter.get_total_flops(),
        "planned peak": sum(planned.peak.values()),
        "measured peak": peak_bytes(run),
    }


def peak_bytes(run: Callable[[], None]) -> float:
    """Return the most bytes that torch's allocator has given out at a time, above those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for _, size in changes:
        live += size
        peak = max(peak, live)
    return float(peak)


def _flash(query: Sequence[int], key: Sequence[int], factor: int, *, causal: bool) -> int:
    pairs = query[2] * (query[2] + 1) // 2 if causal else query[2] * key[2]
    return factor * prod(query[:2]) * pairs * query[3]


def _forward(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    return _flash(query, key, 4, causal=causal)


def _backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, dropout: float, causal: bool, **_: Any
) -> int:
    return _flash(query, key, 10, causal=causal)


_aten = torch.ops.aten
# Torch's counter has no formula for the attention of CPUs, and would count none.
CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published run, in mmrl's nearest settings."""

    row: str
    path: str
    memory_gb: float | None  # published peak of a GPU
    seconds: float | None = None  # published time of a step
    overrides: tuple[str, ...] = ()
    gpu: str = "h100-80gb"
    gpus: int = 8
    prompt: int
    grids: tuple[tuple[int, int, int], ...]
    response: int
    sequences: int | None = None  # sequences of a supervised micro-batch; None for a stage of GRPO
    efficiency: float = 0.3
    is_limit: bool = False  # the memory is a GPU's on which it fits, by its publisher
    # Features of a source that mmrl lacks: the memory is counted with them.
    reference_in_host: bool = False
    engine_gpus: int = 1  # GPUs over which an engine beside the learner divides its weights


GIB = 2**30 / 1e9
ALL = ("model.freeze=[]", "model.gradient_checkpointing=[vision, language]")
EASYR1 = (
    *ALL,
    "stages.grpo.loss.kl.coef=0",
    "rollout.engine=vllm",
    "rollout.vllm.gpu_memory_utilization=0.6",
    "stages.grpo.prompts_per_step=512",
    "stages.grpo.group_size=5",
    "stages.grpo.num_mini_batches=4",
    "stages.grpo.loss.old_logprobs=recomputed",
    "stages.grpo.micro_batch_tokens=700",  # one sequence: EasyR1 runs the prompt with each response
    "deepspeed={zero_stage: 3, offload_optimizer: true}",
)
LORA = ("model.freeze=[vision, projector]", "model.gradient_checkpointing=[language]", "model.lora={rank: 8}")
VQA: dict[str, Any] = {"prompt": 400, "grids": ((1, 34, 34),), "response": 300}  # geometry3k: 700 tokens a sequence
ZERO3 = "deepspeed={zero_stage: 3}"


def published_rows() -> Iterator[Published]:
    """Yield all rows, by the source's numbers."""
    # A sequence has as many tokens as follow from the published tokens a second and GPU, of 8 GPUs and 2,560 sequences.
    for row, path, memory, seconds, rate, extra in (
        ("1 EasyR1 3B AMP, micro 1", "Qwen2.5-VL-3B", 54, 120, 1800, {"efficiency": 0.081}),
        ("2 EasyR1 7B AMP, micro 1", "Qwen2.5-VL-7B", 68, 145, 1600, {"efficiency": 0.16}),
        ("3 EasyR1 7B AMP, micro 4", "Qwen2.5-VL-7B", 72, 120, 2000, {"efficiency": 0.232}),
        ("4 EasyR1 7B AMP, 8 x L20", "Qwen2.5-VL-7B", 42, 580, 410, {"efficiency": 0.265, "gpu": "l20-48gb"}),
        ("5 EasyR1 7B BF16", "Qwen2.5-VL-7B", 58, 145, 1600, {"efficiency": 0.16}),
        ("6 EasyR1 32B BF16, TP 8", "Qwen2.5-VL-32B", 72, 530, 620, {"efficiency": 0.258, "engine_gpus": 8}),
        ("7 EasyR1 30B-A3B BF16, TP 8", "Qwen3-VL-30B-A3B", 50, 4600, 80, {"efficiency": 0.018, "engine_gpus": 8}),
    ):
        yield Published(
            row=row,
            path=path,
            memory_gb=memory,
            seconds=seconds,
            overrides=(*EASYR1, "stages.grpo.loss.kl.coef=0.01"),
            reference_in_host=True,
            **VQA | {"response": rate * 8 * seconds // 2560 - VQA["prompt"]} | extra,
        )
    hf = (*EASYR1, "rollout.engine=hf")
    for method, settings, sizes in (
        ("full AMP", hf, (("3B", 4, 40), ("7B", 8, 40), ("32B", 16, 80), ("72B", 32, 80))),
        ("full BF16", hf, (("3B", 1, 40), ("7B", 4, 40))),
        ("LoRA", (*hf, *LORA), (("3B", 1, 24), ("7B", 2, 32), ("32B", 2, 80))),
    ):
        for size, gpus, memory in sizes:
            yield Published(
                row=f"8 EasyR1 {method} {size}, {gpus} x {memory} GB",
                path=f"Qwen2.5-VL-{size}",
                memory_gb=memory,
                is_limit=True,
                gpus=gpus,
                overrides=settings,
                **VQA,
            )
    videos: dict[str, Any] = {"gpus": 4, "prompt": 484, "grids": ((6, 16, 16),), "response": 100, "sequences": 4}
    for parts, memory in (("[vision, language]", 48), ("[language]", 62), ("[vision]", 56), ("[]", 77)):
        row, model = f"9 swift 7B, recomputed {parts}", "Qwen2.5-VL-7B"
        overrides = ("model.freeze=[]", f"model.gradient_checkpointing={parts}", ZERO3, "stages.grpo.loss.kl.coef=0")
        yield Published(row=row, path=model, memory_gb=memory * GIB, overrides=overrides, **videos)
    packed: dict[str, Any] = {"gpus": 2, "gpu": "a100-80gb", "grids": ((1, 16, 32),), "response": 128, "sequences": 8}
    frozen = ("model.freeze=[vision, projector]", "model.gradient_checkpointing=[language]")
    no_kl = "stages.grpo.loss.kl.coef=0"
    chunked = (*LORA, no_kl, "model.logits_chunk_tokens=4096")
    for row, path, memory, overrides, extra in (
        ("10 Megatron 7B, frozen tower, TP 2", "Qwen2.5-VL-7B", 72 * GIB, (*frozen, ZERO3, no_kl), {}),
        ("11 Megatron 7B LoRA r 8", "Qwen2.5-VL-7B", 23 * GIB, (*LORA, no_kl), {}),
        ("12 swift Qwen3-VL-4B LoRA r 8", "Qwen3-VL-4B", 21 * GIB, chunked, {"sequences": 4, "response": 864}),
        (
            "14 swift 7B LoRA, 1 MP",
            "Qwen2.5-VL-7B",
            20 * GIB,
            (*LORA, no_kl),
            {"sequences": 1, "grids": ((1, 70, 70),)},
        ),
    ):
        sizes = packed | extra
        prompt = sum(map(prod, sizes["grids"])) // 4 + 32
        yield Published(row=row, path=path, memory_gb=memory, overrides=overrides, prompt=prompt, **sizes)
    vllm = ("rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.5", ZERO3)
    yield Published(
        row="13 swift 72B LoRA GRPO, 8 x 80 GiB",
        path="Qwen2.5-VL-72B",
        memory_gb=80 * GIB,
        is_limit=True,
        overrides=(*LORA, no_kl, *vllm, "stages.grpo.micro_batch_tokens=8192"),
        engine_gpus=4,
        **VQA,
    )
    yield Published(
        row="15 Visual-ARFT, 8 GPUs, 200 steps in 2 h",
        path="Qwen2.5-VL-7B",
        memory_gb=None,
        seconds=36,
        overrides=(*EASYR1, "stages.grpo.prompts_per_step=8", "stages.grpo.group_size=8"),
        **VQA,
    )


def plan_published(row: Published) -> Plan:
    """Return mmrl's plan of a published run."""
    config = load_config(RECIPE, [f"model.path=Qwen/{row.path}", *row.overrides]).config
    stage = config.stages[0]
    assert isinstance(stage, RlStage)
    workload = Workload(
        prompt_tokens=row.prompt,
        grids=row.grids,
        mean_prompt_frac=1.0,
        longest_response=row.response,
        mean_response=row.response,
        notes=(),
    )
    plan = make_plan(config, stage, workload, find_gpu(row.gpu), row.gpus, row.efficiency)
    if row.sequences is None:
        return plan
    micro_batch = MicroBatchSizes(
        num_groups=row.sequences, prompt_tokens=row.prompt, grids=row.grids, responses=(row.response,)
    )
    return replace(plan, micro_batch=micro_batch)


def compare_row(row: Published) -> dict[str, float]:
    """Return memory and time of a published run, planned and published."""
    plan = plan_published(row)
    vllm, phases = plan.config.rollout.vllm, phase_gigabytes(plan)
    for part in memory_parts(plan):
        if part.name == "reference" and row.reference_in_host:
            phases = {phase: size - part.gigabytes for phase, size in phases.items()}
        if part.name == "vLLM: weights" and row.engine_gpus > 1:
            # The engine has its share of the GPU, which the weights of a whole model would exceed.
            share = vllm.gpu_memory_utilization * plan.gpu.memory_gb
            phases["generating"] -= part.gigabytes - max(share, part.gigabytes / row.engine_gpus)
    if plan.config.rollout.engine == "hf":
        del phases["generating"]  # nobody else generates so
    numbers = {"planned GB": max(phases.values()), "published GB": row.memory_gb or 0.0}
    if row.seconds:
        seconds = step_seconds(plan)
        if row.reference_in_host:
            # Its efficiency is EasyR1's MFU, which counts three forward passes, and no recomputation.
            seconds["learning"] = 3 * seconds["reference"]
        numbers |= {"planned s": sum(seconds.values()), "published s": row.seconds}
    return numbers


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cells", nargs="*", choices=CELLS, metavar="CELL", help="these of the first table, or all")
    parser.add_argument("--rows", nargs="*", metavar="NUMBER", help="these of the second table, or all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    # None for a table that is not named while the other is.
    cells, rows = options.cells, options.rows
    if cells is None and rows is None:
        cells = rows = []
    if cells is not None:
        for cell in cells or CELLS:
            results[cell] = show(cell, compare_cell(cell))
    for row in published_rows():
        if rows == [] or (rows and row.row.split()[0] in rows):
            results[row.row] = show(row.row, compare_row(row))
    write_results(options.json, "plan", results)


def show(name: str, numbers: dict[str, float]) -> dict[str, float]:
    """Print planned and measured, with the difference in percent."""
    values = list(numbers.items())
    texts = []
    for (_, planned), (title, measured) in zip(values[::2], values[1::2], strict=True):
        difference = f"{planned / measured - 1:+7.1%}" if measured else "      -"
        texts.append(f"{planned:10.4g} {measured:10.4g} {difference} {title.split()[-1]}")
    print(f"{name:42} {'   '.join(texts)}", flush=True)
    return numbers


if __name__ == "__main__":
    main()
