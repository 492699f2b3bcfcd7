"""Official scoring rules against tables worked out by hand, and known errors of other evaluators."""

import random

import pytest

from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.grading import grade_response, score_responses
from mmrl.benchmarks.items import Item, ItemResponse, find_option, parse_canonical_item
from mmrl.benchmarks.official_metrics import formulas, grounding, mathvista, reading
from mmrl.benchmarks.official_metrics.latex_value import evaluate_latex
from mmrl.benchmarks.registry import BENCHMARKS, get_benchmark
from mmrl.benchmarks.verdict import ResponseOutcome
from mmrl.types import CoordinateSystem, Region, Size

FRUIT = ("apple", "pear", "plum", "fig")
NORM_1, NORM_1000 = {"coordinate_system": CoordinateSystem.NORM_1}, {"coordinate_system": CoordinateSystem.NORM_1000}


def make_item(answer_type, answer, **fields):
    return Item(id="1", answer_type=answer_type, answer=answer, **fields)


def make_choice(answer, options=FRUIT):
    return make_item("choice", find_option(answer, options), options=options)


def make_text(answer, **meta):
    return make_item("text", answer, meta=meta)


def grade(benchmark, item, text, **fields):
    return grade_response(get_benchmark(benchmark), item, ItemResponse(id="1", text=text, **fields))


def both(benchmark, item, text, **fields):
    """Return the strict and the official verdict."""
    verdict = grade(benchmark, item, text, **fields)
    return verdict.strict, verdict.official


PEAR = make_choice("pear")
FIFTY = make_choice("50", ("15", "100", "50", "50"))
FLOAT_ROW = {"pid": "1", "answer": "1.2", "answer_type": "float", "choices": None, "precision": 2.0, "question": ""}
GRAMS, CENTIMETRES = make_item("integer", "250", unit="g"), make_item("float", "3 cm", precision=1)
TIMES = make_choice("9:30", ("8:30", "9:00", "9:15", "9:20", "9:30"))
BOX = make_item("box", [100, 100, 200, 200], image_size=Size(640, 480))
BUTTON = make_item("point", [0.1, 0.2, 0.3, 0.4], image_size=Size(1000, 500), **NORM_1)
OCR = make_text(["CENTRE", "CENTER"], dataset="IIIT5K")
OCR_FORMULA = make_text("a + B", dataset="HME100k")

VERDICTS = [
    # The shortest option is nearest to an empty extraction.
    ("mathvista", make_choice("fig"), "I cannot see the picture.", False, True),
    ("mathvista", make_item("integer", "18"), "The answer is 18.7.", False, True),
    ("mathvista", make_item("integer", "18"), "The answer is 18.", True, True),
    ("mathvista", make_item("integer", "14"), "The answer is 14.0", True, True),
    # lmms-eval loses every question of this kind: round(x, 2.0) raises an error.
    ("mathvista", mathvista.parse_mathvista_item(FLOAT_ROW), "It is 1.2001 in all.", True, True),
    # VLMEvalKit compares lists with the text None.
    ("mathvista", make_item("list", "[2014, 2016]"), "Between [2014, 2016].", True, True),
    ("mathvista", make_item("list", "[2014, 2016]"), "None", False, False),
    ("mathvista", FIFTY, "(C)", True, True),  # two options have the same text
    ("mathvista", FIFTY, "(D)", True, True),
    # Numbers are compared in their units.
    ("mathvista", GRAMS, "The answer is 250 g.", True, None),
    ("mathvista", GRAMS, "The answer is 0.25 kg.", True, None),
    ("mathvista", GRAMS, "The answer is 250 kg.", False, None),
    ("canonical", CENTIMETRES, "The answer is 30 mm.", True, None),
    ("canonical", CENTIMETRES, "The answer is 3.", True, None),
    # MMMU: a letter in brackets, else between spaces, else an option's text in a long response.
    ("mmmu", PEAR, "B", True, True),
    ("mmmu", PEAR, "(B)", True, True),
    ("mmmu", PEAR, "A or (B)", None, True),
    ("mmmu", PEAR, "(A) and then (B)", None, True),
    ("mmmu", PEAR, "The answer is B because", True, True),
    ("mmmu", PEAR, "I would say that it is a pear", True, True),
    ("mmmu", PEAR, "a pear", True, False),
    ("mmmu", PEAR, "I'm sorry, A pear is B ", None, True),
    ("mmmu", make_text("3.14"), "The answer is 3.14159", False, True),
    ("mmmu", make_text("1200"), "so x = 1,200", True, True),
    ("mmmu", make_text("convex mirror"), "It is a convex mirror.", None, True),
    ("mmmu", make_text("convex mirror"), "It is a convex lens.", False, False),
    ("mmmu", make_text("x"), "x", True, True),
    ("mmmu", make_text("x"), "box", False, False),
    ("mmmu_pro", PEAR, "Answer: B", True, True),
    ("mmmu_pro", PEAR, "Answer: A\nAnswer: B", True, True),
    ("mmmu_pro", make_choice("plum"), "Answer: A or B. (C)", True, True),
    ("mmmu_pro", PEAR, "It is B.", True, True),
    # MMMU, VLMEvalKit and lmms-eval credit a quarter of refusals.
    *((name, PEAR, "Sorry, no.", False, False) for name in ("mmmu", "mmmu_pro", "geometry3k", "seed_bench_r1")),
    ("mvbench", PEAR, "(B) pear", True, True),
    ("mvbench", PEAR, "B.", True, True),
    ("mvbench", PEAR, "(A) apple", False, False),
    # MVBench's code gives credit where it finds nothing to compare.
    *(("mvbench", PEAR, text, False, True) for text in ("", ".", "(")),
    ("video_mme", PEAR, "The best answer is B.", True, True),
    ("video_mme", PEAR, "Because it is a pear, B.", None, True),  # the first letter: B of Because
    ("video_mme", PEAR, "I cannot say.", None, False),
    ("seed_bench_r1", PEAR, "<think>A</think><answer>B</answer>", True, True),
    ("seed_bench_r1", PEAR, "B", True, False),  # the first character in the tags
    ("geometry3k", make_text(r"8 \sqrt { 3 }"), r"so $x=\boxed{8\sqrt{3}}$", True, True),
    ("geometry3k", make_text(r"8 \sqrt { 3 }"), r"\boxed{8}", False, False),
    ("geometry3k", PEAR, "(B)", True, True),
    ("mathverse", PEAR, "Answer: B", True, True),
    ("mathverse", make_text("14"), "The answer is 14.", True, True),
    ("mathverse", make_text("14"), "The answer is $14$.", True, True),
    ("mathverse", make_text("14"), "The answer is 15.", False, False),
    ("mathvision", make_text("2"), r"\boxed{9^{9^{9^{9}}}}", False, False),  # not expanded
    # 254 false negatives of one published file have this form.
    ("mathvision", TIMES, r"\boxed{\text{(E) 9:30}}", True, False),
    ("mathvision", TIMES, r"\boxed{E}", True, True),
    # A text that is one number is compared as a number.
    ("mathvision", make_text("6"), "There are 6 different digits.", True, None),
    ("mathvision", make_text("6"), "The answer is 6 apples.", True, None),
    ("mathvision", make_text("6"), r"\boxed{6.0}", True, None),
    ("mathvision", make_text("6"), r"\boxed{\sqrt{36}}", True, None),
    ("mathvision", make_text("6"), "<answer>6 cm</answer>", True, None),
    ("mathvision", make_text("6"), "There are 5 digits, not 6.", False, None),
    ("mathvision", make_text("6"), "It is 6 or 7.", False, None),
    ("mathvision", make_text("6 cm"), "The side is 60 mm.", True, None),
    ("mathvision", make_text("50%"), "So 50 percent of them are red.", True, None),
    ("mathvision", make_text("007"), "The code is 7.", False, None),  # a code
    ("mathvision", make_text("C"), "The answer is 6.", False, None),
    ("emma", PEAR, r"\boxed{\text{(B)}}", True, False),
    ("emma", make_text("0.5"), r"\boxed{\frac{1}{2}}", True, True),
    ("emma", make_text("6"), r"\boxed{six}", None, True),
    # lmms-eval's pattern for \boxed reads \frac{1 here.
    ("canonical", make_text(r"\frac{1}{2}"), r"\boxed{\frac{1}{2}}", True, True),
    ("ocrbench", OCR, "The word is\ncentre.", None, True),
    ("ocrbench", OCR, "The word is middle.", None, False),
    ("ocrbench", OCR_FORMULA, "it reads a+B", None, True),
    ("ocrbench", OCR_FORMULA, "it reads a+b", None, False),
    ("counting", make_item("count", 1), "<answer>12</answer>", False, False),  # "12" contains "1"
    ("counting", make_item("count", "1,234 cars"), "<answer>1234</answer>", True, True),
    ("counting", make_item("count", 1), "<think>12</think><answer>1</answer>", True, True),
    ("counting", make_item("count", 1), "There are 1 of 12, so 1.", True, False),
    ("refcoco", BOX, "<answer>[200, 200, 100, 100]</answer>", False, False),
    ("refcoco", BOX, "<answer>[100, 100, 100, 200]</answer>", False, False),
    # VLM-R1 wants JSON with whole numbers, and takes the last box of several.
    ("refcoco", BOX, "<answer>[100, 100, 200, 200]</answer>", True, False),
    ("refcoco", BOX, '<answer>{"bbox_2d": [100.0, 100.0, 200.0, 200.0]}</answer>', True, False),
    ("refcoco", BOX, '<answer>{"bbox": [100, 100, 200, 200]</answer>', True, False),
    ("refcoco", BOX, '<answer>[{"bbox": [0, 0, 9, 9]}, {"bbox": [100, 100, 200, 200]}]</answer>', True, True),
    ("refcoco", BOX, '<answer>[{"bbox": [100, 100, 200, 200]}, {"bbox": [0, 0, 9, 9]}]</answer>', False, False),
    ("screenspot", BUTTON, "pyautogui.click(x=200, y=150)", True, True),
    ("screenspot", BUTTON, "[100, 100, 300, 200]", True, True),
    ("screenspot", BUTTON, "(100, 100)", True, True),  # on the edge
    ("screenspot", BUTTON, "(99, 100)", False, False),
    # ScreenSpot's own code reads (0, 0) from a response without a point.
    ("screenspot", make_item("point", [0, 0, 50, 50]), "It is at the top left.", False, True),
]


@pytest.mark.parametrize(("benchmark", "item", "text", "strict", "official"), VERDICTS)
def test_strict_and_official_verdicts(benchmark, item, text, strict, official):
    verdict = grade(benchmark, item, text)
    assert strict is None or verdict.strict is strict
    assert official is None or verdict.official is official


def mathvista_item(**columns):
    return mathvista.parse_mathvista_item({"pid": "1", "choices": None, "precision": None, **columns})


@pytest.mark.parametrize(
    ("extraction", "prediction"),
    [
        *((text, "pear") for text in ("B", "(b) whatever", "pear", "pears", "sorry")),
        *((text, "fig") for text in ("", "E")),
    ],
)
def test_mathvista_takes_any_text_for_an_option(extraction, prediction):
    item = mathvista_item(answer=FRUIT[0], answer_type="text", choices=FRUIT)
    assert mathvista.normalize_extraction(extraction, item) == prediction


@pytest.mark.parametrize(
    ("extraction", "answer_type", "precision", "prediction"),
    [
        ("18", "integer", None, "18"),
        ("18.0", "integer", None, "18"),
        ("18.7", "integer", None, "18"),
        ("1e3", "integer", None, "1000"),
        ("eighteen", "integer", None, None),
        ("inf", "integer", None, None),
        ("1.26", "float", 1, "1.3"),
        ("1.26", "float", 1.0, "1.3"),
        ("1", "float", 2.0, "1.0"),
        ("x", "float", 1, None),
        ("[1, 2]", "list", None, "[1, 2]"),
    ],
)
def test_mathvista_normalizes_numbers(extraction, answer_type, precision, prediction):
    item = mathvista_item(answer="1", answer_type=answer_type, precision=precision)
    assert mathvista.normalize_extraction(extraction, item) == prediction


def test_mmmu_draws_a_letter_for_a_response_without_one():
    """MMMU's eval_utils.py draws from one seeded generator in the order of the questions, not of the responses."""
    items = {str(n): Item(id=str(n), answer_type="choice", answer="D", options=FRUIT) for n in range(40)}
    responses = [ItemResponse(id=id, text="(A)" if int(id) % 3 == 0 else "no idea") for id in items if id != "7"]
    rng = random.Random(42)
    lucky = [response.id for response in responses if response.text != "(A)" and rng.choice("ABCD") == "D"]
    for order in (responses, responses[::-1]):
        verdicts = score_responses(BENCHMARKS["mmmu"], items, order, {}).verdicts
        assert [verdict.id for verdict in verdicts if verdict.official] == lucky != []
        assert not any(verdict.strict for verdict in verdicts)
        pro_verdicts = score_responses(BENCHMARKS["mmmu_pro"], items, order, {}).verdicts
        assert not any(verdict.official for verdict in pro_verdicts)


@pytest.mark.parametrize(
    ("parse", "response", "answer"),
    [
        (formulas.parse_mathvision_answer, "The answer is (B).", "b"),
        (formulas.parse_mathvision_answer, r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (formulas.parse_mathvision_answer, r"\boxed{1} or \boxed{2}", "2"),
        (formulas.parse_mathvision_answer, "The answer is 3 cm. Good.", "3cm"),
        (formulas.parse_mathvision_answer, "x = 5", "5"),
        (formulas.parse_mathvision_answer, "It is 12.", "12"),
        (formulas.parse_mathvision_answer, "(C)\nbecause", "c"),
        (formulas.parse_emma_answer, "B", "B"),
        (formulas.parse_emma_answer, "B: pear", "B"),
        (formulas.parse_emma_answer, "12.5", "12.5"),
        (formulas.parse_emma_answer, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (formulas.parse_emma_answer, r"\boxed{\text{(B)}}", "(B)"),
        (formulas.parse_emma_answer, "The final answer is 7. Done", "7"),
        (formulas.parse_emma_answer, "nothing", ""),
    ],
)
def test_formulas_are_parsed_as_by_the_authors(parse, response, answer):
    assert parse(response) == answer


KILOS = ("$4 \\mathrm{~kg}$", "$8 \\mathrm{~kg}$", "$30 \\mathrm{~kg}$")
ANGLES = ("$140^{\\circ}$", "$130^{\\circ}$", "$120^{\\circ}$")


@pytest.mark.parametrize(
    ("answer", "options", "response", "official", "strict"),
    [
        # Rows of data/test.jsonl and outputs/ of github.com/mathllm/MATH-V, with `correct` as published.
        ("B", KILOS, "\\boxed{8}", False, True),  # 87, InternLM-XComposer2-VL: a unit
        ("B", KILOS, "8 kg", False, True),  # 87, Qwen-VL-Max
        ("C", ANGLES, "$120^{\\circ}$", False, True),  # 231, Random-Chance: degrees
        ("20", (), "20%", False, True),  # 2634, SPHINX-v2: per cent
        ("D", ("only 0", "only 1", "x", "Beetle with 7 points"), "Beetle with 7 points", False, True),  # 74: spaces
        ("$\\frac{3^{1008}-1}{3^{1009}}$", (), "1/3", True, False),  # 2822, Gemini-Pro: two decimals
        ("A", ("$\\frac{7}{32}$", "1"), "$\\boxed{\\frac{7}{32}}$.The answer is: \\frac{7}{32}", True, True),  # 281
        # Their code by hand: lists, text after a formula, mixed numbers, per cent in the answer alone, the letter E.
        ("(1,2)", (), "\\boxed{(1, 2)}", True, True),
        ("(1,1.5)", (), "\\boxed{(1,\\frac{3}{2})}", True, True),
        ("(1,-2)", (), "(1, -4/2)", False, None),
        ("[1,2]", (), "1, 2", False, None),
        ("70", (), "70. Therefore, the angle is right", True, None),
        ("3", (), "6\\frac{1}{2}", True, False),
        ("$30\\%$", (), "30\\%", False, True),
        ("E", ("1", "2", "3", "4", "5"), "\\boxed{e}", True, True),
        ("x+1", (), "\\boxed{1+x}", False, None),
    ],
)
def test_mathvision_scores_as_its_authors(answer, options, response, official, strict):
    row = {"id": "1", "options": [*options], "answer": answer, "answer_type": "choice" if options else "text"}
    verdict = grade("mathvision", parse_canonical_item(row), response)
    assert verdict.official is official
    assert strict is None or verdict.strict is strict


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        *(("6\\pi", 18.85), ("4:30", 0.13), ("3,136", 3136), ("1,2", None), ("5cm", None), ("[6]", 6)),
        *(("2^3^2", 64), ("-2^2", -4), ("5-+3", 2), ("5!", 120), ("2.5!", None), ("(5", None), ("5)", 5), ("5°", None)),
        *(("\\sqrt[3]{8}", 2.0), ("\\sqrt{-1}", None), ("(-8)^{\\frac{1}{3}}", None), ("\\frac{1}{0}", None)),
        *(("e^{2}", 7.39), ("e", None), ("|5|", None), ("2\\sin3+1", 1.28), ("\\cos40\\cdot2", -0.11)),
        *(("2rows", 2), ("2lines", None), ("18\\choose3", 18), ("\\infty", None), ("3.5\\pi", 11.0), ("2.0", 2)),
        *(("\\binom{4}{2}", 6), ("\\arcsin(\\frac{19}{20})}therefore", 1.25), ("2^{1056}+3^{600}", 2**1056 + 3**600)),
        *(("\\binom{10^{99}}{10^{98}}", None), ("\\frac{٣}{2}", None), ("1.5\\pi!", None), ("\\tan x", None)),
        # latex2sympy2 does not finish these within a minute.
        *(("9^{9^{9}}", None), ("999!", None), ("1e5", None), ("", None), ("(" * 9999, None), ("(99)" * 9999, None)),
        ("$30\\%$", 0.3),
    ],
)
def test_formula_has_the_value_that_latex2sympy2_gives(formula, value):
    """The values are those of latex2sympy2 1.9.1."""
    result = evaluate_latex(formula)
    assert result == value
    assert isinstance(result, type(value))


@pytest.mark.parametrize("benchmark", ["mathvision", "emma", "canonical"])
def test_code_in_a_response_is_not_executed(benchmark, tmp_path):
    """VLMEvalKit calls eval() on it."""
    mark = tmp_path / "ran"
    text = f"\\boxed{{__import__('pathlib').Path('{mark}').touch()}}"
    assert both(benchmark, make_text("1"), text) == (False, False)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("benchmark", "answers", "text", "score"),
    [
        # VQA accuracy is the mean over all choices of nine of the ten people.
        *(
            ("textvqa", ["blue"] * same + [f"other {n}" for n in range(10 - same)], "Blue.", accuracy)
            for same, accuracy in ((0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0))
        ),
        # `if question_result < 0.5: question_result = 0` in DocVQA's, VLMEvalKit's and lmms-eval's scripts.
        *(
            ("docvqa", ["centre", "center"], text, score)
            for text, score in (("centr", 1 - 1 / 6), ("cewxyz", 0.0), ("cenxyz", 0.5), ("somewhere else", 0.0))
        ),
    ],
)
def test_partial_credit_of_reading_benchmarks(benchmark, answers, text, score):
    assert grade(benchmark, make_text(answers), text).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [("The Red one!", "red 1"), ("1,000 dollars", "1000 dollars"), ("3.5", "3.5"), ("a b.c", "bc"), ("none", "0")],
)
def test_vqa_answers_are_normalized(text, normalized):
    assert reading.normalize_vqa_answer(text) == normalized


@pytest.mark.parametrize(
    ("box", "overlap", "verdicts"),
    [
        ([100, 100, 200, 200], 1.0, (True, True)),
        ([100, 100, 200, 150], 0.5, (True, False)),  # at the threshold: strict counts it, VLM-R1 wants more
        ([100, 100, 200, 149], 0.49, (False, False)),
        ([150, 150, 250, 250], 1 / 7, (False, False)),
        ([300, 300, 400, 400], 0.0, (False, False)),
    ],
)
def test_refcoco_compares_boxes_by_iou(box, overlap, verdicts):
    assert grounding.pixel_iou(box, BOX.answer) == pytest.approx(overlap)
    assert both("refcoco", BOX, f"<think>there</think><answer>{{'box': {box}}}</answer>") == verdicts


RESIZED = {"coordinate_system": CoordinateSystem.PX_RESIZED, "resized_size": Size(320, 240)}


@pytest.mark.parametrize(
    ("benchmark", "item", "text", "fields", "correct"),
    [
        # VLMEvalKit takes any box below 1000 for thousandths; lmms-eval tries both and keeps the better.
        ("refcoco", BOX, "<answer>{'box': [156, 208, 312, 416]}</answer>", {}, False),
        ("refcoco", BOX, "<answer>{'box': [156, 208, 312, 416]}</answer>", NORM_1000, True),
        ("refcoco", BOX, "<answer>{[100, 100, 200, 200]}</answer>", NORM_1000, False),
        ("refcoco", BOX, "<answer>{'box': [50, 50, 100, 100]}</answer>", RESIZED, True),
        ("refcoco", BOX, "<answer>{'box': [50, 50, 100, 100]}</answer>", {"resized_size": Size(320, 240)}, False),
        ("screenspot", BUTTON, "pyautogui.click(x=0.2, y=0.3)", NORM_1, True),
        ("screenspot", BUTTON, "[200, 150]", NORM_1000, False),
    ],
)
def test_coordinates_count_only_in_the_declared_system(benchmark, item, text, fields, correct):
    assert both(benchmark, item, text, **fields) == (correct, correct)


def test_grading_twice_gives_the_same_verdict():
    """lmms-eval's OCRBench adds the second task of a process to the first."""
    assert grade("ocrbench", OCR, "center") == grade("ocrbench", OCR, "center")


A, B, FAR = (0.0, 0.0, 10.0, 10.0), (20.0, 20.0, 30.0, 30.0), (50.0, 50.0, 60.0, 60.0)


@pytest.mark.parametrize(
    ("images", "precision"),
    [
        # An image is its predicted boxes with label and confidence, and its targets.
        ([([(A, "cat", 0.9)], [(A, "cat")])], 1.0),
        ([([], [(A, "cat")])], 0.0),
        ([([(A, "dog", 0.9)], [(A, "cat")])], 0.0),
        # One of two found, nothing false: precision 1 up to recall 0.5, which 51 of 101 levels are.
        ([([(A, "cat", 0.9)], [(A, "cat"), (B, "cat")])], 51 / 101),
        # A more confident false box first: precision 1/2 at every level.
        ([([(FAR, "cat", 0.9), (A, "cat", 0.8)], [(A, "cat")])], 0.5),
        # The same over two images: boxes are ranked over all of them.
        ([([(FAR, "cat", 0.9)], []), ([(A, "cat", 0.8)], [(A, "cat")])], 0.5),
        # A repeated box is a false one, but comes last.
        ([([(A, "cat", 0.9), (A, "cat", 0.8)], [(A, "cat")])], 1.0),
        # Two labels, one found.
        ([([(A, "cat", 0.9)], [(A, "cat"), (B, "dog")])], 0.5),
        # IoU 0.8: found at 0.5 to 0.8, seven of ten thresholds.
        ([([((0.0, 0.0, 10.0, 8.0), "cat", 0.9)], [(A, "cat")])], 0.7),
    ],
)
def test_average_precision_by_hand(images, precision):
    results = []
    for predicted, targets in images:
        item = make_item("boxes", [Region(*target) for target in targets])
        regions = tuple(Region(*box) for box in predicted)
        results.append((item, ItemResponse(id="1", text="x"), Extraction("x", "json_boxes", 0, 1, regions=regions)))
    assert grounding.average_precision(results) == pytest.approx(precision)


@pytest.mark.parametrize(
    ("text", "finished", "outcome"),
    [
        ("5", True, ResponseOutcome.CORRECT),
        ("6", True, ResponseOutcome.INCORRECT),
        ("", True, ResponseOutcome.NO_ANSWER),
        ("I cannot see it.", True, ResponseOutcome.REFUSAL),
        ("Let me think", False, ResponseOutcome.TRUNCATED),
        ("<think>5", True, ResponseOutcome.TRUNCATED),
    ],
)
def test_verdict_names_the_outcome(text, finished, outcome):
    assert grade("mathvista", make_item("integer", "5"), text, finished=finished).outcome is outcome


def test_canonical_row_has_its_meta_columns_as_subsets():
    row = {"id": 7, "question": "Which?", "options": [*FRUIT], "answer": "B", "answer_type": "choice"}
    item = parse_canonical_item(row | {"meta": {"task": "x"}})
    assert (item.id, item.answer, item.subsets) == ("7", "B", {"task": ("x",)})
