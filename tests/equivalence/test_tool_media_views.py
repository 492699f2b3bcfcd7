"""Images and videos that tools show: sampling, both layouts and transformers' own forward agree."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from recorded import recorded
from rounding import GRADIENTS, LOGPROBS

from mmrl.learner.shared_prefix_check import ForwardDifference, compare_layouts
from mmrl.policy.families import FAMILIES, PlaceholderRun
from mmrl.policy.policy import PolicyModel
from mmrl.types import Author, CoordinateSystem, Experience, ImageRef, Segment, UserError

EXACT = ForwardDifference(logprobs=LOGPROBS, gradient=GRADIENTS)


def zoomed(tiny, number, crop):
    return replace(tiny.samples[number].images[0], crop=crop)


def refs(tiny, clip):
    """A part of an image, one frame of a video and a part of it, a part of a video with more frames."""
    frame = ImageRef(path=clip.path, sha256=clip.sha256, timestamp=1.0)
    return {
        "zoom": [zoomed(tiny, 0, (4, 8, 40, 32))],
        "frames": [frame, replace(frame, timestamp=1.5, crop=(0, 0, 32, 32))],
        "part": [replace(clip, start=0.5, end=1.5)],
        "all": [zoomed(tiny, 1, (0, 0, 24, 48)), replace(clip, start=1.0), zoomed(tiny, 0, (4, 8, 40, 32))],
        "none": [],
    }


def extended(tiny, sample, shown):
    """Rollouts of a sample, each shown one of these lists of media after three tokens, and then continued."""
    begun = [each.rollout for each in tiny.experiences([sample], len(shown), max_new_tokens=3)]
    ids = tuple(tiny.processor.tokenizer("and").input_ids)
    text = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT)
    rollouts = []
    for rollout, media in zip(begun, shown, strict=True):
        views = []
        for ref in media:
            views += [tiny.processor.build_tool_segment(ref), text]
        rollouts.append(replace(rollout, segments=(*rollout.segments, *views)))
    return tiny.sampler().extend(rollouts, replace(tiny.params, temperature=0.7), step=0)


def make_experiences(tiny, clip):
    """Groups whose siblings were shown different things, or nothing, after an image, a text and a video."""
    known = refs(tiny, clip)
    rollouts = [
        *extended(tiny, tiny.samples[0], [known["zoom"], known["none"], known["all"]]),
        *extended(tiny, tiny.samples[2], [known["part"], known["frames"]]),
        *extended(tiny, tiny.samples[3], [known["frames"], known["all"], known["part"]]),
    ]
    return [Experience(rollout=rollout, advantage=1.0) for rollout in rollouts]


def layouts(tiny, experiences):
    return tiny.collate(experiences), tiny.collate(experiences, shared_prefix=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_and_both_layouts_see_the_same(make_tiny, clip, family):
    """Prefill, cached tails and decoding give the log-probs of one forward; packed gives what plain does."""
    tiny = make_tiny(family)
    made = make_experiences(tiny, clip)
    assert [len(e.rollout.observations) for e in made] == [1, 0, 3, 1, 2, 2, 3, 1]
    packed, plain = layouts(tiny, made)
    for batch in (packed, plain):
        with torch.no_grad():
            scores = tiny.policy.compute_logprobs(batch)
        assert (scores.logprobs_N - recorded(made)).abs().max() < LOGPROBS
    found = compare_layouts(tiny.policy, packed, plain)
    assert found.within(EXACT), found
    assert found.logprobs + found.gradient > 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers_forward_of_the_whole_sequence(make_tiny, clip, family):
    """With patches of its own processor, of an image cut and resized by hand, at positions that it derives."""
    tiny = make_tiny(family)
    sample, box = tiny.samples[0], (4, 8, 40, 32)
    (rollout,) = extended(tiny, sample, [[zoomed(tiny, 0, box)]])
    whole = Image.open(sample.images[0].path).convert("RGB")
    tokens = [*rollout.prompt.token_ids, *(token for segment in rollout.segments for token in segment.token_ids)]
    part = whole.crop(box).resize((rollout.observations[0].grid[2] * 8, rollout.observations[0].grid[1] * 8))
    images = tiny.processor.hf_processor.image_processor([whole, part], do_resize=False, return_tensors="pt")
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = tiny.policy.model(
            input_ids=ids, mm_token_type_ids=(ids == tiny.processor.placeholders.image_id).long(), **images
        ).logits[0]
    logits[:, list(tiny.params.banned_token_ids)] = -torch.inf
    place, expected = len(rollout.prompt.token_ids), []
    for segment in rollout.segments:
        params = segment.sampling_params or rollout.sampling_params
        logps = (logits / params.temperature).log_softmax(-1)
        if segment.author is Author.POLICY:
            expected += [float(logps[place + i - 1, token]) for i, token in enumerate(segment.token_ids)]
        place += len(segment.token_ids)
    assert recorded([Experience(rollout=rollout, advantage=1.0)]).tolist() == pytest.approx(expected, abs=LOGPROBS)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_one_sequence(make_tiny, clip, family):
    tiny = make_tiny(family)
    (rollout,) = extended(tiny, tiny.samples[0], [refs(tiny, clip)["all"]])
    encoder, known = tiny.processor.encoder, tiny.processor.placeholders
    batch = tiny.collate([Experience(rollout=rollout, advantage=1.0)], shared_prefix=False)
    first, video, last = rollout.observations
    seconds = float(tiny.processor.tool_media_tensors(video).second_per_grid_V)
    runs = {
        known.image_id: [PlaceholderRun(grid) for grid in (*rollout.prompt.grids, first.grid, last.grid)],
        known.video_id: encoder.family.video_placeholder_runs(video.grid, seconds),
    }
    expected = encoder.family.position_ids(batch.input_ids_BL[0].tolist(), runs, merge_size=known.merge_size)
    assert torch.equal(batch.position_ids_3BL[:, 0], expected)


def test_a_frozen_tower_encodes_each_view_once(make_tiny, clip):
    tiny = make_tiny()
    made = make_experiences(tiny, clip)
    packed, plain = layouts(tiny, made)
    frozen = PolicyModel(tiny.policy.model, freeze=("vision", "projector"))
    calls = []
    with torch.no_grad():
        free = tiny.policy.compute_logprobs(packed).logprobs_N
        tiny.policy.model.model.visual.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
        kept = [frozen.compute_logprobs(batch).logprobs_N for batch in (packed, plain)]
    views = {view.digest for e in made for view in e.rollout.observations}
    assert len(calls) == len(views) + 2  # and the media of the prompts
    assert len(views) == 6
    assert all((each - free).abs().max() < LOGPROBS for each in kept)


BROKEN = {
    "grid": lambda view: replace(view, observation=replace(view.observation, grid=(1, 3, 6))),
    "missing placeholder": lambda view: replace(view, token_ids=view.token_ids[:-2] + view.token_ids[-1:]),
    "more tokens": lambda view: replace(view, token_ids=(*view.token_ids, 5)),
    "no observation": lambda view: replace(view, observation=None),
    "trained author": lambda view: replace(view, author=Author.POLICY),
}


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ("grid", UserError, "what rollout 0 was shown: the image grids call for 18 patches, there are"),
        ("missing placeholder", UserError, "what rollout 0 was shown: the image grids call for .* placeholders stand"),
        ("more tokens", UserError, r"what rollout 0 was shown: \d+ tokens, positions"),
        ("no observation", ValueError, "rollout 0 contains the placeholder"),
        ("trained author", ValueError, "which its sampling params ban"),
    ],
)
def test_a_view_that_disagrees_with_its_tokens_is_refused(tiny, clip, damage, error, words):
    (rollout,) = extended(tiny, tiny.samples[0], [refs(tiny, clip)["zoom"]])
    first, view, *rest = rollout.segments
    rollout = replace(rollout, segments=(first, BROKEN[damage](view), *rest))
    for shared_prefix in (True, False):
        with pytest.raises(error, match=words):
            tiny.collate([Experience(rollout=rollout, advantage=1.0)], shared_prefix=shared_prefix)
    with pytest.raises(error, match=words):
        tiny.sampler().extend([rollout], tiny.params, step=0)


def test_a_view_whose_file_changed_is_refused(tiny, tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (48, 48), "red").save(path)
    ref = replace(tiny.samples[0].images[0], path=str(path))
    with pytest.raises(UserError, match="changed since it was referenced"):
        tiny.fresh().build_tool_segment(ref)
    view = tiny.processor.build_tool_segment(zoomed(tiny, 0, (0, 0, 24, 24))).observation
    assert torch.equal(
        tiny.fresh().tool_media_tensors(view).image_patches_MD, tiny.processor.tool_media_tensors(view).image_patches_MD
    )
    with pytest.raises(UserError, match="changed since a tool showed it"):
        tiny.fresh().tool_media_tensors(replace(view, digest="0" * 32))


@pytest.mark.parametrize(("room", "opened"), [(10**8, 3), (1, 5)])
def test_a_view_that_left_the_cache_is_encoded_again(make_tiny, monkeypatch, room, opened):
    """Room for all three, or for the last alone: then the first two are opened again when they are asked for."""
    monkeypatch.setattr("mmrl.policy.processor._TOOL_MEDIA_CACHE_BYTES", room)
    processor = make_tiny().processor
    honest, calls = processor.encoder.encode_tool_media, []
    monkeypatch.setattr(processor.encoder, "encode_tool_media", lambda ref: calls.append(ref) or honest(ref))
    refs_shown = [replace(make_tiny().samples[0].images[0], crop=(0, 0, side, 24)) for side in (16, 24, 32)]
    views = [processor.build_tool_segment(ref).observation for ref in refs_shown]
    for ref, view in zip(refs_shown[:2], views, strict=False):
        _, tensors = honest(ref)
        assert torch.equal(processor.tool_media_tensors(view).image_patches_MD, tensors.image_patches_MD)
    assert len(calls) == opened


@pytest.mark.parametrize(
    ("system", "corner"),
    [
        (CoordinateSystem.PX_RESIZED, None),
        (CoordinateSystem.NORM_1, (1.0, 1.0)),
        (CoordinateSystem.NORM_1000, (1000.0, 1000.0)),
    ],
)
def test_coordinates_of_a_view_become_those_of_the_whole_image(tiny, system, corner):
    resize_map = tiny.processor.build_tool_segment(zoomed(tiny, 0, (4, 8, 40, 32))).observation.resize_map
    assert resize_map.original == (36, 24)
    whole_view = (0, 0, *(corner or resize_map.resized))
    assert resize_map.convert(whole_view, system, CoordinateSystem.PX_ORIGINAL) == pytest.approx((4, 8, 40, 32))
    assert resize_map.convert((4, 8, 40, 32), CoordinateSystem.PX_ORIGINAL, system) == pytest.approx(whole_view)
