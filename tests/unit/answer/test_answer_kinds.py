"""Every answer type in every style (tags, boxed, JSON): parsing, refusal, rendering, coordinates, hostile text."""

import random
import re
from dataclasses import replace

import pytest
from waiting import bounded

from mmrl.answer import ResponseFormat, ResponseSection, convert_coordinates, list_coordinates, validate_value
from mmrl.answer.text import parse_answer_value
from mmrl.types import Action, AnswerType, CoordinateSystem, Region, ResizeMap, Size, Target, UserError

TAGS = ResponseFormat(thinking="optional")
BOXED = ResponseFormat(thinking="optional", style="boxed")
JSON = ResponseFormat(thinking="optional", style="json")
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><circle cx="3" cy="4" r="1"/></svg>'
CUP, DOG = Region((1.0, 2.0, 3.0, 4.0), "cup"), Region((5.0, 6.0, 7.0, 8.0))
CLICK = Action("click", {"coordinate": [10, 20]})

TARGETS = [
    Target(answer_type=AnswerType.TEXT, value="Stop sign"),
    Target(answer_type=AnswerType.CHOICE, value="B"),
    Target(answer_type=AnswerType.NUMBER, value=-2.5),
    Target(answer_type=AnswerType.BOX, value=[1, 2, 3, 4], coordinate_system=CoordinateSystem.PX_RESIZED),
    Target(
        answer_type=AnswerType.BOXES,
        value=[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}, [5, 6, 7, 8]],
        coordinate_system=CoordinateSystem.NORM_1000,
    ),
    Target(answer_type=AnswerType.BOXES, value=[], coordinate_system=CoordinateSystem.NORM_1000),
    Target(answer_type=AnswerType.POINT, value=[0.25, 0.5], coordinate_system=CoordinateSystem.NORM_1),
    Target(
        answer_type=AnswerType.POINTS, value=[Region((3, 4), "cup", 0.5)], coordinate_system=CoordinateSystem.PX_RESIZED
    ),
    Target(answer_type=AnswerType.SPAN, value=[12.5, 20]),
    Target(answer_type=AnswerType.SPANS, value=[[0, 1], [2.25, 4]]),
    Target(answer_type=AnswerType.PERMUTATION, value=[3, 1, 2]),
    Target(
        answer_type=AnswerType.ACTION,
        value={"action": "type", "text": "hi {there}"},
        coordinate_system=CoordinateSystem.PX_RESIZED,
    ),
    Target(answer_type=AnswerType.ACTION, value=CLICK, coordinate_system=CoordinateSystem.PX_RESIZED),
    Target(answer_type=AnswerType.LIST, value=["a", "b, c"]),
    Target(answer_type=AnswerType.JSON, value={"a": [1, None, "é"]}),
    Target(
        answer_type=AnswerType.JSON,
        value={"image": 2, "bbox_2d": [1, 2, 3, 4]},
        coordinate_system=CoordinateSystem.PX_RESIZED,
    ),
    Target(answer_type=AnswerType.LATEX, value=r"\frac{1}{2}"),
    Target(answer_type=AnswerType.SVG, value=SVG),
    Target(answer_type=AnswerType.TOOL_CALL, value={"name": "zoom", "arguments": {"bbox_2d": [1, 2, 3, 4]}}),
]


def test_the_targets_cover_every_answer_type():
    assert {target.answer_type for target in TARGETS} == set(AnswerType)


@pytest.mark.parametrize("grammar", [TAGS, BOXED, JSON], ids=["tags", "boxed", "json"])
@pytest.mark.parametrize("thought", [None, "hm, {well}"])
@pytest.mark.parametrize("target", TARGETS, ids=[f"{target.answer_type}-{i}" for i, target in enumerate(TARGETS)])
def test_rendered_targets_of_every_type_and_style_parse_back(grammar, thought, target):
    answer = grammar.parse(grammar.render(target, thought), target.answer_type)
    assert (answer.value, answer.problems, answer.thinking) == (
        validate_value(target.answer_type, target.value),
        (),
        thought,
    )


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (AnswerType.BOX, '{"bbox_2d": [1, 2, 3, 4], "label": "cup"}', CUP.coordinates),
        (AnswerType.BOX, '```json\n{"bbox_2d": [1, 2, 3, 4]}\n```', CUP.coordinates),
        (AnswerType.BOX, '{"bbox_2d": [3, 2, 1, 4]}', None),
        (AnswerType.BOX, '{"bbox_2d": [1, 2, 3, 4], "bbox_2d": [1, 2, 3, 5]}', None),
        (AnswerType.BOXES, '[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}, [5, 6, 7, 8]]', (CUP, DOG)),
        (AnswerType.BOXES, '```json\n[\n\t{"bbox_2d": [1, 2, 3, 4], "label": "cup"}\n]\n```', (CUP,)),
        (AnswerType.BOXES, "[]", ()),
        (AnswerType.BOXES, '[{"bbox_2d": [1, 2, 3, 4], "confidence": 0.5}]', (Region((1.0, 2.0, 3.0, 4.0), "", 0.5),)),
        *(
            (AnswerType.BOXES, f'[{{"bbox_2d": [1, 2, 3, 4], "confidence": {c}}}]', None)
            for c in ("-5", "1.5", '"1"', "NaN")
        ),
        *(
            (AnswerType.BOXES, text, None)
            for text in ["", "none", "[1, 2, 3, 4]", "[[1, 2, 3]]", "[[3, 2, 1, 4]]", "{}", "[{}]"]
        ),
        *(
            (AnswerType.BOXES, f"[[1, 2, 3, {big}]]", None)
            for big in ("1e999", "1e300", "Infinity", "9" * 400, "true", '"4"')
        ),
        (AnswerType.BOXES, '[{"bbox_2d": [1, 2, 3, 4], "lable": "cup"}]', None),
        (AnswerType.BOXES, f"[{', '.join(['[1, 2, 3, 4]'] * 1001)}]", None),
        (AnswerType.BOXES, "[[١, ٢, ٣, ٤]]", None),
        (AnswerType.BOXES, "[[1, 2, 3, 4]] [[1, 2, 3, 4]]", None),
        (AnswerType.POINT, "[1, 2]", (1.0, 2.0)),
        (AnswerType.POINT, "(1.5 2)", (1.5, 2.0)),
        (AnswerType.POINT, '{"point_2d": [1, 2], "label": "cup"}', (1.0, 2.0)),
        *((AnswerType.POINT, text, None) for text in ["1, 2", "[1]", "[1, 2, 3]", "[1, x]", '{"bbox_2d": [1, 2]}']),
        (
            AnswerType.POINTS,
            '[{"point_2d": [1, 2], "label": "cup"}, [3, 4]]',
            (Region((1.0, 2.0), "cup"), Region((3.0, 4.0))),
        ),
        (AnswerType.POINTS, "[[1, 2, 3, 4]]", None),
        (AnswerType.SPAN, "[12.5, 20.0]", (12.5, 20.0)),
        (AnswerType.SPAN, "(0 3)", (0.0, 3.0)),
        *(
            (AnswerType.SPAN, text, None)
            for text in ["12.5 to 20.0", "[20, 12.5]", "[3, 3]", "[-1, 3]", "[00:12, 00:20]", "12.5"]
        ),
        (AnswerType.SPANS, "[[1, 2], [3, 4.5]]", ((1.0, 2.0), (3.0, 4.5))),
        *((AnswerType.SPANS, text, None) for text in ["[1, 2]", "[[2, 1]]", "[[1, 2], 3]"]),
        (AnswerType.PERMUTATION, "[3, 1, 4, 2]", (3, 1, 4, 2)),
        *(
            (AnswerType.PERMUTATION, text, None)
            for text in ["[]", "3 1 2", "[1, 1, 1, 1]", "[0, 1]", "[1, 3]", "[1.0, 2]", "[true]"]
        ),
        (AnswerType.ACTION, '{"action": "click", "coordinate": [10, 20]}', CLICK),
        (AnswerType.ACTION, '{"action": "wait"}', Action("wait", {})),
        *(
            (AnswerType.ACTION, f'{{"action": "click", "coordinate": {at}}}', None)
            for at in ("[1]", '"1, 2"', "[1, null]", "5")
        ),
        *((AnswerType.ACTION, text, None) for text in ["click", "{}", '{"action": ""}', '{"action": 3}', "[]"]),
        (AnswerType.LIST, '["a", "b"]', ("a", "b")),
        (AnswerType.LIST, "[3, 7]", ("3", "7")),
        *((AnswerType.LIST, text, None) for text in ["a, b", '["a", ""]', '["a", null]', '["a", 1.5]', '{"a": 1}']),
        (AnswerType.JSON, '{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        *(
            (AnswerType.JSON, text, None)
            for text in ["null", "{", '{"a": 1, "a": 2}', "NaN", "[1e999]", "{'a': 1}", "[" * 100_000]
        ),
        *(
            (AnswerType.LATEX, text, "x^{2}")
            for text in ["x^{2}", "$x^{2}$", "$$ x^{2} $$", r"\(x^{2}\)", r"\[x^{2}\]"]
        ),
        *((AnswerType.LATEX, text, "x^{2}") for text in [r"\boxed{x^{2}}", r"$\boxed{x^{2}}$"]),
        *(
            (AnswerType.LATEX, text, None)
            for text in ["x^{2", "x}{", "$1$ or $2$", r"\boxed{1} or \boxed{2}", "$$", r"\boxed{}"]
        ),
        (AnswerType.SVG, SVG, SVG),
        (AnswerType.SVG, f"\n{SVG}\n", SVG),
        (AnswerType.TOOL_CALL, '{"name": "zoom", "arguments": {"factor": 2}}', Action("zoom", {"factor": 2})),
        (AnswerType.TOOL_CALL, '<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>', Action("zoom", {})),
        *(
            (AnswerType.TOOL_CALL, text, None)
            for text in ['{"name": "zoom"}', '{"name": 1, "arguments": {}}', "zoom()"]
        ),
        (AnswerType.TOOL_CALL, '{"name": "zoom", "arguments": {}, "more": 1}', None),
    ],
)
def test_answers_of_each_type_are_parsed_or_refused(kind, text, value):
    answer = TAGS.parse(f"<answer>{text}</answer>", kind)
    assert answer.value == value
    assert bool(answer.problems) == (value is None)


@pytest.mark.parametrize(
    ("inner", "complaint"),
    [
        ("<script>alert(1)</script>", "a <script>"),
        ('<g onload="x()"/>', "event handler"),
        ('<image href="http://a/b.png"/>', "leads out"),
        ('<image href="file:///etc/passwd"/>', "leads out"),
        ('<rect style="fill: url(http://a/b)"/>', "leads out"),
        ("<style>@import 'a.css';</style>", "loads another file"),
        ("<foreignObject/>", "a <foreignObject>"),
        ("<?xml-stylesheet href='a'?>", "processing instruction"),
        ("<g>" * 300 + "</g>" * 300, "more than 200 levels"),
        ("<g>", "not well-formed"),
        ("&nbsp;", "not well-formed"),
    ],
)
def test_svg_with_scripts_links_or_errors_is_refused(inner, complaint):
    answer = TAGS.parse(f"<answer>{SVG.replace('<circle', inner + '<circle')}</answer>", AnswerType.SVG)
    assert answer.value is None
    assert complaint in answer.problems[0]


def test_svg_entities_never_expand():
    bomb = '<!DOCTYPE svg [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><svg>&b;</svg>'
    steal = '<!DOCTYPE svg [<!ENTITY a SYSTEM "file:///etc/passwd">]><svg>&a;</svg>'
    for text in (bomb, steal):
        assert "a doctype" in TAGS.parse(f"<answer>{text}</answer>", AnswerType.SVG).problems[0]


def test_svg_may_refer_to_its_own_parts():
    inner = '<defs><g id="a"/></defs><use href="#a"/><rect fill="url(#a)"/>'
    assert TAGS.parse(f"<answer><svg>{inner}</svg></answer>", AnswerType.SVG).value


@pytest.mark.parametrize(
    ("think", "text", "value", "problem"),
    [
        ("none", r"So it is \boxed{4}.", 4, None),
        ("none", r"$\boxed{4}$", 4, None),
        ("none", r"\[\boxed{4}\]", 4, None),
        ("none", r"\boxed{\text{4}}", 4, None),
        ("none", "4", None, r"no \boxed answer"),
        ("none", r"\boxed{4} and then \boxed{3}", None, "two answers"),
        ("none", r"\boxed{4} or 3", None, "text after the answer"),
        ("none", r"\boxed{\boxed{4}}", None, r"\boxed inside \boxed"),
        ("none", r"\boxed{4", None, r"no \boxed answer"),
        ("optional", r"<think>\boxed{3} { </think> so \boxed{4}", 4, None),
        ("optional", r"<think>\boxed{4}</think>", None, r"no \boxed answer"),
        ("optional", r"<think>\boxed{4}", None, r"no \boxed answer"),
        ("required", r"\boxed{4}", 4, "no thinking"),
        ("none", r"<think>a</think>\boxed{4}", 4, "thinking not asked for"),
    ],
)
def test_boxed_answers_are_parsed_or_refused(think, text, value, problem):
    answer = ResponseFormat(thinking=think, style="boxed").parse(text, AnswerType.NUMBER)
    assert answer.value == value
    assert (answer.problems[0] if answer.problems else None) == problem


def test_boxed_answers_may_hold_balanced_braces():
    assert BOXED.parse(r"\boxed{\frac{1}{2}}", AnswerType.LATEX).value == r"\frac{1}{2}"
    assert BOXED.parse(r"\boxed{\{1\}}", AnswerType.LATEX).value == r"\{1\}"
    assert BOXED.parse(r"\boxed{\text{(B)}}", AnswerType.CHOICE).value == "B"
    assert BOXED.parse(r"\boxed{Apple}", AnswerType.CHOICE).value is None


@pytest.mark.parametrize(
    ("text", "value", "problem"),
    [
        ('{"think": "a", "answer": 4}', 4, None),
        ('```json\n{"answer": "4"}\n```', 4, None),
        ('{"answer": 4, "sure": true}', None, "fields after the answer"),
        ('{"sure": true, "answer": 4}', 4, "unknown field 'sure'"),
        ('{"think": 3, "answer": 4}', 4, "'think' is not text"),
        ('{"think": "", "answer": 4}', 4, "empty thinking"),
        ('{"answer": 4, "answer": 5}', None, "no JSON object: a key that appears twice in one object"),
        ('{"answer": null}', None, "empty answer"),
        ('{"thinking": "4"}', None, "no field 'answer'"),
        ('so {"answer": 4}', None, "no JSON object: not JSON"),
        ("[4]", None, "no JSON object"),
        ("", None, "no JSON object: not JSON"),
    ],
)
def test_json_answers_are_parsed_or_refused(text, value, problem):
    answer = JSON.parse(text, AnswerType.NUMBER)
    assert answer.value == value
    assert (answer.problems[0] if answer.problems else None) == problem


OBSERVE = ResponseFormat(
    thinking="required", sections=(ResponseSection("observe"), ResponseSection("rethink", False, True))
)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("<observe>o</observe><think>t</think><answer>4</answer>", ()),
        ("<observe>o</observe>\n<think>t</think><rethink>r</rethink><answer>4</answer>", ()),
        ("<think>t</think><answer>4</answer>", ("no <observe>",)),
        ("<think>t</think><observe>o</observe><answer>4</answer>", ("parts out of order",)),
        ("<observe> </observe><think>t</think><answer>4</answer>", ("empty <observe>",)),
        ("<observe>o</observe><observe>o</observe><think>t</think><answer>4</answer>", ("2 <observe>",)),
        ("<observe>o</observe><think>t</think><answer>4</answer>!", ("text after the answer",)),
    ],
)
def test_sections_are_required_in_order(text, problems):
    answer = OBSERVE.parse(text, AnswerType.NUMBER)
    assert answer.problems == problems
    assert answer.value == (None if "!" in text else 4)


@pytest.mark.parametrize(
    ("grammar", "text", "thought", "sections"),
    [
        (OBSERVE, "<observe>o</observe><think>t</think><answer>4</answer>", "t", {"observe": "o"}),
        (
            OBSERVE,
            "<rethink>r</rethink><observe>a</observe><observe>b</observe>",
            None,
            {"rethink": "r", "observe": "a"},
        ),
        (BOXED, r"<think>t</think>So \boxed{4}", "t", {}),
        (
            ResponseFormat(style="json", thinking="required", sections=(ResponseSection("plan"),)),
            '{"plan": "p", "think": "t", "answer": 4}',
            "t",
            {"plan": "p"},
        ),
        (OBSERVE, "", None, {}),
    ],
)
def test_parse_keeps_the_text_of_sections(grammar, text, thought, sections):
    answer = grammar.parse(text, AnswerType.NUMBER)
    assert (answer.thinking, answer.sections) == (thought, sections)


def test_an_answer_inside_a_section_does_not_count():
    assert OBSERVE.parse("<observe><answer>4</answer></observe><think>t</think>", AnswerType.NUMBER).value is None


def test_render_takes_sections_from_a_thought_with_tags():
    opening = "<observe>o</observe><think>t</think>"
    assert OBSERVE.render(Target(answer_type=AnswerType.NUMBER, value=4), opening) == f"{opening}<answer>4</answer>"
    with pytest.raises(UserError, match="no <observe>"):
        OBSERVE.render(Target(answer_type=AnswerType.NUMBER, value=4), "t")


@pytest.mark.parametrize(
    "grammar", [TAGS, BOXED, JSON, OBSERVE, ResponseFormat(style="json", sections=(ResponseSection("plan"),))]
)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.answer_type)
def test_the_example_of_every_format_parses_without_problems(grammar, target):
    assert grammar.parse(grammar.build_example(target), target.answer_type).problems == ()


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (ResponseFormat(), "Answer as <answer>number</answer>."),
        (TAGS, "Answer as <answer>number</answer>; you may think first in <think>...</think>."),
        (ResponseFormat(thinking="required"), "Think first, then answer: <think>...</think><answer>number</answer>."),
        (ResponseFormat(style="boxed"), r"Answer as \boxed{number}."),
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
def test_instruction_describes_the_format(grammar, sentence):
    assert grammar.instruction(AnswerType.NUMBER, CoordinateSystem.NORM_1000) == sentence


def test_instruction_states_units_of_coordinates_and_times():
    assert TAGS.instruction(AnswerType.SPAN, CoordinateSystem.NORM_1000).startswith(
        "Answer as <answer>[start, end]</answer>, in seconds;"
    )
    assert "coordinates in pixels" in TAGS.instruction(AnswerType.ACTION, CoordinateSystem.PX_RESIZED)


def test_stop_strings_include_the_closing_answer_tag():
    assert ResponseFormat().all_stop_strings == BOXED.all_stop_strings == JSON.all_stop_strings == ()
    stopping = ResponseFormat(answer_tag="tool_call", stop_at_answer=True, stop_strings=("\nUser:",))
    assert stopping.all_stop_strings == ("</tool_call>", "\nUser:")


# As the chat template of Qwen3.5-35B-A3B writes calls.
XML_CALL = """<tool_call>
<function=zoom>
<parameter=box>
[1, 2, 30, 40]
</parameter>
<parameter=why>
to see
it
</parameter>
</function>
</tool_call>"""


def test_xml_tool_calls_equal_json_tool_calls():
    as_json = '{"name": "zoom", "arguments": {"box": [1, 2, 30, 40], "why": "to see\\nit"}}'
    expected = parse_answer_value(AnswerType.TOOL_CALL, as_json)
    assert parse_answer_value(AnswerType.TOOL_CALL, XML_CALL) == expected
    bare = XML_CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert parse_answer_value(AnswerType.TOOL_CALL, bare) == expected
    none = "<tool_call><function=look></function></tool_call>"
    assert parse_answer_value(AnswerType.TOOL_CALL, none) == Action("look", {})


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (XML_CALL.replace("</parameter>\n<parameter=why>", "</parameter>\nand\n<parameter=why>"), "outside"),
        (XML_CALL.replace("</parameter>\n</function>", "</parameter>\nand\n</function>"), "after"),
        (XML_CALL.replace("=why", "=box"), "twice"),
        (XML_CALL.replace("</function>", ""), "not JSON"),
        (XML_CALL.replace("=box>\n[1, 2, 30, 40]", "=bbox_2d>\n[1, 2, 30]"), "4 numbers in 'bbox_2d'"),
    ],
)
def test_broken_xml_tool_calls_are_refused(call, why):
    with pytest.raises(ValueError, match=why):
        parse_answer_value(AnswerType.TOOL_CALL, call)


@pytest.mark.parametrize("opened", ["<parameter=", "<parameter=a>", "<parameter=a></parameter>b"])
def test_a_million_unfinished_parameters_take_linear_time(opened):
    with pytest.raises(ValueError, match="parameters of the call"):
        parse_answer_value(AnswerType.TOOL_CALL, f"<function=look>{opened * 1_000_000}</function>")


def test_tool_calls_may_have_their_own_answer_tag():
    grammar = ResponseFormat(answer_tag="tool_call", thinking="optional")
    text = '<think>a</think><tool_call>{"name": "zoom", "arguments": {"factor": 2}}</tool_call>'
    assert grammar.parse(text, AnswerType.TOOL_CALL).value == Action("zoom", {"factor": 2})
    assert grammar.render(Target(answer_type=AnswerType.TOOL_CALL, value=Action("zoom", {"factor": 2})), "a") == text


@pytest.mark.parametrize(
    "names", [{"answer_tag": "think"}, {"answer_tag": "a b"}, {"think_tag": ""}, {"think_tag": "<x>"}]
)
def test_invalid_or_equal_tag_names_are_refused(names):
    with pytest.raises(UserError, match="response_format: "):
        ResponseFormat(**names)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.answer_type)
def test_convert_coordinates_there_and_back_is_the_identity(target):
    resize = ResizeMap(Size(640, 480), Size(320, 160))
    value = validate_value(target.answer_type, target.value)

    def convert(source, goal):
        return lambda numbers: resize.convert(numbers, source, goal)

    there = convert_coordinates(
        target.answer_type, value, convert(CoordinateSystem.PX_ORIGINAL, CoordinateSystem.PX_RESIZED)
    )
    back = convert_coordinates(
        target.answer_type, there, convert(CoordinateSystem.PX_RESIZED, CoordinateSystem.PX_ORIGINAL)
    )
    assert back == value or back.arguments["coordinate"] == (10.0, 20.0)
    if target.answer_type is AnswerType.BOX:
        assert there == (0.5, 2 / 3, 1.5, 4 / 3)


def test_coordinates_in_json_are_found_by_their_keys():
    value = {
        "image": 2,
        "bbox_2d": [10, 20, 30, 40],
        "steps": [{"point_2d": [100, 50], "bbox_2d": [1, 2]}],
        "box": [1, 2],
    }
    there = convert_coordinates(AnswerType.JSON, value, lambda place: tuple(number / 3 for number in place))
    thirds = [pytest.approx(number / 3) for number in (10, 20, 30, 40, 100, 50)]
    assert there == {
        "image": 2,
        "bbox_2d": thirds[:4],
        "steps": [{"point_2d": thirds[4:], "bbox_2d": [1, 2]}],
        "box": [1, 2],
    }
    framed = Target(answer_type=AnswerType.JSON, value=there, coordinate_system=CoordinateSystem.PX_RESIZED)
    assert '"bbox_2d": [3, 7, 10, 13], "steps": [{"point_2d": [33, 17], "bbox_2d": [1, 2]}]' in TAGS.render(framed)
    assert "3.3333" in TAGS.render(replace(framed, coordinate_system=None))
    assert list_coordinates(AnswerType.JSON, value) == [[10, 20, 30, 40], [100, 50]]


PIECES = [
    *("<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "<svg>", "```json\n", "1, 2, 3, 4", "\\", "{", "}"),
    *('"', "[", ",", "<", ">", " ", "1", "9", "e", "$", "\0", "٣", "\ud800"),
]


def test_every_text_has_a_value_or_a_problem():
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        for grammar in (TAGS, BOXED, JSON, OBSERVE):
            for kind in AnswerType:
                answer = grammar.parse(text, kind)
                assert (answer.value is None) <= bool(answer.problems)


@pytest.mark.parametrize("grammar", [TAGS, BOXED, JSON], ids=lambda grammar: grammar.style)
@pytest.mark.parametrize("piece", PIECES)
def test_repeated_pieces_are_parsed_in_linear_time(grammar, piece):
    long = piece * (200_000 // len(piece))
    for kind in AnswerType if grammar is TAGS else (AnswerType.BOXES, AnswerType.LATEX, AnswerType.SVG):
        for text in (long, f"<answer>{long}</answer>", f"\\boxed{{{long}}}"):
            with bounded():
                grammar.parse(text, kind)


def test_strip_thinking_equals_a_regular_expression_in_linear_time():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["<think>", "</think>", " ", "\n", "a", "<answer>b</answer>"], k=rng.randint(0, 9)))
        expected = re.sub(r"\s*<think>.*?</think>\s*", "", text, count=1, flags=re.DOTALL)
        assert TAGS.strip_thinking(text) == expected, text
    for text in (" " * 1_000_000, "<think>" * 200_000):
        with bounded():
            assert TAGS.strip_thinking(text) == text
