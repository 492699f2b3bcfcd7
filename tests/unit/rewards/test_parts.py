"""The parts of a response that an option `of` names."""

import pytest
from factories import make_response, make_sample
from scoring import check_samples, make_scorer, term

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.scoring.registry import builtin_rewards
from mmrl.types import AnswerType, Unscorable, UserError
from mmrl_rewards import text
from mmrl_rewards.contract import BadAnswer, bind, part_text, part_value

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


READS_TEXT = [
    *("mmrl_rewards.text:exact", "mmrl_rewards.text:rouge", "mmrl_rewards.text:bleu", "mmrl_rewards.text:chrf"),
    *("mmrl_rewards.ocr:exact", "mmrl_rewards.ocr:cer", "mmrl_rewards.ocr:wer", "mmrl_rewards.ocr:anls"),
    *("mmrl_rewards.classify:label", "mmrl_rewards.classify:fuzzy", "mmrl_rewards.maths:equal"),
]
CORRECT = {
    **dict.fromkeys(READS_TEXT, (AnswerType.TEXT, "four plain old words", "four plain old words")),
    "mmrl_rewards.choice:exact": (AnswerType.CHOICE, "B", "B"),
    "mmrl_rewards.choice:option": (AnswerType.CHOICE, "B", "The answer is B."),
    "mmrl_rewards.choice:yes_no": (AnswerType.TEXT, "yes", "Yes, it is."),
    "mmrl_rewards.number:exact": (AnswerType.NUMBER, 4, "4"),
    "mmrl_rewards.number:relaxed": (AnswerType.NUMBER, 4, "4.1"),
    "mmrl_rewards.number:graded": (AnswerType.NUMBER, 4, "4"),
    "mmrl_rewards.number:rounded": (AnswerType.NUMBER, 4, "4.001"),
    "mmrl_rewards.number:quantity": (AnswerType.TEXT, "4 cm", "40 mm"),
    "mmrl_rewards.count:exact": (AnswerType.NUMBER, 4, "4"),
    "mmrl_rewards.count:graded": (AnswerType.NUMBER, 4, "4"),
    "mmrl_rewards.span:iou": (AnswerType.SPAN, [1, 2], "[1, 2]"),
    "mmrl_rewards.span:union_iou": (AnswerType.SPANS, [[1, 2]], "[[1, 2]]"),
    "mmrl_rewards.span:f1": (AnswerType.SPANS, [[1, 2]], "[[1, 2]]"),
    "mmrl_rewards.classify:labels": (AnswerType.LIST, ["a", "b"], '["b", "a"]'),
    "mmrl_rewards.ocr:fields": (AnswerType.JSON, {"a": "b"}, '{"a": "b"}'),
    "mmrl_rewards.format:fields": (AnswerType.JSON, {"a": "b"}, '{"a": 1}'),
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_reward_reads_the_part_that_of_names_and_no_other(name):
    answer_type, target, correct = CORRECT[name]
    fn, sample = builtin_rewards()[name], make_sample(target, answer_type)
    right = f"<observe>{correct}</observe><think>{correct}</think><answer>nothing</answer>"
    wrong = f"<observe>nothing</observe><think>nothing</think><answer>{correct}</answer>"
    for of in ("observe", "thought"):
        for written, value in ((right, 1.0), (wrong, 0.0), (f"<answer>{correct}</answer>", 0.0)):
            response = make_response(written, FORMAT.parse(written, answer_type))
            found = bind(fn, {"of": of})(response, sample).value
            assert found == pytest.approx(value, abs=0.2), written
    response = make_response(correct, FORMAT.parse(correct, answer_type))
    assert bind(fn, {"of": "response"})(response, sample).value == pytest.approx(1.0)


def test_a_column_has_the_correct_texts_of_a_part_that_is_not_the_answer():
    """A sample whose answer is a choice may have its slide's text compared with the thought."""
    ocr = bind(builtin_rewards()["mmrl_rewards.ocr:cer"], {"of": "thought", "column": "slide"})
    written = "<think>Net income</think><answer>B</answer>"
    response = make_response(written, FORMAT.parse(written, AnswerType.CHOICE))
    for slide in ("Net income", ["Gross income", "Net income"]):
        assert ocr(response, make_sample("B", AnswerType.CHOICE, meta={"slide": slide})).value == 1.0
    for meta in ({}, {"slide": []}, {"slide": 3}, {"slide": " "}):
        with pytest.raises(Unscorable):
            ocr(response, make_sample("B", AnswerType.CHOICE, meta=meta))


def test_a_term_that_reads_a_part_which_no_response_has_stops_the_run():
    scorer = make_scorer(term(text.exact, "read", {"of": "obsreve"}))
    with pytest.raises(UserError, match="term 'read', option 'of': the response format has no 'obsreve'; its parts"):
        check_samples(scorer, [], FORMAT)
    check_samples(make_scorer(term(text.exact, "read", {"of": "observe"})), [], FORMAT)
    with pytest.raises(UserError, match="has no 'thought'; its parts are answer, response$"):
        check_samples(make_scorer(term(text.exact, "read", {"of": "thought"})), [], ResponseFormat())
