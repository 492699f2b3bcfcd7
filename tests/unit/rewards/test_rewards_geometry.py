"""Geometric rewards against oracles: counting pixels and seconds, trying every matching, pycocotools; and attacks."""

import itertools
import math
import random

import numpy as np
import pytest
from factories import make_answer, make_response, make_sample
from skimage.measure import points_in_poly

from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Region, ResizeMap, Size, Unscorable
from mmrl_rewards import box, detect, geometry, point, span, video

SQUARE = (Size(100, 100),)
LISTS = [detect.iou, detect.f1, detect.average_precision, detect.confidence]


def pair(kind, target, answer, *, frame=CoordinateSystem.PX_ORIGINAL, sizes=SQUARE, resized=None, medium=0, meta=None):
    """A response whose answer is parsed already (None: unreadable), and its sample with pictures of these sizes."""
    resizes = tuple(ResizeMap(size, small) for size, small in zip(sizes, resized or sizes, strict=True))
    response = make_response("", make_answer(answer), resize_maps=resizes, coordinate_system=frame)
    timed = kind in (AnswerType.SPAN, AnswerType.SPANS, AnswerType.LIST)
    units = None if timed else CoordinateSystem.PX_ORIGINAL
    parts = (*(ImageRef(path="p.png", sha256="") for _ in sizes), "?")
    sample = make_sample(target, kind, parts=parts, coordinate_system=units, media_index=medium, meta=meta or {})
    return response, sample


def value(reward, kind, target, answer, *, options=None, **more):
    return reward(*pair(kind, target, answer, **more), **(options or {})).value


def regions(coordinates, labels=None, confidences=None):
    labels = labels or [""] * len(coordinates)
    confidences = confidences or [None] * len(coordinates)
    return tuple(Region(tuple(c), *more) for c, *more in zip(coordinates, labels, confidences, strict=True))


def random_box(rng, most=20):
    x1, x2 = sorted(rng.sample(range(most), 2))
    y1, y2 = sorted(rng.sample(range(most), 2))
    return (x1, y1, x2, y2)


def pixels(b):
    return {(x, y) for x in range(b[0], b[2]) for y in range(b[1], b[3])}


def jaccard(a, b):
    return len(a & b) / len(a | b)


def test_overlaps_equal_counting_pixels():
    rng = random.Random(0)
    for _ in range(300):
        a, b = random_box(rng), random_box(rng)
        union, hull = pixels(a) | pixels(b), pixels(geometry.enclosing_box(a, b))
        iou = jaccard(pixels(a), pixels(b))
        assert geometry.iou(a, b) == pytest.approx(iou)
        assert value(box.iou, AnswerType.BOX, list(a), b) == pytest.approx(iou)
        assert geometry.giou(a, b) == pytest.approx(iou - len(hull - union) / len(hull))
        centres = [((c[0] + c[2]) / 2, (c[1] + c[3]) / 2) for c in (a, b)]
        corners = [geometry.enclosing_box(a, b)[:2], geometry.enclosing_box(a, b)[2:]]
        assert geometry.diou(a, b) == pytest.approx(iou - math.dist(*centres) ** 2 / math.dist(*corners) ** 2)


@pytest.mark.parametrize("measure", [geometry.iou, geometry.giou, geometry.diou])
def test_overlaps_are_symmetric_bounded_and_independent_of_scale_and_place(measure):
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = (np.concatenate([low, low + rng.uniform(0.1, 5, 2)]) for low in rng.uniform(0, 8, (2, 2)))
        between = measure(a, b)
        assert -1 < between <= 1
        assert measure(b, a) == pytest.approx(between)
        assert measure(a * 37.5, b * 37.5) == pytest.approx(between)
        assert measure(a / 1000, b / 1000) == pytest.approx(between)
        assert measure(a + 11, b + 11) == pytest.approx(between)
        assert measure(a, a) == pytest.approx(1)
        assert max(geometry.giou(a, b), geometry.diou(a, b)) <= geometry.iou(a, b) + 1e-12


def test_giou_and_diou_of_disjoint_boxes_by_hand():
    a, b = (0, 0, 10, 10), (10, 0, 20, 10)
    assert geometry.giou(a, b) == 0  # side by side: the hull is the union
    assert geometry.diou(a, b) == pytest.approx(-(10**2) / (20**2 + 10**2))
    assert value(box.giou, AnswerType.BOX, a, (20, 0, 30, 10), options={"floor": -1.0}) == pytest.approx(1 / 3)


def test_extreme_coordinates_earn_finite_values():
    huge = (0.0, 0.0, 1e9, 1e9)
    for reward in (box.iou, box.ladder, box.giou, box.diou):
        term = reward(*pair(AnswerType.BOX, [0, 0, 10, 10], huge, frame=CoordinateSystem.NORM_1))
        assert 0 <= term.value < 0.01
        assert len(term.reason) < 250
    for reward in LISTS:
        assert value(reward, AnswerType.BOXES, [[0, 0, 10, 10]], regions([huge, (-1e9, -1e9, 1e9, -1e8)])) < 0.01
    assert value(point.distance, AnswerType.POINT, [5, 5], huge[2:], options={"falloff": "linear"}) == 0
    assert value(span.iou, AnswerType.SPAN, [1, 2], (0, 1e9)) < 0.01
    assert value(span.union_iou, AnswerType.SPANS, [[1, 2]], ((0, 1e9), (3, 1e9))) < 0.01
    for entry in ((10**400, 1), (1.7e308, 1), (-1, 1), ("1", 1), (True, 1), (1, 1e308)):
        answer = [{"time": entry[0], "bbox_2d": [0, 0, 1, entry[1]]}]
        assert value(video.tube, AnswerType.JSON, [{"time": 1, "bbox_2d": [0, 0, 1, 1]}], answer) == 0
    term = box.referring(
        *pair(AnswerType.JSON, {"image": 1, "bbox_2d": [0, 0, 1, 1]}, {"image": 10**4000, "bbox_2d": [0, 0, 1, 1]})
    )
    assert term.value == 0
    assert len(term.reason) < 250


def test_rounding_lifts_nothing_above_one():
    rng = random.Random(10)
    for _ in range(300):
        x, y, width, height = (rng.uniform(0.01, 99) for _ in range(4))
        same = (x, y, x + width, y + height)
        near = (math.nextafter(x, 0), y, math.nextafter(x + width, 999), y + height)
        for other in (same, near):
            for reward in (box.iou, box.giou, box.diou):
                assert 0.999 < value(reward, AnswerType.BOX, list(same), other) <= 1
            for reward in (detect.iou, detect.f1, detect.average_precision):
                assert (
                    0.999 < value(reward, AnswerType.BOXES, [same, (0, 0, 9, 9)], regions([other, (0, 0, 9, 9)])) <= 1
                )
        for reward, kind, target in ((span.iou, AnswerType.SPAN, same[::2]), (span.f1, AnswerType.SPANS, (same[::2],))):
            assert value(reward, kind, target, target) == 1


def test_coordinates_belong_to_their_medium():
    sizes, resized = (Size(100, 100), Size(200, 400)), (Size(50, 50), Size(100, 100))
    more = {"sizes": sizes, "resized": resized, "frame": CoordinateSystem.PX_RESIZED, "medium": 1}
    half, quarter = (0, 0, 50, 100), (0, 0, 25, 25)
    assert value(box.iou, AnswerType.BOX, [0, 0, 50, 100], quarter, **more) == 1
    assert value(detect.f1, AnswerType.BOXES, [[0, 0, 50, 100]], regions([quarter]), **more) == 1
    assert value(point.distance, AnswerType.POINT, [50, 100], (25, 25), **more) == 1
    assert value(point.f1, AnswerType.POINTS, [[50, 100]], regions([(25, 25)]), **more) == 1
    assert value(box.iou, AnswerType.BOX, list(half), quarter, **{**more, "medium": 0}) == 0.5
    with pytest.raises(Unscorable, match="medium 2, and the sample has 2"):
        value(box.iou, AnswerType.BOX, [0, 0, 50, 100], quarter, **{**more, "medium": 2})


def test_referring_needs_the_right_image_and_measures_in_it():
    sizes, resized = (Size(100, 100), Size(200, 400)), (Size(100, 100), Size(100, 100))
    target = {"image": 2, "bbox_2d": [0, 0, 50, 100]}
    more = {"sizes": sizes, "resized": resized, "frame": CoordinateSystem.PX_RESIZED}
    assert value(box.referring, AnswerType.JSON, target, {"image": 2, "bbox_2d": [0, 0, 25, 25]}, **more) == 1
    assert value(box.referring, AnswerType.JSON, target, {"image": 1, "bbox_2d": [0, 0, 25, 25]}, **more) == 0
    assert value(box.referring, AnswerType.JSON, target, {"image": 2, "bbox_2d": [25, 25, 0, 0]}, **more) == 0
    with pytest.raises(Unscorable, match="medium 2, and the sample has 2"):
        value(box.referring, AnswerType.JSON, {**target, "image": 3}, None, **more)


def best_by_trying_all(gains):
    """The largest sum of a one-to-one matching, by brute force."""
    answers, targets = gains.shape
    if answers < targets:
        return best_by_trying_all(gains.T)
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
        options = {"threshold": threshold}
        mean = best_by_trying_all(gains) / max(gains.shape)
        assert value(detect.iou, AnswerType.BOXES, gold, given, options=options) == pytest.approx(mean)
        total = best_by_trying_all(gains if threshold is None else gains > 0)
        assert value(detect.f1, AnswerType.BOXES, gold, given, options=options) == pytest.approx(
            2 * total / sum(gains.shape)
        )


def textbook_ap(answers, targets, threshold):
    """COCO's AP of one label at one threshold, written from its description. Answers are (box, confidence)."""
    free, hits = list(targets), []
    for b, _ in sorted(answers, key=lambda answer: -answer[1])[:100]:
        best = max(free, key=lambda target: geometry.iou(b, target), default=None)
        hits.append(best is not None and geometry.iou(b, best) >= threshold)
        if hits[-1]:
            free.remove(best)
    curve = [(sum(hits[:n]) / len(targets), sum(hits[:n]) / n) for n in range(1, len(hits) + 1)]
    recalls = np.linspace(0, 1, 101)
    return sum(max((precision for recall, precision in curve if recall >= level), default=0) for level in recalls) / 101


def random_detections(rng):
    """Targets and noisy answers of three labels, with confidences that all differ."""
    targets = [(random_box(rng, 60), rng.choice("abc")) for _ in range(rng.randint(1, 6))]
    copies = [target for target in targets for _ in range(rng.randint(0, 2))]
    answers = [(tuple(side + rng.uniform(-2, 2) for side in b), label) for b, label in copies]
    answers += [(random_box(rng, 60), rng.choice("abcd")) for _ in range(rng.randint(0, 4))]
    answers = [(b, label) for b, label in answers if b[0] < b[2] and b[1] < b[3]]
    confidences = rng.sample([number / 100 for number in range(100)], len(answers))
    return targets, answers, confidences


def ours(targets, answers, confidences):
    """Our AP without its penalty for extra boxes."""
    gold, given = regions(*zip(*targets, strict=True)), regions(*zip(*answers, strict=True), confidences)
    controlled = value(detect.average_precision, AnswerType.BOXES, gold, given)
    return controlled / min(1.0, len(gold) / len(given))


def test_average_precision_equals_the_textbook():
    rng = random.Random(2)
    seen = 0
    for _ in range(80):
        targets, answers, confidences = random_detections(rng)
        if not answers:
            continue
        labels = sorted({label for _, label in targets})
        expected = np.mean(
            [
                textbook_ap(
                    [(b, c) for (b, name), c in zip(answers, confidences, strict=True) if name == label],
                    [b for b, name in targets if name == label],
                    threshold,
                )
                for label in labels
                for threshold in geometry.COCO_THRESHOLDS
            ]
        )
        assert ours(targets, answers, confidences) == pytest.approx(expected, abs=1e-9)
        seen += 0.05 < expected < 0.95
    assert seen > 30


def test_average_precision_equals_pycocotools():
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    rng = random.Random(3)
    for _ in range(40):
        targets, answers, confidences = random_detections(rng)
        if not answers:
            continue
        labels = sorted({label for _, label in targets})
        gold = coco.COCO()
        gold.dataset = {
            "info": {},
            "images": [{"id": 0}],
            "categories": [{"id": number} for number, _ in enumerate(labels)],
            "annotations": [coco_row(b, labels.index(label), id=i + 1) for i, (b, label) in enumerate(targets)],
        }
        gold.createIndex()
        rows = [
            coco_row(b, labels.index(label), score=c)
            for (b, label), c in zip(answers, confidences, strict=True)
            if label in labels
        ]
        if not rows:
            continue
        run = evaluation.COCOeval(gold, gold.loadRes(rows), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
        assert ours(targets, answers, confidences) == pytest.approx(run.stats[0], abs=1e-9)


def coco_row(b, category, **more):
    width, height = b[2] - b[0], b[3] - b[1]
    place = {"bbox": [b[0], b[1], width, height], "area": width * height}
    return {"image_id": 0, "category_id": category, "iscrowd": 0, **place, **more}


def test_the_length_control_of_average_precision():
    gold = [[0, 0, 10, 10], [20, 20, 30, 30]]
    close = [(0, 0, 10, 9), (20, 20, 30, 29)]  # IoU 0.9
    spam = [(50 + i, 50, 60 + i, 60) for i in range(3)]
    options = {"thresholds": (0.5, 0.6, 0.7, 0.8, 0.95)}
    assert value(detect.average_precision, AnswerType.BOXES, gold, regions(close), options=options) == pytest.approx(
        0.8
    )
    controlled = value(detect.average_precision, AnswerType.BOXES, gold, regions(close + spam), options=options)
    assert controlled == pytest.approx(0.32)  # AP 0.8, two targets, five answers


def test_extra_boxes_before_or_after_earn_equally_little():
    gold = [[0, 0, 10, 10], [20, 20, 30, 30]]
    spam = [(50 + i, 50, 60 + i, 60) for i in range(40)]
    before, after = regions(spam + gold), regions(gold + spam)
    for reward in (detect.average_precision, detect.iou, detect.f1, detect.confidence):
        assert value(reward, AnswerType.BOXES, gold, before) == pytest.approx(
            value(reward, AnswerType.BOXES, gold, after)
        )
        assert value(reward, AnswerType.BOXES, gold, after) < 0.1
    assert value(detect.average_precision, AnswerType.BOXES, gold, after) == pytest.approx(2 / 42)


@pytest.mark.parametrize("reward", LISTS, ids=lambda reward: reward.name)
def test_the_order_of_boxes_does_not_matter(reward):
    rng = random.Random(4)
    for _ in range(60):
        targets, answers, confidences = random_detections(rng)
        if rng.random() < 0.5:
            confidences = [None] * len(answers)
        gold = regions(*zip(*targets, strict=True))
        given = list(regions([b for b, _ in answers], [label for _, label in answers], confidences))
        first = value(reward, AnswerType.BOXES, gold, tuple(given))
        rng.shuffle(given)
        assert value(reward, AnswerType.BOXES, gold, tuple(given)) == pytest.approx(first)
        assert value(reward, AnswerType.BOXES, tuple(reversed(gold)), tuple(given)) == pytest.approx(first)
        assert 0 <= first <= 1


@pytest.mark.parametrize("reward", [*LISTS, point.f1], ids=lambda reward: reward.name)
def test_none_is_right_where_there_is_none_and_only_there(reward):
    kind, entry = (AnswerType.POINTS, (5, 5)) if reward is point.f1 else (AnswerType.BOXES, (0, 0, 10, 10))
    assert value(reward, kind, [], ()) == 1
    assert value(reward, kind, [], regions([entry])) == 0
    assert value(reward, kind, [entry], ()) == 0
    assert value(reward, kind, [entry], None) == 0
    assert value(reward, kind, [entry], regions([entry])) == 1


@pytest.mark.parametrize("reward", [*LISTS, point.f1], ids=lambda reward: reward.name)
def test_two_hundred_entries_earn_little(reward):
    rng = random.Random(5)
    boxes = [random_box(rng, 100) for _ in range(197)]
    gold = [[10, 10, 30, 30], [40, 40, 60, 60], [70, 70, 90, 90]]
    if reward is point.f1:
        gold = [b[:2] for b in gold]
        assert value(reward, AnswerType.POINTS, gold, regions([*(b[:2] for b in boxes), *gold])) < 0.1
    else:
        assert value(reward, AnswerType.BOXES, gold, regions([*boxes, *gold])) < 0.1


def test_a_box_around_everything_earns_little():
    whole = (0, 0, 100, 100)
    for reward in (box.iou, box.ladder, box.giou, box.diou):
        assert value(reward, AnswerType.BOX, [10, 10, 30, 30], whole) < 0.1
    for reward in LISTS:
        assert value(reward, AnswerType.BOXES, [[10, 10, 30, 30], [60, 10, 90, 30]], regions([whole])) < 0.1


def test_labels_count_where_the_target_has_one():
    gold = [{"bbox_2d": [0, 0, 10, 10], "label": "Red Cup"}]
    for reward in LISTS:
        assert value(reward, AnswerType.BOXES, gold, regions([(0, 0, 10, 10)], [" red cup"])) == 1
        assert value(reward, AnswerType.BOXES, gold, regions([(0, 0, 10, 10)], ["dog"])) == 0
        assert value(reward, AnswerType.BOXES, gold, regions([(0, 0, 10, 10)])) == 0
        assert value(reward, AnswerType.BOXES, [[0, 0, 10, 10]], regions([(0, 0, 10, 10)], ["dog"])) == 1


def test_confidence_is_paid_only_through_boxes():
    gold = [[0, 0, 10, 10], [20, 20, 30, 30]]
    for sure in (0.0, 0.5, 1.0):
        wrong = regions([(50, 50, 60, 60)], confidences=[sure])
        assert value(detect.confidence, AnswerType.BOXES, gold, wrong) == 0
        right = regions(gold, confidences=[sure, sure])
        assert value(detect.confidence, AnswerType.BOXES, gold, right) == pytest.approx((1 + sure) / 2)
    honest = regions([*gold, (50, 50, 60, 60)], confidences=[1.0, 1.0, 0.0])
    bold = regions([*gold, (50, 50, 60, 60)], confidences=[1.0, 1.0, 1.0])
    assert value(detect.confidence, AnswerType.BOXES, gold, honest) == pytest.approx(2 / 3)
    assert value(detect.confidence, AnswerType.BOXES, gold, bold) == pytest.approx(2 / 3 * (1 + 2 / 3) / 2)


def test_point_in_region_equals_scikit_image():
    rng = np.random.default_rng(6)
    for _ in range(40):
        polygon = rng.uniform(0, 10, (rng.integers(3, 9), 2))  # outlines that cross themselves, too
        points = rng.uniform(0, 10, (50, 2))
        expected = points_in_poly(points, polygon)
        assert [
            geometry.point_in_region(p, [[tuple(vertex) for vertex in polygon]]) for p in points
        ] == expected.tolist()


def test_a_region_may_have_a_hole_and_repeating_a_point_does_not_pay():
    region = [[[0, 0], [40, 0], [40, 40], [0, 40]], [[10, 10], [30, 10], [30, 30], [10, 30]]]
    meta = {"region": region}
    assert value(point.in_region, AnswerType.POINTS, [[5, 5]], regions([(5, 5), (35, 20)]), meta=meta) == 1
    assert value(point.in_region, AnswerType.POINTS, [[5, 5]], regions([(5, 5), (20, 20)]), meta=meta) == 0.5
    assert value(point.in_region, AnswerType.POINTS, [[5, 5]], regions([(5, 5)] * 9 + [(20, 20)]), meta=meta) == 0.5
    assert value(point.in_region, AnswerType.POINTS, [[5, 5]], (), meta=meta) == 0


def test_matched_points_equal_the_best_of_all_matchings():
    rng = random.Random(7)
    for _ in range(100):
        answers, targets = ([(rng.randrange(8), rng.randrange(8)) for _ in range(rng.randint(1, 4))] for _ in range(2))
        near = np.array([[math.dist(a, b) <= 0.02 * math.hypot(100, 100) for b in targets] for a in answers])
        expected = 2 * best_by_trying_all(near) / sum(near.shape)
        found = value(
            point.f1, AnswerType.POINTS, [list(t) for t in targets], regions(answers), options={"radius": 0.02}
        )
        assert found == pytest.approx(expected)


def test_distance_falls_off_as_stated():
    diagonal = math.hypot(100, 100)
    for off in (0.0, 1.0, 5.0, 20.0):
        answer, share = (10 + off, 10), off / diagonal
        gaussian = value(point.distance, AnswerType.POINT, [10, 10], answer, options={"scale": 0.1})
        assert gaussian == pytest.approx(math.exp(-(share**2) / (2 * 0.1**2)))
        linear = value(point.distance, AnswerType.POINT, [10, 10], answer, options={"scale": 0.1, "falloff": "linear"})
        assert linear == pytest.approx(max(0, 1 - share / 0.1))


def random_spans(rng, most=4):
    return [tuple(sorted(rng.sample(range(30), 2))) for _ in range(rng.randint(1, most))]


def ticks(spans):
    return {tick for start, end in spans for tick in range(start, end)}


def test_spans_equal_counting_seconds():
    rng = random.Random(8)
    for _ in range(200):
        answers, targets = random_spans(rng), random_spans(rng)
        covered = jaccard(ticks(answers), ticks(targets))
        assert value(span.union_iou, AnswerType.SPANS, targets, tuple(answers)) == pytest.approx(covered)
        gains = np.array([[jaccard(ticks([a]), ticks([b])) for b in targets] for a in answers])
        soft = 2 * best_by_trying_all(gains) / sum(gains.shape)
        assert value(span.f1, AnswerType.SPANS, targets, tuple(answers)) == pytest.approx(soft)
        hard = 2 * best_by_trying_all(gains >= 0.5) / sum(gains.shape)
        assert value(span.f1, AnswerType.SPANS, targets, tuple(answers), options={"threshold": 0.5}) == pytest.approx(
            hard
        )
        assert value(span.iou, AnswerType.SPAN, targets[0], answers[0]) == pytest.approx(gains[0, 0])


def test_listing_every_second_earns_little():
    spans = tuple((start, start + 1) for start in range(200))
    assert value(span.f1, AnswerType.SPANS, [[10, 12]], spans) < 0.1
    assert value(span.union_iou, AnswerType.SPANS, [[10, 12]], spans) == pytest.approx(0.01)
    assert value(span.iou, AnswerType.SPAN, [10, 12], (0, 200)) == pytest.approx(0.01)
    frames = tuple(str(number) for number in range(200))
    assert value(video.frames, AnswerType.LIST, [7, 9], frames) < 0.1


def test_a_tube_equals_counting_pixels_of_frames():
    rng = random.Random(9)
    for _ in range(60):
        tubes = [{time: random_box(rng) for time in rng.sample(range(8), rng.randint(1, 6))} for _ in range(2)]
        answer, target = ([{"time": t, "bbox_2d": list(b)} for t, b in tube.items()] for tube in tubes)
        both, either = tubes[0].keys() & tubes[1].keys(), tubes[0].keys() | tubes[1].keys()
        shares = [jaccard(pixels(tubes[0][time]), pixels(tubes[1][time])) for time in both]
        assert value(video.tube, AnswerType.JSON, target, answer) == pytest.approx(sum(shares) / len(either))


def test_a_time_between_instants_goes_to_the_nearest():
    target = [{"time": time, "bbox_2d": [0, 0, 10, 10]} for time in (1, 2, 3)]
    halves = [{"time": time + 0.5, "bbox_2d": [0, 0, 10, 10]} for time in (0, 1, 2)]
    assert value(video.tube, AnswerType.JSON, target, halves) == 1
    assert value(video.tube, AnswerType.JSON, target, [*halves, halves[0]]) == 0  # an instant twice
    assert value(video.tube, AnswerType.JSON, target, halves, options={"step": 0.5}) == 0


def test_frames_are_matched_one_to_one():
    assert value(video.frames, AnswerType.LIST, [10, 20], ("10", "20")) == 1
    assert value(video.frames, AnswerType.LIST, ["10", 20], ("10",)) == pytest.approx(2 / 3)
    assert value(video.frames, AnswerType.LIST, [10, 20], ("10", "10")) == 0.5
    assert value(video.frames, AnswerType.LIST, [10, 20], ("11", "19"), options={"tolerance": 1}) == 1
    for unreadable in ("ten", "1_0", "１０", "nan", "1e1"):
        assert value(video.frames, AnswerType.LIST, [10], (unreadable,)) == 0


BROKEN_BOXES = [
    [0, 0, 10],
    [10, 0, 0, 10],
    [0, 0, 0, 10],
    [math.nan, 0, 10, 10],
    [0, 0, math.inf, 10],
    [0, 0, 1e-200, 1e-200],
    "box",
]


@pytest.mark.parametrize("broken", BROKEN_BOXES, ids=repr)
@pytest.mark.parametrize("answer", [None, "good"])
def test_a_broken_target_box_is_unscorable_whatever_the_answer(broken, answer):
    for reward in (box.iou, box.ladder, box.giou, box.diou, point.in_box):
        with pytest.raises(Unscorable):
            value(reward, AnswerType.BOX, broken, answer and (0, 0, 10, 10))
    for reward in LISTS:
        with pytest.raises(Unscorable):
            value(reward, AnswerType.BOXES, [[0, 0, 10, 10], broken], answer and regions([(0, 0, 10, 10)]))
    for reward, target, given in (
        (box.referring, {"image": 1, "bbox_2d": broken}, {"image": 1, "bbox_2d": [0, 0, 10, 10]}),
        (video.tube, [{"time": 0, "bbox_2d": broken}], [{"time": 0, "bbox_2d": [0, 0, 10, 10]}]),
    ):
        with pytest.raises(Unscorable):
            value(reward, AnswerType.JSON, target, answer and given)


@pytest.mark.parametrize(
    ("reward", "kind", "target", "meta"),
    [
        (point.distance, AnswerType.POINT, [math.nan, 1], {}),
        (point.f1, AnswerType.POINTS, [[1, math.inf]], {}),
        (point.in_box, AnswerType.POINT, [1, 1], {}),
        (point.in_box, AnswerType.POINT, [1, 1], {"box": [3, 3, 1, 1]}),
        (point.in_box, AnswerType.TEXT, "x", {}),
        (point.in_region, AnswerType.POINTS, [[1, 1]], {}),
        (point.in_region, AnswerType.POINTS, [[1, 1]], {"region": []}),
        (point.in_region, AnswerType.POINTS, [[1, 1]], {"region": [[[0, 0], [1, 1]]]}),
        (point.in_region, AnswerType.POINTS, [[1, 1]], {"region": [[[0, 0], [1, 1], [math.nan, 2]]]}),
        (span.iou, AnswerType.SPAN, [5, 5], {}),
        (span.iou, AnswerType.SPAN, [9, 5], {}),
        (span.iou, AnswerType.SPAN, [0, math.nan], {}),
        (span.union_iou, AnswerType.SPANS, [], {}),
        (span.f1, AnswerType.SPANS, [[1, 2], [4, 3]], {}),
        (video.tube, AnswerType.JSON, [], {}),
        (
            video.tube,
            AnswerType.JSON,
            [{"time": 0.6, "bbox_2d": [0, 0, 1, 1]}, {"time": 1, "bbox_2d": [0, 0, 1, 1]}],
            {},
        ),
        (video.frames, AnswerType.LIST, [], {}),
        (video.frames, AnswerType.LIST, ["ten"], {}),
    ],
)
def test_a_broken_target_is_unscorable_whatever_the_answer(reward, kind, target, meta):
    with pytest.raises(Unscorable):
        value(reward, kind, target, None, meta=meta)
