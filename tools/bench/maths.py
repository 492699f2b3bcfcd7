"""How many formulas a second `maths:equal` judges on one core, beside math-verify called bare.

    python tools/bench/maths.py [--rounds 5]

The targets are such as multimodal maths asks for, half of them plain numbers, each answered as eight siblings might:
often alike, in other words, wrong, in prose. No verdict is remembered from one round to the next. Exits 1 if the reward
is slower than 300 a second, or than math-verify by over 15 %.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable

import math_verify

from mmrl_rewards import maths
from mmrl_rewards.cases import Case

FLOOR, OVERHEAD = 300, 0.15
ANSWERS = {
    "5": ["5", "5", "5", "5", "6", r"\frac{10}{2}", "x=5", "The answer is five"],
    "14": ["14", "14", "12", "12", "16", "14.0", "-14", "28"],
    "1,200": ["1200", "1,200", "1200", "120", "1200", "2400", "1000", r"1200\text{ cm}^2"],
    "12.5": ["12.5", "12.5", "12", r"\frac{25}{2}", "13", "12.50", "12.5", "about twelve and a half"],
    "0.08": ["0.08", "0.08", "0.8", r"8\%", "0.08", "0.08", r"\frac{2}{25}", "8"],
    "-3": ["-3", "-3", "3", "-3", "x=-3", "-3", "0", "3"],
    r"60^\circ": [r"60^\circ", "60", "60", r"120^\circ", "30", "60", r"60^\circ", "one third of it"],
    r"\frac{3}{4}": [r"\frac{3}{4}", "0.75", "3/4", r"\frac{4}{3}", r"\frac{3}{4}", r"\frac{6}{8}", "0.75", "3"],
    r"2\sqrt{3}": [r"2\sqrt{3}", r"2\sqrt{3}", r"\sqrt{12}", "3.464", r"3\sqrt{2}", "6", r"2\sqrt{3}", "12"],
    r"36\pi": [r"36\pi", r"36\pi", r"36 \pi", "113.1", r"18\pi", "36", r"36\pi", "the area of a circle"],
    "x^2+2x+1": ["x^2+2x+1", "x^2+2x+1", "(x+1)^2", "x^2+1", "(x+1)^2", "x^2-2x+1", "x^2+2x+1", "2x+1"],
    "(3, -2)": ["(3, -2)", "(3,-2)", "(3, -2)", "(-2, 3)", "(3, -2)", "(3, 2)", "(3,-2)", "in the fourth quadrant"],
    "y=2x+1": ["y=2x+1", "y=2x+1", "y = 2x + 1", "2x+1", "y=2x-1", "y=2x+1", "y=x+1", "y=2x+1"],
    "1,2": ["1,2", "1,2", "2,1", "1", "1,2", "1,3", "2", "1,2"],
}


def rate(calls: list[Callable[[], object]], rounds: int) -> float:
    """Calls a second of processor time, warm, all of them in turn."""
    for call in calls:
        call()
    seconds = 0.0
    for _ in range(rounds):
        maths._math_verify().equal.cache_clear()
        start = time.process_time()
        for call in calls:
            call()
        seconds += time.process_time() - start
    return rounds * len(calls) / seconds


def ours(target: str, answer: str) -> Callable[[], object]:
    sample = {"kind": "latex", "value": target}
    row = {"fn": "", "sample": sample, "response": f"<answer>{answer}</answer>", "expected": 0, "source": ""}
    response, built = Case.model_validate(row).build()
    return lambda: maths.equal(response, built)


def bare(target: str, answer: str) -> Callable[[], object]:
    return lambda: math_verify.verify(math_verify.parse(f"${target}$"), math_verify.parse(f"${answer}$"))


def main() -> None:
    """Print both rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    rounds = parser.parse_args().rounds
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pairs = [(target, answer) for target, answers in ANSWERS.items() for answer in answers]
    beside = rate([bare(*pair) for pair in pairs], rounds)
    reached = rate([ours(*pair) for pair in pairs], rounds)
    print(f"maths:equal {reached:,.0f} a second, math-verify bare {beside:,.0f}; {beside / reached - 1:+.0%} time")
    sys.exit(reached < FLOOR or beside / reached - 1 > OVERHEAD)


if __name__ == "__main__":
    main()
