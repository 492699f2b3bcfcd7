"""Parts of the data check: similar images, coordinates, repeats, histograms, and pixels put together from patches."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from factories import make_sample
from PIL import Image, ImageDraw

from mmrl.config.schema import DataConfig
from mmrl.data_check.duplicates import find_repeated_questions, find_similar_images, find_training_overlap
from mmrl.data_check.fingerprints import find_most_similar, find_near_duplicates, image_fingerprint
from mmrl.data_check.lengths import draw_histograms, make_bins, summarize_lengths, text_histogram
from mmrl.data_check.report import FindingCode, Severity, severity_of
from mmrl.data_check.sample_view import find_outside_image
from mmrl.policy.encoder import unpatchify
from mmrl.policy.families import FAMILIES
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Region, ResizeMap, Sample, Size


def photograph(seed: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """Something with structure at all scales."""
    rng = np.random.default_rng(seed)
    layers = []
    for side in (3, 9, 40):
        noise = Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8))
        layers.append(np.asarray(noise.resize(size, Image.Resampling.BICUBIC)))
    return Image.fromarray(np.mean(layers, axis=0).astype(np.uint8))


def diagram(seed: int) -> Image.Image:
    """Thin lines on white."""
    paper, rng = Image.new("RGB", (320, 240), "white"), np.random.default_rng(seed)
    ImageDraw.Draw(paper).polygon([tuple(point) for point in rng.integers(10, 230, (3, 2)).tolist()], None, "black", 2)
    return paper


def copies(picture: Image.Image) -> list[Image.Image]:
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=60)
    small = picture.resize((picture.width * 3 // 4, picture.height * 3 // 4), Image.Resampling.LANCZOS)
    return [Image.open(jpeg).convert("RGB"), small, picture.point(lambda value: round(20 + 0.9 * value))]


@pytest.mark.parametrize("draw", [photograph, diagram])
def test_copies_are_similar_and_other_images_are_not(draw):
    originals = [draw(seed) for seed in range(40)]
    fingerprints = [image_fingerprint(each) for each in originals]
    assert find_near_duplicates(fingerprints) == {}
    for number, original in enumerate(originals[:10]):
        for copy in copies(original):
            assert find_most_similar([image_fingerprint(copy)], fingerprints) == {0: number}


def test_a_repeat_names_the_first_of_its_kind_across_blocks(monkeypatch):
    monkeypatch.setattr("mmrl.data_check.fingerprints._BLOCK_ROWS", 3)
    a, b, c, d, e, f = (image_fingerprint(photograph(seed)) for seed in range(6))
    assert find_near_duplicates([a, b, c, a, b, b, a]) == {3: 0, 4: 1, 5: 1, 6: 0}
    assert find_most_similar([c, a, a, b], [d, e, b, f, a]) == {1: 4, 2: 4, 3: 2}


def test_images_of_one_colour_are_similar_to_none():
    white, black = (image_fingerprint(Image.new("RGB", (64, 64), colour)) for colour in ("white", "black"))
    assert find_near_duplicates([white, black, white]) == {}


def sample(name="a", *, question="Where?", sha="1", **fields) -> Sample:
    return make_sample(id=name, parts=(ImageRef(path=f"{sha}.png", sha256=sha), question), **fields)


def boxed(value, coordinate_system, answer_type=AnswerType.BOX, media_index=0) -> Sample:
    system = CoordinateSystem(coordinate_system)
    return sample(value=value, answer_type=answer_type, coordinate_system=system, media_index=media_index)


RESIZE = ResizeMap(original=Size(200, 100), resized=Size(100, 50))


@pytest.mark.parametrize(
    ("answer_type", "value", "coordinate_system", "num_outside"),
    [
        ("box", [0, 0, 200, 100], "px_original", 0),
        ("box", [-1, 0, 201, 101], "px_original", 0),  # within the tolerance of a pixel
        ("box", [0, 0, 202, 100], "px_original", 1),
        ("box", [0, 0, 100, 102], "px_original", 1),
        ("box", [0, -2, 100, 50], "px_original", 1),
        ("box", [0, 0, 100, 50], "px_resized", 0),
        ("box", [0, 0, 101, 50], "px_resized", 1),  # two pixels of the original
        ("box", [0, 0, 1000, 1000], "norm_1000", 0),
        ("box", [0, 0, 1.02, 1], "norm_1", 1),
        ("box", [0, 0, float("nan"), 50], "px_original", 1),
        ("point", [200, 100], "px_original", 0),
        ("point", [100, 200], "px_original", 1),
        ("points", (Region((1, 2)), Region((300, 2)), Region((1, 200))), "px_original", 2),
        ("boxes", (Region((0, 0, 9, 9)), Region((0, 0, 999, 9))), "px_original", 1),
    ],
)
def test_answers_and_labels_outside_their_image_are_found(answer_type, value, coordinate_system, num_outside):
    answered = boxed(value, coordinate_system, AnswerType(answer_type))
    assert len(list(find_outside_image(answered, [RESIZE]))) == num_outside
    labelled = replace(boxed([0, 0, 1, 1], "norm_1"), label=answered.target)
    assert len(list(find_outside_image(labelled, [RESIZE]))) == num_outside


def test_an_answer_in_an_image_that_does_not_exist_is_found():
    answered = boxed([0, 0, 1, 1], "norm_1", media_index=1)
    assert list(find_outside_image(answered, [RESIZE, RESIZE])) == []
    (message,) = find_outside_image(answered, [RESIZE])
    assert message == "its answer lies in image or video 1 (counted from 0), but the sample has 1"


@pytest.mark.parametrize(
    ("box", "system", "num_outside"),
    [
        ([310, 210, 330, 230], "px_original", 0),
        ([10, 10, 20, 20], "px_original", 1),
        ([310, 210, 345, 230], "px_original", 1),
        ([0, 0, 1000, 1000], "norm_1000", 0),
    ],
)
def test_pixels_in_a_crop_count_from_the_corner_of_the_larger_image(box, system, num_outside):
    crop = ResizeMap(Size(40, 30), Size(56, 28), offset=(300, 200))
    assert len(list(find_outside_image(boxed(box, system), [crop]))) == num_outside


def test_other_crops_and_frames_of_one_file_are_other_questions():
    whole = sample("a")
    samples = [whole]
    for number, shown in enumerate(
        [{"crop": (0, 0, 4, 4)}, {"crop": (4, 4, 8, 8)}, {"timestamp": 1.0}, {"timestamp": 2.0}, {"fps": 2.0}]
    ):
        parts = [replace(part, **shown) if isinstance(part, ImageRef) else part for part in whole.parts]
        samples.append(replace(whole, id=f"part {number}", parts=tuple(parts)))
    assert list(find_repeated_questions(samples)) == []
    overlaps = find_training_overlap(samples[1:], samples[:1], {})
    assert {finding.code for finding in overlaps} == {FindingCode.SHARED_MEDIA}
    (again,) = find_repeated_questions([samples[1], replace(samples[1], id="again")])
    assert again.code is FindingCode.DUPLICATE


def test_repeated_and_contradicting_questions_are_found():
    first, again = sample("a", question="How  many?"), sample("b", question="how many? ")
    other = sample("c", question="How many?", sha="2")
    against = sample("d", question="How many?", value=4)
    findings = list(find_repeated_questions([first, again, other, against]))
    assert [(finding.code, finding.sample_id, finding.other_id) for finding in findings] == [
        (FindingCode.DUPLICATE, "b", "a"),
        (FindingCode.CONTRADICTION, "d", "a"),
    ]


def test_held_out_questions_and_media_that_training_shows_are_found():
    fingerprints = {str(n): image_fingerprint(photograph(n)) for n in range(4)}
    fingerprints["0b"] = image_fingerprint(copies(photograph(0))[0])
    train = [sample("t0", sha="0"), sample("t1", sha="1"), sample("t1b", sha="1")]
    held_out = [sample("same", sha="1"), sample("medium", sha="1", question="What?")]
    held_out += [sample("similar", sha="0b"), sample("fresh", sha="3")]
    findings = list(find_training_overlap(held_out, train, fingerprints))
    assert [(finding.code, finding.sample_id, finding.other_id) for finding in findings] == [
        (FindingCode.LEAK, "same", "t1"),
        (FindingCode.SHARED_MEDIA, "medium", "t1"),
        (FindingCode.SHARED_MEDIA, "similar", "t0"),
    ]
    assert not list(find_training_overlap([], train, fingerprints))
    assert not list(find_training_overlap(held_out, [], fingerprints))
    (finding,) = find_similar_images([*train, sample("copy", sha="0b")], fingerprints)
    assert (finding.code, finding.sample_id, finding.other_id) == (FindingCode.NEAR_DUPLICATE, "copy", "t0")


RANDOM_LENGTHS = np.random.default_rng(0).integers(0, 5000, 300).tolist()


@pytest.mark.parametrize("values", [[5], [1, 2, 3], list(range(100)), [3, 3, 900], RANDOM_LENGTHS])
def test_bins_cover_all_values_once(values):
    bins = make_bins(values)
    assert len(text_histogram(values)) == len(bins) <= 12
    assert sum(bin_.num_values for bin_ in bins) == len(values)
    for low, high, count in bins:
        assert count == sum(low <= value <= high for value in values)


def test_summary_by_hand():
    summary = summarize_lengths(range(1, 101))
    del summary["bins"]
    assert summary == {"min": 1, "median": 50, "p95": 95, "max": 100, "sum": 5050}


def test_the_histogram_has_bars_where_values_are_and_the_limit_in_red():
    lengths = {"prompt tokens": [10] * 5 + [20] * 10, "visual tokens": []}
    plot = np.asarray(draw_histograms({"train": lengths}, {"prompt tokens": 15}))
    blue = (plot == (59, 130, 196)).all(axis=2)
    heights = blue.sum(axis=0)
    assert plot.shape == (260, 920, 3)
    assert heights.max() == pytest.approx(2 * heights[60], abs=2)  # the bar of 20 is twice that of 10
    assert not blue[:, 460:].any()
    assert (plot == (214, 69, 69)).all(axis=2).any()


def test_severity_follows_what_the_run_would_do():
    strict = DataConfig(train=({"fn": "a:b"},))
    lenient = strict.model_copy(update={"on_bad_sample": "skip", "on_too_long": "skip"})
    for code in (*(FindingCode.ROW, FindingCode.MEDIA, FindingCode.UNSCORABLE, FindingCode.TEXT), FindingCode.TOO_LONG):
        assert (severity_of(code, strict), severity_of(code, lenient)) == (Severity.ERROR, Severity.WARNING)
    assert severity_of(FindingCode.LEAK, lenient) is Severity.ERROR
    assert severity_of(FindingCode.DUPLICATE, strict) is Severity.WARNING


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_become_the_image_that_they_were_cut_from(make_tiny, family, tmp_path):
    tiny = make_tiny(family)
    original = photograph(1, (64, 32))  # 4 x 2 tokens of 16 pixels: nothing is resized
    images, image_format = tiny.processor.hf_processor.image_processor, tiny.processor.encoder.image_format
    encoded = images([original], do_resize=False, return_tensors="pt")
    grid = tuple(encoded["image_grid_thw"][0].tolist())
    frames = unpatchify(encoded["pixel_values"], grid, image_format, images)
    assert frames.shape == (2, 32, 64, 3)
    assert torch.equal(frames[0], frames[1])
    assert np.array_equal(frames[0].numpy(), np.asarray(original))
