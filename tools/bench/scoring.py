"""Cost of scoring: the scorer's own work on one core, with worker processes, and with calls that hang.

    python tools/bench/scoring.py [--seconds 1.0]

Exits 1 when a cheap reward is judged less than 20 000 times a second in this process, when
1 000 calls of which 10 hang take 10 s or more with 4 workers and a deadline of 1 s, or when workers change a score.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from made_rollouts import make_prompt, make_rollout
from results import make_parser, write_results

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardTermConfig as Options
from mmrl.config.schema import ScoringConfig
from mmrl.scoring import BoundTerm, RewardFunctionScorer, registry
from mmrl.types import AnswerType, CoordinateSystem, Group, ImageRef, ResizeMap, Rollout, Sample, Size, Target

MIN_ROLLOUTS_PER_SECOND = 20_000
MAX_SECONDS = 10.0
RESPONSE_FORMAT = ResponseFormat(thinking="required")
THOUGHT = "<think>" + "The picture shows it at the left, beside the other one. " * 4 + "</think>"
TARGETS_AND_ANSWERS = {
    "mmrl_rewards.box:iou": (
        Target(answer_type=AnswerType.BOX, value=(8, 8, 60, 60), coordinate_system=CoordinateSystem.PX_ORIGINAL),
        "[10, 12, 58, 61]",
    ),
    "mmrl_rewards.number:exact": (Target(answer_type=AnswerType.NUMBER, value=3), "3"),
    "mmrl_rewards.choice:exact": (Target(answer_type=AnswerType.CHOICE, value="B"), "B"),
    "mmrl_rewards.format:tags": (Target(answer_type=AnswerType.CHOICE, value="B"), "B"),
}
HANGING_REWARD = """
import time

from mmrl_rewards.contract import reward


@reward(name="sleepy", timeout_s=1.0)
def sleepy(response, sample) -> float:
    while response.text == "hang":
        time.sleep(0.01)
    return float(response.text == "right")
"""


def make_response(target: Target, text: str, index: int) -> Rollout:
    """Return a response to a question about one image."""
    sample = Sample(id="s", task="t", parts=(ImageRef(path="a.png", sha256=""), "Where?"), target=target)
    prompt = make_prompt(sample, (ResizeMap(Size(100, 100), Size(56, 56)),))
    return make_rollout(prompt, index, text, RESPONSE_FORMAT.parse(text, target.answer_type))


def make_scorer(names: Sequence[str], base: Path, workers: int) -> RewardFunctionScorer:
    """Return a scorer of these rewards."""
    loads = [partial(registry.load_bound_reward, name, base, {}) for name in names]
    terms = [
        BoundTerm(name=name, reward=load(), load_reward=load, options=Options(fn=name))
        for name, load in zip(names, loads, strict=True)
    ]
    return RewardFunctionScorer(terms, ScoringConfig(workers=workers))


def make_groups(fn: str) -> list[list[Rollout]]:
    """Return 64 groups of eight responses with one text."""
    target, answer = TARGETS_AND_ANSWERS[fn]
    one = [make_response(target, f"{THOUGHT}<answer>{answer}</answer>", index) for index in range(8)]
    groups = []
    for _ in range(64):
        groups.append([replace(rollout, prompt=one[0].prompt) for rollout in one])
    return groups


@contextmanager
def warm_scorer(scorer: RewardFunctionScorer, groups: Sequence[Sequence[Rollout]]) -> Iterator[RewardFunctionScorer]:
    """Return a scorer whose workers have started."""
    with closing(scorer):
        scorer.score_groups(groups[:1], step=0)
        yield scorer


def measure_rate(
    scorer: RewardFunctionScorer,
    groups: Sequence[Sequence[Rollout]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the rollouts judged per second of `clock`, the best of five turns."""
    count, best = sum(map(len, groups)), 0.0
    for _ in range(5):
        done, start = 0, clock()
        while (elapsed := clock() - start) < seconds / 5:
            scorer.score_groups(groups, step=0)
            done += count
        best = max(best, done / elapsed)
    return best


def benchmark_cheap_rewards(seconds: float, numbers: dict[str, object]) -> bool:
    """Measure the scorer with rewards that cost next to nothing; add the rates to `numbers`."""
    good = True
    print("| reward | judged a second of processor time, no workers | floor | a second, 1 worker | 2 workers |")
    print("|---|---|---|---|---|")
    for fn in TARGETS_AND_ANSWERS:
        groups = make_groups(fn)
        rates, scored = [], []
        for workers in (0, 1, 2):
            with warm_scorer(make_scorer([fn], Path(), workers), groups) as judge:
                clock = time.perf_counter if workers else time.process_time
                rates.append(measure_rate(judge, groups, seconds, clock))
                scored.append(judge.score_groups(groups, step=0))
        print(f"| `{fn}` | {rates[0]:,.0f} | {MIN_ROLLOUTS_PER_SECOND:,} | {rates[1]:,.0f} | {rates[2]:,.0f} |")
        numbers[fn] = {"per_s": rates[0], "one_worker_per_s": rates[1], "two_workers_per_s": rates[2]}
        good = good and rates[0] >= MIN_ROLLOUTS_PER_SECOND and scored[0] == scored[1] == scored[2]
    return good


def benchmark_hanging_calls(numbers: dict[str, object], num_calls: int = 1000, num_hanging: int = 10) -> bool:
    """Time calls of which some hang, with four workers and a deadline of one second; add the time to `numbers`."""
    texts = ["hang" if index % (num_calls // num_hanging) == 7 else "right" for index in range(num_calls)]
    target = Target(answer_type=AnswerType.TEXT, value="right")
    groups = [[make_response(target, text, 0)] for text in texts]
    with TemporaryDirectory() as folder:
        (Path(folder) / "sleepy.py").write_text(HANGING_REWARD)
        with warm_scorer(make_scorer(["./sleepy.py:sleepy"], Path(folder), 4), [groups[0][:1]]) as judge:
            start = time.perf_counter()
            judged: Sequence[Group] = judge.score_groups(groups, step=0)
            took = time.perf_counter() - start
    stopped = sum(len(group.dropped) for group in judged)
    right = sum(total == 1.0 for group in judged for total in group.totals)
    print(f"\n{num_calls} calls, of which {num_hanging} hang, with 4 workers and a deadline of 1 s: {took:.2f} s")
    print(f"{stopped} were stopped, {right} are correct")
    numbers["hanging_calls_s"] = took
    return took < MAX_SECONDS and stopped == num_hanging and right == num_calls - num_hanging


def main() -> None:
    """Print what is measured."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each is timed")
    options = parser.parse_args()
    numbers: dict[str, object] = {}
    results = [benchmark_cheap_rewards(options.seconds, numbers), benchmark_hanging_calls(numbers)]
    write_results(options.json, "scoring", numbers)
    sys.exit(0 if all(results) else "below what must be reached")


if __name__ == "__main__":
    main()
