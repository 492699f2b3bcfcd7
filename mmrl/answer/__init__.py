r"""The response format: one definition for instruction, stop strings, demonstrations, parser and format reward.

A response is some parts in a fixed order, the answer last: by default `<think>...</think><answer>...</answer>`, with
the thinking forbidden, optional or required, and nothing but white space around the parts. The text of an answer
depends on its type:

    NUMBER       3, -2.5, 1,234 (groups of exactly three), 6e23     ASCII digits only; no unit, no second number
    CHOICE       B, (B), B., B)                                     one letter, read as upper case
    BOX          [x1, y1, x2, y2], (..) or {"bbox_2d": [..]}        x1 < x2, y1 < y2, ASCII digits; or a list of one
    POINT        [x, y], (x, y) or {"point_2d": [x, y]}             or a list of one
                 <|box_start|>(x1,y1),(x2,y2)<|box_end|>            BOX and POINT as Qwen2-VL writes them, a box without
                                                                    its tokens, too
    SPAN         [start, end] or (start, end)                       seconds, 0 <= start < end
    TEXT         anything but the tags themselves                   stripped; not empty
    LATEX        one formula, with or without $..$, \boxed{..}       braces balanced
    SVG          one <svg> element                                  no doctype, script or reference to the outside
    BOXES        [{"bbox_2d": [..], "label": ".."}, ..]             JSON; or plain [[..], ..]; [] is none
    POINTS       [{"point_2d": [..], "label": ".."}, ..]            JSON; or plain [[..], ..]; [] is none
    SPANS        [[start, end], ..]                                 JSON
    PERMUTATION  [3, 1, 2]                                          JSON, each of 1..n once
    LIST         ["a", "b"]                                         JSON, texts or whole numbers
    ACTION       {"action": "click", "coordinate": [x, y]}          JSON, what else it has are arguments
    TOOL_CALL    {"name": "zoom", "arguments": {..}}                JSON, <tool_call>..</tool_call> around it or not
    JSON         anything but null                                  no key twice, no NaN, at most 64 levels

JSON and coordinates may be in a ```json fence. Digits of other scripts, fullwidth ones too, are refused rather than
normalised: there is one way to write an answer, and a policy that drifts from it should lose reward. Parsing takes time
linear in the length of the text.
"""

from mmrl.answer.language import ANSWER_LEAD
from mmrl.answer.response_format import ResponseFormat, ResponseSection, check_opening
from mmrl.answer.text import ANSWER_PLACEHOLDERS, parse_answer_value
from mmrl.answer.values import (
    COORDINATE_KEYS,
    COORDINATE_TYPES,
    POSSIBLE_COORDINATE_TYPES,
    AnswerValue,
    convert_coordinates,
    is_nested_deeper,
    is_number,
    list_coordinates,
    validate_value,
)

__all__ = [
    "ANSWER_LEAD",
    "ANSWER_PLACEHOLDERS",
    "COORDINATE_KEYS",
    "COORDINATE_TYPES",
    "POSSIBLE_COORDINATE_TYPES",
    "AnswerValue",
    "ResponseFormat",
    "ResponseSection",
    "check_opening",
    "convert_coordinates",
    "is_nested_deeper",
    "is_number",
    "list_coordinates",
    "parse_answer_value",
    "validate_value",
]
