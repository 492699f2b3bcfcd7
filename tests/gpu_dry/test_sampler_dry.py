"""Sampling on the pretended device, through the interface that all engines share."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from samplers import make_pipeline
from scoring import make_scorer, term
from tool_calls import MEDIA_TOOLS, call, responses, tool_step

from mmrl.config.schema import RethinkConfig, RethinkTriggerConfig
from mmrl.policy.families import FAMILIES
from mmrl.rollout.load import load_tool
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import Author
from mmrl_rewards.contract import reward


@reward(name="never", low=0.0, high=1.0)
def never(response, sample) -> float:
    return 0.0


@pytest.fixture
def tiny(make_tiny, device):
    tiny = make_tiny()
    device.place(tiny.policy.model, torch.bfloat16)
    return tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_is_waited_for_once(make_tiny, family, device, waits):
    tiny = make_tiny(family)
    device.place(tiny.policy.model, torch.bfloat16)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]
    counts = []
    for tokens in (2, 5):
        (first, _), _ = tiny.sampler().generate(prompts, 2, replace(tiny.params, max_new_tokens=tokens), step=0)
        assert first.num_tokens == tokens
        counts.append(sum(waits().values()))
    assert counts[1] - counts[0] == 3


def test_a_prompt_that_is_not_sent_is_found(tiny, monkeypatch):
    prompts = [tiny.processor.build(tiny.samples[0])]
    monkeypatch.setattr("mmrl.policy.batch.send", lambda tensor, device: tensor)
    with pytest.raises(RuntimeError, match="(?i)device"):
        tiny.sampler().generate(prompts, 2, tiny.params, step=0)


@pytest.mark.slow
def test_partial_rollouts_continue_their_responses(tiny):
    step = PartialRollouts(
        sampler=tiny.sampler(), sampling_params=tiny.params, group_size=2, chunk_tokens=4, groups_per_step=2
    )
    batch = step.generate([tiny.processor.build(sample) for sample in tiny.samples[:2]], step=0)
    assert [len(segment.token_ids) for segment in batch.groups[0][0].segments] == [4, 2]


@pytest.mark.slow
def test_a_response_rethinks(tiny):
    trigger = RethinkTriggerConfig(text=" Wait.")
    settings = RethinkConfig(kind="rethink", correct=("never",), max_new_tokens=3, triggers=(trigger,))
    pipeline = make_pipeline(tiny, settings, scorer=make_scorer(term(never)))
    batch = pipeline.run([tiny.processor.build(tiny.samples[0])], step=0)
    authors = {segment.author for rollout in batch.groups[0] for segment in rollout.segments}
    assert Author.FORCED in authors


@pytest.mark.slow
def test_a_response_continues_after_a_picture_of_a_tool(tiny):
    with closing(ToolRunner(partial(load_tool, Path()))) as runner:
        step = tool_step(tiny, runner, MEDIA_TOOLS, max_media=4)
        ((rollout,),) = step(responses(tiny, call("zoom", box=[4.0, 8.0, 40.0, 60.0])), step=0).groups
    assert rollout.observations
    assert rollout.segments[-1].author is Author.POLICY
