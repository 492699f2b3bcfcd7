"""Partial rollouts: a step ends when enough groups are complete; the others continue later."""

from dataclasses import replace

import pytest
from samplers import make_context

from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.types import FinishReason, TrainingState

GROUP, MAX_TOKENS = 2, 12


@pytest.fixture(scope="module")
def params(tiny):
    """With these stop strings, a model of random weights ends some responses early."""
    return replace(tiny.params, max_new_tokens=MAX_TOKENS, stop=tuple("eaiou"))


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.processor.build(sample) for sample in tiny.samples[:6]]


def partial_rollouts(tiny, params, *, sampler=None, chunk_tokens=3, token_budget=None, **context):
    context = {"sampler": sampler or tiny.sampler(), "group_size": GROUP, "prompts_per_step": 6, **context}
    context = make_context(tiny, sampling_params=params, **context)
    return PartialRollouts(context=context, chunk_tokens=chunk_tokens, token_budget=token_budget)


def ended(rollout):
    return rollout.finish_reason is not FinishReason.LENGTH or rollout.num_tokens == MAX_TOKENS


def digests(groups):
    return [group[0].prompt.digest for group in groups]


def all_tokens(rollout):
    return sum((segment.token_ids for segment in rollout.segments), ())


def test_every_response_is_completed_if_all_groups_are_wanted(tiny, params, prompts):
    batch = partial_rollouts(tiny, params).generate(prompts, step=0)
    assert batch.unfinished == ()
    assert digests(batch.groups) == [prompt.digest for prompt in prompts]
    rollouts = [rollout for group in batch.groups for rollout in group]
    assert all(map(ended, rollouts))
    assert MAX_TOKENS in {rollout.num_tokens for rollout in rollouts}
    assert max(len(segment.token_ids) for rollout in rollouts for segment in rollout.segments) == 3
    assert [rollout.index for rollout in batch.groups[0]] == list(range(GROUP))


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 5])
def test_chunks_equal_whole_responses_also_where_a_stop_string_lies_across_them(tiny, params, prompts, chunk_tokens):
    """Sampled greedily, since the seeds of chunks are others."""
    greedy = replace(params, temperature=0.0, stop=())
    free = [all_tokens(rollout) for (rollout,) in tiny.sampler().generate(prompts, 1, greedy, step=0)]
    across = {tiny.processor.decode(ids[n : n + 3])[1:-1] for ids in free for n in (1, 2, 3)}
    stopping = replace(greedy, stop=tuple(sorted(text for text in across if len(text) > 2 and text.isascii())))
    whole = tiny.sampler().generate(prompts, 1, stopping, step=0)
    step = partial_rollouts(tiny, stopping, group_size=1, chunk_tokens=chunk_tokens)
    for (expected,), (found,) in zip(whole, step.generate(prompts, step=0).groups, strict=True):
        assert all_tokens(found) == all_tokens(expected)
        assert (found.text, found.finish_reason, found.answer) == (
            *(expected.text, expected.finish_reason, expected.answer),
        )
        logprobs = sum((segment.logprobs for segment in found.segments), ())
        assert logprobs == pytest.approx(expected.segments[0].logprobs, abs=1e-5)
    assert {rollout.finish_reason for (rollout,) in whole} >= {FinishReason.STOP, FinishReason.LENGTH}


def test_step_ends_with_enough_groups_and_the_others_continue_under_newer_weights(tiny, params, prompts):
    sampler = tiny.sampler()
    step = partial_rollouts(tiny, params, sampler=sampler, prompts_per_step=2)
    first = step.generate(prompts, step=0)
    assert 2 <= len(first.groups) < 6
    assert len(first.groups) + len(first.unfinished) == 6
    assert first.metrics["rollout/unfinished_groups"] == len(first.unfinished)
    assert all(ended(rollout) for group in first.groups for rollout in group)
    assert not any(all(map(ended, group)) for group in first.unfinished)
    sampler.sync(7)
    step = replace(step, context=replace(step.context, prompts_per_step=len(first.unfinished)))
    second = step.generate([], step=1, unfinished=first.unfinished)
    assert digests(second.groups) == digests(first.unfinished)
    versions = [{segment.version for segment in rollout.segments} for group in second.groups for rollout in group]
    assert {0, 7} in versions
    assert second.metrics["rollout/resumed_rollouts"] == versions.count({0, 7})
    for before, after in zip(first.unfinished, second.groups, strict=True):
        for cut, whole in zip(before, after, strict=True):
            assert whole.segments[: len(cut.segments)] == cut.segments  # what was sampled stays, with its log-probs


def test_token_budget_ends_a_step_once_a_group_is_complete(tiny, params, prompts):
    batch = partial_rollouts(tiny, params, token_budget=1).generate(prompts, step=0)
    assert 1 <= len(batch.groups) < 6


def test_unfinished_groups_survive_a_checkpoint(tiny, params, prompts):
    unfinished = partial_rollouts(tiny, params, prompts_per_step=1).generate(prompts, step=0).unfinished
    read = loads(dumps(TrainingState(unfinished=unfinished)), TrainingState).unfinished
    assert read == unfinished != ()
    step = partial_rollouts(tiny, params)
    assert step.generate([], step=1, unfinished=read) == step.generate([], step=1, unfinished=unfinished)


def test_equal_rollouts_in_flight_are_extended_separately(tiny, params, prompts):
    """A sample that is in flight twice: after a resume its equal rollouts are one object, and still two responses."""

    class NumberingSampler:
        """Its rows differ, as rows of a batch may by rounding."""

        def generate(self, prompts, group_size, sampling_params, *, step):
            return []

        def extend(self, rollouts, sampling_params, *, step):
            extended = []
            for row, rollout in enumerate(rollouts):
                segment = replace(rollout.segments[0], token_ids=(5 + row,) * 3)
                extended.append(replace(rollout, segments=(*rollout.segments, segment), finish_reason=FinishReason.EOS))
            return extended

    [group] = tiny.sampler().generate(prompts[:1], GROUP, replace(params, max_new_tokens=3, stop=()), step=0)
    cut = tuple(replace(rollout, finish_reason=FinishReason.LENGTH, sampling_params=params) for rollout in group)
    copied = tuple(replace(rollout) for rollout in cut)
    step = partial_rollouts(tiny, params, sampler=NumberingSampler())
    for unfinished in ([cut, copied], [cut, cut]):
        groups = step.generate([], step=1, unfinished=unfinished).groups
        assert [rollout.segments[-1].token_ids[0] for group in groups for rollout in group] == [5, 6, 7, 8]
