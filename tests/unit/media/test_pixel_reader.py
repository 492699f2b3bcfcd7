"""Rewards see the pixels of their samples: images, crops and frames of videos, each opened once."""

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from videos import picture, write_video

from mmrl import types
from mmrl.media import image, pixel_reader
from mmrl.media.pixel_reader import PixelReader

SIDE = types.Size(40, 30)


@pytest.fixture
def reader(tmp_path) -> Iterator[PixelReader]:
    reader = PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))
    with types.use_media_opener(reader):
        yield reader


def write_image(path: Path, pixels: np.ndarray | None = None) -> types.ImageRef:
    Image.fromarray(picture(0, *SIDE) if pixels is None else pixels).save(path)
    return types.ImageRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def make_sample(*parts: types.ContentPart) -> types.Sample:
    return types.Sample(
        id="s", task="look", parts=parts, target=types.Target(answer_type=types.AnswerType.TEXT, value="red")
    )


def test_image_at_original_and_model_size(tmp_path, reader):
    sample = make_sample(write_image(tmp_path / "a.png"), "question")
    assert np.array_equal(sample.image(), picture(0, *SIDE)) and sample.image().dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        sample.image()[0] = 0
    expected = Image.fromarray(picture(0, *SIDE)).resize((28, 56), Image.Resampling.BICUBIC)
    assert np.array_equal(sample.image(0, size=types.Size(28, 56)), np.asarray(expected))


def test_each_file_is_opened_once(tmp_path, reader, monkeypatch):
    opened = []

    def count(ref, *args):
        opened.append(ref)
        return original(ref, *args)

    original = image.open_shown_image
    monkeypatch.setattr(image, "open_shown_image", count)
    sample = make_sample(write_image(tmp_path / "a.png"))
    hidden = make_sample(replace(sample.images[0], corruption=types.Corruption.GREY))
    first = sample.image()
    # A blind probe hides the picture from the model, never from the reward.
    for _ in range(8):
        assert sample.image() is first and hidden.image() is first
        assert sample.crop((0, 0, 4, 4)).base is not None
    assert len(opened) == 1
    # Whoever receives a copy, such as a worker, opens the file again, and is sent no pixels.
    assert len(pickle.dumps(reader)) < 2000
    assert np.array_equal(pickle.loads(pickle.dumps(reader)).read_image(sample.images[0], None), first)
    assert len(opened) == 2


def test_crops_of_each_coordinate_system(tmp_path, reader):
    pixels = picture(0, *SIDE)
    sample = make_sample(write_image(tmp_path / "a.png"))
    expected = pixels[6:15, 10:30]
    systems = types.CoordinateSystem
    assert np.array_equal(sample.crop((10, 6, 30, 15)), expected)
    assert np.array_equal(sample.crop((0.25, 0.2, 0.75, 0.5), systems.NORM_1), expected)
    assert np.array_equal(sample.crop((250, 200, 750, 500), systems.NORM_1000), expected)
    assert np.array_equal(sample.crop((20, 3, 60, 7.5), systems.PX_RESIZED, resized=types.Size(80, 15)), expected)
    # A pixel that the box touches is part of it; the whole image is allowed despite rounding.
    assert sample.crop((10.9, 6, 11.1, 7)).shape == (1, 2, 3)
    assert sample.crop((0, 0, 40 + 1e-10, 30)).shape == (30, 40, 3)
    # PX_ORIGINAL counts from the corner of the larger image where the sample shows a crop of it.
    part = make_sample(replace(sample.images[0], crop=(10, 6, 30, 15)))
    assert np.array_equal(part.image(), expected)
    assert np.array_equal(part.crop((12, 6, 14, 9)), pixels[6:9, 12:14])
    assert np.array_equal(part.crop((0, 0, 500, 1000), systems.NORM_1000), pixels[6:15, 10:20])
    for box in ((-1, 0, 4, 4), (0, 0, 41, 4), (4, 4, 4, 8), (8, 0, 4, 4), (50, 50, 60, 60)):
        with pytest.raises(types.MediaRangeError, match="not within its 40x30 pixels"):
            sample.crop(box)
    with pytest.raises(types.MediaRangeError, match="not within"):
        part.crop((0, 0, 4, 4))
    with pytest.raises(ValueError, match="px_resized needs"):
        sample.crop((0, 0, 4, 4), systems.PX_RESIZED)


def test_frames_by_second(tmp_path, reader):
    video = write_video(tmp_path / "a.mp4")
    sample = make_sample("question", video, write_image(tmp_path / "a.png"))
    frames = sample.video_frames(0, [1.0, 0.0, 1.05])
    assert frames.shape == (3, 96, 128, 3) and not frames.flags.writeable
    # 12 frames a second; H.264 loses some of the colours.
    assert np.array_equal(frames[0], frames[2])
    for index, frame in ((12, frames[0]), (0, frames[1])):
        assert np.abs(frame.astype(int) - picture(index, 128, 96)).mean() < 30
        assert np.abs(frame.astype(int) - picture(index + 4, 128, 96)).mean() > 40
    assert sample.video_frames(0, [1.0], size=types.Size(64, 48)).shape == (1, 48, 64, 3)
    # The picture of a video's frame is that frame; the second medium is the image.
    still = make_sample(types.ImageRef(path=video.path, sha256=video.sha256, timestamp=1.0))
    assert np.array_equal(still.image(), frames[0]) and sample.image(1).shape == (30, 40, 3)
    for second in (-0.1, 4.1, float("nan")):
        with pytest.raises(types.MediaRangeError, match="a.mp4"):
            sample.video_frames(0, [second])
    part = make_sample(replace(video, start=1.0, end=2.0))
    assert np.array_equal(part.video_frames(0, [1.0])[0], frames[0])
    with pytest.raises(types.MediaRangeError, match=r"3 s is not in the part from 1 to 2 s"):
        part.video_frames(0, [3.0])


def test_a_medium_that_cannot_be_used_is_unscorable(tmp_path, reader):
    ref = write_image(tmp_path / "a.png")
    sample = make_sample(ref, write_video(tmp_path / "a.mp4"))
    for index in (-1, 1, 2):
        with pytest.raises(types.Unscorable, match=f"no image number {index}, from 0; it has image, video"):
            sample.image(index)
    with pytest.raises(types.Unscorable, match="no video number 0"):
        sample.video_frames(0, [0.0])
    with pytest.raises(types.Unscorable, match="it has none"):
        make_sample("only text").image()
    with pytest.raises(types.Unscorable, match="no such file"):
        make_sample(replace(ref, path=str(tmp_path / "gone.png"))).crop((0, 0, 1, 1))
    with pytest.raises(types.Unscorable, match="outside"):
        make_sample(replace(ref, path="/etc/hostname")).image()
    write_image(tmp_path / "a.png", picture(1, *SIDE))
    with pytest.raises(types.Unscorable, match="changed since it was referenced"):
        sample.image()
    (tmp_path / "a.png").write_bytes(b"\x89PNG damaged")
    damaged = replace(ref, sha256=hashlib.sha256(b"\x89PNG damaged").hexdigest())
    with pytest.raises(types.Unscorable, match="image"):
        make_sample(damaged).image()
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(types.Unscorable, match="changed"):
        sample.video_frames(1, [0.0])


def test_without_an_opener_the_error_says_what_to_do(tmp_path):
    with pytest.raises(types.UserError, match=r"mmrl\.use_media_opener"):
        make_sample(write_image(tmp_path / "a.png")).image()


def test_the_memory_of_pixels_is_bounded(tmp_path, reader, monkeypatch):
    monkeypatch.setattr(pixel_reader, "_CACHE_BYTES", 4000)
    small = PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))
    refs = [write_image(tmp_path / f"{index}.png", picture(index, *SIDE)) for index in range(3)]
    first = small.read_image(refs[0], None)
    assert small.read_image(refs[0], None) is first
    small.read_image(refs[1], None)
    assert small.read_image(refs[0], None) is not first


def test_more_frames_than_the_memory_holds_are_read_again(tmp_path, reader, monkeypatch):
    video, seconds = write_video(tmp_path / "a.mp4"), [0.0, 0.5, 1.0, 1.5]
    expected = reader.read_frames(video, seconds, None)
    monkeypatch.setattr(pixel_reader, "_CACHE_BYTES", 3 * expected[0].nbytes)
    small = PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))
    for wanted in (seconds, seconds, seconds[::-1]):
        frames = small.read_frames(video, wanted, None)
        assert np.array_equal(frames, expected if wanted == seconds else expected[::-1])
