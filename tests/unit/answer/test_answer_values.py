"""The text of an answer becomes a value of its type, or is refused; coordinates in a value are found and converted."""

from dataclasses import replace

import pytest

from mmrl.answer import ResponseFormat, convert_coordinates, list_coordinates, parse_answer_value, validate_value
from mmrl.types import Action, AnswerType, CoordinateSystem, Region, ResizeMap, Size, Target

TAGS = ResponseFormat(thinking="optional")
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><circle cx="3" cy="4" r="1"/></svg>'
BOX = (1.0, 2.0, 3.0, 4.0)
CUP, DOG = Region(BOX, "cup"), Region((5.0, 6.0, 7.0, 8.0))
CLICK = Action("click", {"coordinate": [10, 20]})
ZOOM = Action("zoom", {"factor": 2})
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
XML_VALUE = Action("zoom", {"box": [1, 2, 30, 40], "why": "to see\nit"})

VALUES = {
    AnswerType.NUMBER: [
        *(("3", 3), (" 3\n", 3), ("-2.5", -2.5), ("+7", 7), (".5", 0.5), ("5.", 5.0), ("007", 7), ("1,234", 1234)),
        *(("-1,234,567.5", -1234567.5), ("6.02e23", 6.02e23), ("1E-3", 0.001), ("−3", -3)),
    ],
    AnswerType.CHOICE: [(text, "B") for text in ("B", "b", "(B)", "B.", "B)", " B ")],
    AnswerType.TEXT: [(" Stop  sign\n", "Stop  sign"), ("a < b > c </b>", "a < b > c </b>")],
    AnswerType.BOX: [
        *(("[1, 2, 3, 4]", BOX), ("[1,2,3,4]", BOX), ("(1 2 3 4)", BOX)),
        ("[ -1.5 , 2 3.25, 4. ]", (-1.5, 2.0, 3.25, 4.0)),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "cup"}', BOX),
        ('```json\n{"bbox_2d": [1, 2, 3, 4]}\n```', BOX),
    ],
    AnswerType.BOXES: [
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}, [5, 6, 7, 8]]', (CUP, DOG)),
        ('```json\n[\n\t{"bbox_2d": [1, 2, 3, 4], "label": "cup"}\n]\n```', (CUP,)),
        ("[]", ()),
        ('[{"bbox_2d": [1, 2, 3, 4], "confidence": 0.5}]', (Region(BOX, "", 0.5),)),
    ],
    AnswerType.POINT: [
        *(("[1, 2]", (1.0, 2.0)), ("(1.5 2)", (1.5, 2.0)), ('{"point_2d": [1, 2], "label": "cup"}', (1.0, 2.0))),
        ('<points x1="1" y1="2" alt="cup">cup</points>', (1.0, 2.0)),
    ],
    AnswerType.POINTS: [
        ('[{"point_2d": [1, 2], "label": "cup"}, [3, 4]]', (Region((1.0, 2.0), "cup"), Region((3.0, 4.0)))),
        ('<points x1="1" y1="2" alt="cup">cup</points>', (Region((1.0, 2.0), "cup"),)),
    ],
    AnswerType.SPAN: [("[12.5, 20.0]", (12.5, 20.0)), ("(0 3)", (0.0, 3.0))],
    AnswerType.SPANS: [("[[1, 2], [3, 4.5]]", ((1.0, 2.0), (3.0, 4.5)))],
    AnswerType.PERMUTATION: [("[3, 1, 4, 2]", (3, 1, 4, 2))],
    AnswerType.ACTION: [
        ('{"action": "click", "coordinate": [10, 20]}', CLICK),
        ('{"action": "wait"}', Action("wait", {})),
    ],
    AnswerType.LIST: [('["a", "b"]', ("a", "b")), ("[3, 7]", ("3", "7"))],
    AnswerType.JSON: [('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]})],
    AnswerType.LATEX: [
        (text, "x^{2}")
        for text in (
            *("x^{2}", "$x^{2}$", "$$ x^{2} $$", r"\(x^{2}\)", r"\[x^{2}\]", r"\boxed{x^{2}}", r"$\boxed{x^{2}}$"),
        )
    ],
    AnswerType.SVG: [
        (SVG, SVG),
        (f"\n{SVG}\n", SVG),
        # It may refer to its own parts.
        *((text, text) for text in ('<svg><g id="a"/><use href="#a"/><rect fill="url(#a)"/></svg>',)),
    ],
    AnswerType.TOOL_CALL: [
        ('{"name": "zoom", "arguments": {"factor": 2}}', ZOOM),
        ('<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>', Action("zoom", {})),
        (XML_CALL, XML_VALUE),
        (XML_CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), XML_VALUE),
        ("<tool_call><function=look></function></tool_call>", Action("look", {})),
    ],
}
"""Texts and their values, by answer type."""
REFUSED = {
    AnswerType.NUMBER: [
        *("", ".", "-", "e5", "3 4", "3 dots", "three", "nan", "inf", "1e999", "0x10", "1_000", "1,23", "1234,567"),
        *(",123", "1,", "--3", "3-", "1.2.3", "3,", "1/2", "50%", "$5", "٣", "３", "³", "Ⅲ", "−−3", "9" * 41),
    ],
    AnswerType.CHOICE: ["", "(B", "BC", "A B", "A, B", "B. red", "[B]", "2", "Б", "Ｂ", "(B).", "B:"],
    AnswerType.TEXT: [" \n", "a<think>b"],
    AnswerType.BOX: [
        *("", "1, 2, 3, 4", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[1, 2, 3, 4", "[1, 2, 3, 4)"),
        *("[[[1, 2, 3, 4]]]", "[1e0, 2, 3, 4]"),
        *("[1, 2, 3, 4], [1, 2, 3, 4]", "[nan, 2, 3, 4]", "[1, 2, inf, 4]", "[3, 2, 1, 4]", "[1, 4, 3, 2]"),
        *("[1, 2, 1, 4]", "[1, 2, 1e9, 4]", "[1,, 2, 3, 4]", "[١, ٢, ٣, ٤]", f"[1, 2, 3, {'9' * 400}]"),
        *("[1, 2, 3, 9999999999]", "x1 [1, 2, 3, 4]", '{"bbox_2d": [3, 2, 1, 4]}'),
        '{"bbox_2d": [1, 2, 3, 4], "bbox_2d": [1, 2, 3, 5]}',
    ],
    AnswerType.BOXES: [
        *("", "none", "[1, 2, 3, 4]", "[[1, 2, 3]]", "[[3, 2, 1, 4]]", "{}", "[{}]", "[[١, ٢, ٣, ٤]]"),
        *(f'[{{"bbox_2d": [1, 2, 3, 4], "confidence": {number}}}]' for number in ("-5", "1.5", '"1"', "NaN")),
        *(f"[[1, 2, 3, {number}]]" for number in ("1e999", "1e300", "Infinity", "9" * 400, "true", '"4"')),
        *('[{"bbox_2d": [1, 2, 3, 4], "lable": "cup"}]', "[[1, 2, 3, 4]] [[1, 2, 3, 4]]"),
        f"[{', '.join(['[1, 2, 3, 4]'] * 1001)}]",
    ],
    AnswerType.POINT: ["1, 2", "[1]", "[1, 2, 3]", "[1, x]", '{"bbox_2d": [1, 2]}'],
    AnswerType.POINTS: ["[[1, 2, 3, 4]]"],
    AnswerType.SPAN: ["12.5 to 20.0", "[20, 12.5]", "[3, 3]", "[-1, 3]", "[00:12, 00:20]", "12.5"],
    AnswerType.SPANS: ["[1, 2]", "[[2, 1]]", "[[1, 2], 3]"],
    AnswerType.PERMUTATION: ["[]", "3 1 2", "[1, 1, 1, 1]", "[0, 1]", "[1, 3]", "[1.0, 2]", "[true]"],
    AnswerType.ACTION: [
        *("click", "{}", '{"action": ""}', '{"action": 3}', "[]"),
        *(f'{{"action": "click", "coordinate": {place}}}' for place in ("[1]", '"1, 2"', "[1, null]", "5")),
    ],
    AnswerType.LIST: ["a, b", '["a", ""]', '["a", null]', '["a", 1.5]', '{"a": 1}'],
    AnswerType.JSON: ["null", "{", '{"a": 1, "a": 2}', "NaN", "[1e999]", "{'a': 1}", "[" * 100_000],
    AnswerType.LATEX: ["x^{2", "x}{", "$1$ or $2$", r"\boxed{1} or \boxed{2}", "$$", r"\boxed{}"],
    AnswerType.TOOL_CALL: [
        *('{"name": "zoom"}', '{"name": 1, "arguments": {}}', "zoom()"),
        '{"name": "zoom", "arguments": {}, "more": 1}',
    ],
}
"""Texts that are no values, by answer type."""


@pytest.mark.parametrize("answer_type", AnswerType)
def test_text_of_each_type_is_parsed_or_refused(answer_type):
    cases = [*VALUES[answer_type], *((text, None) for text in REFUSED.get(answer_type, ()))]
    for text, value in cases:
        answer = TAGS.parse(f"<answer>{text}</answer>", answer_type)
        assert (answer.value, bool(answer.problems)) == (value, value is None), text[:60]
        assert type(answer.value) is type(value), text[:60]


SVG_ENTITIES = ('<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">', '<!ENTITY b SYSTEM "file:///etc/passwd">')
BROKEN = [
    *(
        (AnswerType.SVG, SVG.replace("<circle", inner + "<circle"), message)
        for inner, message in (
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
        )
    ),
    *((AnswerType.SVG, f"<!DOCTYPE svg [{part}]><svg>&b;</svg>", "a doctype") for part in SVG_ENTITIES),
    *(
        (AnswerType.TOOL_CALL, XML_CALL.replace(old, new), message)
        for old, new, message in (
            ("</parameter>\n<parameter=why>", "</parameter>\nand\n<parameter=why>", "outside"),
            ("</parameter>\n</function>", "</parameter>\nand\n</function>", "after"),
            ("=why", "=box", "twice"),
            ("</function>", "", "not JSON"),
            ("=box>\n[1, 2, 30, 40]", "=bbox_2d>\n[1, 2, 30]", "4 numbers in 'bbox_2d'"),
        )
    ),
    # A million unfinished parameters take linear time.
    *(
        (AnswerType.TOOL_CALL, f"<function=look>{opening * 1_000_000}</function>", "parameters of the call")
        for opening in ("<parameter=", "<parameter=a>", "<parameter=a></parameter>b")
    ),
]


@pytest.mark.parametrize(("answer_type", "text", "message"), BROKEN, ids=[message for *_, message in BROKEN])
def test_broken_or_dangerous_markup_is_refused(answer_type, text, message):
    with pytest.raises(ValueError, match=message):
        parse_answer_value(answer_type, text)


@pytest.mark.parametrize("answer_type", AnswerType)
def test_converting_coordinates_there_and_back_is_the_identity(answer_type):
    resize = ResizeMap(Size(640, 480), Size(320, 160))
    original, resized = CoordinateSystem.PX_ORIGINAL, CoordinateSystem.PX_RESIZED
    for _, value in VALUES[answer_type]:
        there = convert_coordinates(answer_type, value, lambda numbers: resize.convert(numbers, original, resized))
        back = convert_coordinates(answer_type, there, lambda numbers: resize.convert(numbers, resized, original))
        assert validate_value(answer_type, back) == value or back.arguments["coordinate"] == (10.0, 20.0)
        if value == BOX:
            assert there == (0.5, 2 / 3, 1.5, 4 / 3)


def test_coordinates_in_json_are_found_by_their_keys():
    steps = [{"point_2d": [100, 50], "bbox_2d": [1, 2]}]
    value = {"image": 2, "bbox_2d": [10, 20, 30, 40], "steps": steps, "box": [1, 2]}
    there = convert_coordinates(AnswerType.JSON, value, lambda place: tuple(number / 3 for number in place))
    thirds = [pytest.approx(number / 3) for number in (10, 20, 30, 40, 100, 50)]
    new_steps = [{"point_2d": thirds[4:], "bbox_2d": [1, 2]}]
    assert there == {"image": 2, "bbox_2d": thirds[:4], "steps": new_steps, "box": [1, 2]}
    target = Target(answer_type=AnswerType.JSON, value=there, coordinate_system=CoordinateSystem.PX_RESIZED)
    assert '"bbox_2d": [3, 7, 10, 13], "steps": [{"point_2d": [33, 17], "bbox_2d": [1, 2]}]' in TAGS.render(target)
    assert "3.3333" in TAGS.render(replace(target, coordinate_system=None))
    assert list_coordinates(AnswerType.JSON, value) == [[10, 20, 30, 40], [100, 50]]
