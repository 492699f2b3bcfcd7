"""What scoring costs: the judge's own work on one core, worker processes, and calls that hang.

    python tools/bench/score.py [--seconds 1.0]

Exits 1 when a cheap reward is judged less than 20 000 times a second in this process, when
1 000 calls of which 10 hang take 10 s or more with 4 workers and a deadline of 1 s, or when workers change a score.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mmrl.answer import Grammar
from mmrl.config.schema import Judging
from mmrl.config.schema import Term as Options
from mmrl.scoring import BoundTerm, Judge, registry
from mmrl.types import (
    Author,
    Finish,
    Frame,
    Group,
    ImageRef,
    Kind,
    Prompt,
    ResizeMap,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Size,
    Target,
)

FLOOR = 20_000
LIMIT_S = 10.0
GRAMMAR = Grammar(think="required")
THOUGHT = "<think>" + "The picture shows it at the left, beside the other one. " * 4 + "</think>"
SUBJECTS = {
    "mmrl_rewards.box:iou": (Target(kind=Kind.BOX, value=(8, 8, 60, 60), frame=Frame.PX_ORIGINAL), "[10, 12, 58, 61]"),
    "mmrl_rewards.number:exact": (Target(kind=Kind.NUMBER, value=3), "3"),
    "mmrl_rewards.choice:exact": (Target(kind=Kind.CHOICE, value="B"), "B"),
    "mmrl_rewards.format:tags": (Target(kind=Kind.CHOICE, value="B"), "B"),
}
HANGING = """
import time

from mmrl_rewards.contract import reward


@reward(name="sleepy", deadline_s=1.0)
def sleepy(response, sample) -> float:
    while response.text == "hang":
        time.sleep(0.01)
    return float(response.text == "right")
"""


def rollout(target: Target, text: str, index: int) -> Rollout:
    """A response to a question about one picture."""
    sample = Sample(id="s", task="t", parts=(ImageRef(path="a.png", sha256=""), "Where?"), target=target)
    prompt = Prompt(
        sample=sample,
        ids=(1,) * 300,
        grids=((1, 10, 10),),
        resizes=(ResizeMap(Size(100, 100), Size(56, 56)),),
        frame=Frame.PX_ORIGINAL,
        digest="",
    )
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(Segment(ids=(1,) * 100, logps=(-1.0,) * 100, author=Author.POLICY),),
        text=text,
        answer=GRAMMAR.parse(text, target.kind),
        finish=Finish.EOS,
        law=SamplingLaw(max_new_tokens=100),
    )


def judge_of(names: Sequence[str], base: Path, workers: int) -> Judge:
    """A judge of these rewards."""
    loads = [partial(registry.find, name, base, {}) for name in names]
    terms = [
        BoundTerm(name=name, reward=load(), load=load, options=Options(fn=name))
        for name, load in zip(names, loads, strict=True)
    ]
    return Judge(terms, Judging(workers=workers))


def groups_of(fn: str) -> list[list[Rollout]]:
    """Prompts with eight responses each."""
    target, answer = SUBJECTS[fn]
    one = [rollout(target, f"{THOUGHT}<answer>{answer}</answer>", index) for index in range(8)]
    return [[replace(each, prompt=one[0].prompt) for each in one] for _ in range(64)]


@contextmanager
def judging(judge: Judge, groups: Sequence[Sequence[Rollout]]) -> Iterator[Judge]:
    """A judge whose workers run."""
    with closing(judge):
        judge.judge(groups[:1], step=0)
        yield judge


def rate(
    judge: Judge, groups: Sequence[Sequence[Rollout]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Rollouts judged a second by `clock`, the best of five turns."""
    count, best = sum(map(len, groups)), 0.0
    for _ in range(5):
        done, start = 0, clock()
        while (elapsed := clock() - start) < seconds / 5:
            judge.judge(groups, step=0)
            done += count
        best = max(best, done / elapsed)
    return best


def cheap(seconds: float) -> bool:
    """The judge's speed with rewards that cost next to nothing."""
    good = True
    print("| reward | judged a second of processor time, no workers | floor | a second, 1 worker | 2 workers |")
    print("|---|---|---|---|---|")
    for fn in SUBJECTS:
        groups = groups_of(fn)
        rates, scored = [], []
        for workers in (0, 1, 2):
            with judging(judge_of([fn], Path(), workers), groups) as judge:
                clock = time.perf_counter if workers else time.process_time
                rates.append(rate(judge, groups, seconds, clock))
                scored.append(judge.judge(groups, step=0))
        print(f"| `{fn}` | {rates[0]:,.0f} | {FLOOR:,} | {rates[1]:,.0f} | {rates[2]:,.0f} |")
        good = good and rates[0] >= FLOOR and scored[0] == scored[1] == scored[2]
    return good


def hangers(calls: int = 1000, hanging: int = 10) -> bool:
    """Calls of which some hang, four workers, a deadline of one second."""
    texts = ["hang" if index % (calls // hanging) == 7 else "right" for index in range(calls)]
    target = Target(kind=Kind.TEXT, value="right")
    groups = [[rollout(target, text, 0)] for text in texts]
    with TemporaryDirectory() as folder:
        (Path(folder) / "sleepy.py").write_text(HANGING)
        with judging(judge_of(["./sleepy.py:sleepy"], Path(folder), 4), [groups[0][:1]]) as judge:
            start = time.perf_counter()
            judged: Sequence[Group] = judge.judge(groups, step=0)
            took = time.perf_counter() - start
    stopped = sum(len(group.skipped) for group in judged)
    right = sum(total == 1.0 for group in judged for total in group.totals)
    print(f"\n{calls} calls, {hanging} hang, 4 workers, deadline 1 s: {took:.2f} s; {stopped} stopped, {right} right")
    return took < LIMIT_S and stopped == hanging and right == calls - hanging


def main() -> None:
    """Print what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each is timed")
    seconds = parser.parse_args().seconds
    results = [cheap(seconds), hangers()]
    sys.exit(0 if all(results) else "below what must be reached")


if __name__ == "__main__":
    main()
