"""Targets of every answer type from the cells of a table."""

import pytest

from mmrl.types import Action, Region, UserError
from mmrl_datasets.formats.row import BadRowError
from mmrl_datasets.readers.answers import make_answer_spec

CUP = Region((1.0, 2.0, 30.0, 40.0), "cup")


@pytest.mark.parametrize(
    ("answer_type", "coordinates", "cell", "value"),
    [
        ("text", None, "a cat", "a cat"),
        ("choice", None, "b", "B"),
        ("number", None, -2.5, -2.5),
        ("number", None, " 007.50 ", 7.5),
        ("box", "px_original", [0, 1.5, 9, 8], [0, 1.5, 9, 8]),
        ("box", "px_original", "[1, 2, 30, 40]", [1, 2, 30, 40]),
        ("boxes", "px_original", [{"bbox_2d": [1, 2, 30, 40], "label": "cup"}], (CUP,)),
        ("boxes", "px_original", '[{"bbox_2d": [1, 2, 30, 40], "label": "cup"}]', (CUP,)),
        ("boxes", "norm_1000", "[[1, 2, 30, 40]]", (Region((1.0, 2.0, 30.0, 40.0)),)),
        ("point", "norm_1", "[0.5, 1]", (0.5, 1.0)),
        ("points", "px_original", [[3, 4]], (Region((3.0, 4.0)),)),
        ("span", None, "(1.5, 2)", (1.5, 2.0)),
        ("spans", None, [[0, 1], [2, 3]], ((0.0, 1.0), (2.0, 3.0))),
        ("permutation", None, [2, 1], (2, 1)),
        ("action", "norm_1000", '{"action": "click", "coordinate": [5, 6]}', Action("click", {"coordinate": [5, 6]})),
        ("list", None, ["a", "b"], ("a", "b")),
        ("json", None, {"a": 1}, {"a": 1}),
        ("json", None, '{"a": 1}', {"a": 1}),
        ("json", "norm_1000", '{"image": 2, "bbox_2d": [1, 2, 3, 4]}', {"image": 2, "bbox_2d": [1, 2, 3, 4]}),
        ("latex", None, r"$\frac{1}{2}$", r"\frac{1}{2}"),
        ("svg", None, " <svg/> ", "<svg/>"),
        ("tool_call", None, '{"name": "zoom", "arguments": {}}', Action("zoom", {})),
    ],
)
def test_cells_of_each_answer_type_become_values(answer_type, coordinates, cell, value):
    target = make_answer_spec(answer_type, coordinates).parse_target(cell, "answer")
    assert (target.answer_type, target.value, target.coordinate_system) == (answer_type, value, coordinates)


@pytest.mark.parametrize(
    ("answer_type", "coordinates", "cell", "reason"),
    [
        ("box", "norm_1000", [1, 2, 3], "must be four finite numbers"),
        ("box", "norm_1000", [1, 2, float("inf"), 4], "must be four finite numbers"),
        ("box", "norm_1000", "1,2,3,4", "must be four finite numbers"),
        ("box", "norm_1000", "[1,2,3,NaN]", "must be four finite numbers"),
        ("box", "norm_1000", [5, 2, 3, 4], "empty or inverted"),
        ("box", "norm_1000", [1, 2, 1, 4], "empty or inverted"),
        ("box", "norm_1000", [-1, 2, 3, 4], "lies outside the image"),
        ("box", "norm_1000", [1, 2, 1001, 4], "lies outside the image"),
        ("boxes", "px_original", [[1, 2, 30, float("nan")]], "not a box"),
        ("boxes", "px_original", [[30, 2, 1, 40]], "inverted or empty box"),
        ("boxes", "px_original", [[-1, 2, 30, 40]], "lies outside the image in coordinates px_original"),
        ("boxes", "norm_1000", [[1, 2, 30, 1001]], "lies outside the image in coordinates norm_1000"),
        ("boxes", "norm_1", None, "not a list"),
        ("point", "norm_1", [0.5, 1.5], "lies outside the image in coordinates norm_1"),
        ("action", "norm_1", {"action": "click", "coordinate": [5, 6]}, "lies outside the image"),
        ("span", None, [2, 1], "inverted"),
        ("permutation", None, [1, 3], "not each of 1 to 2 once"),
        ("list", None, "a, b", "not JSON"),
        ("json", None, "", "not JSON"),
        ("json", "norm_1", [{"time": 1, "bbox_2d": [0.1, 0.2, 0.3, 40]}], "lies outside the image in coordinates"),
        ("latex", None, "x^{2", "not one formula"),
        ("svg", None, "<svg><script/></svg>", "a <script>"),
        ("tool_call", None, {"name": "zoom"}, "not a tool call"),
    ],
)
def test_cells_without_an_answer_are_refused_by_type(answer_type, coordinates, cell, reason):
    with pytest.raises(BadRowError, match=reason) as caught:
        make_answer_spec(answer_type, coordinates).parse_target(cell, "answer")
    assert str(caught.value).startswith("answer ")


def test_boxes_of_corner_and_size_become_corners():
    spec = make_answer_spec("boxes", "px_original", "xywh")
    assert spec.parse_target('[{"bbox_2d": [1, 2, 29, 38], "label": "cup"}]', "answer").value == (CUP,)
    assert spec.parse_target([[1, 2, 29, 38]], "answer").value == (Region((1.0, 2.0, 30.0, 40.0)),)
    assert spec.parse_target(([1, 2, 29, 38],), "answer").value == (Region((1.0, 2.0, 30.0, 40.0)),)
    fenced = '```json\n[{"bbox_2d": [1, 2, 29, 38], "label": "cup"}]\n```'
    assert spec.parse_target(fenced, "answer").value == (CUP,)
    with pytest.raises(BadRowError, match="inverted or empty box"):
        spec.parse_target([[1, 2, -1, 38]], "answer")
    single = make_answer_spec("box", "norm_1", "xywh")
    assert single.parse_target([0.25, 0.5, 0.5, 0.25], "answer").value == [0.25, 0.5, 0.75, 0.75]
    for cell, reason in (([0.5, 0.5, 0.75, 0.25], "outside the image"), ([0.5, 0.5, 0.25, 0], "empty or inverted")):
        with pytest.raises(BadRowError, match=reason):
            single.parse_target(cell, "answer")


@pytest.mark.parametrize("answer_type", ["json", "action"])
def test_a_corner_and_size_are_refused_where_they_would_not_be_converted(answer_type):
    with pytest.raises(UserError, match=f"answer_type='{answer_type}' with box_format='xywh': only boxes of the types"):
        make_answer_spec(answer_type, "px_original", "xywh")
