"""Boxes in space against scipy's half-spaces and drawn points; boxes with points against all matchings tried."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from factories import make_response, make_sample
from scipy.optimize import linprog
from scipy.spatial import ConvexHull, HalfspaceIntersection
from scipy.spatial.transform import Rotation

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, ResizeMap, Size
from mmrl_rewards import box3d, joint

SIZE = Size(840, 840)


def pair(target, answer, size=SIZE):
    text = f"<answer>{json.dumps(answer)}</answer>"
    parsed = ResponseFormat(thinking="optional").parse(text, AnswerType.JSON)
    response = make_response(text, parsed, resize_maps=(ResizeMap(size, size),))
    parts = (ImageRef(path="p.png", sha256=""), "?")
    sample = make_sample(target, AnswerType.JSON, parts=parts, coordinate_system=CoordinateSystem.PX_ORIGINAL)
    return response, sample


def half_spaces(numbers):
    """The planes of a box, [6, 4], of nine numbers with angles in half turns; scipy turns about x, y and z in turn."""
    centre, halves = np.array(numbers[:3]), np.array(numbers[3:6]) / 2
    axes = Rotation.from_euler("xyz", np.array(numbers[6:]) * 180, degrees=True).as_matrix()
    planes = []
    for axis, half in zip(axes.T, halves, strict=True):
        for side in (-1, 1):
            planes.append([*(side * axis), -(side * axis @ centre + half)])
    return np.array(planes)


def slow_iou(a, b):
    planes = np.vstack([half_spaces(a), half_spaces(b)])
    # The centre of the largest ball that fits between all planes.
    slack = np.c_[planes[:, :3], np.ones(len(planes))]
    bounds = [(None, None)] * 3 + [(0, None)]
    ball = linprog([0, 0, 0, -1], A_ub=slack, b_ub=-planes[:, 3], bounds=bounds)
    if ball.status or ball.x[3] < 1e-7:
        return 0.0
    shared = ConvexHull(HalfspaceIntersection(planes, ball.x[:3]).intersections).volume
    return shared / (np.prod(a[3:6]) + np.prod(b[3:6]) - shared)


def iou(target, answer, **options):
    return box3d.iou(*pair(target, answer), **options).value


def random_box(rng):
    return [*rng.uniform(-1, 1, 3), *rng.uniform(0.3, 3, 3), *rng.uniform(-1, 1, 3)]


def straight_box(rng):
    """Sides of whole numbers and quarter turns: faces often coincide or touch."""
    return [*map(float, rng.integers(-1, 2, 3)), *map(float, rng.integers(1, 4, 3)), *(rng.integers(-2, 3, 3) / 2)]


@pytest.mark.parametrize("make", [random_box, straight_box])
def test_volume_iou_equals_that_of_half_spaces_and_is_symmetric(make):
    rng = np.random.default_rng(0)
    overlapping = 0
    for _ in range(150):
        a, b = make(rng), make(rng)
        expected = slow_iou(a, b)
        overlapping += expected > 0
        # The half-spaces of scipy and the tolerance of the reward differ by up to 4e-10.
        assert iou(a, b) == pytest.approx(expected, abs=1e-8)
        assert iou(b, a) == pytest.approx(expected, abs=1e-8)
    assert overlapping > 80


def test_volume_iou_equals_the_share_of_drawn_points():
    rng = np.random.default_rng(1)
    for _ in range(5):
        a, b = random_box(rng), random_box(rng)
        points = np.c_[rng.uniform(-4, 4, (200_000, 3)), np.ones(200_000)]
        in_a, in_b = ((points @ half_spaces(box).T <= 0).all(axis=1) for box in (a, b))
        assert iou(a, b) == pytest.approx((in_a & in_b).sum() / (in_a | in_b).sum(), abs=0.03)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_volume_iou_does_not_depend_on_scale_place_or_the_frame(scale):
    rng = np.random.default_rng(2)
    for _ in range(40):
        a, b = random_box(rng), random_box(rng)
        scaled = [[*(scale * np.array(box[:6])), *box[6:]] for box in (a, b)]
        assert iou(*scaled) == pytest.approx(iou(a, b), abs=1e-6)
        frame = Rotation.from_euler("xyz", rng.uniform(-3, 3, 3))
        turned = []
        for box in (a, b):
            own = Rotation.from_euler("xyz", np.array(box[6:]) * np.pi)
            angles = (frame * own).as_euler("xyz") / np.pi
            turned.append([*(frame.apply(box[:3]) + 5.0), *box[3:6], *angles])
        assert iou(*turned) == pytest.approx(iou(a, b), abs=1e-6)


def test_volume_iou_of_nearly_equal_boxes_is_nearly_one():
    box = [0.3, -0.2, 4.0, 1.8, 1.5, 4.2, 0.1, 0.2, 0.3]
    for place in range(9):
        moved = [number + 1e-8 * (index == place) for index, number in enumerate(box)]
        assert iou(box, moved) == pytest.approx(1.0, abs=1e-6)


def slow_joint(answers, targets, diagonal):
    """The best sum of passed tests over all one-to-one matchings, divided by the larger count."""
    best = 0
    small, large = sorted([answers, targets], key=len)
    for chosen in itertools.permutations(large, len(small)):
        passed = 0
        for one, other in zip(small, chosen, strict=True):
            answer, target = (one, other) if small is answers else (other, one)
            (ax1, ay1, ax2, ay2), (tx1, ty1, tx2, ty2) = answer["bbox_2d"], target["bbox_2d"]
            cells = set(itertools.product(range(ax1, ax2), range(ay1, ay2)))
            others = set(itertools.product(range(tx1, tx2), range(ty1, ty2)))
            passed += len(cells & others) / len(cells | others) >= 0.4
            passed += (abs(ax1 - tx1) + abs(ay1 - ty1) + abs(ax2 - tx2) + abs(ay2 - ty2)) / 4 <= 0.05 * diagonal
            x, y = answer["point_2d"]
            is_near = math.dist((x, y), target["point_2d"]) <= 0.1 * diagonal
            passed += is_near and ax1 <= x <= ax2 and ay1 <= y <= ay2
        best = max(best, passed)
    return best / 3 / max(len(answers), len(targets))


def test_boxes_with_points_equal_all_matchings_tried():
    rng = random.Random(3)
    options = {"threshold": 0.4, "corners": 0.05, "radius": 0.1}
    found = set()
    for _ in range(150):
        lists = []
        for _ in range(2):
            objects = []
            for _ in range(rng.randint(1, 4)):
                (x1, x2), (y1, y2) = sorted(rng.sample(range(12), 2)), sorted(rng.sample(range(12), 2))
                objects.append({"bbox_2d": [x1, y1, x2, y2], "point_2d": [rng.randint(0, 12), rng.randint(0, 12)]})
            lists.append(objects)
        got = joint.boxes_and_points(*pair(*lists, size=Size(12, 9)), **options).value
        assert got == pytest.approx(slow_joint(lists[1], lists[0], 15.0))
        found.add(round(got, 3))
    assert len(found) > 5


def test_a_long_list_is_matched_in_bounded_time():
    many = [{"bbox_2d": [i, i, i + 50, i + 50], "point_2d": [i + 25, i + 25]} for i in range(400)]
    assert joint.boxes_and_points(*pair(many[:300], many)).value == pytest.approx(0.75)
