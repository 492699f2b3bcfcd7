"""One answer in the wordings of many models is always read; a response that names several answers has none."""

import pytest

from mmrl.benchmarks.extraction.extract import ExtractionQuery, extract

SIDES = ("12 cm", "7 cm", "9 cm", "5 cm")

CHOOSING = [
    # boxes, tags and headings
    "So we get:\n\n\\[\\boxed{{{letter}}}\\]",
    "Final Answer: The final answer is $\\boxed{{{letter}}}$",
    "\\boxed{{\\text{{{letter}. {text}}}}}",
    "<think>{other}?</think>\n<answer>{letter}</answer>",
    "<think>{other}?</think><answer>The triangle is right-angled. Hence the correct answer is {letter}.</answer>",
    "<SUMMARY> Options A and B are near. </SUMMARY>\n\n<CONCLUSION> {letter} </CONCLUSION>",
    "<REASONING> Options A and B are near. </REASONING>\n\n<CONCLUSION> {text} </CONCLUSION>",
    "<think>..</think>Of the options A and B we take <|begin_of_box|>{letter}<|end_of_box|>",
    "<thinking>Answer: {other}?</thinking>\n{letter}",
    "◁think▷Answer: {other}?◁/think▷\n\n**{letter}**",
    '{{"reasoning": "The figure shows it.", "answer": "{letter}"}}',
    '```json\n{{\n "answer": "{text}"\n}}\n```',
    "### Reasoning\nWe see it.\n\n### Final Answer\n{letter}",
    "## Answer\n\n**{letter}. {text}**",
    "Ans: {letter}",
    "【答案】{letter}\n【解析】根据图示。",
    "通过分析,{letter}选项正确。",
    "答：{letter}",
    # LaTeX and marks around a letter
    "The answer is $\\text{{{letter}}}$.",
    "The answer is \\(\\mathbf{{{letter}}}\\).",
    "The answer is ${letter}$.",
    "The correct answer is **{letter}**.",
    "Answer: <{letter}>",
    "[{letter}]",
    # sentences
    "I'd say {letter}.",
    "I cannot be certain without a clearer picture, but my best guess is {letter}.",
    "The others fail. So {letter}.",
    "We can rule out {other}, so {letter} it is.",
    "The side is opposite, thus {letter}.",
    "Not {other} but {letter} is correct.",
    "We look at the triangle. A line is drawn.\n{letter}",
    "We can eliminate {other}. This leaves {letter}.",
    "The correct option is the one labelled {letter}.",
    # second thoughts, suppositions, lists
    "The answer is ({other}). Wait, actually, it should be ({letter}).",
    "So the answer would be {other}. Wait, that is not right. Actually it's {letter}.",
    "The answer is ({letter}).\n\nNote: If the diagram were different, the answer could be ({other}).",
    "The options are (A) 12 cm, (B) 7 cm, (C) 9 cm, (D) 5 cm. By the theorem it is {text}.",
]

OPEN = [
    "The answer is either A or B.",
    "Answer: A/B",
    "Answer: A, B, C, D",
    "答案:A或B",
    "\\boxed{A, B}",
    "\\boxed{A \\text{ or } B}",
    "<answer>A and B</answer>",
    "The answer is 12 cm or 7 cm.",
    "Options A and B are both plausible.",
    "If the line is straight, the answer is (A); otherwise the answer is (B).",
    "The options are (A) 12 cm, (B) 7 cm, (C) 9 cm, (D) 5 cm.",
    "As I have no access to the picture, I can't choose between the options.",
]

COUNTING = [
    "{value}\n\nExplanation: There were {other} objects on the left, and some of them were removed afterwards.",
    "{value}. This is because, of the {other} objects in the picture, some are removed one after the other.",
    "The answer is {other}. Wait, actually it should be {value}.",
    "<think>{other}</think>There were {other} before. <|begin_of_box|>{value}<|end_of_box|>",
    "<REASONING>{other} - 1 = 4.</REASONING>\n\n<CONCLUSION> {value} units </CONCLUSION>",
    "<answer>In the year 2014 the total was {value}.</answer>",
    "### Steps\n{other} first.\n\n### Final Answer\n{value}",
    "x = {other}, so we continue.\n\nOutput: {value}",
    "The answer is {value}, not {other}.",
    "Answer: The value of f(4) is {value}.",
]

UNDECIDED = [
    "The answer is either {value} or {other}.",
    "The answer is between {value} and {other}.",
    "Answer: {value}, {other}",
    "\\boxed{{{value} \\text{{ or }} {other}}}",
    "<answer>{value} or {other}</answer>",
    "It is not {value}.",
    "I cannot tell from the {value} pictures.",
]


@pytest.mark.parametrize("dress", CHOOSING)
@pytest.mark.parametrize("place", range(4))
def test_a_choice_is_read_in_every_wording(dress, place):
    letter, other = "ABCD"[place], "ABCD"[place - 1]
    response = dress.format(letter=letter, other=other, text=SIDES[place])
    assert (
        extract(
            response, ExtractionQuery(expected_type="choice", options=SIDES, question="How long is the side?")
        ).value
        == letter
    )


@pytest.mark.parametrize("response", OPEN)
def test_a_response_that_names_several_options_chooses_none(response):
    assert (
        extract(
            response, ExtractionQuery(expected_type="choice", options=SIDES, question="How long is the side?")
        ).value
        is None
    )


@pytest.mark.parametrize("dress", COUNTING)
@pytest.mark.parametrize(("value", "other"), [("9", "11"), ("4.5", "7"), ("1024", "3")])
def test_a_number_is_read_in_every_wording(dress, value, other):
    response = dress.format(value=value, other=other)
    assert extract(response, ExtractionQuery(expected_type="number", question="How many are left?")).number == float(
        value
    )


@pytest.mark.parametrize("dress", UNDECIDED)
def test_a_response_that_names_several_numbers_has_no_answer(dress):
    response = dress.format(value="9", other="11")
    assert extract(response, ExtractionQuery(expected_type="number", question="How many are left?")).value is None


def test_the_article_a_is_not_an_option():
    asked = ExtractionQuery(expected_type="choice", options=("A", "B", "C"), question="Which point is nearest?")
    assert extract("A line is drawn through the two points, and", asked).value is None
    assert extract("The nearest is B", asked).value == "B"


def test_a_small_letter_counts_at_the_end_of_a_response():
    asked = ExtractionQuery(expected_type="choice", options=SIDES)
    assert extract("The answer is c.", asked).value == "C"
    assert extract("The answer is a matter of taste", asked).value is None


@pytest.mark.parametrize(("written", "value"), [("9{,}079", 9079), ("10\\,000", 10000), ("1{,}234{,}567.5", 1234567.5)])
def test_latex_separators_of_thousands_are_read(written, value):
    assert extract(f"\\boxed{{{written}}}", ExtractionQuery(expected_type="number")).number == value
