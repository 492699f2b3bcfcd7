"""Cost of selective sample replay: selecting with a buffer of 4096 rollouts, compared with none.

    python tools/bench/replay.py [--capacity 4096] [--step-s 0.3]

Exits 1 when replay adds 1 % or more to a step of `--step-s` seconds (by default the quickstart's, the shortest step
that learns anything). Loading the media of drawn rollouts is the learner's work, done earlier, and not counted.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from types import SimpleNamespace

from made_rollouts import make_prompt, make_rollout
from results import make_parser, write_results

from mmrl.algo.replay import ReplaySettings
from mmrl.algo.select_experiences import ExperienceSelector
from mmrl.config.schema import ReplayConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.protocols import Selector
from mmrl.training.media_recheck import MediaRecheck
from mmrl.types import Answer, AnswerType, Group, Prompt, Rollout, Sample, Score, Target, TrainingState, UserError

NUM_PROMPTS, GROUP_SIZE, ROUNDS = 32, 8, 60
MAX_STEP_FRACTION = 0.01


def make_group(name: str, version: int, rewards: Sequence[float]) -> Group:
    """Return a group with these rewards."""
    sample = Sample(id=name, task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=1))
    prompt, answer = make_prompt(sample), Answer(text="1", thinking=None, value=1)
    rollouts = tuple(make_rollout(prompt, index, "", answer, version=version) for index in range(len(rewards)))
    scores = tuple(Score(terms={}, total=reward) for reward in rewards)
    return Group(prompt=prompt, rollouts=rollouts, scores=scores)


def center_rewards(groups: Sequence[Group]) -> list[list[float]]:
    """Return each reward less its group's mean."""
    centered = []
    for group in groups:
        mean = fmean(group.totals)
        centered.append([total - mean for total in group.totals])
    return centered


def time_selection(selector: Selector, prompts: dict[str, Prompt]) -> tuple[float, int]:
    """Return the median CPU time of selecting, with half of the groups saturated and a full buffer; and its size."""
    dice, state, times = random.Random(0), TrainingState(), []
    for step in range(ROUNDS):
        groups = []
        for index in range(NUM_PROMPTS):
            rewards = [float(dice.random() < 0.5) * (index % 2) for _ in range(GROUP_SIZE)]
            groups.append(make_group(f"{step}-{index}", step, rewards))
        prompts.update((group.prompt.digest, group.prompt) for group in groups)
        start = time.process_time()
        selector.select(groups, state)
        times.append(time.process_time() - start)
        state.step, state.version = step + 1, step + 1
    return median(times[ROUNDS * 2 // 3 :]), len(state.replay_buffer)


def main() -> None:
    """Measure, print, judge."""
    parser = make_parser(__doc__)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--step-s", type=float, default=0.3)
    options = parser.parse_args()
    asked: dict[str, Prompt] = {}

    def check_media(rollout: Rollout) -> None:
        if asked[rollout.prompt.digest].digest != rollout.prompt.digest:
            raise UserError("its media changed")

    media = MediaRecheck(SimpleNamespace(check_media=check_media), SingleProcess(), {}, print).find_changed
    replay = ReplayConfig(capacity=options.capacity, max_staleness=None)
    settings = ReplaySettings(options=replay, rollouts_per_step=NUM_PROMPTS * GROUP_SIZE, seed=("bench",))
    without = ExperienceSelector(
        compute_advantages=center_rewards, prompts_per_step=NUM_PROMPTS, find_changed_media=media
    )
    plain, _ = time_selection(without, asked)
    full, held = time_selection(replace(without, replay=settings), asked)
    share = (full - plain) / options.step_s
    print(f"selecting {NUM_PROMPTS} x {GROUP_SIZE} rollouts: {plain * 1e3:.2f} ms")
    print(f"with a replay buffer of {held}: {full * 1e3:.2f} ms")
    print(f"replay takes {share:.2%} of a step of {options.step_s:g} s (limit {MAX_STEP_FRACTION:.0%})")
    numbers = {"select_ms": plain * 1e3, "select_with_replay_ms": full * 1e3, "fraction_of_step": share}
    write_results(options.json, "replay", numbers)
    sys.exit(share >= MAX_STEP_FRACTION)


if __name__ == "__main__":
    main()
