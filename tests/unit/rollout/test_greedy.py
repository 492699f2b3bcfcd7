"""Greedy responses: one to each prompt at temperature 0, through all other steps; scored, and never trained."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from samplers import hf_sampler, make_pipeline
from scoring import make_scorer, term
from tool_calls import call, responses

from mmrl.algo.group_metrics import compute_blind_gaps
from mmrl.algo.group_rewards import greedy_baseline
from mmrl.config import schema
from mmrl.config.schema.rollout_steps import GENERATE_ONLY, check_plain_generation, check_rollout_steps
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import Author
from mmrl_rewards.contract import reward

GREEDY = schema.GreedyConfig(kind="greedy")
GREY = schema.BlindProbeConfig(kind="probe", corruption="grey")


@reward(name="length", low=0.0, high=100.0)
def length(response, sample) -> float:
    """How many characters."""
    return float(len(response.text))


SCORER = make_scorer(term(length))


@pytest.fixture(scope="module")
def prompts(tiny):
    """Prompts with one image, two, none, a video."""
    return [tiny.processor.build(sample) for sample in tiny.samples[:4]]


def run(tiny, prompts, *steps, step=0):
    return make_pipeline(tiny, *steps, scorer=SCORER, swap_samples=tiny.samples).run(prompts, step=step)


def tokens(rollout):
    return [segment.token_ids for segment in rollout.segments]


def test_each_prompt_has_the_response_of_greedy_sampling(tiny, prompts):
    batch = run(tiny, prompts, GREY, GREEDY)
    assert batch.groups == run(tiny, prompts).groups
    greedy = replace(tiny.params, temperature=0.0)
    for prompt, probes, sampled in zip(prompts, batch.probes, batch.groups, strict=True):
        assert probes.keys() == ({"grey", "greedy"} if prompt.sample.media else {"greedy"})
        (own,) = probes["greedy"]
        (same,) = tiny.sampler().generate([prompt], 1, greedy, step=7)[0]
        assert tokens(own) == tokens(same)
        assert own.prompt.digest == prompt.digest and own.prompt.sample.id == f"{prompt.sample.id}~greedy"
        assert tokens(own) != tokens(sampled[0]) or tokens(own) != tokens(sampled[1])
    assert tokens(run(tiny, prompts, GREEDY, step=1).probes[0]["greedy"][0]) == tokens(batch.probes[0]["greedy"][0])


def test_its_images_and_videos_are_encoded_once(tiny):
    processor, encoded = tiny.fresh(), []
    encode = processor.encoder.encode
    processor.encoder.encode = lambda sample: encoded.append(sample.id) or encode(sample)
    pipeline = make_pipeline(tiny, GREEDY, processor=processor, sampler=hf_sampler(tiny.policy, processor))
    batch = pipeline.run([processor.build(sample) for sample in tiny.samples[:4]], step=0)
    assert all(probes["greedy"] for probes in batch.probes)
    assert encoded == [sample.id for sample in tiny.samples[:4]]


@pytest.mark.parametrize("greedy_first", [True, False])
def test_a_greedy_response_is_rethought_greedily_and_not_counted(tiny, prompts, greedy_first):
    triggers = (schema.RethinkTriggerConfig(text=" Wait."),)
    rethink = schema.RethinkConfig(
        kind="rethink", correct=("length",), max_new_tokens=3, triggers=triggers, temperature=2.0, fraction=1.0
    )
    # With these stop strings, most responses end themselves.
    stopping = replace(tiny, params=replace(tiny.params, stop=tuple("aeiou ")))
    steps = (GREEDY, rethink) if greedy_first else (rethink, GREEDY)
    batch = run(stopping, prompts, *steps)
    continued = [probes["greedy"][0] for probes in batch.probes if probes["greedy"][0].parent_index is not None]
    assert continued
    greedy = replace(stopping.params, temperature=0.0, max_new_tokens=3)
    for rollout in continued:
        first, forced, last = rollout.segments
        assert forced.author is Author.FORCED
        (again,) = tiny.sampler().extend([replace(rollout, segments=(first, forced))], greedy, step=3)
        assert again.segments[-1].token_ids == last.token_ids
    trained = [rollout for group in batch.groups for rollout in group]
    assert batch.metrics["rethink/attempted"] == sum(rollout.parent_index is not None for rollout in trained)


class CallingSampler:
    """Writes the same call as every first response and nothing after its result; notes the temperatures."""

    def __init__(self, calling):
        self.calling, self.temperatures = calling, []

    def generate(self, prompts, count, params, *, step):
        self.temperatures.append(params.temperature)
        return [[replace(self.calling, prompt=prompt, index=index) for index in range(count)] for prompt in prompts]

    def extend(self, rollouts, params, *, step):
        self.temperatures.append(params.temperature)
        return rollouts


@pytest.mark.parametrize("greedy_first", [True, False])
def test_tools_and_environments_apply_to_it_wherever_they_are_written(tiny, prompts, greedy_first):
    tools = schema.ToolsConfig(
        kind="tools", tools=(schema.ToolConfig(fn="mmrl.rollout.tools.builtin:check_answer"),), max_turns=1
    )
    world = schema.EnvironmentConfig(kind="environment", fn="examples/environment.py:make")
    ((calling,),) = responses(tiny, call("check_answer", answer="3")).groups
    sampler = CallingSampler(calling)
    with closing(ToolRunner(Path())) as runner:
        pipelines = []
        for other in (tools, world):
            steps = (GREEDY, other) if greedy_first else (other, GREEDY)
            pipelines.append(make_pipeline(tiny, *steps, sampler=sampler, tool_runner=runner))
        batch = pipelines[0].run(prompts[:1], step=0)
    assert sampler.temperatures == [tiny.params.temperature] * 2 + [0.0] * 2
    (greedy,) = batch.probes[0]["greedy"]
    for rollout in (greedy, *batch.groups[0]):
        assert [segment.author for segment in rollout.segments] == [Author.POLICY, Author.ENVIRONMENT]
    assert batch.metrics["tools/calls"] == len(batch.groups[0])
    episodes, last = pipelines[1].steps
    assert last.steps == (replace(episodes, probe="greedy"),)


def test_its_total_is_subtracted_and_no_blind_gap(tiny, prompts):
    batch = run(tiny, prompts[:1], GREEDY)
    (group,) = SCORER.score_groups(batch.groups, step=0, probes=batch.probes)
    greedy = len(batch.probes[0]["greedy"][0].text)
    assert [value.value for value in greedy_baseline(group)] == [-float(greedy)] * len(group.rollouts)
    assert compute_blind_gaps([group]) == {}


def test_steps_that_make_no_sense_are_refused():
    check_rollout_steps((*GENERATE_ONLY, GREEDY, GREY))
    with pytest.raises(ValueError, match="a probe is named 'greedy'"):
        check_rollout_steps((*GENERATE_ONLY, GREY.model_copy(update={"name": "greedy"})))
    with pytest.raises(ValueError, match="'greedy'"):
        check_rollout_steps((*GENERATE_ONLY, GREEDY, GREEDY))
    with pytest.raises(ValueError, match="kind greedy is for training; evaluation"):
        check_plain_generation((*GENERATE_ONLY, GREEDY), "evaluation")
