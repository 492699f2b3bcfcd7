"""Samplers of a tiny model, as runs with `rollout.engine: hf` have them, and rollout steps that use one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from scoring import make_scorer

from mmrl.config.schema import GenerateConfig
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.hf import HfEngine
from mmrl.rollout.pipeline import StepPipeline, build_pipeline
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.types import FinishReason, Rollout


def hf_sampler(
    policy: PolicyModel,
    processor: PromptProcessor,
    *,
    seed_parts: tuple[str | int, ...] = ("test",),
    version: int = 0,
    record_routes: bool = False,
    **options: Any,
) -> EngineSampler:
    engine = HfEngine(policy, processor, **options)
    return EngineSampler(
        engine,
        processor,
        load_version=lambda _: engine.load_weights(PolicyWeightStream(policy)),
        seed_parts=seed_parts,
        version=version,
        record_routes=record_routes,
    )


def make_pipeline(tiny: Any, *steps: Any, **context: Any) -> StepPipeline:
    """A pipeline of a tiny model: first responses, then the steps with these configs."""
    return build_pipeline((GenerateConfig(kind="generate"), *steps), make_context(tiny, **context))


def make_context(tiny: Any, **replaced: Any) -> RolloutContext:
    """The context of a pipeline of a tiny model, with fields `replaced`."""
    fields = {"sampler": tiny.sampler(), "scorer": make_scorer(), "processor": tiny.processor, "seed": 0}
    fields |= {"sampling_params": tiny.params, "group_size": 2, "prompts_per_step": 1}
    fields["tool_runner"] = ToolRunner(Path.cwd())
    return RolloutContext(**(fields | replaced))


def reworded(tiny: Any, rollout: Rollout, text: str, finish_reason: FinishReason = FinishReason.STOP) -> Rollout:
    """The rollout with `text` in place of its last segment; FinishReason.EOS appends the token."""
    ids = tuple(tiny.processor.tokenizer(text).input_ids)
    if finish_reason is FinishReason.EOS:
        ids = (*ids, tiny.eos_id)
    segment = replace(rollout.segments[-1], token_ids=ids, logprobs=(-1.0,) * len(ids))
    segments = (*rollout.segments[:-1], segment)
    return tiny.processor.parse_rollout(replace(rollout, segments=segments, finish_reason=finish_reason))
