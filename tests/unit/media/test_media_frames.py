"""Folders of frames as videos: the frames that are seen, their order, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from processors import make_media_cache

from mmrl.config.schema import VideoConfig
from mmrl.media.video import FrameSampling
from mmrl.types import ImageRef, MediaError, Size, UserError, VideoRef
from mmrl.utils.digests import file_digest, frames_digest
from mmrl.utils.files import list_frames

SAMPLING = FrameSampling(video=VideoConfig(min_pixels=28 * 28, max_pixels=28 * 28 * 8), patch_size=14)
SIZE = (56, 28)  # a multiple of the patches, so nothing is resized


@pytest.fixture
def folder(tmp_path) -> Path:
    """Twelve frames, 1.png to 12.png, frame n in grey 20 n, and a hidden file such as macOS leaves."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", SIZE, (20 * number,) * 3).save(folder / f"{number + 1}.png")
    (folder / ".DS_Store").touch()
    return folder


def ref(folder: Path, **options: Any) -> VideoRef:
    frames = {file.name: file_digest(file) for file in list_frames(folder, (folder.parent,))}
    return VideoRef(path=str(folder), sha256=frames_digest(frames), fps=3.0, **options)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        # 12 frames at 3 a second last 4 s; at 2 a second 8 of them are seen, spread from the first to the last.
        ({}, [0, 2, 3, 5, 6, 8, 9, 11]),
        # Frames 3 to 9 are shown from 1 s to 3 s: 7 of them, of which 4 are seen.
        ({"start": 1.0, "end": 3.0}, [3, 5, 7, 9]),
    ],
)
def test_frames_are_seen_in_natural_order_at_the_rate_of_the_config(folder, span, expected):
    video = make_media_cache(folder).read_video(ref(folder, **span), SAMPLING)
    assert [np.unique(frame.numpy()).tolist() for frame in video.frames_TCHW] == [[20 * n] for n in expected]
    plan = video.plan
    assert (plan.fps, plan.total_frames, plan.original_size, plan.resized_size) == (3.0, 12, Size(*SIZE), Size(*SIZE))


def test_one_frame_may_be_shown_as_an_image(folder):
    video = ref(folder)
    frame = ImageRef(path=video.path, sha256=video.sha256, timestamp=2.5, fps=video.fps)
    # The eighth is shown from 7/3 s on.
    assert make_media_cache(folder).get_image(frame).getpixel((0, 0)) == (140, 140, 140)


def test_a_changed_folder_is_refused(folder):
    before = ref(folder)
    for change in (Image.new("RGB", SIZE).save, Path.unlink):
        change(folder / "7.png")
        with pytest.raises(MediaError, match="clip: changed since it was referenced"):
            make_media_cache(folder).get_frame_plan(before, SAMPLING)


def test_frames_of_two_sizes_are_refused(folder):
    Image.new("RGB", (28, 28)).save(folder / "12.png")
    with pytest.raises(MediaError, match=r"12\.png: a frame of 28x28 in a folder of 56x28; make them one size"):
        make_media_cache(folder).read_video(ref(folder), SAMPLING)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_video_frames": 11}, "12 frames exceed max_video_frames=11"),
        ({"max_video_seconds": 3.5}, "4.0 s exceed max_video_seconds=3.5"),
        ({"max_image_bytes": 10}, r"1\.png: .+ bytes exceed max_image_bytes=10"),
        ({"max_pixels": 100}, "56x28 pixels exceed max_pixels=100"),
    ],
)
def test_a_folder_over_a_limit_is_refused(folder, limits, words):
    with pytest.raises(MediaError, match=words):
        make_media_cache(folder, **limits).get_frame_plan(ref(folder), SAMPLING)


def test_a_folder_of_other_files_or_outside_the_roots_is_refused(folder, tmp_path):
    good = ref(folder)
    with pytest.raises(MediaError, match="no such folder of frames"):
        make_media_cache(folder).get_frame_plan(VideoRef(path=str(folder / "1.png"), sha256="", fps=3.0), SAMPLING)
    with pytest.raises(MediaError, match="lies outside"):
        make_media_cache(tmp_path / "elsewhere").get_frame_plan(good, SAMPLING)
    (folder / "notes.txt").touch()
    with pytest.raises(MediaError, match=r"holds notes\.txt, which is not an image"):
        make_media_cache(folder).get_frame_plan(good, SAMPLING)


def test_links_out_of_the_roots_and_empty_folders_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no frames"):
        list_frames(tmp_path / "empty", (tmp_path,))
    (tmp_path / "secret.png").write_bytes((folder / "1.png").read_bytes())
    (folder / "13.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UserError, match="lies outside"):
        list_frames(folder, (folder,))
