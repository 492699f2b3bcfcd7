"""Geometric rewards against oracles: counted pixels and seconds, all matchings tried, pycocotools, scikit-image.

Values by hand, attacks and unusable targets are rows of the case tables.
"""

import itertools
import math
import random

import numpy as np
import pytest
from factories import make_answer, make_response, make_sample
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from skimage.measure import points_in_poly

from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Region, ResizeMap, Size, Unscorable
from mmrl_rewards import box, detect, geometry, point, span, video

SQUARE = (Size(100, 100),)
LIST_REWARDS = [detect.iou, detect.f1, detect.average_precision, detect.confidence]


def pair(
    answer_type, target, answer, *, system=CoordinateSystem.PX_ORIGINAL, sizes=SQUARE, resized=None, media_index=0
):
    """A response whose answer is parsed already, and its sample with images of these sizes."""
    resize_maps = tuple(map(ResizeMap, sizes, resized or sizes))
    response = make_response("", make_answer(answer), resize_maps=resize_maps, coordinate_system=system)
    is_timed = answer_type in (AnswerType.SPAN, AnswerType.SPANS)
    units = None if is_timed else CoordinateSystem.PX_ORIGINAL
    parts = (*(ImageRef(path="p.png", sha256="") for _ in sizes), "?")
    return response, make_sample(target, answer_type, parts=parts, coordinate_system=units, media_index=media_index)


def value(reward, answer_type, target, answer, options=None, **media):
    return reward(*pair(answer_type, target, answer, **media), **(options or {})).value


def regions(coordinates, labels=None, confidences=None):
    labels = labels or [""] * len(coordinates)
    confidences = confidences or [None] * len(coordinates)
    return tuple(Region(tuple(c), *more) for c, *more in zip(coordinates, labels, confidences, strict=True))


def random_box(rng, side=20):
    x1, x2 = sorted(rng.sample(range(side), 2))
    y1, y2 = sorted(rng.sample(range(side), 2))
    return (x1, y1, x2, y2)


def pixels(b):
    return {(x, y) for x in range(b[0], b[2]) for y in range(b[1], b[3])}


def jaccard(a, b):
    return len(a & b) / len(a | b)


def test_overlaps_equal_counted_pixels():
    rng = random.Random(0)
    for _ in range(300):
        a, b = random_box(rng), random_box(rng)
        hull = geometry.enclosing_box(a, b)
        iou = jaccard(pixels(a), pixels(b))
        assert geometry.iou(a, b) == pytest.approx(iou)
        assert value(box.iou, AnswerType.BOX, list(a), b) == pytest.approx(iou)
        unfilled = len(pixels(hull) - pixels(a) - pixels(b)) / len(pixels(hull))
        assert geometry.giou(a, b) == pytest.approx(iou - unfilled)
        centres = [((c[0] + c[2]) / 2, (c[1] + c[3]) / 2) for c in (a, b)]
        distance = math.dist(*centres) / math.dist(hull[:2], hull[2:])
        assert geometry.diou(a, b) == pytest.approx(iou - distance**2)


@pytest.mark.parametrize("measure", [geometry.iou, geometry.giou, geometry.diou])
def test_overlaps_are_symmetric_bounded_and_independent_of_scale_and_place(measure):
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = (np.concatenate([low, low + rng.uniform(0.1, 5, 2)]) for low in rng.uniform(0, 8, (2, 2)))
        overlap = measure(a, b)
        assert -1 < overlap <= geometry.iou(a, b) + 1e-12
        changed = [measure(b, a), measure(a * 37.5, b * 37.5), measure(a / 1000, b / 1000), measure(a + 11, b + 11)]
        assert changed == pytest.approx([overlap] * 4)
        assert measure(a, a) == pytest.approx(1)


def test_extreme_coordinates_earn_finite_values():
    huge = (0.0, 0.0, 1e9, 1e9)
    for reward in (box.iou, box.ladder, box.giou, box.diou):
        got = reward(*pair(AnswerType.BOX, [0, 0, 10, 10], huge, system=CoordinateSystem.NORM_1))
        assert 0 <= got.value < 0.01
        assert len(got.reason) < 250
    for reward in LIST_REWARDS:
        assert value(reward, AnswerType.BOXES, [[0, 0, 10, 10]], regions([huge, (-1e9, -1e9, 1e9, -1e8)])) < 0.01
    assert value(point.distance, AnswerType.POINT, [5, 5], huge[2:], {"falloff": "linear"}) == 0
    assert value(span.iou, AnswerType.SPAN, [1, 2], (0, 1e9)) < 0.01
    assert value(span.union_iou, AnswerType.SPANS, [[1, 2]], ((0, 1e9), (3, 1e9))) < 0.01
    for time, side in ((10**400, 1), (1.7e308, 1), (-1, 1), ("1", 1), (True, 1), (1, 1e308)):
        answer = [{"time": time, "bbox_2d": [0, 0, 1, side]}]
        assert value(video.tube, AnswerType.JSON, [{"time": 1, "bbox_2d": [0, 0, 1, 1]}], answer) == 0
    target = {"image": 1, "bbox_2d": [0, 0, 1, 1]}
    assert len(box.referring(*pair(AnswerType.JSON, target, target | {"image": 10**4000})).reason) < 250


def test_rounding_lifts_no_value_above_one():
    rng = random.Random(10)
    for _ in range(300):
        x, y, width, height = (rng.uniform(0.01, 99) for _ in range(4))
        same = (x, y, x + width, y + height)
        for answer in (same, (math.nextafter(x, 0), y, math.nextafter(x + width, 999), y + height)):
            for reward in (box.iou, box.giou, box.diou):
                assert 0.999 < value(reward, AnswerType.BOX, list(same), answer) <= 1
            target, answers = [same, (0, 0, 9, 9)], regions([answer, (0, 0, 9, 9)])
            for reward in (detect.iou, detect.f1, detect.average_precision):
                assert 0.999 < value(reward, AnswerType.BOXES, target, answers) <= 1
        assert value(span.iou, AnswerType.SPAN, same[::2], same[::2]) == 1
        assert value(span.f1, AnswerType.SPANS, (same[::2],), (same[::2],)) == 1


def test_coordinates_belong_to_the_image_of_the_target():
    sizes, resized = (Size(100, 100), Size(200, 400)), (Size(50, 50), Size(100, 100))
    media = {"sizes": sizes, "resized": resized, "system": CoordinateSystem.PX_RESIZED}
    target, answer = [0, 0, 50, 100], (0, 0, 25, 25)
    assert value(box.iou, AnswerType.BOX, target, answer, **media, media_index=1) == 1
    assert value(detect.f1, AnswerType.BOXES, [target], regions([answer]), **media, media_index=1) == 1
    assert value(point.distance, AnswerType.POINT, target[2:], answer[2:], **media, media_index=1) == 1
    assert value(point.f1, AnswerType.POINTS, [target[2:]], regions([answer[2:]]), **media, media_index=1) == 1
    assert value(box.iou, AnswerType.BOX, target, answer, **media, media_index=0) == 0.5
    with pytest.raises(Unscorable, match="medium 2, and the sample has 2"):
        value(box.iou, AnswerType.BOX, target, answer, **media, media_index=2)


def best_of_all_matchings(gains):
    """The largest sum of a one-to-one matching, by brute force."""
    answers, targets = gains.shape
    if answers < targets:
        return best_of_all_matchings(gains.T)
    columns = range(targets)
    return max(gains[rows, columns].sum() for rows in itertools.permutations(range(answers), targets))


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_matched_boxes_equal_the_best_of_all_matchings(threshold):
    rng = random.Random(1)
    for _ in range(150):
        answers, targets = ([random_box(rng, 8) for _ in range(rng.randint(1, 4))] for _ in range(2))
        names = [[rng.choice("ab") for _ in boxes] for boxes in (answers, targets)]
        ious = np.array([[geometry.iou(a, b) for b in targets] for a in answers])
        same = np.array([[a == b for b in names[1]] for a in names[0]])
        gains = np.where(same & (ious >= (threshold or 0)), ious, 0)
        given, gold = regions(answers, names[0]), regions(targets, names[1])
        mean = best_of_all_matchings(gains) / max(gains.shape)
        assert value(detect.iou, AnswerType.BOXES, gold, given, {"threshold": threshold}) == pytest.approx(mean)
        f1 = 2 * best_of_all_matchings(gains if threshold is None else gains > 0) / sum(gains.shape)
        assert value(detect.f1, AnswerType.BOXES, gold, given, {"threshold": threshold}) == pytest.approx(f1)


def random_detections(rng):
    """Targets and noisy answers of three labels, with confidences that all differ."""
    targets = [(random_box(rng, 60), rng.choice("abc")) for _ in range(rng.randint(1, 6))]
    copies = [target for target in targets for _ in range(rng.randint(0, 2))]
    answers = [(tuple(side + rng.uniform(-2, 2) for side in b), label) for b, label in copies]
    answers += [(random_box(rng, 60), rng.choice("abcd")) for _ in range(rng.randint(0, 4))]
    answers = [(b, label) for b, label in answers if b[0] < b[2] and b[1] < b[3]]
    confidences = rng.sample([number / 100 for number in range(100)], len(answers))
    return targets, answers, confidences


def coco_row(b, category, **fields):
    width, height = b[2] - b[0], b[3] - b[1]
    place = {"bbox": [b[0], b[1], width, height], "area": width * height}
    return {"image_id": 0, "category_id": category, "iscrowd": 0, **place, **fields}


def coco_average_precision(targets, answers, confidences):
    """What pycocotools finds; None where no answer has a label of the target."""
    labels = sorted({label for _, label in targets})
    found = zip(answers, confidences, strict=True)
    rows = [coco_row(b, labels.index(label), score=c) for (b, label), c in found if label in labels]
    if not rows:
        return None
    gold = COCO()
    gold.dataset = {
        "info": {},
        "images": [{"id": 0}],
        "categories": [{"id": number} for number, _ in enumerate(labels)],
        "annotations": [coco_row(b, labels.index(label), id=i + 1) for i, (b, label) in enumerate(targets)],
    }
    gold.createIndex()
    run = COCOeval(gold, gold.loadRes(rows), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return run.stats[0]


def test_average_precision_equals_pycocotools():
    rng = random.Random(3)
    num_between = 0
    for _ in range(60):
        targets, answers, confidences = random_detections(rng)
        expected = coco_average_precision(targets, answers, confidences)
        if expected is None:
            continue
        gold, given = regions(*zip(*targets, strict=True)), regions(*zip(*answers, strict=True), confidences)
        factor = min(1.0, len(gold) / len(given))  # ours alone counts superfluous boxes
        got = value(detect.average_precision, AnswerType.BOXES, gold, given)
        assert got == pytest.approx(expected * factor, abs=1e-9)
        num_between += 0.05 < expected < 0.95
    assert num_between > 25


@pytest.mark.parametrize("reward", LIST_REWARDS, ids=lambda reward: reward.name)
def test_the_order_of_boxes_has_no_effect(reward):
    rng = random.Random(4)
    for _ in range(60):
        targets, answers, confidences = random_detections(rng)
        if rng.random() < 0.5:
            confidences = [None] * len(answers)
        gold = regions(*zip(*targets, strict=True))
        given = list(regions([b for b, _ in answers], [label for _, label in answers], confidences))
        first = value(reward, AnswerType.BOXES, gold, tuple(given))
        rng.shuffle(given)
        assert value(reward, AnswerType.BOXES, gold[::-1], tuple(given)) == pytest.approx(first)


def test_point_in_region_equals_scikit_image():
    rng = np.random.default_rng(6)
    for _ in range(40):
        polygon = rng.uniform(0, 10, (rng.integers(3, 9), 2))  # outlines that cross themselves, too
        points = rng.uniform(0, 10, (50, 2))
        inside = [geometry.point_in_region(p, [polygon.tolist()]) for p in points]
        assert inside == points_in_poly(points, polygon).tolist()


def test_matched_points_equal_the_best_of_all_matchings():
    rng = random.Random(7)
    for _ in range(100):
        answers, targets = ([(rng.randrange(8), rng.randrange(8)) for _ in range(rng.randint(1, 4))] for _ in range(2))
        near = np.array([[math.dist(a, b) <= 0.02 * math.hypot(100, 100) for b in targets] for a in answers])
        got = value(point.f1, AnswerType.POINTS, list(map(list, targets)), regions(answers), {"radius": 0.02})
        assert got == pytest.approx(2 * best_of_all_matchings(near) / sum(near.shape))


def random_spans(rng):
    return [tuple(sorted(rng.sample(range(30), 2))) for _ in range(rng.randint(1, 4))]


def seconds(spans):
    return {second for start, end in spans for second in range(start, end)}


def test_spans_equal_counted_seconds():
    rng = random.Random(8)
    for _ in range(200):
        answers, targets = random_spans(rng), random_spans(rng)
        covered = jaccard(seconds(answers), seconds(targets))
        assert value(span.union_iou, AnswerType.SPANS, targets, tuple(answers)) == pytest.approx(covered)
        gains = np.array([[jaccard(seconds([a]), seconds([b])) for b in targets] for a in answers])
        assert value(span.iou, AnswerType.SPAN, targets[0], answers[0]) == pytest.approx(gains[0, 0])
        for threshold, matched in ((None, gains), (0.5, gains >= 0.5)):
            got = value(span.f1, AnswerType.SPANS, targets, tuple(answers), {"threshold": threshold})
            assert got == pytest.approx(2 * best_of_all_matchings(matched) / sum(gains.shape))


def test_a_tube_equals_counted_pixels_of_frames():
    rng = random.Random(9)
    for _ in range(60):
        a, b = ({time: random_box(rng) for time in rng.sample(range(8), rng.randint(1, 6))} for _ in range(2))
        answer, target = ([{"time": time, "bbox_2d": list(corners)} for time, corners in t.items()] for t in (a, b))
        shares = [jaccard(pixels(a[time]), pixels(b[time])) for time in a.keys() & b.keys()]
        expected = sum(shares) / len(a.keys() | b.keys())
        assert value(video.tube, AnswerType.JSON, target, answer) == pytest.approx(expected)
