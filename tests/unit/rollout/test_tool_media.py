"""Tools that show media: parts are cut from the file, labelled in the model's coordinates, and limited in number."""

from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processors import make_media_cache
from pydantic import ValidationError
from samplers import reworded
from tool_calls import MEDIA_TOOLS, call, responses, tool_step, tool_texts

from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import BlindProbeConfig, MediaLimitsConfig, ToolConfig, ToolsConfig
from mmrl.config.schema.rollout_steps import GENERATE_ONLY, check_rollout_steps
from mmrl.media.image import crop_image
from mmrl.policy.encoder import unpatchify
from mmrl.rollout.tools.builtin import crop, frames, passage, zoom
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.rollout.tools.media_results import find_media
from mmrl.types import Author, CoordinateSystem, ImageRef, Rollout, RolloutBatch, UserError, VideoRef

VIDEO_SAMPLE = 3


@pytest.fixture(scope="module")
def make_step(tiny):
    with closing(ToolRunner(Path())) as opened:
        yield lambda **options: tool_step(tiny, opened, MEDIA_TOOLS, **{"max_media": 4, **options})


def test_zoom_shows_every_pixel_that_the_box_touches_with_a_label(tiny, make_step):
    batch = make_step()(responses(tiny, call("zoom", box=[4.2, 8.0, 40.0, 60.0])), step=0)
    ((rollout,),) = batch.groups
    (resize_map,) = rollout.prompt.resize_maps
    assert resize_map.original == resize_map.resized == (48, 48)
    assert rollout.prompt.coordinate_system is CoordinateSystem.PX_RESIZED
    (shown,) = rollout.observations
    assert shown.ref == replace(rollout.prompt.sample.images[0], crop=(4, 8, 40, 48))
    assert tool_texts(tiny, rollout) == [
        "\n<tool_response>\nMedium 2: the part [4, 8, 40, 48] of medium 1.\n",
        "\n</tool_response>\n",
    ]
    assert [s.author for s in rollout.segments] == [Author.POLICY, *[Author.ENVIRONMENT] * 3, Author.POLICY]
    assert (batch.metrics["tools/media_shown"], batch.metrics["tools/results"]) == (1.0, 1.0)
    patches, processor = tiny.processor.tool_media_tensors(shown).image_patches_MD, tiny.processor.hf_processor
    image_format = tiny.processor.encoder.image_format
    pixels = unpatchify(patches, shown.grid, image_format, processor.image_processor)[0]
    part = Image.open(shown.ref.path).convert("RGB").crop(shown.ref.crop).resize(shown.resize_map.resized)
    assert (pixels.int() - torch.from_numpy(np.array(part))).abs().max() <= 1
    assert loads(dumps(rollout), Rollout) == rollout


def test_part_of_a_part_is_cut_from_the_file(tiny, make_step):
    """The second box is measured on the part as it was shown: resized, from its own corner."""
    ((once,),) = make_step()(responses(tiny, call("zoom", box=[8, 8, 32, 32])), step=0).groups
    (first,) = once.observations
    assert (first.resize_map.original, first.resize_map.resized) == ((24, 24), (48, 48))
    again = reworded(tiny, once, call("zoom", medium=2, box=[0, 24, 24, 48]))
    ((twice,),) = make_step()(RolloutBatch(groups=((again,),)), step=0).groups
    assert twice.observations[1].ref.crop == (8, 20, 20, 32)
    assert "Medium 3: the part [0, 24, 24, 48] of medium 2." in "".join(tool_texts(tiny, twice))


def test_frames_and_passage_of_a_video_are_shown(tiny, make_step, clip):
    calls = (call("frames", seconds=[0.5, 1.5]), call("passage", start=0.5, end=1.5))
    batch = make_step()(responses(tiny, *calls, sample=VIDEO_SAMPLE), step=0)
    ((still, part),) = batch.groups
    stills = [ImageRef(path=clip.path, sha256=clip.sha256, timestamp=second) for second in (0.5, 1.5)]
    assert [shown.ref for shown in still.observations] == stills
    assert part.observations[0].ref == VideoRef(path=clip.path, sha256=clip.sha256, start=0.5, end=1.5)
    assert "Medium 3: medium 1 at 1.5 seconds." in "".join(tool_texts(tiny, still))
    assert "Medium 2: from 0.5 to 1.5 seconds of medium 1." in tool_texts(tiny, part)[0]
    assert batch.metrics["tools/media_shown"] == 3.0


REFUSED = {
    0: [
        (call("zoom", box=[60, 60, 70, 70]), "the box [60, 60, 70, 70] holds nothing of medium 1"),
        (call("zoom", box=[8, 8, 8, 20]), "holds nothing of medium 1"),
        (call("zoom", box=[0, 0, 9, 9], medium=2), "there is no medium 2; there are 1, counted from 1"),
        (call("zoom", box=[0, 0, 9, 9], medium=0), "there is no medium 0"),
        (call("zoom", box=[0, 0, 9]), '"box" is [x1, y1, x2, y2]'),
        (call("zoom", box=[0, 0, 9, "9"]), '"box" must be given, in numbers'),
        (call("zoom", box=[0, 0, 9, 9], size=3), "there is no argument 'size'; there are box, medium"),
        (call("frames", seconds=[1.0]), "medium 1 is a picture, not a video"),
    ],
    VIDEO_SAMPLE: [
        (call("zoom", box=[0, 0, 9, 9]), "medium 1 is a video; look at one of its frames first"),
        (call("frames", seconds=[7.0]), "there is nothing at 7 s; its last frame is at 1.917 s"),
        (call("frames", seconds=[0, 0, 0, 0, 0]), '"seconds" are 1 to 4 numbers'),
        (call("frames", seconds=[0, 1, 1.5]), "2 more pictures or videos may be shown, not 3"),
        (call("passage", start=1.5, end=1.0), "1.5 to 1 s is not part of its 2.000 s"),
        (call("passage", start=1.5), '"end" must be given, in numbers'),
    ],
}


@pytest.mark.parametrize("sample", REFUSED)
def test_model_is_told_why_media_cannot_be_shown(tiny, make_step, sample):
    calls, reasons = zip(*REFUSED[sample], strict=True)
    batch = make_step(max_media=2)(responses(tiny, *calls, sample=sample), step=0)
    for rollout, reason in zip(batch.groups[0], reasons, strict=True):
        (text,) = tool_texts(tiny, rollout)
        assert text.startswith("\n<tool_response>\nThe tool refuses: ") and reason in text
        assert not rollout.observations
        assert ".mp4" not in text  # no path is told to the model
    assert batch.metrics["tools/refused"] == len(calls)


def test_nothing_is_shown_from_outside_the_part_that_was_shown(tiny, make_step, clip):
    """The question shows 0.5 to 1.5 s of the file; a passage of that bounds the calls that name it."""
    part = replace(tiny.samples[VIDEO_SAMPLE], parts=(replace(clip, start=0.5, end=1.5), "?"))
    first = tiny.sampler().generate([tiny.processor.build(part)], 1, tiny.params, step=0)[0][0]

    def look(rollout, text):
        batch = RolloutBatch(groups=((reworded(tiny, rollout, text),),))
        return make_step(max_total_tokens=10_000)(batch, step=0).groups[0][0]

    for outside in (call("frames", seconds=[1.0, 1.6]), call("passage", start=0.4, end=1.0)):
        (text,) = tool_texts(tiny, look(first, outside))
        assert "s is outside medium 1, which lasts from 0.5 s to 1.5 s" in text
    passage_of_it = look(first, call("passage", start=0.5, end=1.0))
    assert len(passage_of_it.observations) == 1
    beyond = look(passage_of_it, call("frames", seconds=[1.25], medium=2))
    assert "1.25 s is outside medium 2, which lasts from 0.5 s to 1 s" in "".join(tool_texts(tiny, beyond))
    assert len(look(passage_of_it, call("frames", seconds=[1.25])).observations) == 2


def test_media_with_too_many_tokens_are_not_shown(tiny, make_step):
    batch = responses(tiny, call("zoom", box=[0, 0, 9, 9]))
    ((rollout,),) = make_step(max_total_tokens=batch.groups[0][0].num_tokens + 5)(batch, step=0).groups
    assert "tokens to show, and 5 are left" in tool_texts(tiny, rollout)[0]
    assert not rollout.observations


def test_arguments_are_read_strictly():
    assert zoom({"box": [1, 2, 3, 4.5]}, None).box == (1.0, 2.0, 3.0, 4.5)
    assert frames({"seconds": [1], "medium": 2}, None).medium_number == 2
    assert passage({"start": 0, "end": 1.5}, None).end == 1.5
    for box in ([True, 0, 1, 1], [float("nan"), 0, 1, 1], [0, 0, 1, 10**400], "0 0 1 1", None):
        with pytest.raises(ValueError, match=r'"box" must be given, in numbers|too large'):
            zoom({"box": box}, None)
    with pytest.raises(ValueError, match='"medium" is the number'):
        zoom({"box": [0, 0, 1, 1], "medium": True}, None)


def test_crop_reads_the_arguments_of_published_calls(tiny):
    """DeepEyes gives pixels, Pixel Reasoner fractions with a border of 0.1 on each side."""
    (rollout,) = responses(tiny, "a").groups[0]
    (resize_map,) = rollout.prompt.resize_maps
    assert resize_map.original == resize_map.resized == (48, 48)
    seen = crop({"bbox_2d": [4, 8, 40, 44], "label": "cup"}, None)
    assert seen == zoom({"box": [4, 8, 40, 44]}, None)
    near = crop({"bbox_2d": [0.25, 0.5, 0.5, 0.95], "target_image": 1}, None, normalized=True, padding=0.1)
    ((label, ref),) = find_media(near, rollout)
    # 0.15, 0.4, 0.6 and 1.05 of 48 pixels, rounded outwards and cut at the edge.
    assert ref.crop == (7, 19, 29, 48)
    assert label == "the part [7, 19, 29, 48] of medium 1"
    with pytest.raises(ValueError, match=r'"bbox_2d" is \[x1, y1, x2, y2\]'):
        crop({"bbox_2d": [1, 2, 3]}, None)
    with pytest.raises(ValueError, match='"target_image" is the number'):
        crop({"bbox_2d": [1, 2, 3, 4], "target_image": 1.5}, None)


def test_missing_file_ends_the_run(tiny, make_step, tmp_path):
    (rollout,) = responses(tiny, call("zoom", box=[0, 0, 24, 24])).groups[0]
    sample = rollout.prompt.sample
    lost = replace(sample, parts=(replace(sample.images[0], path=str(tmp_path / "gone.png")), "?"))
    rollout = replace(rollout, prompt=replace(rollout.prompt, sample=lost))
    with pytest.raises(UserError, match=r"gone.png: no such file"):
        make_step()(RolloutBatch(groups=((rollout,),)), step=0)


def test_frame_is_what_the_video_shows_at_that_second(clip):
    """The clip has 12 frames a second: each stays until the next one comes."""
    cache = make_media_cache(max_bytes=10**8)
    frame = ImageRef(path=clip.path, sha256=clip.sha256, timestamp=0.0)
    times = [0.0, 1 / 12, 1.5 / 12, 2 / 12, 23.5 / 12]
    shown = [cache.get_image(replace(frame, timestamp=second)).tobytes() for second in times]
    assert shown[1] == shown[2]
    assert len(set(shown)) == 4
    part = cache.get_image(replace(frame, crop=(8, 8, 24, 32)))
    assert part.tobytes() == cache.get_image(frame).crop((8, 8, 24, 32)).tobytes()


@pytest.mark.parametrize("box", [(0, 0, 0, 5), (-1, 0, 5, 5), (0, 0, 49, 5), (5, 5, 4, 6), (0, 0, 48, 1)])
def test_crop_outside_the_image_empty_or_too_long_is_refused(box, monkeypatch):
    monkeypatch.setattr("mmrl.media.checks.MAX_ASPECT_RATIO", 10)
    ref = ImageRef(path="a.png", sha256="", crop=box)
    with pytest.raises(UserError, match=r"a.png: .*(is not part of its 48x48 pixels|more than 10 times as long)"):
        crop_image(Image.new("RGB", (48, 48)), ref, box, MediaLimitsConfig())


@pytest.mark.parametrize(("name", "refused"), [("frames", True), ("passage", True), ("zoom", False)])
def test_frames_cannot_be_shuffled_beside_a_tool_that_finds_them_by_time(name, refused):
    tool = ToolConfig(fn=f"mmrl.rollout.tools.builtin:{name}")
    tools = ToolsConfig(kind="tools", tools=(tool,), max_media=1)
    shuffled = BlindProbeConfig(kind="probe", corruption="shuffled")
    with pytest.raises(ValueError, match="finds frames by their time") if refused else nullcontext():
        check_rollout_steps((*GENERATE_ONLY, tools, shuffled))


def test_media_tools_need_max_media():
    with pytest.raises(ValidationError, match="builtin:zoom shows .* `max_media` allows none"):
        ToolsConfig(kind="tools", tools=MEDIA_TOOLS)
