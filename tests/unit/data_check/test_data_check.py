"""The doctor's instruments: likeness, coordinates, repeats, histograms, and pixels put together from patches."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.config.schema import DataConfig
from mmrl.data_check.duplicates import find_repeated_questions, find_similar_images, find_training_overlap
from mmrl.data_check.fingerprints import find_most_similar, find_near_duplicates, image_fingerprint
from mmrl.data_check.lengths import draw_histograms, make_bins, summarize_lengths, text_histogram
from mmrl.data_check.report import FindingCode, Severity, severity_of
from mmrl.data_check.sample_view import find_outside_image
from mmrl.policy.encoder import unpatchify
from mmrl.policy.families import FAMILIES
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Region, ResizeMap, Sample, Size, Target


def photograph(seed: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """Something with structure at all scales."""
    rng = np.random.default_rng(seed)
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
        )
        for side in (3, 9, 40)
    ]
    return Image.fromarray(np.mean(layers, axis=0).astype(np.uint8))


def diagram(seed: int) -> Image.Image:
    """Thin lines on white."""
    from PIL import ImageDraw

    paper, rng = Image.new("RGB", (320, 240), "white"), np.random.default_rng(seed)
    ImageDraw.Draw(paper).polygon([tuple(point) for point in rng.integers(10, 230, (3, 2)).tolist()], None, "black", 2)
    return paper


def copies(picture: Image.Image) -> list[Image.Image]:
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=60)
    small = picture.resize((picture.width * 3 // 4, picture.height * 3 // 4), Image.Resampling.LANCZOS)
    return [Image.open(jpeg).convert("RGB"), small, picture.point(lambda value: round(20 + 0.9 * value))]


@pytest.mark.parametrize("draw", [photograph, diagram])
def test_copies_are_alike_and_other_pictures_are_not(draw):
    originals = [draw(seed) for seed in range(40)]
    marks = [image_fingerprint(each) for each in originals]
    assert find_near_duplicates(marks) == {}
    for number, original in enumerate(originals[:10]):
        for copy in copies(original):
            assert find_most_similar([image_fingerprint(copy)], marks) == {0: number}


def test_a_repeat_names_the_first_of_its_kind_across_blocks(monkeypatch):
    monkeypatch.setattr("mmrl.data_check.fingerprints._BLOCK_ROWS", 3)
    a, b, c, d, e, f = (image_fingerprint(photograph(seed)) for seed in range(6))
    assert find_near_duplicates([a, b, c, a, b, b, a]) == {3: 0, 4: 1, 5: 1, 6: 0}
    assert find_most_similar([c, a, a, b], [d, e, b, f, a]) == {1: 4, 2: 4, 3: 2}


def test_flat_pictures_are_like_nothing():
    white, black = (image_fingerprint(Image.new("RGB", (64, 64), colour)) for colour in ("white", "black"))
    assert find_near_duplicates([white, black, white]) == {}


def sample(name="a", *, question="Where?", sha="1", target=None, label=None) -> Sample:
    picture = ImageRef(path=f"{sha}.png", sha256=sha)
    target = target or Target(answer_type=AnswerType.NUMBER, value=1)
    return Sample(id=name, task="t", parts=(picture, question), target=target, label=label)


RESIZE = ResizeMap(original=Size(200, 100), resized=Size(100, 50))


@pytest.mark.parametrize(
    ("kind", "value", "frame", "faults"),
    [
        (AnswerType.BOX, [0, 0, 200, 100], CoordinateSystem.PX_ORIGINAL, 0),
        (AnswerType.BOX, [-1, 0, 201, 101], CoordinateSystem.PX_ORIGINAL, 0),  # within the slack of a pixel
        (AnswerType.BOX, [0, 0, 202, 100], CoordinateSystem.PX_ORIGINAL, 1),
        (AnswerType.BOX, [0, 0, 100, 102], CoordinateSystem.PX_ORIGINAL, 1),
        (AnswerType.BOX, [0, -2, 100, 50], CoordinateSystem.PX_ORIGINAL, 1),
        (AnswerType.BOX, [0, 0, 100, 50], CoordinateSystem.PX_RESIZED, 0),
        (AnswerType.BOX, [0, 0, 101, 50], CoordinateSystem.PX_RESIZED, 1),  # two pixels of the original
        (AnswerType.BOX, [0, 0, 1000, 1000], CoordinateSystem.NORM_1000, 0),
        (AnswerType.BOX, [0, 0, 1.02, 1], CoordinateSystem.NORM_1, 1),
        (AnswerType.BOX, [0, 0, float("nan"), 50], CoordinateSystem.PX_ORIGINAL, 1),
        (AnswerType.POINT, [200, 100], CoordinateSystem.PX_ORIGINAL, 0),
        (AnswerType.POINT, [100, 200], CoordinateSystem.PX_ORIGINAL, 1),
        (AnswerType.POINTS, (Region((1, 2)), Region((300, 2)), Region((1, 200))), CoordinateSystem.PX_ORIGINAL, 2),
        (AnswerType.BOXES, (Region((0, 0, 9, 9)), Region((0, 0, 999, 9))), CoordinateSystem.PX_ORIGINAL, 1),
    ],
)
def test_coordinates_outside_their_picture(kind, value, frame, faults):
    target = Target(answer_type=kind, value=value, coordinate_system=frame)
    assert len(list(find_outside_image(sample(target=target), [RESIZE]))) == faults
    good = Target(answer_type=AnswerType.BOX, value=[0, 0, 1, 1], coordinate_system=CoordinateSystem.NORM_1)
    assert len(list(find_outside_image(sample(target=good, label=target), [RESIZE]))) == faults


def test_an_answer_in_a_medium_that_is_not_there():
    target = Target(
        answer_type=AnswerType.BOX, value=[0, 0, 1, 1], coordinate_system=CoordinateSystem.NORM_1, media_index=1
    )
    assert list(find_outside_image(sample(target=target), [RESIZE, RESIZE])) == []
    assert list(find_outside_image(sample(target=target), [RESIZE])) == [
        "its answer lies in image or video 1 (counted from 0), and it has 1"
    ]


def test_repeated_questions():
    three = Target(answer_type=AnswerType.NUMBER, value=3)
    first, again = sample("a", question="How  many?"), sample("b", question="how many? ")
    other = sample("c", question="How many?", sha="2")
    against = sample("d", question="How many?", target=three)
    alarms = list(find_repeated_questions([first, again, other, against]))
    assert [(alarm.code, alarm.sample_id, alarm.other_id) for alarm in alarms] == [
        (FindingCode.DUPLICATE, "b", "a"),
        (FindingCode.CONTRADICTION, "d", "a"),
    ]


def test_what_training_shows_of_held_out_data():
    marks = {str(n): image_fingerprint(photograph(n)) for n in range(4)} | {
        "0b": image_fingerprint(copies(photograph(0))[0])
    }
    train = [sample("t0", sha="0"), sample("t1", sha="1"), sample("t1b", sha="1")]
    held_out = [
        sample("same", sha="1"),
        sample("medium", sha="1", question="What?"),
        sample("similar", sha="0b"),
        sample("fresh", sha="3"),
    ]
    alarms = list(find_training_overlap(held_out, train, marks))
    assert [(alarm.code, alarm.sample_id, alarm.other_id) for alarm in alarms] == [
        (FindingCode.LEAK, "same", "t1"),
        (FindingCode.SHARED_MEDIA, "medium", "t1"),
        (FindingCode.SHARED_MEDIA, "similar", "t0"),
    ]
    assert list(find_training_overlap([], train, marks)) == list(find_training_overlap(held_out, [], marks)) == []
    (alarm,) = find_similar_images([*train, sample("copy", sha="0b")], marks)
    assert (alarm.code, alarm.sample_id, alarm.other_id) == (FindingCode.NEAR_DUPLICATE, "copy", "t0")


def test_bins_cover_all_values_once():
    for values in (
        [5],
        [1, 2, 3],
        list(range(100)),
        [3, 3, 900],
        np.random.default_rng(0).integers(0, 5000, 300).tolist(),
    ):
        found = make_bins(values)
        assert len(found) <= 12
        assert sum(each.num_values for each in found) == len(values)
        for low, high, count in found:
            assert count == sum(low <= value <= high for value in values)
        assert len(text_histogram(values)) == len(found)


def test_summary_by_hand():
    told = summarize_lengths([*range(1, 101)])
    assert (told["min"], told["median"], told["p95"], told["max"], told["sum"]) == (1, 50, 95, 100, 5050)


def test_the_plot_has_a_bar_where_values_are_and_the_limit_in_red():
    plot = np.asarray(
        draw_histograms({"train": {"prompt tokens": [10] * 5 + [20] * 10, "visual tokens": []}}, {"prompt tokens": 15})
    )
    blue = (plot == (59, 130, 196)).all(axis=2)
    heights = blue.sum(axis=0)
    assert plot.shape == (260, 920, 3)
    assert heights.max() == pytest.approx(2 * heights[60], abs=2)  # the bar of 20 is twice that of 10
    assert not blue[:, 460:].any()
    assert (plot == (214, 69, 69)).all(axis=2).any()


def test_severity_follows_what_the_run_would_do():
    strict = DataConfig(train=({"fn": "a:b"},))
    lenient = strict.model_copy(update={"on_bad_sample": "skip", "on_too_long": "skip"})
    for code in (FindingCode.ROW, FindingCode.MEDIA, FindingCode.TEXT, FindingCode.TOO_LONG):
        assert (severity_of(code, strict), severity_of(code, lenient)) == (Severity.ERROR, Severity.WARNING)
    assert severity_of(FindingCode.LEAK, lenient) is Severity.ERROR
    assert severity_of(FindingCode.DUPLICATE, strict) is Severity.WARNING


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_become_the_picture_they_were_cut_from(make_tiny, family, tmp_path):
    tiny = make_tiny(family)
    original = photograph(1, (64, 32))  # 4 x 2 tokens of 16 pixels: nothing is resized
    images, image_format = tiny.processor.hf_processor.image_processor, tiny.processor.encoder.image_format
    encoded = images([original], do_resize=False, return_tensors="pt")
    grid = tuple(encoded["image_grid_thw"][0].tolist())
    frames = unpatchify(encoded["pixel_values"], grid, image_format, images)
    assert frames.shape == (2, 32, 64, 3)
    assert torch.equal(frames[0], frames[1])
    assert np.array_equal(frames[0].numpy(), np.asarray(original))
