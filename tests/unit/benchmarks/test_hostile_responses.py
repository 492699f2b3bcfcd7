"""Hostile responses: ten thousand of them without a crash, and a megabyte of anything without a hang."""

import random
import time

import pytest
from waiting import bounded

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.registry import BENCHMARKS
from mmrl.benchmarks.reward_scores import formulas_equal
from mmrl.types import Region


def make_item(answer_type, answer, **fields):
    return Item(id="1", answer_type=answer_type, answer=answer, **fields)


CHOICE = make_item("choice", "A", options=("3π", r"\frac{1}{2}", "Yes", "No"), question="Is 3 it?")
YES_NO = make_item("choice", "A", options=("Yes", "No"), question="Is the red cube larger than 3?")
INTEGER = make_item("integer", "3", question="How many of the 12 cubes?")
FLOAT = make_item("float", "1.25", precision=2, unit="m")
TEXT = make_item("text", ["x", r"\frac{1}{2}"])
BOX = (1.0, 2.0, 3.0, 4.0)

ITEMS = {
    "mathvista": (CHOICE, YES_NO, INTEGER, FLOAT, make_item("list", "[1, 2]")),
    "geometry3k": (YES_NO,),
    "canonical": (FLOAT,),
    **dict.fromkeys(("mathverse", "mathvision", "mmmu", "emma"), (CHOICE, TEXT)),
    **dict.fromkeys(("mmmu_pro", "mvbench", "video_mme", "seed_bench_r1"), (CHOICE,)),
    **dict.fromkeys(("ocrbench", "textvqa", "docvqa"), (TEXT,)),
    "counting": (make_item("count", 3),),
    "refcoco": (make_item("box", BOX),),
    "screenspot": (make_item("point", BOX),),
    "coco": (make_item("boxes", (Region(BOX, "cat"),)),),
}
"""Items that suit each benchmark."""
PIECES = [
    *("(A)", "(B", "B)", "A.", " A ", "answer", "The answer is ", "\\boxed{", "\\text{", "\\frac{1}{2}", "}", "{", "$"),
    *("<answer>", "</answer>", "<think>", "</think>", "\n", "\n\n", " ", ". ", ", ", "=", "10^99999", "1e308", "1e999"),
    *("9" * 50, "1,000", "-", "/0", "3/4", "×10^", "%", "°", "twenty-one", "one", "no", "not", "Yes", "No", "cannot "),
    *("determine", "Question: ", "Hint:", "###Human", "\0", "\u202e", "\ud800", "é" * 9, "答案是", "故选B", "。"),
    *("无法", "__import__('os').system('true')", "[1, 2, 3, 4]", '[{"bbox_2d": [1,2,3,4]}]', "x=1, y=2", "**", "`"),
    *("\\", "√{3}", "inf", "nan", "NaN", "-0", "٣", "x", "larger", "smaller", "red cube", "https://", "\t", "|", "I "),
    *("if ", "so "),
]


@pytest.fixture(scope="module", autouse=True)
def math_verify():
    """Load it before times are measured: that takes a second."""
    formulas_equal("x + 1", "2")


@pytest.mark.slow
def test_ten_thousand_hostile_responses_are_graded():
    rng = random.Random(0)
    cases = [(benchmark, item) for benchmark, items in ITEMS.items() for item in items]
    for number in range(10_000):
        benchmark, item = cases[number % len(cases)]
        text = "".join(rng.choice(PIECES) for _ in range(rng.choice((1, 3, 10, 40))))
        with bounded():
            verdict = grade_response(BENCHMARKS[benchmark], item, ItemResponse(id="1", text=text))
        assert 0 <= verdict.start <= verdict.end <= len(text)
        assert 0.0 <= verdict.score <= 1.0
        assert not (verdict.strict and verdict.value is None)


WORST = ("(", "1", "{}", "\\", "<answer>", "the answer is ", "\n", "[1,2,3,4],")
UNITS = [
    *("\\boxed{", " ", "a", "1,000", "1=", "(A) ", "(A) 1\n", "**1** ", "I cannot determine ", "Question: x\n"),
    *("twenty-one ", "\\frac{1}{2}", "\uff08\uff11\uff09", "</think>", "[1, ", "x=1,", "1 ", ". ", "\u200b", "A"),
    *("so ", "if ", "$", "not ", "é\u0301"),
]


@pytest.mark.parametrize(
    ("benchmark", "unit"),
    [
        *(("mathvista", unit) for unit in (*WORST, *UNITS)),
        *(
            (name, unit)
            for name in ("mathvision", "mmmu", "emma", "textvqa", "refcoco", "screenspot", "coco")
            for unit in WORST
        ),
        ("textvqa", "<answer>" + "x " * 400_000),
    ],
)
def test_a_megabyte_is_graded_in_linear_time(benchmark, unit):
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    for item in ITEMS[benchmark]:
        with bounded():
            grade_response(BENCHMARKS[benchmark], item, ItemResponse(id="1", text=text))


@pytest.mark.parametrize(
    "text",
    [
        "The answer is " + "answer letter " * 10,
        "The answer is" + " " * 3900,
        "I cannot determine" + "\n" * 3900,
        "Answer" + " " * 3900,
        "3" + "a" * 3900,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_short_response_is_graded_in_milliseconds(text):
    """Patterns read a few thousand characters at most, on which a quadratic one still takes seconds, not 15 ms."""
    start = time.process_time()
    for item in (CHOICE, INTEGER):
        for _ in range(10):
            grade_response(BENCHMARKS["mathvista"], item, ItemResponse(id="1", text=text))
    assert time.process_time() - start < 2.0
