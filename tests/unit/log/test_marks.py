"""Marks: where the resize map puts a box, a point or a span of an answer."""

import pytest

from mmrl.log.rollout_records import make_marks, parse_resize_map
from mmrl.types import ResizeMap, Size

MAP = ResizeMap(Size(200, 100), Size(112, 56))


@pytest.mark.parametrize(
    ("frame", "box"),
    [
        ("px_original", [50, 25, 150, 50]),
        ("px_resized", [28, 14, 84, 28]),
        ("norm_1", [0.25, 0.25, 0.75, 0.5]),
        ("norm_1000", [250, 250, 750, 500]),
    ],
)
def test_a_box_is_where_its_coordinate_system_and_the_resize_map_put_it(frame, box):
    (mark,) = make_marks("box", box, frame, 1, MAP)
    assert mark | {"shape": "box", "medium": 1, "label": "", "second": None} == mark
    assert mark["at"] == pytest.approx([0.25, 0.25, 0.75, 0.5])


def test_original_pixels_of_a_crop_count_from_the_larger_image():
    crop = ResizeMap(Size(100, 50), Size(56, 28), (100, 0))
    (mark,) = make_marks("box", [100, 0, 150, 25], "px_original", 0, crop)
    assert mark["at"] == pytest.approx([0, 0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("answer_type", "value", "expected"),
    [
        ("point", [100, 50], [("point", [0.5, 0.5], "")]),
        ("boxes", [[[0, 0, 100, 50], "cat", None]], [("box", [0, 0, 0.5, 0.5], "cat")]),
        (
            "points",
            [[[100, 50], "", 0.5], [[200, 100], "dog", None]],
            [("point", [0.5, 0.5], ""), ("point", [1, 1], "dog")],
        ),
        ("action", ["click", {"coordinate": [100, 50], "button": "left"}], [("point", [0.5, 0.5], "click")]),
        ("json", [{"bbox_2d": [0, 0, 100, 50], "label": "x"}], [("box", [0, 0, 0.5, 0.5], "")]),
        ("span", [1, 2.5], [("span", [1.0, 2.5], "")]),
        ("spans", [[1, 2], [3, 4]], [("span", [1.0, 2.0], ""), ("span", [3.0, 4.0], "")]),
        ("text", "[1, 2, 3, 4]", []),
        ("box", None, []),
    ],
)
def test_each_answer_type_has_its_marks(answer_type, value, expected):
    marks = make_marks(answer_type, value, "px_original", 0, MAP)
    assert [(mark["shape"], pytest.approx(mark["at"]), mark["label"]) for mark in marks] == expected


@pytest.mark.parametrize(
    ("answer_type", "value"),
    [
        ("box", [1, 2, 3]),
        ("box", ["a", 2, 3, 4]),
        ("box", [10**400, 2, 3, 4]),
        ("box", {"x": 1}),
        ("boxes", [[1, 2, 3, 4]]),
        ("boxes", 5),
        ("action", ["click", {"coordinate": 3}]),
        ("action", ["click"]),
        ("span", ["x", "y"]),
        ("spans", [[1]]),
    ],
)
def test_a_value_that_is_not_of_its_type_has_no_marks(answer_type, value):
    assert make_marks(answer_type, value, "px_original", 0, MAP) == []


def test_boxes_over_time_have_their_seconds():
    tube = [{"time": 0, "bbox_2d": [0, 0, 100, 50]}, {"time": 1.5, "bbox_2d": [100, 50, 200, 100]}]
    marks = make_marks("json", tube, "px_original", 0, MAP)
    assert [(mark["second"], mark["at"]) for mark in marks] == [(0.0, [0, 0, 0.5, 0.5]), (1.5, [0.5, 0.5, 1, 1])]
    (mark,) = make_marks("json", {"time": "noon", "bbox_2d": [0, 0, 100, 50]}, "px_original", 0, MAP)
    assert mark["second"] is None


def test_an_unknown_coordinate_system_or_a_missing_resize_map_gives_no_boxes():
    assert make_marks("box", [1, 2, 3, 4], "miles", 0, MAP) == []
    assert make_marks("box", [1, 2, 3, 4], None, 0, MAP) == []
    assert make_marks("box", [1, 2, 3, 4], "norm_1", 0, None) == []


def test_resize_maps_are_parsed_from_records_or_not_at_all():
    assert parse_resize_map({"original": [200, 100], "resized": [112, 56], "offset": [0, 0]}) == MAP
    for damaged in ({}, {"original": [0, 100], "resized": [1, 1]}, {"original": 3, "resized": [1, 1]}):
        assert parse_resize_map(damaged) is None
