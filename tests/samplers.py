"""Samplers of the learner's own model, as runs with `rollout.engine: hf` have them."""

from __future__ import annotations

from typing import Any

from mmrl.policy.policy import Policy
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.engine_sampler import EngineSampler, WeightPublisher
from mmrl.rollout.engines.hf import HfEngine
from mmrl.rollout.weight_sync import PolicyWeightStream


def hf_sampler(
    policy: Policy,
    processor: PromptProcessor,
    *,
    seed_parts: tuple[str | int, ...] = ("test",),
    version: int = 0,
    record_routes: bool = False,
    **engine: Any,
) -> EngineSampler:
    publisher = WeightPublisher(HfEngine(policy, processor, **engine), PolicyWeightStream(policy))
    return EngineSampler(publisher, processor, seed_parts=seed_parts, version=version, record_routes=record_routes)
