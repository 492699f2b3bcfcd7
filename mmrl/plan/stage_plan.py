"""A stage on a number of GPUs: the sizes from which its memory (`memory.py`) and its time (`step_time.py`) follow."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

from mmrl.config import Config
from mmrl.config.schema import ModelConfig, RlStage, SftStage
from mmrl.plan.measure import Measurement, make_policy, measure
from mmrl.plan.shapes import ModelShapes, read_shapes
from mmrl.plan.workload import MicroBatchSizes, Workload
from mmrl.policy.build import ComponentSummary, summarize_components
from mmrl.types import UserError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A stage on a number of GPUs, and all sizes that follow from its config."""

    config: Config
    stage: SftStage | RlStage
    options: ModelConfig  # the section `model` of the config, with what the stage freezes
    workload: Workload
    micro_batch: MicroBatchSizes  # the fullest micro-batch

    gpu: Gpu
    num_gpus: int  # all GPUs, those of rollout servers included
    learners: int  # GPUs that learn
    efficiency: float  # share of a GPU's peak that learning reaches
    num_engines: int  # rollout engines
    engine_gpus: int  # GPUs of one engine
    engine_rows: int  # most responses that one engine generates at a time

    model: ModelShapes
    components: tuple[ComponentSummary, ...]  # parameters by component
    parameters: int  # parameters of the whole model
    trained: int  # those of them that are trained
    width: int  # bytes of a parameter
    trained_width: int  # bytes of a trained parameter: 4 for an adapter, which is float32
    zero_stage: int  # stage of ZeRO; 0 without DeepSpeed
    offloads_optimizer: bool  # the optimizer's numbers are in host memory
    gathered: int  # parameters that ZeRO-3 gathers at a time: two blocks, embeddings and output matrix
    has_reference: bool  # a KL penalty compares the policy with a reference model

    @property
    def measurement(self) -> Measurement:
        """Work and memory of `micro_batch`. Measuring takes seconds, so each result is kept while the process lives."""
        key = self.options.model_dump_json(), self.micro_batch
        if key not in _measured:
            _measured[key] = measure(self.model, self.options, self.micro_batch)
        return _measured[key]


def make_plan(
    config: Config, stage: SftStage | RlStage, workload: Workload, gpu: Gpu, num_gpus: int, efficiency: float
) -> Plan:
    """Return what a stage needs on so many GPUs. `efficiency` is the share of a GPU's peak that learning reaches.

    Raises:
        UserError: the model is unknown, or this torch cannot pretend a device.
    """
    model, options = read_shapes(config.model), config.model.with_freeze(stage.freeze)
    module = make_policy(model, options).model
    components = summarize_components(module, model.family)
    blocks = sorted(sum(map(torch.numel, block.parameters())) for block in module.get_decoder().layers)
    tables = {module.get_input_embeddings().weight, module.get_output_embeddings().weight}
    server, deepspeed = config.rollout.server, config.deepspeed
    learners = num_engines = num_gpus
    engine_gpus = 1
    if config.rollout.engine == "vllm_server":
        num_engines, engine_gpus = len(server.urls) or server.replicas, config.rollout.vllm.tensor_parallel_size
        learners = max(1, num_gpus - num_engines * engine_gpus)
    engine_rows, has_reference = 0, False
    if isinstance(stage, RlStage):
        engine_rows = ceil(stage.prompts_per_round * stage.group_size / num_engines)
        has_reference = stage.loss.kl.coef > 0
    return Plan(
        config=config,
        stage=stage,
        options=options,
        workload=workload,
        micro_batch=workload.micro_batch(stage, learners),
        gpu=gpu,
        num_gpus=num_gpus,
        learners=learners,
        efficiency=efficiency,
        num_engines=num_engines,
        engine_gpus=engine_gpus,
        engine_rows=engine_rows,
        model=model,
        components=tuple(components),
        parameters=sum(component.num_parameters for component in components),
        trained=sum(component.num_trained for component in components),
        width=4 if options.dtype == "float32" else 2,
        trained_width=next(each for each in module.parameters() if each.requires_grad).element_size(),
        zero_stage=deepspeed.zero_stage if deepspeed else 0,
        offloads_optimizer=deepspeed is not None and deepspeed.offload_optimizer,
        gathered=sum(blocks[-2:]) + sum(map(torch.numel, tables)),
        has_reference=has_reference,
    )


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name.

    Raises:
        UserError: the name is not in the table.
    """
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: unknown; known are {', '.join(GPUS)}")
    return GPUS[name.lower()]
