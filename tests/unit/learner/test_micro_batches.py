"""Micro-batches of all ranks, one rank after another in one process, and dummy media that change no gradient."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from fake_ranks import FakeRanks
from learning import copy_of_sample, gradients_of, make_experiences

from mmrl.learner.micro_batches import (
    add_dummy_media,
    assign_to_ranks,
    dummy_batch,
    own_micro_batches,
    pack_micro_batches,
    split_into_mini_batches,
)
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.families import FAMILIES
from mmrl.types import Experience, ImageRef, VideoRef


@pytest.fixture(scope="module")
def groups(make_tiny):
    """One image, two, none, a video, an image and a video; two responses each."""
    return group_by_prompt(make_experiences(make_tiny(), (1.0, 1.0), num_prompts=5))


def flatten(groups):
    return list(chain.from_iterable(groups))


def digests(experiences):
    return {experience.rollout.prompt.digest for experience in experiences}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_group_goes_to_one_rank_as_a_whole(groups, size):
    assigned = assign_to_ranks(flatten(groups), {}, size)
    assert sorted(map(id, flatten(assigned))) == sorted(map(id, flatten(groups)))
    assert sum(len(digests(own)) for own in assigned) == len(groups)


def test_a_group_stays_with_its_media_while_loads_are_even(groups):
    copies = []
    for digest in "0123":
        for experience in groups[0]:
            prompt = replace(experience.rollout.prompt, digest=digest)
            copies.append(replace(experience, rollout=replace(experience.rollout, prompt=prompt)))
    kept = assign_to_ranks(copies, {"0": 1, "1": 0, "2": 1, "3": 0}, 2)
    assert [digests(own) for own in kept] == [{"1", "3"}, {"0", "2"}]
    crowded = assign_to_ranks(copies, dict.fromkeys("0123", 1), 2)
    assert [len(digests(own)) for own in crowded] == [2, 2]


def test_copies_of_a_sample_are_groups_of_their_own(groups):
    copies = flatten(copy_of_sample(groups[0], number) for number in range(8))
    assert len(digests(copies)) == 1
    assert split_into_mini_batches(copies, 8) == [copies[start : start + 2] for start in range(0, 16, 2)]
    # Also when one rank holds the media of all of them.
    for media_ranks in ({}, dict.fromkeys(digests(copies), 1)):
        assert list(map(len, assign_to_ranks(copies, media_ranks, 2))) == [8, 8]
    micro_batches = pack_micro_batches(copies, max_groups=2, max_tokens=10_000, shared_prefix=True)
    assert [list(map(len, micro_batch)) for micro_batch in micro_batches] == [[2, 2]] * 4


def test_ranks_have_equally_many_micro_batches_and_know_the_media_of_all(groups):
    image, _, text, video, _ = groups
    media_ranks = {text[0].rollout.prompt.digest: 0, image[0].rollout.prompt.digest: 1}

    def pack(experiences):
        return [[group] for group in group_by_prompt(experiences)]

    all_ranks = [FakeRanks(rank, 2, media_ranks=media_ranks) for rank in range(2)]
    first, second = (own_micro_batches([*text, *image, *video], ranks, pack) for ranks in all_ranks)
    assert len(first) == len(second) == 2  # of three groups, so one is empty
    assert sum(not micro_batch.groups for micro_batch in (*first, *second)) == 1
    for ours, theirs in zip(first, second, strict=True):
        refs = [ref for group in (*ours.groups, *theirs.groups) for ref in group[0].rollout.media]
        kinds = {type(ref) for ref in refs}
        for micro_batch in (ours, theirs):
            assert micro_batch.any_rank_has_images == (ImageRef in kinds)
            assert micro_batch.any_rank_has_videos == (VideoRef in kinds)


def gradient(tiny, batch, *, dummies):
    batch = add_dummy_media(batch, tiny.processor.placeholders, images=dummies, videos=dummies)
    tiny.policy.model.zero_grad()
    tiny.policy.compute_logprobs(batch).logprobs_N.sum().backward()
    return gradients_of(tiny.policy)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_dummies_run_the_tower_and_change_no_gradient(make_tiny, family, shared_prefix):
    tiny = make_tiny(family)
    prompt = tiny.processor.build(tiny.samples[2])
    (rollouts,) = tiny.sampler().generate([prompt], 2, tiny.params, step=0)
    text = [Experience(rollout=rollout, advantage=1.0) for rollout in rollouts]
    batch = collate([text], tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
    before, after = (gradient(tiny, batch, dummies=dummies) for dummies in (False, True))
    assert not any("visual" in name for name in before)
    # A product of more rows is rounded otherwise: by 2.2e-6 of the largest, measured in the decay rates of a recurrent
    # layer. A dummy that was seen would change a gradient by a share of itself.
    for name, own in before.items():
        torch.testing.assert_close(after[name], own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))
    assert {name for name, _ in tiny.policy.model.named_parameters() if "visual" in name} <= after.keys()
    assert not any(after[name].any() for name in after.keys() - before.keys())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_a_dummy_batch_has_a_gradient_of_0_for_every_weight(make_tiny, family, shared_prefix):
    tiny = make_tiny(family)
    batch = dummy_batch(pad_id=tiny.eos_id, patch_dim=tiny.policy.patch_dim, shared_prefix=shared_prefix)
    found = gradient(tiny, batch, dummies=True)
    assert found.keys() == {name for name, _ in tiny.policy.model.named_parameters()}
    assert not any(own.any() for own in found.values())
