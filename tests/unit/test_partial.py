"""Partial rollouts: a step ends when enough groups are complete; the others continue later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.types import FinishReason, TrainingState

GROUP, LONGEST = 2, 12


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


@pytest.fixture(scope="module")
def params(tiny):
    """Stop strings end some responses of a model of random weights early."""
    return replace(tiny.params, max_new_tokens=LONGEST, stop=tuple("eaiou"))


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.processor.build(sample) for sample in tiny.samples[:6]]


def partial_rollouts(tiny, params, *, sampler=None, **options):
    options = {"chunk_tokens": 3, "groups_per_step": 6, **options}
    return PartialRollouts(sampler=sampler or tiny.sampler(), group_size=GROUP, sampling_params=params, **options)


def ended(rollout):
    return rollout.finish_reason is not FinishReason.LENGTH or rollout.num_tokens == LONGEST


def digests(groups):
    return [group[0].prompt.digest for group in groups]


def test_every_response_is_completed_if_all_groups_are_wanted(tiny, params, prompts):
    answers = partial_rollouts(tiny, params).generate(prompts, step=0)
    assert answers.unfinished == ()
    assert digests(answers.groups) == [prompt.digest for prompt in prompts]
    rollouts = [rollout for group in answers.groups for rollout in group]
    assert all(map(ended, rollouts))
    assert {rollout.num_tokens for rollout in rollouts} >= {LONGEST}
    assert all(len(s.token_ids) <= 3 for r in rollouts for s in r.segments)
    assert [r.index for r in answers.groups[0]] == list(range(GROUP))


def test_greedy_chunks_equal_greedy_whole_responses(tiny, params, prompts):
    greedy = replace(params, temperature=0.0)
    whole = tiny.sampler().generate(prompts, 1, greedy, step=0)
    parts = PartialRollouts(
        sampler=tiny.sampler(), group_size=1, sampling_params=greedy, chunk_tokens=5, groups_per_step=6
    ).generate(prompts, step=0)
    for (a,), (b,) in zip(whole, parts.groups, strict=True):
        assert (a.text, a.finish_reason, a.answer) == (b.text, b.finish_reason, b.answer)
        assert sum((s.logprobs for s in b.segments), ()) == pytest.approx(a.segments[0].logprobs, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_stop_string_may_lie_across_chunks(tiny, params, prompts, chunk):
    """What completes it ends the response, as where nothing is cut."""
    greedy = replace(params, temperature=0.0, stop=())
    free = [rollout.segments[0].token_ids for (rollout,) in tiny.sampler().generate(prompts, 1, greedy, step=0)]
    across = {tiny.processor.decode(ids[n : n + 3])[1:-1] for ids in free for n in (1, 2, 3)}
    stopping = replace(greedy, stop=tuple(sorted(text for text in across if len(text) > 2 and text.isascii())))
    whole = tiny.sampler().generate(prompts, 1, stopping, step=0)
    program = PartialRollouts(
        sampler=tiny.sampler(), group_size=1, sampling_params=stopping, chunk_tokens=chunk, groups_per_step=6
    )
    parts = program.generate(prompts, step=0).groups
    for (a,), (b,) in zip(whole, parts, strict=True):
        assert (a.segments[0].token_ids, a.finish_reason) == (
            sum((s.token_ids for s in b.segments), ()),
            b.finish_reason,
        )
    assert FinishReason.STOP in {rollout.finish_reason for (rollout,) in whole}


def test_a_step_ends_with_enough_groups_and_the_others_go_on_under_newer_weights(tiny, params, prompts):
    sampler = tiny.sampler()
    step = partial_rollouts(tiny, params, sampler=sampler, groups_per_step=2)
    first = step.generate(prompts, step=0)
    assert 2 <= len(first.groups) < 6
    assert len(first.groups) + len(first.unfinished) == 6
    assert first.metrics["rollout/unfinished_groups"] == len(first.unfinished)
    assert all(ended(r) for group in first.groups for r in group)
    assert not any(all(map(ended, group)) for group in first.unfinished)
    sampler.sync(7)
    second = replace(step, groups_per_step=len(first.unfinished)).generate(
        prompts[:0], step=1, unfinished=first.unfinished
    )
    assert digests(second.groups) == digests(first.unfinished)
    versions = [[s.version for s in r.segments] for group in second.groups for r in group]
    assert [0, 7] in [sorted(set(of)) for of in versions]
    assert second.metrics["rollout/resumed_rollouts"] == sum(len(set(of)) > 1 for of in versions)
    for before, after in zip(first.unfinished, second.groups, strict=True):
        for cut, whole in zip(before, after, strict=True):
            assert whole.segments[: len(cut.segments)] == cut.segments  # what was drawn stays, with its log-probs


def test_a_budget_ends_a_step_once_a_group_is_complete(tiny, params, prompts):
    free = partial_rollouts(tiny, params).generate(prompts, step=0)
    tight = partial_rollouts(tiny, params, token_budget=1).generate(prompts, step=0)
    assert 1 <= len(tight.groups) < len(free.groups)


def test_unfinished_groups_survive_a_checkpoint(tiny, params, prompts):
    unfinished = partial_rollouts(tiny, params, groups_per_step=1).generate(prompts, step=0).unfinished
    assert unfinished
    again = loads(dumps(TrainingState(unfinished=unfinished)), TrainingState).unfinished
    assert again == unfinished
    step = partial_rollouts(tiny, params)
    assert step.generate([], step=1, unfinished=again) == step.generate([], step=1, unfinished=unfinished)


def test_equal_rollouts_in_flight_are_extended_each_for_itself(tiny, params, prompts):
    """A sample that is drawn twice: after a resume its equal rollouts are one object, and still two responses."""

    class Numbering:
        """A sampler whose rows differ, as rows of a batch may by rounding."""

        def extend(self, rollouts, sampling_params, *, step):
            segments = [replace(r.segments[0], token_ids=(5 + row,) * 3) for row, r in enumerate(rollouts)]
            return [replace(r, segments=(*r.segments, s)) for r, s in zip(rollouts, segments, strict=True)]

    sampler = tiny.sampler()
    [group] = sampler.generate(prompts[:1], GROUP, replace(params, max_new_tokens=3), step=0)
    cut = tuple(replace(r, finish_reason=FinishReason.LENGTH, sampling_params=params) for r in group)
    again = tuple(replace(rollout) for rollout in cut)
    step = partial_rollouts(tiny, params, sampler=Numbering())
    apart, same = step._extend_unfinished([cut, again], 1), step._extend_unfinished([cut, cut], 1)
    assert apart == same
    assert [r.segments[-1].token_ids[0] for g in same for r in g] == [5, 6, 7, 8]
