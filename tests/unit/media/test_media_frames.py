"""Folders of frames as videos: which frames are seen, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.config.schema import MediaLimitsConfig, VideoConfig
from mmrl.media.cache import MediaCache
from mmrl.media.image import MediaError
from mmrl.media.video import FrameSampling
from mmrl.types import ImageRef, MediaPolicy, Size, UserError, VideoRef
from mmrl.utils.digests import file_digest, frames_digest
from mmrl.utils.files import list_frames

RULE = FrameSampling(video=VideoConfig(min_pixels=28 * 28, max_pixels=28 * 28 * 8), patch_size=14)
SIZE = (56, 28)  # a multiple of the patches, so nothing is resized


def shade(number: int) -> int:
    return 20 * number


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve frames, 1.png to 12.png, each of one shade, and a hidden file such as macOS leaves."""
    home = tmp_path / "clip"
    home.mkdir()
    for number in range(12):
        Image.new("RGB", SIZE, (shade(number),) * 3).save(home / f"{number + 1}.png")
    (home / ".DS_Store").touch()
    return home


def ref(folder: Path, **options: Any) -> VideoRef:
    frames = {file.name: file_digest(file) for file in list_frames(folder, (folder.parent,))}
    return VideoRef(path=str(folder), sha256=frames_digest(frames), fps=3.0, **options)


def store(folder: Path, **limits: Any) -> MediaCache:
    return MediaCache(MediaPolicy(roots=(folder.parent,)), MediaLimitsConfig(**limits), max_bytes=0)


def seen(folder: Path, **options: Any) -> list[int]:
    """Return which frames a clip shows, by their shade."""
    clip = store(folder).read_video(ref(folder, **options), RULE)
    shades = [np.unique(frame.numpy()).tolist() for frame in clip.frames_TCHW]
    assert all(len(values) == 1 for values in shades)
    return [round(values[0] / shade(1)) for values in shades]


def test_frames_are_seen_in_natural_order_at_the_rate_of_the_config(folder: Path) -> None:
    # 12 frames at 3 a second last 4 s; at 2 a second 8 of them are seen, spread evenly from the first to the last
    assert seen(folder) == [0, 2, 3, 5, 6, 8, 9, 11]
    plan = store(folder).get_frame_plan(ref(folder), RULE)
    assert (plan.fps, plan.total_frames, plan.original_size, plan.resized_size) == (3.0, 12, Size(*SIZE), Size(*SIZE))


def test_a_span_shows_the_frames_of_its_seconds(folder: Path) -> None:
    # frames 3 to 9 stand from 1 s to 3 s: 7 of them, of which 4 are seen
    assert seen(folder, start=1.0, end=3.0) == [3, 5, 7, 9]


def test_one_frame_may_be_shown_as_an_image(folder: Path) -> None:
    whole = ref(folder)
    picture = store(folder).get_image(ImageRef(path=whole.path, sha256=whole.sha256, timestamp=2.5, fps=whole.fps))
    assert picture.getpixel((0, 0)) == (shade(7),) * 3  # the eighth is shown from 7/3 s on


def test_a_changed_folder_of_frames_is_refused_by_name(folder: Path) -> None:
    before = ref(folder)
    Image.new("RGB", SIZE).save(folder / "7.png")
    with pytest.raises(MediaError, match=r"clip: changed since it was referenced"):
        store(folder).get_frame_plan(before, RULE)
    (folder / "12.png").unlink()
    with pytest.raises(MediaError, match=r"clip: changed since it was referenced"):
        store(folder).get_frame_plan(before, RULE)


def test_frames_of_two_sizes_are_refused(folder: Path) -> None:
    Image.new("RGB", (28, 28)).save(folder / "12.png")
    with pytest.raises(MediaError, match=r"12\.png: a frame of 28x28 in a folder of 56x28; make them one size"):
        store(folder).read_video(ref(folder), RULE)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_video_frames": 11}, "12 frames exceed max_video_frames=11"),
        ({"max_video_seconds": 3.5}, "4.0 s exceed max_video_seconds=3.5"),
        ({"max_image_bytes": 10}, r"1\.png: .+ bytes exceed max_image_bytes=10"),
        ({"max_pixels": 100}, "56x28 pixels exceed max_pixels=100"),
    ],
)
def test_folders_of_frames_obey_the_limits_of_videos(folder: Path, limits: dict[str, Any], said: str) -> None:
    with pytest.raises(MediaError, match=said):
        store(folder, **limits).get_frame_plan(ref(folder), RULE)


def test_a_folder_with_other_files_is_refused(folder: Path, tmp_path: Path) -> None:
    good = ref(folder)
    with pytest.raises(MediaError, match="no such folder of frames"):
        store(folder).get_frame_plan(VideoRef(path=str(folder / "1.png"), sha256="", fps=3.0), RULE)
    with pytest.raises(MediaError, match="lies outside"):
        MediaCache(MediaPolicy(roots=(tmp_path / "elsewhere",)), MediaLimitsConfig(), max_bytes=0).get_frame_plan(
            good, RULE
        )
    (folder / "notes.txt").touch()
    with pytest.raises(MediaError, match=r"holds notes\.txt, which is not an image"):
        store(folder).get_frame_plan(good, RULE)


def test_links_and_empty_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no frames"):
        list_frames(tmp_path / "empty", (tmp_path,))
    (tmp_path / "secret.png").write_bytes((folder / "1.png").read_bytes())
    (folder / "13.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UserError, match="lies outside"):
        list_frames(folder, (folder,))
