"""Response formats with tags: parsing of numbers, choices, boxes and text, reported problems, rendering."""

import pytest

from mmrl.answer import COORDINATE_TYPES, ResponseFormat
from mmrl.types import AnswerType, CoordinateSystem, Target, UserError

NONE, OPTIONAL, REQUIRED = (ResponseFormat(thinking=think) for think in ("none", "optional", "required"))


def value(text, kind):
    return OPTIONAL.parse(f"<answer>{text}</answer>", kind).value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        (" 3\n", 3),
        ("-2.5", -2.5),
        ("+7", 7),
        (".5", 0.5),
        ("5.", 5.0),
        ("007", 7),
        ("1,234", 1234),
        ("-1,234,567.5", -1234567.5),
        ("6.02e23", 6.02e23),
        ("1E-3", 0.001),
        *(
            (text, None)
            for text in ["", ".", "-", "e5", "3 4", "3 dots", "three", "nan", "inf", "1e999", "0x10", "1_000"]
        ),
        *((text, None) for text in ["1,23", "1234,567", ",123", "1,", "--3", "3-", "1.2.3", "3,", "1/2", "50%", "$5"]),
        *((text, None) for text in ["٣", "３", "³", "Ⅲ", "−3", "9" * 41]),
    ],
)
def test_number_answers_are_parsed_or_refused(text, expected):
    parsed = value(text, AnswerType.NUMBER)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "B") for text in ["B", "b", "(B)", "B.", "B)", " B "]),
        *((text, None) for text in ["", "(B", "BC", "A B", "A, B", "B. red", "[B]", "2", "Б", "Ｂ", "(B).", "B:"]),
    ],
)
def test_choice_answers_are_parsed_or_refused(text, expected):
    assert value(text, AnswerType.CHOICE) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2, 3, 4]", (1.0, 2.0, 3.0, 4.0)),
        ("[1,2,3,4]", (1.0, 2.0, 3.0, 4.0)),
        ("(1 2 3 4)", (1.0, 2.0, 3.0, 4.0)),
        ("[ -1.5 , 2 3.25, 4. ]", (-1.5, 2.0, 3.25, 4.0)),
        *((text, None) for text in ["", "1, 2, 3, 4", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[1, 2, 3, 4", "[1, 2, 3, 4)"]),
        *(
            (text, None)
            for text in ["[[1, 2, 3, 4]]", "[1, 2, 3, 4], [1, 2, 3, 4]", "[nan, 2, 3, 4]", "[1, 2, inf, 4]"]
        ),
        *((text, None) for text in ["[3, 2, 1, 4]", "[1, 4, 3, 2]", "[1, 2, 1, 4]", "[1, 2, 1e9, 4]", "[1,, 2, 3, 4]"]),
        *(
            (text, None)
            for text in ["[١, ٢, ٣, ٤]", f"[1, 2, 3, {'9' * 400}]", "[1, 2, 3, 9999999999]", "x1 [1, 2, 3, 4]"]
        ),
    ],
)
def test_box_answers_are_parsed_or_refused(text, expected):
    assert value(text, AnswerType.BOX) == expected


def test_text_answers_are_only_stripped():
    assert value(" Stop  sign\n", AnswerType.TEXT) == "Stop  sign"
    assert value("a < b > c </b>", AnswerType.TEXT) == "a < b > c </b>"
    assert value(" \n", AnswerType.TEXT) is None


@pytest.mark.parametrize(
    ("grammar", "text", "problems", "expected"),
    [
        (NONE, "<answer>3</answer>", (), 3),
        (NONE, "\n<answer>3</answer> \n", (), 3),
        (NONE, "<think>a</think><answer>3</answer>", ("thinking not asked for",), 3),
        (OPTIONAL, "<answer>3</answer>", (), 3),
        (OPTIONAL, "<think>a</think><answer>3</answer>", (), 3),
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
        (OPTIONAL, "<think>a</think> so <answer>3</answer>", ("text outside the tags",), 3),
        (OPTIONAL, "<answer>3</answer><think>a</think>", ("text after the answer",), None),
        (OPTIONAL, "<answer><think>a</think>3</answer>", None, None),
        (OPTIONAL, "<answer><answer>3</answer></answer>", None, None),
        (OPTIONAL, "<think><answer>3</answer></think>", None, None),
        (OPTIONAL, "<think><answer>3</answer>", None, None),
        (OPTIONAL, "<think><think>a</think><answer>3</answer></think>", None, None),
        (OPTIONAL, "<think><answer>3</answer></think><answer>4</answer>", None, 4),
        (OPTIONAL, "<think>a<think>b</think>c</think><answer>4</answer>", None, 4),
    ],
)
def test_parse_reports_problems_of_tags_and_thinking(grammar, text, problems, expected):
    answer = grammar.parse(text, AnswerType.NUMBER)
    assert answer.value == expected
    if problems is None:
        assert answer.problems
    else:
        assert answer.problems == problems


def test_parse_keeps_thinking_and_answer_text():
    answer = REQUIRED.parse("<think> a </think><answer> x </answer>", AnswerType.NUMBER)
    assert (answer.thinking, answer.text, answer.value) == (" a ", " x ", None)
    assert OPTIONAL.parse("<answer>3</answer>", AnswerType.NUMBER).thinking is None


def test_a_tag_inside_a_text_answer_makes_it_unreadable():
    assert OPTIONAL.parse("<answer>a<think>b</answer>", AnswerType.TEXT).value is None


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Target(answer_type=AnswerType.NUMBER, value=3), "<answer>3</answer>"),
        (Target(answer_type=AnswerType.NUMBER, value=3.0), "<answer>3</answer>"),
        (Target(answer_type=AnswerType.NUMBER, value=-2.5), "<answer>-2.5</answer>"),
        (Target(answer_type=AnswerType.CHOICE, value="B"), "<answer>B</answer>"),
        (Target(answer_type=AnswerType.TEXT, value="Stop sign"), "<answer>Stop sign</answer>"),
        (
            Target(answer_type=AnswerType.BOX, value=(1.4, 2, 30.6, 40), coordinate_system=CoordinateSystem.PX_RESIZED),
            "<answer>[1, 2, 31, 40]</answer>",
        ),
        (
            Target(answer_type=AnswerType.BOX, value=[0, 0.25, 0.5, 1], coordinate_system=CoordinateSystem.NORM_1),
            "<answer>[0, 0.25, 0.5, 1]</answer>",
        ),
    ],
)
def test_rendered_targets_parse_back_to_themselves(target, text):
    assert NONE.render(target, thinking="left out") == text
    assert OPTIONAL.render(target) == text
    assert REQUIRED.render(target, "hm") == "<think>hm</think>" + text
    for grammar, thought in ((NONE, None), (OPTIONAL, None), (OPTIONAL, "hm"), (REQUIRED, "hm")):
        answer = grammar.parse(grammar.render(target, thought), target.answer_type)
        assert answer.problems == ()
        assert grammar.render(
            Target(answer_type=target.answer_type, value=answer.value, coordinate_system=target.coordinate_system),
            thought,
        ) == grammar.render(target, thought)


@pytest.mark.parametrize(
    ("target", "thought", "complaint"),
    [
        (Target(answer_type=AnswerType.NUMBER, value=3), None, "cannot be written as an answer: no thinking"),
        (Target(answer_type=AnswerType.NUMBER, value=3), "a</think>b", "stray </think>"),
        (Target(answer_type=AnswerType.NUMBER, value=float("nan")), "hm", "not a number: 'nan'"),
        (Target(answer_type=AnswerType.NUMBER, value=True), "hm", "not a number: 'True'"),
        (Target(answer_type=AnswerType.TEXT, value=""), "hm", "empty answer"),
        (Target(answer_type=AnswerType.TEXT, value="a</answer>"), "hm", "text after the answer"),
        (Target(answer_type=AnswerType.BOX, value=(3, 2, 1, 4)), "hm", "inverted or empty box"),
        (Target(answer_type=AnswerType.BOX, value=(float("nan"), 2, 1, 4)), "hm", "not a box"),
        (Target(answer_type=AnswerType.BOX, value=None), "hm", "not a box: 'None'"),
    ],
)
def test_render_refuses_targets_that_would_not_parse(target, thought, complaint):
    with pytest.raises(UserError, match=complaint):
        REQUIRED.render(target, thought)


def test_render_does_not_share_results_between_formats():
    three = Target(answer_type=AnswerType.NUMBER, value=3)
    assert NONE.render(three) == OPTIONAL.render(three) == "<answer>3</answer>"
    for _ in range(2):
        with pytest.raises(UserError, match="no thinking"):
            REQUIRED.render(three)
    long = Target(answer_type=AnswerType.TEXT, value="word " * 100)
    assert NONE.parse(NONE.render(long), AnswerType.TEXT).value == long.value.strip()


@pytest.mark.parametrize("grammar", [NONE, OPTIONAL, REQUIRED], ids=lambda grammar: grammar.thinking)
@pytest.mark.parametrize("kind", AnswerType)
def test_the_instruction_states_what_the_parser_reads(grammar, kind):
    sentence = grammar.instruction(kind, CoordinateSystem.NORM_1000)
    assert "<answer>" in sentence
    assert ("<think>" in sentence) == (grammar.thinking != "none")
    assert ("from 0 to 1000" in sentence) == (kind in COORDINATE_TYPES)
    assert "</answer>" in sentence
