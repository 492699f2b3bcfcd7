"""Responses in every style (tags, boxed, JSON): splitting, reported problems, rendering, instruction, hostile text."""

import random
import re

import pytest
from waiting import bounded

from mmrl.answer import COORDINATE_TYPES, ResponseFormat, ResponseSection, validate_value
from mmrl.types import Action, AnswerType, CoordinateSystem, Region, Target, UserError

NONE, TAGS, REQUIRED = (ResponseFormat(thinking=thinking) for thinking in ("none", "optional", "required"))
BOXED, JSON = (ResponseFormat(thinking="optional", style=style) for style in ("boxed", "json"))
BOXED_NONE, BOXED_REQUIRED = (ResponseFormat(thinking=thinking, style="boxed") for thinking in ("none", "required"))
OBSERVE = ResponseFormat(
    thinking="required", sections=(ResponseSection("observe"), ResponseSection("rethink", False, True))
)
PLAN = ResponseFormat(style="json", thinking="required", sections=(ResponseSection("plan"),))
TOOL = ResponseFormat(answer_tag="tool_call", thinking="optional")

PROBLEMS = [
    # format, text, the problems, the worst first (None: any), and the number that is the answer's value
    (NONE, "<answer>3</answer>", (), 3),
    (NONE, "\n<answer>3</answer> \n", (), 3),
    (NONE, "<think>a</think><answer>3</answer>", ("thinking not asked for",), 3),
    (TAGS, "<answer>3</answer>", (), 3),
    (TAGS, "<think>a</think><answer>3</answer>", (), 3),
    (REQUIRED, " <think>\na\n</think>\n<answer>3</answer>\n", (), 3),
    (REQUIRED, "<answer>3</answer>", ("no thinking",), 3),
    (REQUIRED, "<think> </think><answer>3</answer>", ("empty thinking",), 3),
    (REQUIRED, "<think>a</think><think>b</think><answer>3</answer>", ("2 thoughts",), 3),
    (NONE, "", ("no answer tag",), None),
    (NONE, "3", ("no answer tag",), None),
    (NONE, "<ANSWER>3</ANSWER>", ("no answer tag",), None),
    (NONE, "<answer>3", ("no answer tag", "<answer> never closed"), None),
    (NONE, "3</answer>", ("no answer tag", "stray </answer>"), None),
    (NONE, "<answer></answer>", ("empty answer",), None),
    (NONE, "<answer>x</answer>", ("not a number: 'x'",), None),
    (NONE, "<answer>3</answer><answer>3</answer>", ("two answers",), None),
    (NONE, "<answer>3</answer>" * 3, ("3 answers",), None),
    (NONE, "<answer>3</answer> or 4", ("text after the answer",), None),
    (NONE, "so <answer>3</answer>", ("text outside the tags",), 3),
    (TAGS, "<think>a</think> so <answer>3</answer>", ("text outside the tags",), 3),
    (TAGS, "<answer>3</answer><think>a</think>", ("text after the answer",), None),
    (TAGS, "<answer><think>a</think>3</answer>", None, None),
    (TAGS, "<answer><answer>3</answer></answer>", None, None),
    (TAGS, "<think><answer>3</answer></think>", None, None),
    (TAGS, "<think><answer>3</answer>", None, None),
    (TAGS, "<think><think>a</think><answer>3</answer></think>", None, None),
    (TAGS, "<think><answer>3</answer></think><answer>4</answer>", None, 4),
    (TAGS, "<think>a<think>b</think>c</think><answer>4</answer>", None, 4),
    (BOXED_NONE, r"So it is \boxed{4}.", (), 4),
    (BOXED_NONE, r"$\boxed{4}$", (), 4),
    (BOXED_NONE, r"\[\boxed{4}\]", (), 4),
    (BOXED_NONE, r"\boxed{\text{4}}", (), 4),
    (BOXED_NONE, "4", (r"no \boxed answer",), None),
    (BOXED_NONE, r"\boxed{4} and then \boxed{3}", ("two answers",), None),
    (BOXED_NONE, r"\boxed{4} or 3", ("text after the answer",), None),
    (BOXED_NONE, r"\boxed{\boxed{4}}", (r"\boxed inside \boxed",), None),
    (BOXED_NONE, r"\boxed{4", (r"no \boxed answer", r"\boxed never closed"), None),
    (BOXED_NONE, r"<think>a</think>\boxed{4}", ("thinking not asked for",), 4),
    (BOXED, r"<think>\boxed{3} { </think> so \boxed{4}", (), 4),
    (BOXED, r"<think>\boxed{4}</think>", (r"no \boxed answer",), None),
    (BOXED, r"<think>\boxed{4}", (r"no \boxed answer", "<think> never closed"), None),
    (BOXED_REQUIRED, r"\boxed{4}", ("no thinking",), 4),
    (JSON, '{"think": "a", "answer": 4}', (), 4),
    (JSON, '```json\n{"answer": "4"}\n```', (), 4),
    (JSON, '{"answer": 4, "sure": true}', ("fields after the answer", "unknown field 'sure'"), None),
    (JSON, '{"sure": true, "answer": 4}', ("unknown field 'sure'",), 4),
    (JSON, '{"think": 3, "answer": 4}', ("'think' is not text",), 4),
    (JSON, '{"think": "", "answer": 4}', ("empty thinking",), 4),
    (JSON, '{"answer": 4, "answer": 5}', ("no JSON object: a key that appears twice in one object",), None),
    (JSON, '{"answer": null}', ("empty answer",), None),
    (JSON, '{"thinking": "4"}', ("no field 'answer'", "unknown field 'thinking'"), None),
    (JSON, 'so {"answer": 4}', ("no JSON object: not JSON",), None),
    (JSON, "[4]", ("no JSON object",), None),
    (JSON, "", ("no JSON object: not JSON",), None),
    (OBSERVE, "<observe>o</observe><think>t</think><answer>4</answer>", (), 4),
    (OBSERVE, "<observe>o</observe>\n<think>t</think><rethink>r</rethink><answer>4</answer>", (), 4),
    (OBSERVE, "<think>t</think><answer>4</answer>", ("no <observe>",), 4),
    (OBSERVE, "<think>t</think><observe>o</observe><answer>4</answer>", ("parts out of order",), 4),
    (OBSERVE, "<observe> </observe><think>t</think><answer>4</answer>", ("empty <observe>",), 4),
    (OBSERVE, "<observe>o</observe>" * 2 + "<think>t</think><answer>4</answer>", ("2 <observe>",), 4),
    (OBSERVE, "<observe>o</observe><think>t</think><answer>4</answer>!", ("text after the answer",), None),
    (OBSERVE, "<observe><answer>4</answer></observe><think>t</think>", None, None),
]


@pytest.mark.parametrize(("response_format", "text", "problems", "value"), PROBLEMS)
def test_parse_gives_value_and_problems(response_format, text, problems, value):
    answer = response_format.parse(text, AnswerType.NUMBER)
    assert answer.value == value
    assert answer.problems if problems is None else answer.problems == problems


@pytest.mark.parametrize(
    ("answer_type", "text", "value"),
    [
        (AnswerType.LATEX, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (AnswerType.LATEX, r"\boxed{\{1\}}", r"\{1\}"),
        (AnswerType.CHOICE, r"\boxed{\text{(B)}}", "B"),
        (AnswerType.CHOICE, r"\boxed{Apple}", None),
    ],
)
def test_box_may_hold_balanced_braces(answer_type, text, value):
    assert BOXED.parse(text, answer_type).value == value


@pytest.mark.parametrize(
    ("response_format", "text", "thinking", "sections"),
    [
        (REQUIRED, "<think> a </think><answer> x </answer>", " a ", {}),
        (TAGS, "<answer>3</answer>", None, {}),
        (OBSERVE, "<observe>o</observe><think>t</think><answer>4</answer>", "t", {"observe": "o"}),
        (
            OBSERVE,
            "<rethink>r</rethink><observe>a</observe><observe>b</observe>",
            None,
            {"rethink": "r", "observe": "a"},
        ),
        (OBSERVE, "", None, {}),
        (BOXED, r"<think>t</think>So \boxed{4}", "t", {}),
        (PLAN, '{"plan": "p", "think": "t", "answer": 4}', "t", {"plan": "p"}),
    ],
)
def test_parse_keeps_the_text_of_sections(response_format, text, thinking, sections):
    answer = response_format.parse(text, AnswerType.NUMBER)
    assert (answer.thinking, answer.sections) == (thinking, sections)


def make_target(answer_type, value, coordinate_system=None):
    return Target(answer_type=answer_type, value=value, coordinate_system=coordinate_system)


RESIZED, NORM_1, NORM_1000 = CoordinateSystem.PX_RESIZED, CoordinateSystem.NORM_1, CoordinateSystem.NORM_1000
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><circle cx="3" cy="4" r="1"/></svg>'
TARGETS = [
    # target, and the text of its answer
    (make_target(AnswerType.TEXT, "Stop sign"), "Stop sign"),
    (make_target(AnswerType.CHOICE, "B"), "B"),
    (make_target(AnswerType.NUMBER, 3), "3"),
    (make_target(AnswerType.NUMBER, 3.0), "3"),
    (make_target(AnswerType.NUMBER, -2.5), "-2.5"),
    (make_target(AnswerType.BOX, [1, 2, 3, 4], RESIZED), "[1, 2, 3, 4]"),
    (
        make_target(AnswerType.BOXES, [{"bbox_2d": [1, 2, 3, 4], "label": "cup"}, [5, 6, 7, 8]], NORM_1000),
        '[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}, {"bbox_2d": [5, 6, 7, 8]}]',
    ),
    (make_target(AnswerType.BOXES, [], NORM_1000), "[]"),
    (make_target(AnswerType.POINT, [0.25, 0.5], NORM_1), "[0.25, 0.5]"),
    (
        make_target(AnswerType.POINTS, [Region((3, 4), "cup", 0.5)], RESIZED),
        '[{"point_2d": [3, 4], "label": "cup", "confidence": 0.5}]',
    ),
    (make_target(AnswerType.SPAN, [12.5, 20]), "[12.5, 20]"),
    (make_target(AnswerType.SPANS, [[0, 1], [2.25, 4]]), "[[0, 1], [2.25, 4]]"),
    (make_target(AnswerType.PERMUTATION, [3, 1, 2]), "[3, 1, 2]"),
    (
        make_target(AnswerType.ACTION, {"action": "type", "text": "hi {there}"}, RESIZED),
        '{"action": "type", "text": "hi {there}"}',
    ),
    (
        make_target(AnswerType.ACTION, Action("click", {"coordinate": [10, 20]}), RESIZED),
        '{"action": "click", "coordinate": [10, 20]}',
    ),
    (make_target(AnswerType.LIST, ["a", "b, c"]), '["a", "b, c"]'),
    (make_target(AnswerType.JSON, {"a": [1, None, "é"]}), '{"a": [1, null, "é"]}'),
    (
        make_target(AnswerType.JSON, {"image": 2, "bbox_2d": [1, 2, 3, 4]}, RESIZED),
        '{"image": 2, "bbox_2d": [1, 2, 3, 4]}',
    ),
    (make_target(AnswerType.LATEX, r"\frac{1}{2}"), r"\frac{1}{2}"),
    (make_target(AnswerType.SVG, SVG), SVG),
    (
        make_target(AnswerType.TOOL_CALL, {"name": "zoom", "arguments": {"bbox_2d": [1, 2, 3, 4]}}),
        '{"name": "zoom", "arguments": {"bbox_2d": [1, 2, 3, 4]}}',
    ),
]


def test_targets_cover_every_answer_type():
    assert {target.answer_type for target, _ in TARGETS} == set(AnswerType)


@pytest.mark.parametrize("response_format", [TAGS, BOXED, JSON, OBSERVE, PLAN], ids=["tags", "boxed", "json", "o", "p"])
@pytest.mark.parametrize(("target", "text"), TARGETS, ids=[f"{target.answer_type}" for target, _ in TARGETS])
def test_rendered_target_parses_back(response_format, target, text):
    example = response_format.build_example(target)
    assert response_format.parse(example, target.answer_type).problems == ()
    if response_format.sections:
        return
    for thinking in (None, "hm, {well}"):
        answer = response_format.parse(response_format.render(target, thinking), target.answer_type)
        assert answer.value == validate_value(target.answer_type, target.value)
        assert (answer.problems, answer.thinking) == ((), thinking)
    assert NONE.render(target, thinking="left out") == TAGS.render(target) == f"<answer>{text}</answer>"
    assert REQUIRED.render(target, "hm") == f"<think>hm</think><answer>{text}</answer>"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (make_target(AnswerType.BOX, (1.4, 2, 30.6, 40), RESIZED), "[1, 2, 31, 40]"),
        (make_target(AnswerType.BOX, [0, 0.25, 0.5, 1], NORM_1), "[0, 0.25, 0.5, 1]"),
    ],
)
def test_rendered_coordinates_are_rounded(target, text):
    assert NONE.render(target) == f"<answer>{text}</answer>"


@pytest.mark.parametrize(
    ("response_format", "target", "thinking", "message"),
    [
        (REQUIRED, make_target(AnswerType.NUMBER, 3), None, "cannot be written as an answer: no thinking"),
        (REQUIRED, make_target(AnswerType.NUMBER, 3), "a</think>b", "stray </think>"),
        (REQUIRED, make_target(AnswerType.NUMBER, float("nan")), "hm", "not a number: 'nan'"),
        (REQUIRED, make_target(AnswerType.NUMBER, True), "hm", "not a number: 'True'"),
        (REQUIRED, make_target(AnswerType.TEXT, ""), "hm", "empty answer"),
        (REQUIRED, make_target(AnswerType.TEXT, "a</answer>"), "hm", "text after the answer"),
        (REQUIRED, make_target(AnswerType.BOX, (3, 2, 1, 4)), "hm", "inverted or empty box"),
        (REQUIRED, make_target(AnswerType.BOX, (float("nan"), 2, 1, 4)), "hm", "not a box"),
        (REQUIRED, make_target(AnswerType.BOX, None), "hm", "not a box: 'None'"),
        (OBSERVE, make_target(AnswerType.NUMBER, 4), "t", "no <observe>"),
    ],
)
def test_target_that_would_not_parse_is_refused(response_format, target, thinking, message):
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match=message):
            response_format.render(target, thinking)


def test_thinking_with_tags_is_everything_before_the_answer():
    opening = "<observe>o</observe><think>t</think>"
    assert OBSERVE.render(make_target(AnswerType.NUMBER, 4), opening) == f"{opening}<answer>4</answer>"


def test_tool_call_may_have_its_own_answer_tag():
    zoom = Action("zoom", {"factor": 2})
    text = '<think>a</think><tool_call>{"name": "zoom", "arguments": {"factor": 2}}</tool_call>'
    assert TOOL.parse(text, AnswerType.TOOL_CALL).value == zoom
    assert TOOL.render(make_target(AnswerType.TOOL_CALL, zoom), "a") == text


@pytest.mark.parametrize(
    ("response_format", "sentence"),
    [
        (NONE, "Answer as <answer>number</answer>."),
        (TAGS, "Answer as <answer>number</answer>; you may think first in <think>...</think>."),
        (REQUIRED, "Think first, then answer: <think>...</think><answer>number</answer>."),
        (BOXED_NONE, r"Answer as \boxed{number}."),
        (ResponseFormat(style="json", thinking="required"), 'Answer as {"think": "...", "answer": number}.'),
        (
            OBSERVE,
            "Answer as <observe>...</observe><think>...</think><rethink>...</rethink><answer>number</answer>; "
            "rethink may be left out.",
        ),
        (
            ResponseFormat(thinking="required", think_tag="thought", answer_tag="action"),
            "Think first, then answer: <thought>...</thought><action>number</action>.",
        ),
    ],
)
def test_instruction_describes_the_format(response_format, sentence):
    assert response_format.instruction(AnswerType.NUMBER, NORM_1000) == sentence


@pytest.mark.parametrize("answer_type", AnswerType)
def test_instruction_states_units_of_coordinates_and_times(answer_type):
    sentence = TAGS.instruction(answer_type, NORM_1000)
    assert ("coordinates from 0 to 1000" in sentence) == (answer_type in COORDINATE_TYPES)
    assert ("in pixels" in TAGS.instruction(answer_type, RESIZED)) == (answer_type in COORDINATE_TYPES)
    assert ("</answer>, in seconds;" in sentence) == (answer_type in (AnswerType.SPAN, AnswerType.SPANS))


def test_stop_strings_include_the_closing_answer_tag():
    assert NONE.all_stop_strings == BOXED.all_stop_strings == JSON.all_stop_strings == ()
    stopping = ResponseFormat(answer_tag="tool_call", stop_at_answer=True, stop_strings=("\nUser:",))
    assert stopping.all_stop_strings == ("</tool_call>", "\nUser:")


@pytest.mark.parametrize(
    "names", [{"answer_tag": "think"}, {"answer_tag": "a b"}, {"think_tag": ""}, {"think_tag": "<x>"}]
)
def test_invalid_or_equal_tag_names_are_refused(names):
    with pytest.raises(UserError, match="response_format: "):
        ResponseFormat(**names)


PIECES = [
    *("<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "<svg>", "```json\n", "1, 2, 3, 4", "\\", "{", "}"),
    *('"', "[", ",", "<", ">", " ", "1", "9", "e", "$", "\0", "٣", "\ud800"),
]


def test_every_text_has_a_value_or_a_problem():
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        for response_format in (TAGS, BOXED, JSON, OBSERVE):
            for answer_type in AnswerType:
                answer = response_format.parse(text, answer_type)
                assert answer.value is not None or answer.problems


@pytest.mark.parametrize("response_format", [TAGS, BOXED, JSON], ids=lambda response_format: response_format.style)
@pytest.mark.parametrize("piece", PIECES)
def test_repeated_pieces_are_parsed_in_linear_time(response_format, piece):
    long = piece * (200_000 // len(piece))
    some_types = (AnswerType.BOXES, AnswerType.LATEX, AnswerType.SVG)
    for answer_type in AnswerType if response_format is TAGS else some_types:
        for text in (long, f"<answer>{long}</answer>", f"\\boxed{{{long}}}"):
            with bounded():
                response_format.parse(text, answer_type)


def test_strip_thinking_equals_a_regular_expression_in_linear_time():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["<think>", "</think>", " ", "\n", "a", "<answer>b</answer>"], k=rng.randint(0, 9)))
        expected = re.sub(r"\s*<think>.*?</think>\s*", "", text, count=1, flags=re.DOTALL)
        assert TAGS.strip_thinking(text) == expected, text
    for text in (" " * 1_000_000, "<think>" * 200_000):
        with bounded():
            assert TAGS.strip_thinking(text) == text
