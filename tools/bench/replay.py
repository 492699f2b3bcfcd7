"""What selective sample replay costs a step: choosing with a memory of 4096 rollouts, against choosing without one.

    python tools/bench/replay.py [--capacity 4096] [--step-s 0.3]

Exits 1 when replay adds 1 % or more to a step of `--step-s` seconds (by default what the quickstart's step takes: the
shortest that learns anything). Asking for the media of what is drawn is the learner's work, done earlier, and left out.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

from mmrl.algo.select_experiences import Everything, MediaCheck, Replaying, look
from mmrl.config.schema import Replay
from mmrl.ports import Chooser
from mmrl.types import (
    Answer,
    Author,
    Finish,
    Frame,
    Group,
    Kind,
    Prompt,
    Rollout,
    Sample,
    SamplingLaw,
    Score,
    Segment,
    State,
    Target,
)

PROMPTS, SIZE, ROUNDS = 32, 8, 60
LAW = SamplingLaw(max_new_tokens=512)
LIMIT = 0.01


def prompt_of(name: str) -> Prompt:
    """A question."""
    sample = Sample(id=name, task="t", parts=("?",), target=Target(kind=Kind.NUMBER, value=1))
    return Prompt(sample=sample, ids=(1,) * 300, grids=(), resizes=(), frame=Frame.NORM_1, digest=name)


def group(name: str, version: int, rewards: Sequence[float]) -> Group:
    """A group with these rewards."""
    prompt = prompt_of(name)
    segment = Segment(ids=(5,) * 100, logps=(-1.0,) * 100, author=Author.POLICY, version=version)
    answer = Answer(text="1", thought=None, value=1)
    rollouts = [
        Rollout(prompt=prompt, index=i, segments=(segment,), text="", answer=answer, finish=Finish.EOS, law=LAW)
        for i in range(len(rewards))
    ]
    return Group(
        prompt=prompt, rollouts=tuple(rollouts), scores=tuple(Score(terms={}, total=reward) for reward in rewards)
    )


def centred(groups: Sequence[Group]) -> list[list[float]]:
    """Each reward less its group's mean."""
    return [[total - sum(group.totals) / len(group.totals) for total in group.totals] for group in groups]


def seconds(chooser: Chooser, asked: dict[str, Prompt]) -> tuple[float, int]:
    """Median CPU time to choose, with half of the groups saturated, once the memory is full; and what it then holds."""
    dice, state, times = random.Random(0), State(), []
    for step in range(ROUNDS):
        rewards = [[float(dice.random() < 0.5) * (g % 2) for _ in range(SIZE)] for g in range(PROMPTS)]
        groups = [group(f"{step}-{g}", step, row) for g, row in enumerate(rewards)]
        asked.update((group.prompt.digest, group.prompt) for group in groups)
        start = time.process_time()
        chooser.choose(groups, state)
        times.append(time.process_time() - start)
        state.step, state.version = step + 1, step + 1
    return median(times[ROUNDS * 2 // 3 :]), len(state.memory)


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--step-s", type=float, default=0.3)
    options = parser.parse_args()
    asked: dict[str, Prompt] = {}
    media = MediaCheck(partial(look, lambda sample: asked[sample.id]), print)
    replay = Replay(capacity=options.capacity, max_age=None)
    plain, _ = seconds(Everything(centred), asked)
    replaying = Replaying(Everything(centred), replay, size=PROMPTS * SIZE, seed=("bench",), media=media)
    full, held = seconds(replaying, asked)
    share = (full - plain) / options.step_s
    print(f"choosing {PROMPTS} x {SIZE} rollouts: {plain * 1e3:.2f} ms; with a memory of {held}: {full * 1e3:.2f} ms")
    print(f"replay takes {share:.2%} of a step of {options.step_s:g} s (limit {LIMIT:.0%})")
    sys.exit(share >= LIMIT)


if __name__ == "__main__":
    main()
