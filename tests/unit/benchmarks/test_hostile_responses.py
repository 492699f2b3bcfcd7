"""Hostile responses: ten thousand of them without a crash, and a megabyte of anything without a hang."""

import random
import time

import pytest
from waiting import bounded

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.registry import get_benchmark
from mmrl.benchmarks.reward_scores import formulas_equal
from mmrl.types import Region

ITEMS = {
    "choice": Item(
        id="1", answer_type="choice", answer="A", options=("3π", r"\frac{1}{2}", "Yes", "No"), question="Is 3 it?"
    ),
    "yes_no": Item(
        id="1", answer_type="choice", answer="A", options=("Yes", "No"), question="Is the red cube larger than 3?"
    ),
    "integer": Item(id="1", answer_type="integer", answer="3", question="How many of the 12 cubes?"),
    "float": Item(id="1", answer_type="float", answer="1.25", precision=2, unit="m"),
    "list": Item(id="1", answer_type="list", answer="[1, 2]"),
    "text": Item(id="1", answer_type="text", answer=["x", r"\frac{1}{2}"]),
    "count": Item(id="1", answer_type="count", answer=3),
    "box": Item(id="1", answer_type="box", answer=(1.0, 2.0, 3.0, 4.0)),
    "point": Item(id="1", answer_type="point", answer=(1.0, 2.0, 3.0, 4.0)),
    "boxes": Item(id="1", answer_type="boxes", answer=(Region((1.0, 2.0, 3.0, 4.0), "cat"),)),
}
SUITED = {
    "choice": (
        "mathvista",
        "mathverse",
        "mathvision",
        "mmmu",
        "mmmu_pro",
        "emma",
        "mvbench",
        "video_mme",
        "seed_bench_r1",
    ),
    "yes_no": ("mathvista", "geometry3k"),
    "integer": ("mathvista",),
    "float": ("mathvista", "canonical"),
    "list": ("mathvista",),
    "text": ("mathverse", "mathvision", "mmmu", "emma", "ocrbench", "textvqa", "docvqa"),
    "count": ("counting",),
    "box": ("refcoco",),
    "point": ("screenspot",),
    "boxes": ("coco",),
}
PIECES = [
    *("(A)", "(B", "B)", "A.", " A ", "answer", "The answer is ", "\\boxed{", "\\text{", "\\frac{1}{2}", "}", "{", "$"),
    *("<answer>", "</answer>", "<think>", "</think>", "\n", "\n\n", " ", ". ", ", ", "=", "10^99999", "1e308", "1e999"),
    *("9" * 50, "1,000", "-", "/0", "3/4", "×10^", "%", "°", "twenty-one", "one", "no", "not", "Yes", "No", "cannot "),
    *(
        "determine",
        "Question: ",
        "Hint:",
        "###Human",
        "\0",
        "\u202e",
        "\ud800",
        "é" * 9,
        "答案是",
        "故选B",
        "。",
        "无法",
    ),
    *(
        "__import__('os').system('true')",
        "[1, 2, 3, 4]",
        '[{"bbox_2d": [1,2,3,4]}]',
        "x=1, y=2",
        "**",
        "`",
        "\\",
        "√{3}",
    ),
    *("inf", "nan", "NaN", "-0", "٣", "x", "larger", "smaller", "red cube", "https://", "\t", "|", "I ", "if ", "so "),
]


@pytest.mark.slow
def test_ten_thousand_hostile_responses_are_graded():
    rng = random.Random(0)
    cases = [(kind, bench) for kind, benches in SUITED.items() for bench in benches]
    formulas_equal("x + 1", "2")  # loads math-verify, which takes a second
    for number in range(10_000):
        kind, bench = cases[number % len(cases)]
        text = "".join(rng.choice(PIECES) for _ in range(rng.choice((1, 3, 10, 40))))
        with bounded():
            verdict = grade_response(get_benchmark(bench), ITEMS[kind], ItemResponse(id="1", text=text))
        assert 0 <= verdict.start <= verdict.end <= len(text)
        assert 0.0 <= verdict.score <= 1.0
        assert (verdict.value is None) <= (not verdict.strict)


UNITS = [
    *("(", "\\boxed{", "{}", "1", " ", "\n", "a", "1,000", "1=", "(A) ", "(A) 1\n", "the answer is ", "**1** "),
    *(
        "I cannot determine ",
        "Question: x\n",
        "twenty-one ",
        "\\frac{1}{2}",
        "\uff08\uff11\uff09",
        "<answer>",
        "</think>",
    ),
    *("[1, ", "x=1,", "1 ", ". ", "\u200b", "A", "so ", "if ", "\\", "$", "not ", "[1,2,3,4],", "é\u0301"),
]
WORST = ("(", "1", "{}", "\\", "<answer>", "the answer is ", "\n", "[1,2,3,4],")


@pytest.mark.parametrize(
    ("bench", "unit"),
    [
        *(("mathvista", unit) for unit in UNITS),
        *(
            (bench, unit)
            for bench in ("mathvision", "mmmu", "emma", "textvqa", "refcoco", "screenspot")
            for unit in WORST
        ),
    ],
)
def test_a_megabyte_is_graded_in_linear_time(bench, unit):
    formulas_equal("x + 1", "2")
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    kinds = [kind for kind, benches in SUITED.items() if bench in benches]
    for kind in kinds:
        with bounded():
            grade_response(get_benchmark(bench), ITEMS[kind], ItemResponse(id="1", text=text))


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
    for kind in ("choice", "integer"):
        for _ in range(10):
            grade_response(get_benchmark("mathvista"), ITEMS[kind], ItemResponse(id="1", text=text))
    assert time.process_time() - start < 2.0
