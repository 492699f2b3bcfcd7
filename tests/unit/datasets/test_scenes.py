"""Generated scenes: targets agree with pixels, photographs are split, labels are noisy; the example dataset."""

import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generated import pixels
from PIL import Image
from skimage.measure import label as connected

from mmrl.cli import main
from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, Target, UserError
from mmrl.utils.plugins import load_function
from mmrl_datasets.generators import scenes
from mmrl_datasets.generators.drawing import COLOURS, SCENE_GREY, SceneObject, draw_shape
from mmrl_datasets.generators.photos import (
    SPLITS,
    load_handwritten_digits,
    load_materials,
    load_textures,
    split_region,
    split_slice,
)

ROOT = Path(__file__).parents[3]
GENERATORS = [scenes.counting, scenes.grounding, scenes.digits]


def things(sample):
    return [(thing["name"], tuple(thing["box"])) for thing in sample.meta["things"]]


def test_datasets_import_without_torch():
    code = "import sys, mmrl_datasets.generators.scenes, mmrl_datasets.readers.table; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Photographs and drawing


@pytest.mark.parametrize("count", [5, 100, 384, 1797])
def test_shares_are_disjoint_and_complete(count):
    parts = [list(range(count)[split_slice(split, count)]) for split in SPLITS]
    assert list(itertools.chain(*parts)) == list(range(count))
    assert all(parts)


def test_a_region_holds_only_its_own_columns():
    ramp = np.tile(np.arange(200, dtype=np.uint8), (60, 1))
    for split, (low, high) in zip(SPLITS, [(0, 119), (120, 159), (160, 199)], strict=True):
        seen = np.asarray(split_region(ramp, split, 20))
        assert seen.min() >= low
        assert seen.max() <= high


@pytest.mark.parametrize("split", SPLITS)
def test_photographs_leave_room_for_a_patch_in_every_split(split):
    textures, materials = load_textures(split, 48), load_materials(split, 24).values()
    assert {photo.mode for photo in (*textures, *materials)} == {"RGB"}
    assert min(min(photo.size) for photo in textures) >= 48
    assert min(min(photo.size) for photo in materials) >= 24


def test_no_handwritten_digit_is_in_two_splits():
    drawn = {split: {digit.ink.tobytes() for digit in load_handwritten_digits(split)} for split in SPLITS}
    assert sum(len(load_handwritten_digits(split)) for split in SPLITS) == 1797
    for one, other in itertools.combinations(SPLITS, 2):
        assert not drawn[one] & drawn[other]


def test_drawing_a_shape_does_not_depend_on_earlier_shapes():
    disc, blue = SceneObject("red disc", (2, 3, 12, 13)), SceneObject("blue disc", (20, 3, 30, 13))
    first, second = (Image.new("RGB", (48, 48)) for _ in range(2))
    draw_shape(first, disc)
    draw_shape(first, blue)
    draw_shape(second, disc)
    assert first.crop(disc.box).tobytes() == second.crop(disc.box).tobytes() != first.crop(blue.box).tobytes()
    assert {pixel for _, pixel in first.crop(blue.box).getcolors()} >= {COLOURS["blue"], (0, 0, 0)}


# Scenes


@pytest.mark.parametrize(
    ("generate", "noise"),
    [
        (scenes.counting, {"label_miss_prob": 0.5}),
        (scenes.grounding, {"label_pad_px": 4}),
        (scenes.digits, {"label_unclear_prob": 0.5}),
    ],
)
def test_label_noise_changes_labels_alone(generate, noise, context):
    exact = list(generate(context, split="train", size=40))
    noisy = list(generate(context, split="train", size=40, **noise))
    assert [(s.parts, s.target, s.meta) for s in exact] == [(s.parts, s.target, s.meta) for s in noisy]
    assert all(sample.label == sample.target for sample in exact)
    assert 5 < sum(sample.label != sample.target for sample in noisy) <= 40


def test_the_target_counts_the_shapes_in_the_image(context):
    counts = []
    for sample in scenes.counting(context, split="train", size=60, background=0.0):
        assert sample.target.answer_type is AnswerType.NUMBER
        colour = next(name for name in COLOURS if f" {name} " in sample.parts[1])
        near = np.abs(pixels(sample.images[0]) - COLOURS[colour]).sum(axis=-1) < 60
        assert connected(near, connectivity=2).max() == sample.target.value
        assert sum(name.startswith(colour) for name, _ in things(sample)) == sample.target.value
        counts.append(sample.target.value)
    assert set(counts) == {0, 1, 2, 3, 4}


def test_an_annotator_overlooks_one_shape_at_most_and_invents_none(context):
    samples = list(scenes.counting(context, split="train", size=300, label_miss_prob=0.3))
    missed = [sample.target.value - sample.label.value for sample in samples if sample.target.value]
    assert set(missed) == {0, 1}
    assert 0.22 < np.mean(missed) < 0.38
    assert all(sample.label.value == 0 for sample in samples if not sample.target.value)


@pytest.mark.parametrize("objects", ["photos", "shapes"])
def test_the_box_bounds_what_is_pasted(objects, context):
    for sample in scenes.grounding(context, split="train", size=40, background=0.0, max_objects=1, objects=objects):
        rows, columns = np.nonzero((pixels(sample.images[0]) != SCENE_GREY).any(axis=-1))
        assert sample.target.value == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert sample.target.coordinate_system is CoordinateSystem.PX_ORIGINAL
        assert all(corner % 4 == 0 for corner in sample.target.value)


def test_the_question_names_the_thing_in_the_box(context):
    for sample in scenes.grounding(context, split="train", size=40, objects="shapes"):
        named = {name: box for name, box in things(sample) if f" {name}." in sample.parts[1]}
        ((name, box),) = named.items()
        assert list(box) == sample.target.value
        x, y = (box[0] + box[2]) // 2, (box[1] + box[3]) // 2
        assert tuple(pixels(sample.images[0])[y, x]) == COLOURS[name.split()[0]]


def test_things_have_different_names_and_do_not_overlap(context):
    pairs = 0
    for sample in scenes.grounding(context, split="train", size=80, max_objects=3):
        for (name, a), (other, b) in itertools.combinations(things(sample), 2):
            pairs += 1
            assert name != other
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert pairs > 40


def test_careless_boxes_grow_and_stay_inside_the_picture(context):
    steps = []
    for sample in scenes.grounding(context, split="train", size=300, label_pad_px=3):
        x1, y1, x2, y2 = sample.target.value
        outward = np.subtract(sample.label.value, sample.target.value) * (-1, -1, 1, 1)
        free = np.array([x1, y1, 48 - x2, 48 - y2])
        assert ((outward >= 0) & (outward <= free)).all()
        steps += list(outward[free >= 3])
    assert set(steps) == {0, 3}
    assert 0.7 < np.mean(np.array(steps) == 3) < 0.8


def test_the_number_is_what_is_written(context):
    inks, values = zip(*load_handwritten_digits("test"), strict=True)
    known = np.stack([np.asarray(ink, dtype=float) for ink in inks])
    right = total = 0
    for sample in scenes.digits(context, split="test", size=60, background=0.0, min_length=1, length=2):
        placed = things(sample)
        assert sample.target == Target(answer_type=AnswerType.TEXT, value="".join(name for name, _ in placed))
        assert [box[0] for _, box in placed] == sorted(box[0] for _, box in placed)
        for name, box in placed:
            crop = Image.open(sample.images[0].path).convert("L").crop(box).resize((8, 8), Image.Resampling.BOX)
            ink = 255 - np.asarray(crop, dtype=float)
            match = values[int(np.abs(known - (ink - ink.min()) * (255 / np.ptp(ink))).sum(axis=(1, 2)).argmin())]
            right, total = right + (str(match) == name), total + 1
    assert total > 70
    assert right / total > 0.95


def test_annotators_give_up_on_some_readings(context):
    samples = list(scenes.digits(context, split="train", size=200, label_unclear_prob=0.4))
    assert all(sample.label.value in (sample.target.value, "unclear") for sample in samples)
    assert 0.3 < np.mean([sample.label.value == "unclear" for sample in samples]) < 0.5


@pytest.mark.parametrize("generate", GENERATORS)
def test_larger_pictures_work_in_every_split(generate, context):
    for split in SPLITS:
        (sample,) = generate(context, split=split, size=1, image_px=224)
        assert pixels(sample.images[0]).shape == (224, 224, 3)


def test_too_many_objects_for_the_image_are_refused(context, monkeypatch):
    monkeypatch.setattr("mmrl_datasets.generators.drawing.MAX_DRAWS", 100)
    with pytest.raises(UserError, match="do not fit into the image"):
        list(scenes.counting(context, split="train", size=50, max_count=60))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "work").write_text("a file, not a folder")
    context = DatasetContext(work_dir=tmp_path / "work", base_dir=tmp_path, seed=0)
    with pytest.raises(UserError, match="cannot write the file"):
        list(scenes.counting(context, split="train", size=1))


def test_the_example_dataset_yields_samples_and_rejected_rows(context):
    rows = load_function("./dataset.py:rows", ROOT / "examples", role="function")
    folder = context.base_dir / "meters"
    folder.mkdir()
    (folder / "1.jpg").write_bytes(b"an image")
    (folder / "train.csv").write_text("file,reading\n1.jpg,41.5\n2.jpg,7\n1.jpg,seven\n", encoding="utf-8")
    sample, without_image, without_number = rows(context, split="train", folder="meters")
    assert sample.target == Target(answer_type=AnswerType.NUMBER, value=41.5)
    assert sample.images[0].sha256 == hashlib.sha256(b"an image").hexdigest()
    assert "train.csv:3: there is no image" in without_image.reason
    assert "train.csv:4: reading 'seven' is not a number" in without_number.reason
    with pytest.raises(UserError, match="no such table"):
        list(rows(context, split="test", folder="meters"))


def test_the_example_dataset_is_read_by_data_make(tmp_path, monkeypatch, capsys):
    """The command checks options by the signature and reads the images through the run's media policy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meters").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "meters" / "1.png")
    (tmp_path / "meters" / "train.csv").write_text("file,reading\n1.png,41.5\n", encoding="utf-8")
    function = f"{ROOT / 'examples' / 'dataset.py'}:rows"
    assert main(["data", "make", function, "split=train", "folder=meters", "--out", "out"]) == 0
    assert main(["data", "make", function, "split=train", "floder=meters", "--out", "other"]) == 2
    assert "floder" in capsys.readouterr().err
