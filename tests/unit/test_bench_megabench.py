"""MEGA-Bench's metrics against values worked out by hand, fields put together, and its mean over tasks."""

import pytest

from mmrl.bench.benches import BENCHES, judge, read
from mmrl.bench.items import Item, Response
from mmrl.bench.official.megabench import macro
from mmrl.bench.official.megabench_metrics import METRICS
from mmrl.types import UserError

CASES = [
    ("exact_str_match", "Paris", "Paris", 1.0),
    ("exact_str_match", "paris", "Paris", 0.0),
    ("exact_str_match", "(B) a pear", "B", 1.0),  # a letter is due: the first one said
    ("exact_str_match", "Best of all", "B", 1.0),  # even if it begins a word
    ("exact_str_match_case_insensitive", "paris", "Paris", 1.0),
    ("simple_str_match", "new-york.", "New York", 1.0),
    ("simple_str_match", "new-york!", "New York", 0.0),
    ("near_str_match", "Pariss", "Paris", 0.0),  # 1 - 1/6 is below 0.9
    ("near_str_match", "the constantinopel", "Constantinople", 13 / 14),  # one letter of fourteen changed places
    ("near_str_match", "cr\u00e8me br\u00fbl\u00e9e", "Creme Brulee", 1.0),
    ("normalized_similarity_damerau_levenshtein", "abdc", "abcd", 0.75),
    ("number_rel_diff_ratio", "90", "100", 0.9),
    ("number_rel_diff_ratio", "300", "100", 0.0),
    ("general_single_numerical_match", "x is 3.14", "3.14", 1.0),
    ("general_single_numerical_match", "101", "100", 1.0),
    ("general_single_numerical_match", "102", "100", 0.0),
    ("general_single_numerical_match", "a b", "AB", 1.0),
    ("boxed_single_numerical_match", "7", "7", 1.0),
    ("positive_int_match", "7", "7", 1.0),
    ("positive_int_match", "-7", "-7", 0.0),
    ("set_equality", '["a", "b"]', "b, a", 1.0),
    ("set_equality", "A, b", "b, a", 0.0),
    ("set_equality_case_insensitive", "A, b", "b, a", 1.0),
    ("str_set_equality_comma", "A, b", "b, a", 1.0),
    ("str_set_equality_line_break", "x\nY", "y\\nx", 1.0),
    ("jaccard_index", "a, b, c", "b, c, d", 0.5),
    ("jaccard_index", "[('a', 'b')]", "[['a', 'b'], ['c', 'd']]", 0.5),
    ("jaccard_index_case_insensitive", "A, b", "a, B, c", 2 / 3),
    ("set_precision", "a, b", "a", 0.5),
    ("sequence_equality", "a, b", "b, a", 0.0),
    ("sequence_equality", "[1, 2]", "[1, 2]", 1.0),
    ("sequence_equality_case_insensitive", "A, b", "a, B", 1.0),
    ("sequence_accuracy_case_insensitive", "a, X, C", "a, b, c", 2 / 3),
    ("sequence_accuracy_case_insensitive", "a", "a, b", 0.0),
    ("longest_common_list_prefix_ratio", "a, b, x", "a, b, c, d", 0.5),
    ("longest_common_list_prefix_ratio", "a, b, c, d", "a, b", 1.0),
    ("dict_equality", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', 1.0),
    ("dict_equality", '{"a": 1}', '{"b": 2, "a": 1}', 0.0),
    ("dict_precision", '{"a": 1, "b": 3}', '{"a": 1, "b": 2}', 0.5),
    ("dict_exact_str_match_agg_recall", '{"a": "x", "c": "z"}', '{"a": "x", "b": "y"}', 0.5),
    ("dict_set_equality_agg_jaccard", '{"a": "x, y", "c": "z"}', '{"a": "y, x", "b": "y"}', 1 / 3),
    ("dict_jaccard_agg_jaccard", '{"a": "x, y"}', '{"a": "x", "b": "y"}', 0.25),
    ("latex_expr_equality", r"\frac{1}{2}", "0.5", 1.0),
    ("nbbox_iou_single", "(0, 0, 1, 0.5)", "(0, 0, 1, 1)", 0.5),
    ("nbbox_iou_tuple", "[(0, 0, 1, 0.5), (0, 0, 1, 1)]", "[(0, 0, 1, 1), (2, 2, 3, 3)]", 0.75),
    ("nbbox_iou_sequence", "[(0, 0, 1, 0.5), (0, 0, 1, 1)]", "[(0, 0, 1, 1), (2, 2, 3, 3)]", 0.25),
    ("nbbox_iou_sequence", "[(0, 0, 1, 1)]", "[(0, 0, 1, 1), (2, 2, 3, 3)]", 0.0),
    ("xml_nbbox_iou_single", "<box>0, 0, 1, 0.5</box>", "<box>0, 0, 1, 1</box>", 0.5),
    ("xml_norm_point_in_bbox", "<point>0.5, 0.5</point>", "(0.4, 0.4, 0.6, 0.6)", 1.0),
    ("xml_norm_point_in_bbox", "<point>0.5, 0.5</point> or <point>0.5, 0.5</point>", "(0.4, 0.4, 0.6, 0.6)", 0.0),
    ("xml_norm_point_in_bbox", "(0.5, 0.5)", "(0.4, 0.4, 0.6, 0.6)", 0.0),
]


def credit(text, answer, **extra):
    asked = Item(id="1", kind="text", answer=answer, extra=extra)
    response = Response(id="1", text=text)
    return BENCHES["megabench"].credit(asked, response, read(asked, response))


@pytest.mark.parametrize(("metric", "said", "due", "expected"), CASES)
def test_a_metric(metric, said, due, expected):
    assert METRICS[metric](said, due) == pytest.approx(expected)
    assert credit(f"<answer>{said}</answer>", due, metric=metric) == pytest.approx(expected)


def test_every_metric_has_a_row():
    assert {metric for metric, *_ in CASES} == {*METRICS}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("said", ["", "[" * 9000, "{" * 50, "1e999", "\ud800", "<point>,</point>", "{'a': {1: 2}}"])
def test_no_metric_breaks(metric, said):
    assert 0.0 <= METRICS[metric](said, "[(0, 0, 1, 1)]") <= 1.0


def test_an_empty_set_is_precise_as_megabench_has_it():
    assert METRICS["set_precision"]("", "a") == 1.0
    assert METRICS["jaccard_index"]("", "a") == 0.0


FIELDS = {"metric": {"x": "exact_str_match", "y": "positive_int_match"}}


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ('```json\n{"x": "cat", "y": 3}\n```', {}, 1.0),
        ('So {"x": "cat", "y": 4}.', {}, 0.5),
        ("<think>{}</think>{'x': 'cat', 'y': 4}", {"function": "min"}, 0.0),
        ('{"x": "cat"}', {"function": "mean", "field_weights": {"x": 3, "y": 1}}, 0.75),
        ("cat", {}, 0.5),  # no object: the whole response, for each field
        ("", {}, 0.0),
    ],
)
def test_fields_are_put_together(text, how, expected):
    assert credit(text, {"x": "cat", "y": 3}, **FIELDS, aggregation=how) == pytest.approx(expected)


def test_strict_wants_every_field():
    asked = Item(id="1", kind="text", answer={"x": "cat", "y": 3}, extra=FIELDS)
    verdicts = [
        judge(BENCHES["megabench"], asked, Response(id="1", text=text)) for text in ('{"x": "Cat", "y": 3}', "cat")
    ]
    assert [(one.strict, one.compat, one.score) for one in verdicts] == [(True, False, 0.5), (False, False, 0.5)]


def test_points_are_due_in_the_boxes_of_the_context():
    context = {"bounding_boxes": ["(0.0, 0.0, 0.1, 0.1)", "(0.4, 0.4, 0.6, 0.6)"]}
    for point, right in (("0.5, 0.5", 1.0), ("0.3, 0.3", 0.0)):
        text = f"<answer><point>{point}</point></answer>"
        assert credit(text, "", metric={"p": "xml_norm_point_in_bbox"}, context=context) == right


def test_tasks_count_alike_however_many_questions_they_have():
    asked = [
        Item(id=str(n), kind="text", answer="a", extra={"metric": "exact_str_match", "task": "one" if n else "two"})
        for n in range(4)
    ]
    responses = [Response(id=item.id, text="a" if item.id == "0" else "b") for item in asked]
    judged = [(item, response, read(item, response)) for item, response in zip(asked, responses, strict=True)]
    assert macro(judged) == 0.5
    assert BENCHES["megabench"].overall == ("macro mean over tasks", macro)


def test_metrics_that_need_a_judge_are_refused():
    with pytest.raises(UserError, match="gpt_4o_as_judge"):
        credit("x", "x", metric="gpt_4o_as_judge")
