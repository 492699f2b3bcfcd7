"""Tools that show media: parts are cut from the file, labelled in the model's coordinates, and limited in number."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from scoring import make_scorer, term
from test_tools import anything, call, saying

from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import GenerateConfig, MediaLimitsConfig, ToolConfig, ToolsConfig
from mmrl.media.cache import MediaCache
from mmrl.media.image import crop_image
from mmrl.policy.encoder import unpatchify
from mmrl.rollout.pipeline import build_pipeline
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.tools.builtin import frames, passage, zoom
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.scoring.registry import load_tool
from mmrl.types import Author, CoordinateSystem, FinishReason, ImageRef, MediaPolicy, Rollout, UserError, VideoRef

TOOLS = tuple(ToolConfig(fn=f"mmrl.rollout.tools.builtin:{name}") for name in ("zoom", "frames", "passage"))


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


@pytest.fixture(scope="module")
def tool_runner():
    with closing(ToolRunner(partial(load_tool, Path()))) as opened:
        yield opened


def make_tool_step(tiny, tool_runner, **options):
    settings = ToolsConfig(kind="tools", tools=TOOLS, **{"max_turns": 1, "max_media": 4, "timeout_s": 60.0, **options})
    context = RolloutContext(
        sampler=tiny.sampler(),
        scorer=make_scorer(term(anything)),
        processor=tiny.processor,
        sampling_params=tiny.params,
        group_size=1,
        groups_per_step=1,
        seed=0,
        tool_runner=tool_runner,
    )
    return build_pipeline((GenerateConfig(kind="generate"), settings), context).steps[0]


def calling(tiny, number, *texts):
    """Responses to a sample, each ending in a call."""
    return saying(replace(tiny, samples=(tiny.samples[number],)), *texts)


def words(tiny, rollout):
    return [
        tiny.processor.decode(s.token_ids)
        for s in rollout.segments
        if s.author is Author.ENVIRONMENT and s.observation is None
    ]


def test_zoom_shows_a_part_of_an_image_with_a_label(tiny, tool_runner):
    """The model's frame is that of the resized picture; all pixels that the box touches are shown."""
    answers = calling(tiny, 0, call("zoom", box=[4.2, 8.0, 40.0, 60.0]))
    found = make_tool_step(tiny, tool_runner)(answers, step=0)
    ((rollout,),) = found.groups
    (resize,) = rollout.prompt.resize_maps
    assert (resize.original, resize.resized, rollout.prompt.coordinate_system) == (
        (48, 48),
        (48, 48),
        CoordinateSystem.PX_RESIZED,
    )
    (view,) = rollout.observations
    assert view.ref == replace(rollout.prompt.sample.images[0], crop=(4, 8, 40, 48))
    assert words(tiny, rollout) == [
        "\n<tool_response>\nMedium 2: the part [4, 8, 40, 48] of medium 1.\n",
        "\n</tool_response>\n",
    ]
    assert [s.author for s in rollout.segments] == [Author.POLICY, *[Author.ENVIRONMENT] * 3, Author.POLICY]
    assert (found.metrics["tools/media_shown"], found.metrics["tools/results"]) == (1.0, 1.0)
    seen = unpatchify(
        tiny.processor.tool_media_tensors(view).image_patches_MD,
        view.grid,
        tiny.processor.encoder.image_format,
        tiny.processor.hf_processor.image_processor,
    )[0]
    part = Image.open(view.ref.path).convert("RGB").crop(view.ref.crop).resize(view.resize_map.resized)
    assert (seen.int() - torch.from_numpy(np.array(part))).abs().max() <= 1
    assert loads(dumps(rollout), Rollout) == rollout


def test_a_part_of_a_part_is_cut_from_the_file(tiny, tool_runner):
    """The second box is measured on the part as it was shown: resized, from its own corner."""
    box = make_tool_step(tiny, tool_runner)
    ((once,),) = box(calling(tiny, 0, call("zoom", box=[8, 8, 32, 32])), step=0).groups
    (first,) = once.observations
    assert first.resize_map.original == (24, 24)
    assert first.resize_map.resized == (48, 48)
    ids = tuple(tiny.processor.tokenizer(call("zoom", medium=2, box=[0, 24, 24, 48])).input_ids)
    last = replace(once.segments[-1], token_ids=ids, logprobs=(-1.0,) * len(ids))
    again = tiny.processor.parse_rollout(
        replace(once, segments=(*once.segments[:-1], last), finish_reason=FinishReason.STOP)
    )
    ((twice,),) = box(replace(calling(tiny, 0, "x"), groups=((again,),)), step=0).groups
    assert twice.observations[1].ref.crop == (8, 20, 20, 32)
    assert "Medium 3: the part [0, 24, 24, 48] of medium 2." in "".join(words(tiny, twice))


def test_frames_and_passages_of_a_video(tiny, tool_runner, clip):
    answers = calling(tiny, 3, call("frames", seconds=[0.5, 1.5]), call("passage", start=0.5, end=1.5))
    found = make_tool_step(tiny, tool_runner)(answers, step=0)
    ((still, part),) = found.groups
    assert [view.ref for view in still.observations] == [
        ImageRef(path=clip.path, sha256=clip.sha256, timestamp=second) for second in (0.5, 1.5)
    ]
    assert [view.ref for view in part.observations] == [
        VideoRef(path=clip.path, sha256=clip.sha256, start=0.5, end=1.5)
    ]
    assert "Medium 3: medium 1 at 1.5 seconds." in "".join(words(tiny, still))
    assert "Medium 2: from 0.5 to 1.5 seconds of medium 1." in words(tiny, part)[0]
    assert found.metrics["tools/media_shown"] == 3.0


REFUSED = {
    0: [
        (call("zoom", box=[60, 60, 70, 70]), "the box [60, 60, 70, 70] holds nothing of medium 1"),
        (call("zoom", box=[8, 8, 8, 20]), "holds nothing of medium 1"),
        (call("zoom", box=[0, 0, 9, 9], medium=2), "there is no medium 2; there are 1, counted from 1"),
        (call("zoom", box=[0, 0, 9, 9], medium=0), "there is no medium 0"),
        (call("zoom", box=[0, 0, 9]), '"box" is [x1, y1, x2, y2]'),
        (call("zoom", box=[0, 0, 9, "9"]), '"box" must be given, in numbers'),
        (call("zoom", box=[0, 0, 9, 9], size=3), "there is no argument 'size'; there are box, medium"),
        (call("frames", seconds=[1.0]), "medium 1 is a picture, and no video"),
    ],
    3: [
        (call("zoom", box=[0, 0, 9, 9]), "medium 1 is a video; look at one of its frames first"),
        (call("frames", seconds=[7.0]), "there is nothing at 7 s; its last frame is at 1.917 s"),
        (call("frames", seconds=[0, 0, 0, 0, 0]), '"seconds" are 1 to 4 numbers'),
        (call("frames", seconds=[0, 1, 1.5]), "2 more pictures or videos may be shown, not 3"),
        (call("passage", start=1.5, end=1.0), "1.5 to 1 s is not part of its 2.000 s"),
        (call("passage", start=1.5), '"end" must be given, in numbers'),
    ],
}


@pytest.mark.parametrize("number", REFUSED)
def test_the_model_is_told_why_media_cannot_be_shown(tiny, tool_runner, number):
    calls, feedback = zip(*REFUSED[number], strict=True)
    found = make_tool_step(tiny, tool_runner, max_media=2)(calling(tiny, number, *calls), step=0)
    for rollout, expected in zip(found.groups[0], feedback, strict=True):
        (told,) = words(tiny, rollout)
        assert told.startswith("\n<tool_response>\nThe tool refuses: ")
        assert expected in told
        assert not rollout.observations
        assert ".mp4" not in told  # no path is told to the model
    assert found.metrics["tools/refused"] == len(calls)


def test_media_with_too_many_tokens_are_not_shown(tiny, tool_runner):
    answers = calling(tiny, 0, call("zoom", box=[0, 0, 9, 9]))
    length = answers.groups[0][0].num_tokens
    found = make_tool_step(tiny, tool_runner, max_total_tokens=length + 5)(answers, step=0)
    ((rollout,),) = found.groups
    assert "tokens to show, and 5 are left" in words(tiny, rollout)[0]
    assert not rollout.observations


def test_arguments_are_read_strictly():
    assert zoom({"box": [1, 2, 3, 4.5]}, None).box == (1.0, 2.0, 3.0, 4.5)
    assert frames({"seconds": [1], "medium": 2}, None).medium_number == 2
    assert (passage({"start": 0, "end": 1.5}, None).start, passage({"start": 0, "end": 1.5}, None).end) == (0.0, 1.5)
    for strange in ([True, 0, 1, 1], [float("nan"), 0, 1, 1], [0, 0, 1, 10**400], "0 0 1 1", None):
        with pytest.raises(ValueError, match=r'"box" must be given, in numbers|too large'):
            zoom({"box": strange}, None)
    with pytest.raises(ValueError, match='"medium" is the number'):
        zoom({"box": [0, 0, 1, 1], "medium": True}, None)


def test_a_file_that_changed_ends_the_run(tiny, tool_runner, tmp_path):
    answers = calling(tiny, 0, call("zoom", box=[0, 0, 24, 24]))
    (rollout,) = answers.groups[0]
    sample = rollout.prompt.sample
    lost = replace(sample, parts=(replace(sample.images[0], path=str(tmp_path / "gone.png")), "?"))
    moved = replace(rollout, prompt=replace(rollout.prompt, sample=lost))
    with pytest.raises(UserError, match=r"gone.png: no such file"):
        make_tool_step(tiny, tool_runner)(replace(answers, groups=((moved,),)), step=0)


def test_a_frame_is_what_the_video_shows_at_that_second(clip):
    """12 frames a second: each stays until the next one comes."""
    store = MediaCache(MediaPolicy(roots=(Path("/"),)), MediaLimitsConfig(), max_bytes=10**8)
    frame = ImageRef(path=clip.path, sha256=clip.sha256)
    shown = [
        store.get_image(replace(frame, timestamp=second)).tobytes()
        for second in (0.0, 1 / 12, 1.5 / 12, 2 / 12, 23.5 / 12)
    ]
    assert shown[1] == shown[2]
    assert len(set(shown)) == 4
    part = store.get_image(replace(frame, timestamp=0.0, crop=(8, 8, 24, 32)))
    assert part.tobytes() == store.get_image(replace(frame, timestamp=0.0)).crop((8, 8, 24, 32)).tobytes()


@pytest.mark.parametrize("box", [(0, 0, 0, 5), (-1, 0, 5, 5), (0, 0, 49, 5), (5, 5, 4, 6), (0, 0, 48, 1)])
def test_no_part_is_outside_empty_or_too_long(box, monkeypatch):
    monkeypatch.setattr("mmrl.media.checks.MAX_ASPECT_RATIO", 10)
    ref = ImageRef(path="a.png", sha256="", crop=box)
    with pytest.raises(UserError, match=r"a.png: .*(is not part of its 48x48 pixels|more than 10 times as long)"):
        crop_image(Image.new("RGB", (48, 48)), ref, box, MediaLimitsConfig())


def test_media_tools_need_max_media():
    with pytest.raises(ValidationError, match="builtin:zoom shows .* `max_(views|media)` allows none"):
        ToolsConfig(kind="tools", tools=TOOLS)
