"""Extraction of the answer from a response: choices, numbers, coordinates, refusals, in the wordings of many models."""

import json

import pytest

from mmrl.benchmarks.extraction.extract import extract
from mmrl.benchmarks.extraction.numbers import find_number_words, find_numbers
from mmrl.benchmarks.extraction.options import normalize_option

NUMBERS = ("3", "5", "7", "9")
ANGLES = ("30°", "45°", "60°", "90°")
FORMULAS = (r"\frac { 5 } { 12 }", "2√{3}", "12", "3π")
CHANGES = ("increase", "decrease", "stay the same", "none of the above")
STARVING = ("Hawks will starve", "Foxes will starve")
YES_NO = ("Yes", "No")
COLOURED = "Is the red cube larger than the blue sphere?"

CHOICES = [
    # explicit: boxes, tags, announcements
    (NUMBERS, r"So we get \boxed{B}", "B", "boxed"),
    (NUMBERS, r"\boxed{\text{(B)}}", "B", "boxed"),
    (NUMBERS, r"$$\boxed{\textbf{(B) } 5}$$", "B", "boxed"),
    (NUMBERS, r"It is $\boxed{5}$ and not 3.", "B", "boxed"),
    (FORMULAS, r"\boxed{\frac{5}{12}}", "A", "boxed"),
    (FORMULAS, r"\boxed{2\sqrt{3}}", "B", "boxed"),
    (NUMBERS, "<think>A or C?</think><answer>B</answer>", "B", "answer_tag"),
    (NUMBERS, "<answer>(B) 5", "B", "answer_tag"),
    (NUMBERS, "The correct answer is B.", "B", "announced_letter"),
    (NUMBERS, "Answer: **(B)** 5", "B", "announced_letter"),
    (NUMBERS, "The answer is:\n\n(B)", "B", "announced_letter"),
    (NUMBERS, "The answer is A, no: the answer is B.", "B", "announced_letter"),
    (NUMBERS, "Since x + 2 = 7, the correct option letter is B.", "B", "announced_letter"),
    (NUMBERS, "I would choose B.", "B", "announced_letter"),
    (NUMBERS, "The answer is 5.", "B", "announced_text"),
    (("30m", "45m"), "The answer is 45 metres.", "B", "announced_number"),
    (CHANGES, "The most likely answer would be: decrease", "B", "announced_text"),
    (NUMBERS, "因此,答案是(B)。", "B", "announced_letter"),
    (NUMBERS, "故选B。", "B", "announced_letter"),
    (NUMBERS, "所以,答案是5°,对应选项是B。", "B", "announced_letter"),
    (NUMBERS, "所以为48°,答案选项为B。", "B", "announced_letter"),
    (NUMBERS, "(A) 3 is odd. Hence (B) is correct.", "B", "judged_letter"),
    (NUMBERS, "B is the answer, since 5 + 4 is 9.", "B", "judged_letter"),
    (NUMBERS, "A is too small. Therefore option B is the answer.", "B", "judged_letter"),
    # alone, or first
    (NUMBERS, "B", "B", "first_letter"),
    (NUMBERS, "(b)", "B", "first_letter"),
    (NUMBERS, "b", "B", "first_letter"),
    (NUMBERS, "B.\n\nThe sides are 2 and 3.", "B", "first_letter"),
    (NUMBERS, "5", "B", "whole_text"),
    (FORMULAS, "5/12", "A", "whole_text"),
    (("True", "False"), "A: False", "B", "first_text"),
    (YES_NO, "A) Yes", "A", "yes_no_first"),
    (YES_NO, "No, it is not. It is smaller.", "B", "yes_no_first"),
    # implied
    (NUMBERS, "The angle at (B) is the one.", "B", "only_letter"),
    (CHANGES, "Fewer algae, fewer fish: they would decrease.", "B", "concluding_text"),
    (CHANGES, "If algae increase, the fish decrease.", "B", "concluding_text"),
    (CHANGES, "The population of fish will decline.", "B", "distinctive_words"),
    (STARVING, "With fewer mice, hawks lose their prey. Foxes would not be affected.", "A", "distinctive_words"),
    (NUMBERS, "It is 5. The other options (A, C, and D) are too far off.", "B", "only_text"),
    (NUMBERS, "It is 5. None of the other options fits.", "B", "only_text"),
    (ANGLES, "∠A = 180° - 90° - 45° = 45 degrees", "B", "concluding_number"),
    (YES_NO, "The red cube is larger than the blue sphere.", "A", "yes_no_statement"),
    (YES_NO, "The red cube is not larger than the blue sphere.", "B", "yes_no_statement"),
    (YES_NO, "The red cube is smaller than the blue sphere.", "B", "yes_no_statement"),
    (YES_NO, "The red cube is equal in size to the blue sphere.", "B", "yes_no_statement"),
    (YES_NO, "That the red cube is larger than the blue sphere is false.", "B", "yes_no_statement"),
]

FIGURES = [
    (r"\boxed{12}", 12, "boxed"),
    (r"\boxed{45^\circ}", 45, "boxed"),
    (r"\boxed{18\text{ cm}}", 18, "boxed"),
    (r"\boxed{\frac{3}{4}}", 0.75, "boxed"),
    ("<think>1 2 3</think><answer>5</answer>", 5, "answer_tag"),
    ("The answer is 42.", 42, "announced_number"),
    ("The final answer is 12 - 4 = 8.", 8, "announced_number"),
    ("Final Answer: 1/2", 0.5, "announced_number"),
    ("答案是12。", 12, "announced_number"),
    ("42", 42, "lone_number"),
    ("**17**", 17, "lone_number"),
    ("There is one cube.", 1, "lone_number"),
    ("It is **7**, which is more than the three there were before the move, and fewer than 12.", 7, "bold_number"),
    ("So, 3 + 4 = 7 objects are left, as 2 were removed in the first step of the two.", 7, "concluding_number"),
    ("The total comes to $1,234.50 for all of the people who bought their tickets today.", 1234.5, "concluding_number"),
    ("Obama was born on August 4, 1961, and Bill Clinton in 1946. The gap is 15 years.", 15, "concluding_number"),
    ("Step 1: Count the cubes. Step 2: Add the rest of them.\nThe number of objects is seven.", 7, "concluding_number"),
    ("1. Start with 8 cubes on the table.\n2. Subtract 3 of them.\n3. Then 5 cubes are left.", 5, "concluding_number"),
    ("The temperatures that I read there range from 13 to 20 degrees on the five days.", 20, "concluding_number"),
    (
        "The hall has 40 seats, so it may hold up to 55. In general, a hall like this one is good for 50 people.",
        50,
        "concluding_number",
    ),
]

NOTHING = [
    ("", "empty", "no_answer"),
    (" \n\t", "empty", "no_answer"),
    ("<think>It is A, for", "unclosed_thinking", "truncated"),
    ("I cannot see the picture.", "refusal", "refusal"),
    ("Sorry, I can't help with pictures of people yet.", "refusal", "refusal"),
    ("Without more information, it is impossible to determine the answer.", "refusal", "refusal"),
    ("无法确定。", "refusal", "refusal"),
    ("What a lovely picture!", "nothing", "no_answer"),
]

SIDES = ("12 cm", "7 cm", "9 cm", "5 cm")

CHOICE_WORDINGS = [
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

SEVERAL_OPTIONS = [
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

NUMBER_WORDINGS = [
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

SEVERAL_NUMBERS = [
    "The answer is either {value} or {other}.",
    "The answer is between {value} and {other}.",
    "Answer: {value}, {other}",
    "\\boxed{{{value} \\text{{ or }} {other}}}",
    "<answer>{value} or {other}</answer>",
    "It is not {value}.",
    "I cannot tell from the {value} pictures.",
]


def choice(options, text, question=COLOURED):
    return extract(text, "choice", options=options, question=question)


def number(text, question=""):
    return extract(text, "number", question=question)


@pytest.mark.parametrize(("options", "text", "letter", "rule"), CHOICES)
def test_chosen_option_is_found(options, text, letter, rule):
    found = choice(options, text)
    assert (found.value, found.rule) == (letter, rule)
    assert 0 <= found.start < found.end <= len(text)


@pytest.mark.parametrize(("text", "value", "rule"), FIGURES)
def test_number_is_found(text, value, rule):
    found = number(text)
    assert (found.number, found.rule) == (value, rule)
    assert found.value == text[found.start : found.end].strip()


@pytest.mark.parametrize(("text", "rule", "reason"), NOTHING)
@pytest.mark.parametrize("expected_type", ["choice", "number"])
def test_missing_answer_has_a_reason(text, rule, reason, expected_type):
    options = NUMBERS if expected_type == "choice" else ()
    found = extract(text, expected_type, options=options)
    assert (found.value, found.rule, found.no_answer_reason) == (None, rule, reason)


MORE = "Are there more?"


@pytest.mark.parametrize(
    ("options", "text", "rule", "question"),
    [
        # An answer outside the options chooses none of those it mentions.
        (NUMBERS, "2x = 10, so x is 5, and 5 / 2 is not among the given choices.", "refusal", ""),
        (NUMBERS, "It is 5 or so: none of the options fits.", "refusal", ""),
        (NUMBERS, "它是5,选项中没有。", "refusal", ""),
        (NUMBERS, r"It is \boxed{4}, which is less than 5.", "nothing", ""),
        (YES_NO, "The answer is (E).", "nothing", ""),
        # A list of the options chooses none, and neither do two letters.
        (("red", "blue", "green"), "(A) red\n(B) blue\n(C) green", "nothing", ""),
        (YES_NO, "(A) Yes\n(B) No", "nothing", ""),
        (NUMBERS, "The answer is either A or C.", "nothing", ""),
        # Answers in one case or the other, and then a refusal.
        (YES_NO, "If so, the answer is (A) Yes. If not, it is (B) No. It is unclear which.", "refusal", MORE),
        # Articles are not options.
        (("A", "B", "C"), "A line is drawn through the two points, and", "nothing", "Which point is nearest?"),
        (SIDES, "The answer is a matter of taste", "nothing", ""),
        *((SIDES, text, None, "How long is the side?") for text in SEVERAL_OPTIONS),
    ],
)
def test_response_that_chooses_no_option_has_no_answer(options, text, rule, question):
    found = choice(options, text, question)
    assert found.value is None
    assert rule is None or found.rule == rule


UNKNOWN = ("6", "7", "It cannot be determined from the information given")


@pytest.mark.parametrize(
    ("options", "question", "text", "letter"),
    [
        # Statements answer yes-or-no questions.
        (YES_NO, "Is the glass full of water?", "The glass of water is empty.", "B"),
        (YES_NO, "Is the gate of the garden open?", "The gate of the garden is closed.", "B"),
        (YES_NO, "Is it false that the gate is shut?", "It is false that the gate is shut.", "A"),
        # Invented turns are left out.
        (NUMBERS, "", "The answer is (B) 5.\n\nHint: Go.\nQuestion: What is 2+2?\nThe answer is (D) 9.", "B"),
        (NUMBERS, "", "The answer is B.###Human: And now?###Assistant: The answer is C.", "B"),
        # So is a repeated prompt.
        (NUMBERS, "", "Question: Which?\nChoices:\n(A) 3\nAnswer: (B) 5\n\nQuestion: And?\nAnswer: (A) 3", "B"),
        # An answer after a refusal counts, and a refusal may be an option.
        (NUMBERS, "", "I can't see the picture, but the answer is (B).", "B"),
        (UNKNOWN, "", "The length cannot be determined from the information given.", "C"),
        # A letter names the place before an option of that text; the first of equal options is chosen.
        (("(c)", "(a)", "(b)"), "", "A", "A"),
        (("20", "15", "20"), "", "20", "A"),
        (("A", "B", "C"), "Which point is nearest?", "The nearest is B", "B"),
        (SIDES, "", "The answer is c.", "C"),
    ],
)
def test_option_is_chosen_despite_its_surroundings(options, question, text, letter):
    found = choice(options, text, question)
    assert found.value == letter
    assert text[found.start : found.end]


@pytest.mark.parametrize(
    ("question", "text", "value"),
    [
        ("", "### Step 1\nCount.\n### Result\nThe answer is 7.", 7),  # headings are not turns
        ("", "I cannot see it. However, based on the text, there are 5 cubes left in all.", 5),
        # Numbers of the question are not the answer.
        ("When was it lower than 0.2?", "The spending was lower than 0.2 percent of all spending in 1970 alone.", 1970),
        *(("", f"\\boxed{{{text}}}", n) for text, n in (("9{,}079", 9079), ("10\\,000", 10000), ("1{,}234.5", 1234.5))),
    ],
)
def test_number_is_read_despite_its_surroundings(question, text, value):
    assert number(text, question).number == value


@pytest.mark.parametrize("wording", CHOICE_WORDINGS)
@pytest.mark.parametrize("index", range(4))
def test_choice_is_read_in_every_wording(wording, index):
    letter, other = "ABCD"[index], "ABCD"[index - 1]
    response = wording.format(letter=letter, other=other, text=SIDES[index])
    assert choice(SIDES, response, "How long is the side?").value == letter


@pytest.mark.parametrize("wording", NUMBER_WORDINGS)
@pytest.mark.parametrize(("value", "other"), [("9", "11"), ("4.5", "7"), ("1024", "3")])
def test_number_is_read_in_every_wording(wording, value, other):
    assert number(wording.format(value=value, other=other), "How many are left?").number == float(value)


@pytest.mark.parametrize("wording", SEVERAL_NUMBERS)
def test_response_with_several_numbers_has_no_answer(wording):
    assert number(wording.format(value="9", other="11"), "How many are left?").value is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,234,567 and 89", [1234567, 89]),
        ("2.5 x 10^{-3} and 1e-6 and 6.02 × 10^23", [0.0025, 1e-6, 6.02e23]),
        ("3/4 of 12", [0.75, 12]),
        (r"\frac{1}{3} and \dfrac{3}{2}", [1 / 3, 1.5]),
        ("the 1st, 2nd, 3rd and 20th of May", []),
        ("at 9:30 on 2019-05-03 or 1/2/2003", []),
        ("see Figure 3, Table 2 and Step 1", []),
        ("x^2 + y_3 and cm2", []),
        ("-7 and −7", [-7, 7]),
        *((text, []) for text in ("10^99999", "9" * 100, "1/0")),
    ],
)
def test_find_numbers_reads_digits(text, values):
    assert [found.value for found in find_numbers(text)] == pytest.approx(values)


def test_find_number_words_reads_words():
    text = "twenty-five of the one hundred, no one, one of them and only one"
    assert [found.value for found in find_number_words(text)] == [25, 1]
    assert [found.value for found in find_number_words("three hundred thousand")] == [300]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\frac { 5 } { 12 }", "5/12"),
        ("45°", r"$45^\circ$"),
        ("45 degrees", "45°"),
        (r"2\sqrt{3}", "2√3"),
        ("The red one.", "red one"),
        (r"3\pi", "3π"),
    ],
)
def test_normalize_option_equates_notations(a, b):
    assert normalize_option(a) == normalize_option(b)


@pytest.mark.parametrize(
    ("expected_type", "text", "coordinates"),
    [
        ("box", "<answer>[10, 20, 30, 40]</answer>", (10, 20, 30, 40)),
        ("box", 'Here: ```json\n{"bbox_2d": [10, 20, 30, 40], "label": "cat"}\n```', (10, 20, 30, 40)),
        ("box", "<|box_start|>(10,20),(30,40)<|box_end|>", (10, 20, 30, 40)),
        ("box", "first [1, 2, 3, 4], rather [10.5, 20, 30, 40]", (10.5, 20, 30, 40)),
        ("box", "[1, 2, 3]", None),
        ("point", "pyautogui.click(x=10, y=20)", (10, 20)),
        ("point", '{"x": 10, "y": 20}', (10, 20)),
        ("point", "<point>10 20</point>", (10, 20)),
        ("point", "(0.1, 0.2)", (0.1, 0.2)),
        ("point", "[10, 20, 30, 40]", (20, 30)),
        ("point", "nowhere", None),
    ],
)
def test_coordinates_are_found(expected_type, text, coordinates):
    found = extract(text, expected_type)
    assert (found.regions[0].coordinates if found.regions else None) == coordinates
    assert found.value is None or text[found.start : found.end] == found.value


@pytest.mark.parametrize(
    ("text", "value", "labels"),
    [
        ('```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]\n```', True, ["cat"]),
        ("no boxes", False, []),
        ("[]", True, []),
        (json.dumps([{"bbox_2d": [1000, 2000, 3000, 4000], "label": "cat"}] * 200), True, ["cat"] * 200),
        ("A row [of cats]. " + "Hm. " * 1000 + '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]', True, ["cat"]),
        ("[" + "a cat, " * 900, False, []),
    ],
)
def test_labelled_boxes_are_found(text, value, labels):
    found = extract(text, "boxes")
    assert (found.value is not None, [region.label for region in found.regions]) == (value, labels)


@pytest.mark.parametrize(
    ("expected_type", "text", "value"),
    [
        ("text", "The answer is: Paris.", "Paris"),
        ("text", "Paris", "Paris"),
        ("text", "<answer>The answer is Paris.</answer> Bye.", "Paris"),
        ("text", "The answer is Rome. <answer> Paris </answer>", "Paris"),
        ("text", f"<answer>{'x' * 9000}</answer> Bye.", "x" * 9000),
        ("text", f"<answer>The answer is Rome. {'x ' * 3000} The answer is Paris.</answer>", "Paris"),
        ("list", "Between [1, 2] or rather [2014, 2016].", "[2014, 2016]"),
    ],
)
def test_text_and_list_are_found(expected_type, text, value):
    assert extract(text, expected_type).value == value
