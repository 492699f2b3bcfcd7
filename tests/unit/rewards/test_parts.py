"""The parts of a response that an option `of` names."""

import pytest
from factories import make_response

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.types import AnswerType
from mmrl_rewards.contract import BadAnswer, part_text, part_value

FORMAT = ResponseFormat(thinking="optional", sections=(ResponseSection("observe", required=False),))
WHOLE = "<observe> 4 </observe><think>five</think><answer>6</answer>"


def respond(text, response_format=FORMAT):
    return make_response(text, response_format.parse(text, AnswerType.NUMBER))


def test_the_text_and_the_value_of_each_part_are_read():
    response = respond(WHOLE)
    texts = [part_text(response, of) for of in ("answer", "thought", "response", "observe")]
    assert texts == ["6", "five", WHOLE, " 4 "]
    assert part_text(response) == "6"
    assert part_value(response, AnswerType.NUMBER) == 6
    assert part_value(response, AnswerType.NUMBER, "observe") == 4
    assert part_value(response, AnswerType.TEXT, "thought") == "five"


@pytest.mark.parametrize(
    ("text", "of", "reason"),
    [
        ("<answer>6</answer>", "observe", "no observe"),
        ("<answer>6</answer>", "thought", "no thought"),
        ("<think>five</think>", "answer", "no answer tag"),
        ("", "response", "empty response"),
        ("<observe> \n</observe><answer>6</answer>", "observe", "empty observe"),
        ("<think></think><answer>6</answer>", "thought", "empty thought"),
        ("<observe>4</observe><observe>4</observe><answer>6</answer>", "observe", "more than one observe"),
        ("<think>4</think><think>5</think><answer>6</answer>", "thought", "more than one thought"),
        ("<think>five</think><answer>6</answer>", "thought", "thought is not a number: 'five'"),
        ("<think><observe>4</observe></think><answer>6</answer>", "observe", "no observe"),
        (WHOLE, "nothing", "no nothing"),
    ],
)
def test_a_part_that_is_absent_empty_repeated_or_of_another_type_is_a_bad_answer(text, of, reason):
    with pytest.raises(BadAnswer, match=f"^{reason}$"):
        part_value(respond(text), AnswerType.NUMBER, of)


def test_a_part_before_a_tool_call_may_come_again_after_it():
    """Each turn of a conversation with tools has a thought of its own; the last one is read."""
    answer = FORMAT.parse_continuation("<think>4</think>", "<think>5</think><answer>6</answer>", AnswerType.NUMBER)
    assert answer.thinking == "5" and not answer.repeated


def test_fields_of_json_are_parts():
    json_format = ResponseFormat(style="json", thinking="required")
    response = respond('{"think": "[1, 2]", "answer": 6}', json_format)
    assert part_value(response, AnswerType.POINT, "thought") == (1.0, 2.0)
