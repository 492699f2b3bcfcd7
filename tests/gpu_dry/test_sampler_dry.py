"""Sampling on the pretended device, through the interface that all engines share."""

from dataclasses import replace

import pytest
import torch
from processors import pad_prompts
from samplers import hf_sampler, make_context, make_pipeline
from scoring import make_scorer, term
from tool_calls import responses, zoom_response

from mmrl.config.schema import RethinkConfig, RethinkTriggerConfig
from mmrl.policy.decode_cache import DecodeCache
from mmrl.policy.families import FAMILIES
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.types import Author
from mmrl_rewards.contract import reward


@reward(name="never", low=0.0, high=1.0)
def never(response, sample) -> float:
    return 0.0


@pytest.fixture
def tiny(make_tiny, device):
    tiny = make_tiny()
    device.place(tiny.policy.model.to(torch.bfloat16))
    return tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_waits_once_for_a_token_and_once_for_all_logprobs(make_tiny, family, device, waits):
    tiny = make_tiny(family)
    device.place(tiny.policy.model.to(torch.bfloat16))
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]
    (first, _), _ = tiny.sampler().generate(prompts, 2, replace(tiny.params, max_new_tokens=4), step=0)
    assert first.num_tokens == 4
    assert waits().total() == 4 + 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_rows_that_end_wait_for_nothing(make_tiny, family, device, waits):
    tiny = make_tiny(family)
    device.place(tiny.policy.model.to(torch.bfloat16))
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3]]
    batch = pad_prompts(prompts, tiny.processor, pad_id=tiny.eos_id)
    cache, _ = tiny.policy.prefill(batch)
    shares_prompts = tiny.policy.supports_shared_prefix
    rows = DecodeCache(cache, [0, 0, 1, 2], batch.attention_mask_BP, shares_prompts=shares_prompts)
    token_R = torch.ones(4, dtype=torch.int64, device=device.device)
    tiny.policy.append_text(rows, token_R, token_R)
    assert rows.keep_rows([1, 3]) == [3, 1]
    assert not waits()


@pytest.mark.slow
def test_partial_rollouts_continue_their_responses(tiny):
    step = PartialRollouts(context=make_context(tiny), chunk_tokens=4)
    batch = step.generate([tiny.processor.build(tiny.samples[0])], step=0)
    assert [len(segment.token_ids) for segment in batch.groups[0][0].segments] == [4, 2]


@pytest.mark.slow
def test_a_response_rethinks(tiny):
    trigger = RethinkTriggerConfig(text=" Wait.")
    settings = RethinkConfig(kind="rethink", correct=("never",), max_new_tokens=3, triggers=(trigger,))
    pipeline = make_pipeline(tiny, settings, scorer=make_scorer(term(never)))
    ((rollout,),) = pipeline.steps[0](responses(tiny, "An answer."), step=0).groups
    assert [segment.author for segment in rollout.segments] == [Author.POLICY, Author.FORCED, Author.POLICY]


@pytest.mark.slow
def test_a_response_continues_after_a_picture_of_a_tool(tiny):
    rollout = zoom_response(tiny)
    assert rollout.observations
    assert rollout.segments[-1].author is Author.POLICY


@pytest.mark.slow
def test_routes_are_recorded(make_tiny, device):
    tiny = make_tiny("qwen3_vl_moe")
    device.place(tiny.policy.model.to(torch.bfloat16))
    sampler = hf_sampler(tiny.policy, tiny.processor, record_routes=True)
    ((rollout,),) = sampler.generate([tiny.processor.build(tiny.samples[0])], 1, tiny.params, step=0)
    assert rollout.segments[0].routes is not None
