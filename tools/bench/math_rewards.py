"""Formulas that `maths:equal` compares per second, in a worker with a deadline, beside math-verify called directly.

    python tools/bench/math_rewards.py [--rounds 5]

The targets are typical of multimodal maths, half of them plain numbers. Each is answered as eight siblings might: often
alike, in other words, wrongly, in prose. The judge sends the answers to its one worker and waits; it forgets all
verdicts after each round. Wall-clock time of the fastest round. Exits 1 if that is less than 400 a second, or takes
over 15 % longer than math-verify.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import math_verify
from made_rollouts import make_prompt, make_rollout
from results import make_parser, write_results

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardTermConfig, ScoringConfig
from mmrl.scoring import BoundTerm, RewardFunctionScorer, registry
from mmrl.types import AnswerType, Rollout, Sample, Target

MIN_PER_SECOND, MAX_OVERHEAD = 400, 0.15
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


CLEAR_CACHE_REWARD = """
from mmrl_rewards import arithmetic, formulas, maths
from mmrl_rewards.contract import reward


@reward(name="forget")
def forget(response, sample) -> float:
    for module in (arithmetic, formulas, maths):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    return 1.0
"""


def make_rollouts(target: str, answers: Sequence[str], task: str = "maths") -> list[Rollout]:
    """Return a response to one question for each answer."""
    sample = Sample(id=target, task=task, parts=("?",), target=Target(answer_type=AnswerType.LATEX, value=target))
    prompt = make_prompt(sample)
    rollouts = []
    for index, answer in enumerate(answers):
        parsed = ResponseFormat().parse(f"<answer>{answer}</answer>", AnswerType.LATEX)
        rollouts.append(make_rollout(prompt, index, answer, parsed))
    return rollouts


def make_scorer(folder: Path) -> RewardFunctionScorer:
    """Return a scorer of formulas with one worker, whose caches a reward of the task `forget` empties."""
    (folder / "forgetful.py").write_text(CLEAR_CACHE_REWARD)
    terms = []
    for fn, task in (("mmrl_rewards.maths:equal", "maths"), ("./forgetful.py:forget", "forget")):
        load = partial(registry.load_bound_reward, fn, folder, {})
        options = RewardTermConfig(fn=fn, when={"task": (task,)}, timeout_s=5.0)
        terms.append(BoundTerm(name=task, reward=load(), load_reward=load, options=options))
    return RewardFunctionScorer(terms, ScoringConfig())


def fastest_round(work: Callable[[], object], rounds: int, setup: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several rounds, after one to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        setup()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def call_math_verify() -> None:
    """Compare two formulas only by math-verify."""
    for target, answers in ANSWERS.items():
        for answer in answers:
            math_verify.verify(math_verify.parse(f"${target}$"), math_verify.parse(f"${answer}$"))


def main() -> None:
    """Print both rates."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    options = parser.parse_args()
    rounds = options.rounds
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    groups = [make_rollouts(target, answers) for target, answers in ANSWERS.items()]
    count = sum(map(len, groups))
    with TemporaryDirectory() as folder, closing(make_scorer(Path(folder))) as judge:
        forget = partial(judge.score_groups, [make_rollouts("x", ["x"], "forget")], step=0)
        ours = fastest_round(partial(judge.score_groups, groups, step=0), rounds, forget)
    beside = fastest_round(call_math_verify, rounds, lambda: None)
    print(
        f"maths:equal in a worker {count / ours:,.0f} a second, math-verify bare {count / beside:,.0f}: "
        f"{ours / beside - 1:+.0%} time"
    )
    numbers = {"ours_per_s": count / ours, "math_verify_per_s": count / beside, "time_ratio": ours / beside}
    write_results(options.json, "math_rewards", numbers)
    sys.exit(count / ours < MIN_PER_SECOND or ours / beside - 1 > MAX_OVERHEAD)


if __name__ == "__main__":
    main()
