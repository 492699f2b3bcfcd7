"""Blind probes: extra rollouts without the media; scored, and never trained."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from factories import make_group, make_score
from processors import make_media_cache
from pydantic import ValidationError
from samplers import make_pipeline
from scoring import make_scorer, term
from tool_calls import zoom_response
from videos import SMALL

from mmrl import types
from mmrl.algo.group_metrics import compute_blind_gaps
from mmrl.config.schema import BlindProbeConfig, RethinkConfig, RethinkTriggerConfig
from mmrl.media.video import FrameSampling
from mmrl_rewards.contract import reward


@reward(name="length", low=0.0, high=100.0)
def length(response, sample) -> float:
    """How many characters."""
    return float(len(response.text))


SCORER = make_scorer(term(length))


@pytest.fixture(scope="module")
def prompts(tiny):
    """Prompts whose answers are not coordinates: one image, two, none, a video, an image and a video."""
    return [tiny.processor.build(sample) for sample in tiny.samples[:5]]


def probe(corruption, **options):
    return BlindProbeConfig(kind="probe", corruption=corruption, **options)


def run(tiny, prompts, *steps, step=0):
    return make_pipeline(tiny, *steps, scorer=SCORER, swap_samples=tiny.samples).run(prompts, step=step)


def text_of(sample):
    return [part for part in sample.parts if isinstance(part, str)]


@pytest.mark.parametrize("corruption", ["left_out", "grey", "noise", "shuffled"])
def test_probe_hides_the_media_and_nothing_else(tiny, prompts, corruption):
    batch = run(tiny, prompts, probe(corruption, rollouts_per_prompt=3))
    assert batch.groups == run(tiny, prompts).groups
    for prompt, probes in zip(prompts, batch.probes, strict=True):
        media_types = set(map(type, prompt.sample.media))
        if not media_types or (corruption == "shuffled" and types.VideoRef not in media_types):
            assert probes == {}
            continue
        rollouts = probes[corruption]
        assert [rollout.index for rollout in rollouts] == [0, 1, 2]
        hidden = rollouts[0].prompt
        assert hidden.sample.target == prompt.sample.target
        assert text_of(hidden.sample) == text_of(prompt.sample)
        assert hidden.digest != prompt.digest
        if corruption == "left_out":
            assert hidden.sample.media == () and not hidden.grids
            continue
        assert hidden.token_ids == prompt.token_ids and hidden.grids == prompt.grids
        before, after = (tiny.processor.prompt_tensors(each) for each in (prompt, hidden))
        assert not (
            torch.equal(before.image_patches_MD, after.image_patches_MD)
            and torch.equal(before.video_patches_MD, after.video_patches_MD)
        )


def test_cropped_image_is_the_same_part_at_every_step(tiny, prompts):
    batches = [run(tiny, prompts, probe("cropped"), step=step) for step in (0, 1)]
    corners = set()
    for prompt, probes, later in zip(prompts, batches[0].probes, batches[1].probes, strict=True):
        if not prompt.sample.images:
            assert probes == {}  # text alone, and a video alone
            continue
        hidden = probes["cropped"][0].prompt.sample
        assert hidden == later["cropped"][0].prompt.sample
        for before, after in zip(prompt.sample.media, hidden.media, strict=True):
            if isinstance(before, types.VideoRef):
                assert after == before
                continue
            assert replace(after, crop=None) == before
            left, top, right, bottom = after.crop
            assert (right - left, bottom - top) == (24, 24)
            assert left >= 0 and right <= 48 and top >= 0 and bottom <= 48
            corners.add((left, top))
    assert len(corners) > 2


def test_crop_of_a_crop_lies_within_it(tiny):
    sample = tiny.samples[0]
    part = replace(sample, id="part", parts=(replace(sample.images[0], crop=(20, 8, 44, 40)), "How many?"))
    batch = run(tiny, [tiny.processor.build(part)], probe("cropped"))
    left, top, right, bottom = batch.probes[0]["cropped"][0].prompt.sample.images[0].crop
    assert (right - left, bottom - top) == (12, 16)
    assert left >= 20 and right <= 44 and top >= 8 and bottom <= 40


def swapped_media(tiny, prompts, step):
    """The media shown in place of those of each prompt, or None."""
    batch = run(tiny, prompts, probe("swapped"), step=step)
    return [probes["swapped"][0].prompt.sample.media if probes else None for probes in batch.probes]


def test_swapped_media_are_those_of_another_sample(tiny):
    prompts = [tiny.processor.build(sample) for sample in tiny.samples]
    single_images = {sample.media for sample in tiny.samples if [*map(type, sample.media)] == [types.ImageRef]}
    shown = swapped_media(tiny, prompts, 1)
    for prompt, media in zip(prompts, shown, strict=True):
        if prompt.sample.media in single_images:
            assert media in single_images - {prompt.sample.media}
        else:
            assert media is None  # text alone; and no two samples have the same number of media of each type
    assert len(set(shown)) > len(single_images) / 3
    assert shown != swapped_media(tiny, prompts, 0)
    # The other prompts of the round do not matter.
    assert [swapped_media(tiny, [prompt], 1) for prompt in prompts] == [[media] for media in shown]


def test_media_that_make_a_prompt_too_long_are_not_swapped_in(tiny):
    sample, large, small = tiny.samples[0], *tiny.samples[5:7]

    class LimitedProcessor:
        def build(self, sample):
            if sample.media == large.media:
                raise types.PromptTooLongError("too long")
            return tiny.processor.build(sample)

    batch = run(tiny, [tiny.processor.build(sample)])

    def swapped(*samples):
        options = {"processor": LimitedProcessor(), "swap_samples": samples}
        (step,) = make_pipeline(tiny, probe("swapped"), **options).steps
        return step(batch, step=0).probes[0]

    assert swapped(large, sample) == {}
    assert swapped(large, sample, small)["swapped"][0].prompt.sample.media == small.media


def test_several_probes_are_made_when_each_is_due(tiny, prompts):
    steps = (probe("grey", every=3), probe("noise", name="snow", every=2))
    names = [[set(probes) for probes in run(tiny, prompts[:2], *steps, step=step).probes] for step in range(4)]
    assert names == [[{"grey", "snow"}] * 2, [], [{"snow"}] * 2, [{"grey"}] * 2]


@pytest.mark.parametrize("probe_first", [True, False])
def test_probes_go_through_all_other_steps_uncounted(tiny, prompts, probe_first):
    """Otherwise what a continuation adds would look like what seeing the image adds."""
    triggers = (RethinkTriggerConfig(text=" Wait."),)
    steps = [
        RethinkConfig(kind="rethink", correct=("length",), max_new_tokens=3, triggers=triggers),
        probe("grey", rollouts_per_prompt=4),
    ]
    # With these stop strings, most responses end themselves.
    stopping = replace(tiny, params=replace(tiny.params, stop=tuple("aeiou ")))
    batch = run(stopping, prompts[:2], *(reversed(steps) if probe_first else steps))
    probes = [rollout for probes in batch.probes for rollout in probes["grey"]]
    assert len(probes) == 8
    assert any(segment.author is types.Author.FORCED for rollout in probes for segment in rollout.segments)
    trained = [rollout for group in batch.groups for rollout in group]
    assert batch.metrics["rethink/attempted"] == sum(rollout.parent_index is not None for rollout in trained) > 0


def test_probe_has_random_numbers_of_its_own(tiny, prompts):
    prompt = prompts[0]
    same_input = tiny.sampler().generate([prompt], 8, tiny.params, step=0)[0]
    renamed = tiny.processor.build(replace(prompt.sample, id=f"{prompt.sample.id}~grey"))
    own = tiny.sampler().generate([renamed], 8, tiny.params, step=0)[0]
    assert [r.segments[0].token_ids for r in same_input] != [r.segments[0].token_ids for r in own]
    rollouts = run(tiny, [prompt], probe("grey")).probes[0]["grey"]
    assert rollouts[0].prompt.sample.id == renamed.sample.id


def test_hiding_the_image_of_a_coordinate_question_is_refused(tiny):
    sample = next(
        sample for sample in tiny.samples if sample.target.coordinate_system is types.CoordinateSystem.PX_ORIGINAL
    )
    prompts = [tiny.processor.build(sample)]
    for corruption in ("left_out", "cropped"):
        with pytest.raises(types.UserError, match="asks for coordinates"):
            run(tiny, prompts, probe(corruption))
    batch = run(tiny, prompts, probe("grey"))
    (group,) = SCORER.score_groups(batch.groups, step=0, probes=batch.probes)
    assert len(group.probes["grey"]) == 1


def looked(tiny, *rollouts, **context):
    """The prompts of the answers that are given from what the rollouts of one group looked at."""
    (step,) = make_pipeline(tiny, probe("looked"), scorer=SCORER, **context).steps
    (probes,) = step(types.RolloutBatch(groups=(rollouts,)), step=0).probes
    assert all(rollout.text for rollout in probes["looked"])
    return [rollout.prompt.sample for rollout in probes["looked"]]


def test_looked_shows_each_rollout_its_own_parts_in_the_order_of_their_indices(tiny):
    zoomed = zoom_response(tiny)
    (part,) = zoomed.observations
    (shown,) = (segment for segment in zoomed.segments if segment.observation)
    twice = replace(zoomed, index=2, segments=(*zoomed.segments, shown))
    blind = replace(zoomed, index=1, segments=zoomed.segments[:1])
    samples = looked(tiny, twice, zoomed, blind)
    assert [sample.media for sample in samples] == [(part.ref,), (), (part.ref, part.ref)]
    for sample in samples:
        assert text_of(sample) == text_of(zoomed.prompt.sample)
        assert sample.target == zoomed.prompt.sample.target
    assert len({sample.id for sample in samples}) == 3
    assert looked(tiny, blind, zoomed, twice) == samples


def test_of_more_parts_than_a_prompt_takes_the_last_are_kept(tiny):
    zoomed = zoom_response(tiny)
    (shown,) = (segment for segment in zoomed.segments if segment.observation)
    observation = shown.observation
    other = replace(shown, observation=replace(observation, ref=replace(observation.ref, crop=(0, 0, 9, 9))))
    many = replace(zoomed, segments=(*zoomed.segments, shown, other))

    class LimitedProcessor:
        def build(self, sample):
            if len(sample.media) > 2:
                raise types.PromptTooLongError("too long")
            return tiny.processor.build(sample)

    (sample,) = looked(tiny, many, processor=LimitedProcessor())
    assert sample.media == (observation.ref, other.observation.ref)


def test_looked_is_refused_where_it_means_nothing(tiny):
    sample = next(
        sample for sample in tiny.samples if sample.target.coordinate_system is types.CoordinateSystem.PX_ORIGINAL
    )
    with pytest.raises(types.UserError, match="asks for coordinates"):
        run(tiny, [tiny.processor.build(sample)], probe("looked"))
    for options in ({"rollouts_per_prompt": 2}, {"name": "parts"}):
        with pytest.raises(ValidationError, match="looked makes one rollout for each"):
            probe("looked", **options)


def test_gap_is_by_term_over_groups_that_have_the_probe(prompts):
    groups = [
        make_group(prompts[0], [], [make_score(a=1), make_score(a=0)], probes={"grey": (make_score(a=0.25),)}),
        make_group(prompts[0], [], [make_score(a=1, b=1)], probes={"grey": (make_score(a=0, b=1),)}),
        make_group(prompts[0], [], [make_score(a=7)]),
    ]
    gaps = compute_blind_gaps(groups)
    assert gaps == {"probe/blind_gap/grey/a": pytest.approx(2 / 3 - 0.125), "probe/blind_gap/grey/b": 0.0}


def pixels(ref, corruption=None, cache=None):
    return np.asarray((cache or make_media_cache(max_bytes=10**8)).get_image(replace(ref, corruption=corruption)))


def test_corrupted_image_keeps_its_size_and_is_deterministic(tiny):
    ref, other = tiny.samples[0].images[0], tiny.samples[5].images[0]
    grey, noise = pixels(ref, types.Corruption.GREY), pixels(ref, types.Corruption.NOISE)
    assert grey.shape == noise.shape == pixels(ref).shape
    assert set(grey.flat) == {128}
    assert noise.std() > 50
    assert np.array_equal(pixels(ref, types.Corruption.NOISE, make_media_cache()), noise)
    assert not np.array_equal(pixels(other, types.Corruption.NOISE), noise)


def test_shuffled_video_has_its_frames_in_another_order(clip):
    sampling, cache = FrameSampling(video=SMALL, patch_size=8), make_media_cache(max_bytes=10**8)
    plain, shuffled, grey = (
        cache.read_video(replace(clip, corruption=corruption), sampling)
        for corruption in (None, types.Corruption.SHUFFLED, types.Corruption.GREY)
    )
    assert shuffled.plan == plain.plan
    frames = [frame.numpy().tobytes() for frame in plain.frames_TCHW]
    order = [frames.index(frame.numpy().tobytes()) for frame in shuffled.frames_TCHW]
    assert sorted(order) == list(range(len(order))) != order
    assert set(grey.frames_TCHW.flatten().tolist()) == {128.0}
