"""Blind probes: extra rollouts without the media; scored, and never trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scoring import make_scorer, term
from videos import SMALL

from mmrl.algo.step_metrics import compute_blind_gaps
from mmrl.config.schema import BlindProbeConfig, GenerateConfig, MediaLimitsConfig, RethinkConfig, RethinkTriggerConfig
from mmrl.media.cache import MediaCache
from mmrl.media.video import FrameSampling
from mmrl.rollout.pipeline import build_pipeline
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.steps.blind_probe import BlindProbe
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.scoring.registry import load_tool
from mmrl.types import (
    Author,
    CoordinateSystem,
    Corruption,
    Group,
    ImageRef,
    MediaPolicy,
    PromptTooLongError,
    RewardValue,
    Score,
    UserError,
    VideoRef,
)
from mmrl_rewards.contract import reward


@reward(name="length", low=0.0, high=100.0)
def length(response, sample) -> float:
    """How many characters."""
    return float(len(response.text))


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


def counted(tiny):
    """The samples whose targets are not coordinates: one picture, two, none, a video, a picture and a video."""
    return [tiny.processor.build(sample) for sample in tiny.samples[:5]]


def pipeline(tiny, *steps, group_size=2, swap_samples=None):
    context = RolloutContext(
        sampler=tiny.sampler(),
        scorer=make_scorer(term(length)),
        processor=tiny.processor,
        sampling_params=tiny.params,
        group_size=group_size,
        groups_per_step=1,
        seed=0,
        tool_runner=ToolRunner(partial(load_tool, Path.cwd())),
        swap_samples=tiny.samples if swap_samples is None else swap_samples,
    )
    return build_pipeline((GenerateConfig(kind="generate"), *steps), context)


def hide(what, **options):
    return BlindProbeConfig(kind="probe", corruption=what, **options)


@pytest.mark.parametrize("what", ["left_out", "grey", "noise", "shuffled"])
def test_a_probe_hides_the_media_and_nothing_else(tiny, what):
    prompts = counted(tiny)
    answers = pipeline(tiny, hide(what, rollouts_per_prompt=3)).run(prompts, step=0)
    plain = pipeline(tiny).run(prompts, step=0)
    assert answers.groups == plain.groups
    for prompt, probes in zip(prompts, answers.probes, strict=True):
        before, kinds = prompt.sample, {type(ref) for ref in prompt.sample.media}
        if not kinds or (what == "shuffled" and VideoRef not in kinds):
            assert probes == {}
            continue
        (rollouts,) = probes.values()
        assert [rollout.index for rollout in rollouts] == [0, 1, 2]
        after = rollouts[0].prompt
        assert after.sample.target == before.target
        assert [p for p in after.sample.parts if isinstance(p, str)] == [p for p in before.parts if isinstance(p, str)]
        assert after.digest != prompt.digest
        if what == "left_out":
            assert after.sample.media == () and not after.grids
        else:
            assert after.token_ids == prompt.token_ids and after.grids == prompt.grids
            seen, hidden = (tiny.processor.prompt_tensors(p) for p in (prompt, after))
            assert not torch.equal(
                torch.cat([seen.image_patches_MD, seen.video_patches_MD]),
                torch.cat([hidden.image_patches_MD, hidden.video_patches_MD]),
            )


def test_a_cropped_picture_is_a_part_of_it_in_one_place(tiny):
    prompts = counted(tiny)
    step = hide("cropped")
    answers, again = (pipeline(tiny, step).run(prompts, step=turn) for turn in (0, 1))
    places = set()
    for prompt, probes, later in zip(prompts, answers.probes, again.probes, strict=True):
        if not prompt.sample.images:
            assert probes == {}  # text alone, and a video alone
            continue
        hidden = probes["cropped"][0].prompt.sample
        assert hidden == later["cropped"][0].prompt.sample
        for before, after in zip(prompt.sample.media, hidden.media, strict=True):
            if isinstance(before, VideoRef):
                assert after == before
                continue
            assert replace(after, crop=None) == before
            left, top, right, bottom = after.crop
            assert (right - left, bottom - top) == (24, 24)
            assert left >= 0 and right <= 48 and top >= 0 and bottom <= 48
            places.add((left, top))
    assert len(places) > 2


def test_a_part_of_a_part_lies_within_it(tiny):
    sample = tiny.samples[0]
    part = replace(sample, id="part", parts=(replace(sample.images[0], crop=(20, 8, 44, 40)), "How many?"))
    answers = pipeline(tiny, hide("cropped")).run([tiny.processor.build(part)], step=0)
    left, top, right, bottom = answers.probes[0]["cropped"][0].prompt.sample.images[0].crop
    assert (right - left, bottom - top) == (12, 16)
    assert left >= 20 and right <= 44 and top >= 8 and bottom <= 40


def test_swapped_media_are_those_of_another_sample(tiny):
    prompts = [tiny.processor.build(sample) for sample in tiny.samples]
    pictures = {sample.media for sample in tiny.samples if [*map(type, sample.media)] == [ImageRef]}
    earlier, shown = (hidden_in(tiny, prompts, step) for step in (0, 1))
    for prompt, media in zip(prompts, shown, strict=True):
        if prompt.sample.media in pictures:
            assert media in pictures - {prompt.sample.media}
        else:
            assert media is None  # text; and no two of the swap_samples have as many media of the same kinds
    assert len({*shown}) > len(pictures) / 3
    assert shown != earlier
    assert [hidden_in(tiny, [prompt], 1) for prompt in prompts] == [[media] for media in shown]  # whoever else is asked


def hidden_in(tiny, prompts, step):
    """The media that stand for those of prompts."""
    answers = pipeline(tiny, hide("swapped")).run(prompts, step=step)
    return [probes["swapped"][0].prompt.sample.media if probes else None for probes in answers.probes]


def test_media_that_make_a_prompt_too_long_are_not_swapped_in(tiny):
    sample, large, small = tiny.samples[0], *tiny.samples[5:7]

    class Narrow:
        def build(self, sample):
            if sample.media == large.media:
                raise PromptTooLongError("too long")
            return tiny.processor.build(sample)

    answers = pipeline(tiny).run([tiny.processor.build(sample)], step=0)
    step = BlindProbe(options=hide("swapped"), processor=Narrow(), sampler=tiny.sampler(), sampling_params=tiny.params)
    assert replace(step, swap_samples=(large, sample))(answers, step=0).probes == ({},)
    (probes,) = replace(step, swap_samples=(large, sample, small))(answers, step=0).probes
    assert probes["swapped"][0].prompt.sample.media == small.media


def test_probes_come_when_they_are_due_and_several_stand_side_by_side(tiny):
    prompts = counted(tiny)[:2]
    both = pipeline(tiny, hide("grey", every=3), hide("noise", name="snow", every=2))
    names = [[set(probes) for probes in both.run(prompts, step=step).probes] for step in range(4)]
    assert names == [[{"grey", "snow"}] * 2, [], [{"snow"}] * 2, [{"grey"}] * 2]


@pytest.mark.parametrize("first", [0, 1], ids=["probe first", "probe last"])
def test_probes_go_through_all_other_steps_without_being_counted(tiny, first):
    """Or what a continuation adds would pass for what looking adds."""
    look = RethinkConfig(
        kind="rethink", correct=("length",), max_new_tokens=3, triggers=(RethinkTriggerConfig(text=" Wait."),)
    )
    ending = replace(tiny, params=replace(tiny.params, stop=tuple("aeiou ")))  # most responses end themselves
    steps = [look, hide("grey", rollouts_per_prompt=4)]
    answers = pipeline(ending, *(reversed(steps) if first == 0 else steps)).run(counted(ending)[:2], step=0)
    forced = [
        any(segment.author is Author.FORCED for segment in rollout.segments)
        for probes in answers.probes
        for rollout in probes["grey"]
    ]
    assert len(forced) == 8 and any(forced)
    trained = [rollout for group in answers.groups for rollout in group]
    assert answers.metrics["rethink/attempted"] == sum(rollout.parent_index is not None for rollout in trained) > 0


def test_a_probe_has_random_numbers_of_its_own(tiny):
    """Else its rollouts would be like those it is compared with for no reason."""
    prompt = counted(tiny)[2]
    named = replace(prompt.sample, id=f"{prompt.sample.id}~grey")
    ours, theirs = (
        tiny.sampler().generate([tiny.processor.build(sample)], 8, tiny.params, step=0)[0]
        for sample in (prompt.sample, named)
    )
    assert [r.segments[0].token_ids for r in ours] != [r.segments[0].token_ids for r in theirs]


def test_hiding_the_image_of_a_coordinate_question_is_refused(tiny):
    boxed = next(sample for sample in tiny.samples if sample.target.coordinate_system is CoordinateSystem.PX_ORIGINAL)
    prompts = [tiny.processor.build(boxed)]
    for what in ("left_out", "cropped"):
        with pytest.raises(UserError, match="asks for coordinates, which need a picture"):
            pipeline(tiny, hide(what)).run(prompts, step=0)
    judge = make_scorer(term(length))
    answers = pipeline(tiny, hide("grey")).run(prompts, step=0)
    (group,) = judge.score_groups(answers.groups, step=0, probes=answers.probes)
    assert len(group.probes["grey"]) == 1


def score(**terms):
    return Score(terms={name: RewardValue(value, "") for name, value in terms.items()}, total=-100.0)


def test_the_gap_is_by_term_and_over_groups_that_have_the_probe(tiny):
    prompt = counted(tiny)[0]
    groups = [
        Group(prompt=prompt, rollouts=(), scores=(score(a=1.0), score(a=0.0)), probes={"grey": (score(a=0.25),)}),
        Group(prompt=prompt, rollouts=(), scores=(score(a=1.0, b=1.0),), probes={"grey": (score(a=0.0, b=1.0),)}),
        Group(prompt=prompt, rollouts=(), scores=(score(a=7.0),)),
    ]
    gaps = compute_blind_gaps(groups)
    assert gaps == {"probe/blind_gap/grey/a": pytest.approx(2 / 3 - 0.125), "probe/blind_gap/grey/b": 0.0}


@pytest.fixture
def store():
    return MediaCache(MediaPolicy(roots=("/",)), MediaLimitsConfig(), max_bytes=10**8)


def test_corruptions_keep_the_size_and_are_deterministic(tiny, store):
    ref: ImageRef = tiny.samples[0].images[0]
    seen = np.asarray(store.get_image(ref))
    grey, noise = (
        np.asarray(store.get_image(replace(ref, corruption=corruption)))
        for corruption in (Corruption.GREY, Corruption.NOISE)
    )
    assert grey.shape == noise.shape == seen.shape
    assert set(grey.flat) == {128}
    assert noise.std() > 50
    afresh = MediaCache(MediaPolicy(roots=("/",)), MediaLimitsConfig(), max_bytes=0)
    assert (np.asarray(afresh.get_image(replace(ref, corruption=Corruption.NOISE))) == noise).all()
    other = tiny.samples[5].images[0]
    assert not np.array_equal(np.asarray(store.get_image(replace(other, corruption=Corruption.NOISE))), noise)


def test_a_shuffled_video_has_its_frames_in_another_order(clip, store):
    rule = FrameSampling(video=SMALL, patch_size=8)
    seen, hidden = (
        store.read_video(replace(clip, corruption=corruption), rule) for corruption in (None, Corruption.SHUFFLED)
    )
    assert hidden.plan == seen.plan
    place = [next(i for i, own in enumerate(seen.frames_TCHW) if torch.equal(own, f)) for f in hidden.frames_TCHW]
    assert sorted(place) == list(range(len(place)))
    assert place != sorted(place)
    grey = store.read_video(replace(clip, corruption=Corruption.GREY), rule)
    assert set(grey.frames_TCHW.flatten().tolist()) == {128.0}
