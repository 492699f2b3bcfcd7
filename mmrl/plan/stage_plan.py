"""A stage on a number of GPUs: the sizes from which its memory (`memory.py`) and its time (`step_time.py`) follow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch

from mmrl.config import Config
from mmrl.config.schema import DeepspeedConfig, ModelConfig, RlStage, SftStage
from mmrl.plan.measure import Measurement, make_policy, measure
from mmrl.plan.shapes import ModelShapes, read_shapes
from mmrl.plan.workload import MicroBatchSizes, Workload
from mmrl.policy.build import ComponentSummary, find_untrained_components, summarize_components
from mmrl.rollout.engines.hf import MAX_BATCH_TOKENS
from mmrl.types import UserError

_measured: dict[tuple[str, MicroBatchSizes], Measurement] = {}


class Gpu(NamedTuple):
    """A kind of GPU."""

    memory_gb: float  # memory, in GB
    peak_tflops: float  # dense bfloat16 multiply-adds with float32 sums, in TFLOP/s, each multiply-add as two
    bandwidth_tbs: float  # memory bandwidth, in TB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A stage on a number of GPUs, and all sizes that follow from its config."""

    config: Config
    stage: SftStage | RlStage
    options: ModelConfig  # the section `model` of the config, with what the stage freezes
    workload: Workload
    micro_batch: MicroBatchSizes  # the fullest micro-batch

    gpu: Gpu
    num_gpus: int  # all GPUs, rollout servers' included
    learners: int  # GPUs that learn
    efficiency: float  # share of a GPU's peak that learning reaches
    num_engines: int  # rollout engines
    engine_gpus: int  # GPUs of one engine
    engine_rows: int  # most responses that one engine generates in a round
    hf_batch: int  # of these, most that the engine `hf` generates at a time

    model: ModelShapes
    components: tuple[ComponentSummary, ...]  # parameters by component
    parameters: int  # parameters of the whole model
    trained: int  # parameters that this stage trains
    ever_trained: int  # parameters that some stage trains
    width: int  # bytes of a parameter
    trained_width: int  # bytes of a trained parameter: 4 for an adapter, which is float32
    zero: DeepspeedConfig  # the section `deepspeed` of the config; stage 0 if there is none
    gathered: int  # parameters that ZeRO-3 gathers at a time: two blocks, embeddings and output matrix

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
        UserError: there are no shapes of this model, or the rollout servers leave no GPU to learn on.
    """
    model, options = read_shapes(config.model), config.model.with_freeze(stage.freeze)
    module = make_policy(model, options).model
    components = summarize_components(module, model.family)
    blocks = sorted(sum(map(torch.numel, block.parameters())) for block in module.get_decoder().layers)
    tables = {module.get_input_embeddings().weight, module.get_output_embeddings().weight}
    learners, num_engines, engine_gpus = num_gpus, num_gpus, 1
    if config.rollout.engine == "vllm_server":
        num_engines = len(config.rollout.server.urls) or config.rollout.server.replicas
        engine_gpus = config.rollout.vllm.tensor_parallel_size
        learners = num_gpus - num_engines * engine_gpus
        if learners < 1:
            raise UserError(f"--gpus {num_gpus}: the servers take {num_gpus - learners}, and none is left to learn on")
    rows = ceil(stage.prompts_per_round * stage.group_size / num_engines)
    trained = sum(component.num_trained for component in components)
    thawed = set(options.freeze).difference(find_untrained_components(config))
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
        engine_rows=rows,
        hf_batch=min(rows, max(1, MAX_BATCH_TOKENS // (workload.prompt_tokens + workload.longest_response))),
        model=model,
        components=tuple(components),
        parameters=sum(component.num_parameters for component in components),
        trained=trained,
        ever_trained=trained + sum(each.num_parameters for each in components if each.component in thawed),
        width=4 if options.dtype == "float32" else 2,
        trained_width=next(each for each in module.parameters() if each.requires_grad).element_size(),
        zero=config.deepspeed or DeepspeedConfig(zero_stage=0),
        gathered=sum(blocks[-2:]) + sum(map(torch.numel, tables)),
    )


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name.

    Raises:
        UserError: the name is not in `gpus.json`.
    """
    known = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))["gpus"]
    if name.lower() not in known:
        raise UserError(f"--gpu {name}: unknown; known are {', '.join(known)}")
    return Gpu(**known[name.lower()])
