"""Pictures: the size and content that the model saw, each once, and a reason for each that cannot be shown."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from videos import write_video
from view_runs import BLUE, RED, image_medium, write_picture

from mmrl.view.media import MAX_FRAMES, MAX_SIDE, PictureStore, RunMedia

SETTINGS = {"model": {"video": {"fps": 2.0, "min_frames": 4, "max_frames": 48, "min_pixels": 1024, "max_pixels": 2304}}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def describe(run, record, *, store=None, roots=(), settings=SETTINGS):
    """Return the entry of a medium after its pictures were made, and their store."""
    store = store or PictureStore(with_media=True)
    opener = RunMedia(run, settings, Path(), roots)
    for frame in store.describe(record, opener)["frames"]:
        store.read((frame["src"] or "").removeprefix("media/").removesuffix(".jpg"))
    return store.describe(record, opener), store


def load(store, medium, frame=0):
    name = medium["frames"][frame]["src"].removeprefix("media/").removesuffix(".jpg")
    return Image.open(io.BytesIO(store.read(name))).convert("RGB")


def test_a_picture_has_the_size_that_the_model_saw(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"))
    medium, store = describe(run, record)
    assert medium["problem"] is None
    assert load(store, medium).size == (112, 56)
    assert load(store, medium).getpixel((20, 20)) == pytest.approx(RED, abs=12)
    assert load(store, medium).getpixel((90, 20)) == pytest.approx(BLUE, abs=12)


def test_a_large_picture_is_shown_smaller(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"), resized=[3000, 1500])
    medium, store = describe(run, record)
    assert load(store, medium).size == (MAX_SIDE, MAX_SIDE // 2)
    assert (medium["width"], medium["height"]) == (3000, 1500)


def test_a_crop_shows_its_part(run):
    sha256 = write_picture(run / "data/a.png")
    record = image_medium("data/a.png", sha256, crop=[100, 0, 200, 100], resized=[56, 56])
    medium, store = describe(run, record)
    assert load(store, medium).getpixel((3, 30)) == pytest.approx(BLUE, abs=12)


def test_a_hidden_picture_is_shown_as_it_was_hidden(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"), corruption="grey")
    medium, store = describe(run, record)
    assert np.asarray(load(store, medium)).std() < 1


def test_a_video_shows_frames_of_those_that_the_model_saw_with_their_seconds(run):
    (run / "data").mkdir()
    ref = write_video(run / "data/b.mp4")
    record = image_medium("data/b.mp4", ref.sha256, (128, 96), kind="video", resized=[56, 42])
    medium, store = describe(run, record)
    seconds = [frame["second"] for frame in medium["frames"]]
    assert len(seconds) == 8  # 4 s, two frames a second
    assert seconds == sorted(set(seconds))
    assert load(store, medium, 3).size == (56, 42)
    many = {"model": {"video": {**SETTINGS["model"]["video"], "fps": 12.0}}}
    medium, _ = describe(run, {**record, "resized": [28, 21]}, settings=many)
    assert len(medium["frames"]) == MAX_FRAMES
    assert medium["frames"][-1]["second"] > 3.5


def test_shuffled_frames_are_shown_in_their_order(run):
    (run / "data").mkdir()
    ref = write_video(run / "data/b.mp4")
    record = image_medium("data/b.mp4", ref.sha256, (128, 96), kind="video", resized=[56, 42])
    plain, store = describe(run, record)
    shuffled, _ = describe(run, {**record, "corruption": "shuffled"}, store=store)
    before = [np.asarray(load(store, plain, index), int) for index in range(8)]
    after = [np.asarray(load(store, shuffled, index), int) for index in range(8)]
    order = [min(range(8), key=lambda index: np.abs(before[index] - frame).mean()) for frame in after]
    assert sorted(order) == list(range(8))
    assert order != list(range(8))


def test_a_frame_of_a_video_is_an_image(run):
    (run / "data").mkdir()
    ref = write_video(run / "data/b.mp4")
    medium, store = describe(run, image_medium("data/b.mp4", ref.sha256, (128, 96), timestamp=1.0))
    assert len(medium["frames"]) == 1
    assert load(store, medium).size == (112, 56)


def test_a_changed_missing_or_damaged_file_is_reported(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"))
    write_picture(run / "data/a.png", left=(0, 255, 0))
    assert describe(run, record)[0]["problem"] == "changed since it was recorded"
    (run / "data/a.png").unlink()
    medium, _ = describe(run, record)
    assert medium["problem"] == "the file is gone"
    assert medium["frames"] == [{"src": None, "second": None}]
    assert (medium["width"], medium["height"]) == (112, 56)
    for damaged in (None, 3, {}, {"kind": "image", "path": 3}, {**record, "crop": [1]}, {**record, "resized": "no"}):
        assert describe(run, damaged)[0]["problem"] == "its record is damaged"


def test_an_absurd_size_of_a_record_is_not_allocated(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"), resized=[10**9, 10**9])
    medium, store = describe(run, record)
    assert max(load(store, medium).size) <= MAX_SIDE
    ref = write_video(run / "data/b.mp4")
    record = image_medium("data/b.mp4", ref.sha256, (128, 96), kind="video", resized=[10**9, 10**8])
    medium, store = describe(run, record)
    assert load(store, medium).size == (MAX_SIDE, 102)
    assert describe(run, {**record, "resized": [0, -5]})[0]["problem"] == "its record is damaged"


def test_a_file_outside_the_media_folders_is_not_opened(run, tmp_path):
    sha256 = write_picture(tmp_path / "elsewhere/a.png")
    record = image_medium(str(tmp_path / "elsewhere/a.png"), sha256)
    assert describe(run, record)[0]["problem"].startswith("outside the media folders")
    (run / "data").mkdir()
    os.symlink(tmp_path / "elsewhere/a.png", run / "data/link.png")
    for path in ("data/link.png", "data/../../elsewhere/a.png"):
        assert describe(run, image_medium(path, sha256))[0]["problem"].startswith("outside the media folders")
    # Named on the command line, or in the config, relative to the folder that the command is called in.
    assert describe(run, record, roots=[tmp_path / "elsewhere"])[0]["problem"] is None
    assert describe(run, record, settings={"data": {"media_roots": ["../elsewhere"]}})[0]["problem"] is None


def test_relative_roots_start_from_the_folder_of_the_config(run, tmp_path):
    sha256 = write_picture(tmp_path / "pictures/a.png")
    record = image_medium(str(tmp_path / "pictures/a.png"), sha256)
    opener = RunMedia(run, {"data": {"media_roots": ["../../pictures"]}}, tmp_path / "my/configs", ())
    assert PictureStore(with_media=True).describe(record, opener)["problem"] is None


def test_limits_of_the_config_hold(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"))
    settings = {"data": {"media_limits": {"max_pixels": 100}}}
    assert "max_pixels=100" in describe(run, record, settings=settings)[0]["problem"]


def test_a_picture_of_many_groups_is_made_once(run):
    record = image_medium("data/a.png", write_picture(run / "data/a.png"))
    first, store = describe(run, record)
    second, _ = describe(run, dict(record), store=store)
    assert first["frames"] == second["frames"]
    assert len(list(store.items())) == 1


def test_without_media_no_file_is_opened(run):
    store = PictureStore(with_media=False)
    medium, _ = describe(run, image_medium("data/absent.png", "0" * 64), store=store)
    assert (medium["problem"], list(store.items())) == ("left out (--no-media)", [])


def test_an_unknown_picture_is_none():
    store = PictureStore(with_media=True)
    assert store.read("0" * 16) is None
    assert store.read("../../etc/passwd") is None


def test_an_image_is_decoded_when_it_is_asked_for_and_its_problem_then_shown(run):
    store, opener = PictureStore(with_media=True), RunMedia(run, SETTINGS, Path(), ())
    write_picture(run / "data/a.png")
    cut = (run / "data/a.png").read_bytes()[:-20]
    (run / "data/cut.png").write_bytes(cut)
    damaged = image_medium("data/cut.png", hashlib.sha256(cut).hexdigest())
    medium = store.describe(damaged, opener)
    name = medium["frames"][0]["src"].removeprefix("media/").removesuffix(".jpg")
    assert medium["problem"] is None
    assert store.read(name) is None
    assert "damaged" in store.describe(damaged, opener)["problem"]
    # An export is written once, so it decodes the image before it writes what is wrong with it.
    assert "damaged" in PictureStore(with_media=True, is_live=False).describe(damaged, opener)["problem"]


def test_an_export_tells_the_same_of_a_picture_as_a_live_page(run):
    good = image_medium("data/a.png", write_picture(run / "data/a.png"))
    changed, gone = {**good, "sha256": "0" * 64}, {**good, "path": "data/absent.png"}
    opener = RunMedia(run, SETTINGS, Path(), ())
    export = PictureStore(with_media=True, is_live=False)
    for record in (good, changed, gone, {**good, "path": "../a.png"}):
        assert export.describe(record, opener) == describe(run, record)[0]
    assert len(list(export.items())) == 1
