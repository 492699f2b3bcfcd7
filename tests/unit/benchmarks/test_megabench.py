"""MEGA-Bench's metrics against values worked out by hand, their aggregation over fields, the mean over tasks."""

import math

import pytest
from benchmark_rows import PNG_BASE64, read

from mmrl.benchmarks.grading import grade_response, score_responses
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.megabench.metrics import FIELD_METRICS
from mmrl.benchmarks.megabench.planning import parse_problem
from mmrl.benchmarks.registry import BENCHMARKS
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
    ("xml_norm_point_distance", "<point>0.1, 0.5</point>", "<point>0.4, 0.9</point>", 0.5),  # sides 0.3 and 0.4
    ("xml_norm_point_distance", "<point>0, 0</point>", "<point>1, 1</point>", 0.0),
    ("xml_norm_point_distance", "<point>1.1, 0.5</point>", "<point>1, 0.5</point>", 0.0),  # outside
    ("sequence_coords_similarity", "[(0.1, 0.5), (0, 0)]", "[(0.1, 0.5), (0, 0)]", 1.0),
    ("sequence_coords_similarity", "[(0, 0), (0, 0)]", "[(0.1, 0.1), (0, 0)]", (1 + math.exp(-1)) / 2),
    ("sequence_coords_similarity", "[(0, 0)]", "[(0, 0), (0, 0)]", 0.0),
    ("sequence_coords_similarity", "(0, 0)", "[(0, 0)]", 0.0),
    ("normalized_rmse", "0.53", "0.5", 0.7),
    ("normalized_rmse", "0.7", "0.5", 0.0),
    ("normalized_rmse", "about half", "0.5", 0.0),
    ("angle_seq_float_rmse", "[90, 44]", "[92, 45.0]", 0.85),  # off by 2 and 1 of 10 degrees
    ("angle_seq_float_rmse", "90, 45", "[92, 45]", 0.9),
    ("angle_seq_float_rmse", "[90]", "[90, 45]", 0.0),
    ("angle_seq_float_rmse", "[90, 'no']", "[90]", 0.0),
    ("dict_nbbox_iou_tuple_agg_jaccard", '{"a": [[0, 0, 1, 0.5]], "c": []}', '{"a": [[0, 0, 1, 1]]}', 0.25),
    ("chess_move_list_jaccard_index", "Qh7#, Nf3", "['Qh7', 'Rd1!']", 1 / 3),
    ("multi_ref_phrase", "a red-hat", "blue hat, a red hat", 1.0),
    ("multi_ref_phrase", "红帽", "蓝帽\uff0c红帽", 1.0),
    ("multi_ref_phrase", "hat", "blue hat, a red hat", 0.0),
    ("code_result_exact_str_match", "```\n3 4\n```", "```text\n3 4\n```", 1.0),
    ("code_result_exact_str_match", "3 5", "```\n3 4\n```", 0.0),
    ("text_with_latex_expr_equality", r"at rest, $\frac{1}{2}$", "At rest $0.5$", 1.0),
    ("text_with_latex_expr_equality", "moving $0.5$", "at rest $0.5$", 0.0),
    ("text_with_latex_expr_equality", "at rest $0.4$", "at rest $0.5$", 0.0),
    ("text_with_latex_expr_equality", "at rest", "at rest.", 1.0),
    ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1.0),
    # The right text is the hypothesis: 5 of 6 words, 4 of 5 pairs, 3 of 4 triples, 2 of 3 fours; as long as the other.
    ("bleu", "the cat sat on the rug", "the cat sat on the mat", (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25),
    # All of its 5 words are there, in a text of 6.
    ("bleu", "the cat sat on the mat", "the cat sat on the", math.exp(1 - 6 / 5)),
    ("bleu", "a dog", "the cat sat on the mat", 0.0),
]

DOMAIN = """(define (domain rooms) (:requirements :strips) ; doors are open
  (:predicates (at ?who ?where) (path ?from ?to))
  (:action move :parameters (?who - robot ?from ?to - room)
    :precondition (and (at ?who ?from) (path ?from ?to) (not (= ?from ?to)))
    :effect (and (at ?who ?to) (not (at ?who ?from))))
  (:action rest :parameters (?who) :precondition (at ?who hall) :effect (rested ?who)))"""
TASK = """(define (problem p) (:domain rooms) (:objects r - robot hall den loft - room)
  (:init (at r den) (path den hall) (path hall loft) (path hall den))
  (:goal (and (at r loft) (rested r))))"""
PLANS = [
    ("(move r den hall)\n(rest r)\n(move r hall loft)", 1.0),
    ("First:\n(move r den hall)\n  (rest r)\n(rest r)\n(move r hall loft)", 1.0),  # other lines are not looked at
    ("(move r den hall)\n(move r hall loft)", 0.0),  # never rested
    ("(rest r)\n(move r den hall)\n(move r hall loft)", 0.0),  # not in the hall yet
    ("(move r den loft)", 0.0),  # no path
    ("(move r den hall)\n(rest r)\n(move r den loft)", 0.0),  # no longer there
    ("(move r den)\n(fly r)", 0.0),
    ("", 0.0),
]


CONTEXT = {"domain_pddl": DOMAIN, "task_pddl": TASK}


def grade(text, answer, **meta):
    """Return the verdict on a response to an item with this answer, by the metrics of `meta`."""
    item = Item(id="1", answer_type="text", answer=answer, meta=meta)
    return grade_response(BENCHMARKS["megabench"], item, ItemResponse(id="1", text=text))


@pytest.mark.parametrize(("metric", "prediction", "reference", "score"), CASES)
def test_metric_scores_its_row(metric, prediction, reference, score):
    assert FIELD_METRICS[metric](prediction, reference) == pytest.approx(score)
    assert grade(f"<answer>{prediction}</answer>", reference, metric=metric).score == pytest.approx(score)


def test_every_metric_has_a_row():
    assert {metric for metric, *_ in CASES} | {"symbolic_planning_test"} == {*FIELD_METRICS}


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "score"),
    [
        # 6 + 4 words: 5 + 4 found; pairs 4 + 3 of 5 + 3, triples 3 + 2 of 4 + 2, fours 2 + 1 of 3 + 1.
        (
            *("bleu", ["the cat sat on the rug", "it is a dog"], ["the cat sat on the mat", "it is a dog"]),
            (9 / 10 * 7 / 8 * 5 / 6 * 3 / 4) ** 0.25,
        ),
        ("bleu", ["the cat"], ["the cat", "it is a dog"], 0.0),
        ("bleu", "x", ["x"], 0.0),
        ("bleu", [1], ["x"], 0.0),
        # Of an empty prediction every entry is right, as in MEGA-Bench.
        ("set_precision", "", "a", 1.0),
        ("jaccard_index", "", "a", 0.0),
    ],
)
def test_metric_of_lists_and_empty_values(metric, prediction, reference, score):
    assert FIELD_METRICS[metric](prediction, reference) == pytest.approx(score)


@pytest.mark.parametrize(("plan", "score"), PLANS)
def test_a_plan_is_scored_by_simulation(plan, score):
    assert FIELD_METRICS["symbolic_planning_test"](plan.split("\n"), CONTEXT) == score
    meta = {"metric": {"plan": "symbolic_planning_test"}, "context": CONTEXT}
    verdict = grade(f"<answer>{plan}</answer>", {"plan": "(as the authors did)"}, **meta)
    assert (verdict.strict, verdict.official) == (bool(score), bool(score))


def test_goal_may_be_one_fact():
    context = {"domain_pddl": DOMAIN, "task_pddl": TASK.replace("(and (at r loft) (rested r))", "(at r hall)")}
    assert FIELD_METRICS["symbolic_planning_test"]("(move r den hall)", context) == 1.0
    assert FIELD_METRICS["symbolic_planning_test"]("", context) == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *(({"domain_pddl": bad}, "PDDL|domain_pddl") for bad in (DOMAIN[:-1], DOMAIN + ")", "", "(define (domain r))")),
        ({"domain_pddl": f"{DOMAIN[:-1]} (:action))"}, "an action of PDDL has no name"),
        ({"domain_pddl": DOMAIN.replace("(not (at ?who ?from))", "(not)")}, r"\(not\) in PDDL has no fact to negate"),
        ({"task_pddl": "(define (problem p))"}, "no task_pddl with :init and :goal"),
    ],
)
def test_broken_planning_problem_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        parse_problem(CONTEXT | changed)
    with pytest.raises(UserError, match=message):
        FIELD_METRICS["symbolic_planning_test"]("(move r den hall)", CONTEXT | changed)


FIELDS = {"metric": {"x": "exact_str_match", "y": "positive_int_match"}}
CAT = {"x": "cat", "y": 3}
BOXES = {"bounding_boxes": ["(0.0, 0.0, 0.1, 0.1)", "(0.4, 0.4, 0.6, 0.6)"]}
IN_BOX = {"metric": {"p": "xml_norm_point_in_bbox"}, "context": BOXES}
SET, EXACT = {"metric": "set_equality"}, {"metric": "exact_str_match"}


@pytest.mark.parametrize(
    ("text", "answer", "meta", "strict", "score"),
    [
        # Fields are aggregated as the task says.
        ('```json\n{"x": "cat", "y": 3}\n```', CAT, FIELDS, True, 1.0),
        ('So {"x": "cat", "y": 4}.', CAT, FIELDS, False, 0.5),
        ("<think>{}</think>{'x': 'cat', 'y': 4}", CAT, FIELDS | {"aggregation": {"function": "min"}}, False, 0.0),
        ('{"x": "cat"}', CAT, FIELDS | {"aggregation": {"field_weights": {"x": 3, "y": 1}}}, False, 0.75),
        ("cat", CAT, FIELDS, False, 0.5),  # no object: the whole response, for each field
        ("", CAT, FIELDS, False, 0.0),
        # Strict wants every field, and accepts sets in any order, but no quirks.
        ('{"x": "Cat", "y": 3}', CAT, FIELDS, True, 0.5),
        ("<answer>b, a</answer>", "a, b", SET, True, 1.0),
        ("<answer>a, b, c</answer>", "a, b", EXACT, False, 0.0),
        (f"<answer>{'b, ' * 1500}a</answer>", "a, b", SET, True, 1.0),
        (f"<answer>b{'a' * 5000}</answer>", f"b{'a' * 5000}", EXACT, True, 1.0),
        ("<answer>Best of all</answer>", "B", EXACT, False, 1.0),
        # An announced answer may have several lines.
        (f"Hm.\n\nAnswer:\n{PLANS[0][0]}", "(gt)", {"metric": "symbolic_planning_test", "context": CONTEXT}, None, 1.0),
        ("Answer: x\nY", "y\nx", {"metric": "str_set_equality_line_break"}, None, 1.0),
        ("Answer: a\nb", "a\nb", {"metric": "simple_str_match"}, None, 1.0),
        ("Answer: a\nThat is what I see.", "a", {"metric": "simple_str_match"}, None, 1.0),
        # Points are compared with the boxes of the context.
        ("<answer><point>0.5, 0.5</point></answer>", "", IN_BOX, None, 1.0),
        ("<answer><point>0.3, 0.3</point></answer>", "", IN_BOX, None, 0.0),
    ],
)
def test_answer_is_scored_by_the_metrics_of_its_item(text, answer, meta, strict, score):
    verdict = grade(text, answer, **meta)
    assert verdict.score == pytest.approx(score)
    assert strict is None or verdict.strict is strict


HOSTILE = (
    *("", "[" * 9000, "{" * 50, "1e999", "\ud800", "<point>,</point>", "{'a': {1: 2}}", "[" + "9" * 4000 + "]"),
    *("[(NaN, 1e999)]", "[NaN]"),
)


@pytest.mark.parametrize("metric", FIELD_METRICS)
def test_no_metric_raises_on_hostile_text(metric):
    for text in HOSTILE:
        assert 0.0 <= FIELD_METRICS[metric](text, "[(0, 0, 1, 1)]") <= 1.0, text[:20]


def test_overall_score_is_the_mean_over_tasks():
    items = {}
    for id in "0123":
        meta = EXACT | {"task": "one" if id == "0" else "other"}
        items[id] = Item(id=id, answer_type="text", answer="a", meta=meta)
    responses = [ItemResponse(id=id, text="a" if id == "0" else "b") for id in items]
    run = score_responses(BENCHMARKS["megabench"], items, responses, {})
    assert run.overall_scores == {"macro mean over tasks": 0.5}


@pytest.mark.parametrize(
    ("answer", "meta", "problem"),
    [
        ("x", {}, "meta.metric is None; metrics that work by rule: exact_str_match"),
        ("x", {"metric": "gpt_4o_as_judge"}, "meta.metric is 'gpt_4o_as_judge'; metrics that work"),
        ("x", {"metric": {}, "aggregation": {"function": "min"}}, "meta.metric is {}"),
        ({"x": "cat"}, FIELDS, "scores the field 'y', and the answer has only x"),
        ({"x": "cat"}, EXACT, "scores the field '', and the answer has only x"),
        ("x", IN_BOX | {"context": {"boxes": []}}, "needs a list `bounding_boxes` in meta.context, which has boxes"),
        (CAT, FIELDS | {"aggregation": "mean"}, "meta.aggregation is 'mean'; give an object"),
        (CAT, FIELDS | {"aggregation": {"field_weights": {"x": "much"}}}, "meta.aggregation is {'field_weights'"),
        ("x", {"metric": "symbolic_planning_test"}, "meta.context holds no problem"),
        ("x", {"metric": "symbolic_planning_test", "context": CONTEXT | {"task_pddl": "("}}, "PDDL must be one"),
    ],
)
def test_question_that_no_metric_can_score_is_found_before_anything_is_generated(answer, meta, problem, tmp_path):
    image = f"data:image/png;base64,{PNG_BASE64}"
    row = {"id": "1", "question": "?", "answer": answer, "answer_type": "text", "images": image}
    good = row | {"id": "2", "answer": "x", "meta": EXACT}
    questions = read(tmp_path, "megabench", row | {"meta": meta}, good)
    assert problem in questions.problems["1"]
    assert [*questions.problems] == ["1"]
