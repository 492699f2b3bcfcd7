"""Extraction of the answer from a response: choices, numbers, coordinates, refusals."""

import pytest

from mmrl.benchmarks.extraction.extract import ExtractionQuery, extract
from mmrl.benchmarks.extraction.numbers import find_number_words, find_numbers
from mmrl.benchmarks.extraction.options import normalize_option, prepare_options

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
    (
        "Barack Obama was born on August 4, 1961, and Bill Clinton in 1946. The gap is 15 years.",
        15,
        "concluding_number",
    ),
    ("Step 1: Count the cubes. Step 2: Add the rest of them.\nThe number of objects is seven.", 7, "concluding_number"),
    ("1. Start with 8 cubes on the table.\n2. Subtract 3 of them.\n3. Then 5 cubes are left.", 5, "concluding_number"),
    (
        "The temperatures that I read in the chart range from 13 to 20 degrees on the five days.",
        20,
        "concluding_number",
    ),
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


def choice(options, text, question=COLOURED):
    return extract(text, ExtractionQuery(expected_type="choice", options=options, question=question))


def number(text, question=""):
    return extract(text, ExtractionQuery(expected_type="number", question=question))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("2x = 10, so x is 5, and 5 / 2 is not among the given choices.", "refusal"),
        ("It is 5 or so: none of the options fits.", "refusal"),
        ("它是5,选项中没有。", "refusal"),
        (r"It is \boxed{4}, which is less than 5.", "nothing"),
    ],
)
def test_an_answer_outside_the_options_chooses_none_that_it_mentions(text, rule):
    found = choice(NUMBERS, text)
    assert (found.value, found.rule) == (None, rule)


@pytest.mark.parametrize(("options", "text", "letter", "rule"), CHOICES)
def test_extract_finds_the_chosen_option(options, text, letter, rule):
    found = choice(options, text)
    assert (found.value, found.rule) == (letter, rule)
    assert 0 <= found.start < found.end <= len(text)


@pytest.mark.parametrize(("text", "value", "rule"), FIGURES)
def test_extract_finds_the_number(text, value, rule):
    found = number(text)
    assert (found.number, found.rule) == (value, rule)
    assert found.value == text[found.start : found.end].strip()


@pytest.mark.parametrize(("text", "rule", "why"), NOTHING)
@pytest.mark.parametrize("wants", ["choice", "number"])
def test_extract_says_why_there_is_no_answer(text, rule, why, wants):
    found = extract(text, ExtractionQuery(expected_type=wants, options=NUMBERS if wants == "choice" else ()))
    assert (found.value, found.rule, found.no_answer_reason) == (None, rule, why)


@pytest.mark.parametrize(
    ("question", "text", "letter"),
    [
        ("Is the glass full of water?", "The glass of water is empty.", "B"),
        ("Is the gate of the garden open?", "The gate of the garden is closed.", "B"),
        ("Is it false that the gate is shut?", "It is false that the gate is shut.", "A"),
    ],
)
def test_a_statement_answers_yes_or_no(question, text, letter):
    assert choice(YES_NO, text, question).value == letter


def test_listing_the_options_chooses_none():
    assert choice(("red", "blue", "green"), "(A) red\n(B) blue\n(C) green").value is None
    assert choice(YES_NO, "(A) Yes\n(B) No").value is None
    assert choice(NUMBERS, "The answer is either A or C.").value is None


def test_a_letter_without_an_option_is_no_answer():
    assert choice(YES_NO, "The answer is (E).").value is None


def test_invented_turns_are_left_out():
    text = "The answer is (B) 5.\n\nHint: Please answer.\nQuestion: What is 2+2?\nThe answer is (D) 9."
    assert choice(NUMBERS, text).value == "B"
    assert choice(NUMBERS, "The answer is B.###Human: And now?###Assistant: The answer is C.").value == "B"


def test_a_repeated_prompt_is_left_out():
    text = "Question: Which?\nChoices:\n(A) 3\n(B) 5\nAnswer: (B) 5\n\nQuestion: And?\nAnswer: (A) 3"
    found = choice(NUMBERS, text)
    assert found.value == "B"
    assert text[found.start : found.end] == "B"


def test_markdown_headings_are_no_turns():
    assert number("### Step 1\nCount.\n### Result\nThe answer is 7.").number == 7


def test_an_answer_after_a_refusal_counts():
    assert choice(NUMBERS, "I can't see the picture, but the answer is (B).").value == "B"
    assert number("I cannot see it. However, based on the text, there are 5 cubes left in all.").number == 5


def test_conditional_answers_before_a_refusal_do_not_count():
    text = "If there are more, the answer is (A) Yes. If not, the answer is (B) No. It is impossible to determine."
    assert choice(YES_NO, text, "Are there more?").no_answer_reason == "refusal"


def test_an_option_may_say_that_it_cannot_be_determined():
    options = ("6", "7", "It cannot be determined from the information given")
    assert choice(options, "The length cannot be determined from the information given.").value == "C"


def test_numbers_of_the_question_are_not_the_answer():
    text = "The military expenditure was lower than 0.2 percent of all that was spent in 1970 alone."
    assert number(text, "When was the value lower than 0.2?").number == 1970


def test_a_letter_names_the_place_before_an_option_of_that_text():
    assert choice(("(c)", "(a)", "(b)"), "A").value == "A"


def test_the_first_of_equal_options_is_chosen():
    assert choice(("20", "15", "20"), "20").value == "A"


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
        ("10^99999", []),
        ("9" * 100, []),
        ("1/0", []),
    ],
)
def test_find_numbers_reads_digits(text, values):
    assert [one.value for one in find_numbers(text)] == pytest.approx(values)


def test_find_number_words_reads_words():
    text = "twenty-five of the one hundred, no one, one of them and only one"
    assert [one.value for one in find_number_words(text)] == [25, 1]
    assert [one.value for one in find_number_words("three hundred thousand")] == [300]


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


def test_options_are_prepared_once():
    assert prepare_options(NUMBERS) is prepare_options(("3", "5", "7", "9"))


@pytest.mark.parametrize(
    ("wants", "text", "coordinates"),
    [
        ("box", "<answer>[10, 20, 30, 40]</answer>", (10, 20, 30, 40)),
        ("box", 'Here: ```json\n{"bbox_2d": [10, 20, 30, 40], "label": "cat"}\n```', (10, 20, 30, 40)),
        ("box", "<|box_start|>(10,20),(30,40)<|box_end|>", (10, 20, 30, 40)),
        ("box", "first [1, 2, 3, 4], rather [10.5, 20, 30, 40]", (10.5, 20, 30, 40)),
        ("point", "pyautogui.click(x=10, y=20)", (10, 20)),
        ("point", '{"x": 10, "y": 20}', (10, 20)),
        ("point", "<point>10 20</point>", (10, 20)),
        ("point", "(0.1, 0.2)", (0.1, 0.2)),
        ("point", "[10, 20, 30, 40]", (20, 30)),
    ],
)
def test_extract_finds_coordinates(wants, text, coordinates):
    found = extract(text, ExtractionQuery(expected_type=wants))
    assert found.regions[0].coordinates == coordinates
    assert text[found.start : found.end] == found.value


def test_text_without_coordinates_has_no_answer():
    assert extract("[1, 2, 3]", ExtractionQuery(expected_type="box")).value is None
    assert extract("nowhere", ExtractionQuery(expected_type="point")).value is None


def test_extract_finds_labelled_boxes():
    text = '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]\n```'
    assert extract(text, ExtractionQuery(expected_type="boxes")).regions[0].label == "cat"
    assert extract("no boxes", ExtractionQuery(expected_type="boxes")).value is None
    assert extract("[]", ExtractionQuery(expected_type="boxes")).regions == ()


def test_extract_finds_free_text_and_lists():
    assert extract("The answer is: Paris.", ExtractionQuery(expected_type="text")).value == "Paris"
    assert extract("Paris", ExtractionQuery(expected_type="text")).value == "Paris"
    assert extract("<answer>The answer is Paris.</answer> Bye.", ExtractionQuery(expected_type="text")).value == "Paris"
    assert (
        extract("The answer is Rome. <answer> Paris </answer>", ExtractionQuery(expected_type="text")).value == "Paris"
    )
    assert (
        extract("Between [1, 2] or rather [2014, 2016].", ExtractionQuery(expected_type="list")).value == "[2014, 2016]"
    )
