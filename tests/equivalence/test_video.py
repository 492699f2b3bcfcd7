"""A video reaches the model as by qwen-vl-utils and the processors of transformers."""

import re

import pytest
import torch
from qwen_vl_utils.vision_process import VIDEO_READER_BACKENDS, fetch_video
from videos import SMALL

from mmrl.media.cache import MediaCache
from mmrl.policy.families import FAMILIES
from mmrl.types import Size

START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"


@pytest.fixture
def fetched(clip, monkeypatch):
    """What qwen-vl-utils makes of the clip: frames resized, and how they were chosen."""
    reader = "qwen_vl_utils.vision_process.get_video_reader_backend"
    monkeypatch.setattr(reader, lambda: "decord")
    monkeypatch.setitem(VIDEO_READER_BACKENDS, "torchvision", None)  # no way to fall back
    wanted = {"video": clip.path, "fps": SMALL.fps, "min_pixels": SMALL.min_pixels, "max_pixels": SMALL.max_pixels}
    frames, metadata = fetch_video(wanted, image_patch_size=8, return_video_metadata=True)
    return frames, metadata


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_and_grids_are_those_of_qwen_vl_utils_and_transformers(make_tiny, family, fetched):
    tiny = make_tiny(family)
    frames, metadata = fetched
    prompt = tiny.processor.build(tiny.samples[3])
    options = {"do_resize": False, "do_sample_frames": False, "video_metadata": [metadata]}
    text = [START + PAD + END]
    theirs = tiny.processor.hf_processor(text=text, videos=[frames], videos_kwargs=options, return_tensors="pt")
    assert torch.equal(tiny.processor.prompt_tensors(prompt).video_patches_MD, theirs["pixel_values_videos"])
    assert prompt.grids == (tuple(theirs["video_grid_thw"][0].tolist()),) == ((2, 4, 8),)
    (resize,) = prompt.resize_maps
    assert resize.original == resize.resized == Size(64, 32)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_video_is_one_run_of_placeholders(make_tiny, family):
    assert f"user\n{START}{PAD * 16}{END}Which way" in prompt_text(make_tiny(family), 3)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_each_pair_of_frames_follows_its_seconds(make_tiny, family):
    """24 frames, 12 a second: frames 0, 8, 15, 23 are seen, the pairs' middles are 4/12 and 19/12 seconds."""
    pair = START + PAD * 8 + END
    assert f"user\n<0.3 seconds>{pair}<1.6 seconds>{pair}Which way" in prompt_text(make_tiny(family), 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_and_a_video_keep_their_places_in_the_question(make_tiny, family):
    tiny = make_tiny(family)
    text = re.sub(r"<\d\.\d seconds>", "", prompt_text(tiny, 4))
    shortened = re.sub(r"(<\|vision_start\|>(<\|\w+_pad\|>)+<\|vision_end\|>)+", lambda match: f"[{match[2]}]", text)
    assert "Is[<|image_pad|>]in[<|video_pad|>]at the end?" in shortened
    assert tiny.processor.build(tiny.samples[4]).grids[1] == (2, 4, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_prompt_is_measured_without_its_frames(make_tiny, family, monkeypatch):
    tiny = make_tiny(family)
    prompt = tiny.processor.build(tiny.samples[3])
    encoder = tiny.processor.encoder
    monkeypatch.setattr(MediaCache, "read_video", lambda *_: pytest.fail("decoded"))
    assert encoder.measure(tiny.samples[3]).ids == prompt.token_ids


def test_twice_the_frame_rate_is_twice_the_frames_in_the_same_time(make_tiny):
    """Positions of Qwen2.5-VL follow seconds: a pair of frames at 4 a second lasts half as long, one position."""
    tiny = make_tiny("qwen2_5_vl")
    finer = tiny.fresh(video=SMALL.model_copy(update={"fps": 4.0}))
    coarse, fine = tiny.processor.encoder.encode(tiny.samples[3]), finer.encoder.encode(tiny.samples[3])
    assert (coarse.prompt.grids, fine.prompt.grids) == (((2, 4, 8),), ((4, 4, 8),))
    assert times(tiny, coarse) == [0, 2]
    assert times(tiny, fine) == [0, 1, 2, 3]


def times(tiny, encoded):
    """Positions in time of the frames of a prompt, from the first on."""
    ids = torch.tensor(encoded.prompt.token_ids)
    times_P = encoded.tensors.position_ids_3P[0][ids == tiny.processor.placeholders.video_id]
    return (times_P.unique() - times_P[0]).tolist()


def prompt_text(tiny, index):
    prompt = tiny.processor.build(tiny.samples[index])
    return tiny.processor.tokenizer.decode(list(prompt.token_ids))
