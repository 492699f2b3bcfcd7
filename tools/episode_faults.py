"""Kills runs in the midst of episodes of an environment, on one rank and on two, and resumes them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from lab import MAX_EXIT_S, FaultHarness, FaultRow, wait_for_exit
from rank_faults import TWO_PROCESSES, child_processes, kill_leftovers

LAMP = '''
"""A lamp is switched to the wanted level by "up" and "down"; a picture shows both. Each action is counted in a file."""

import io
from pathlib import Path

from PIL import Image

from mmrl import Observation, StepResult

ACTIONS = Path(__file__).with_name("actions")


class Lamp:
    def reset(self, sample, seed):
        self.level, self.wanted = 3, seed % 6
        return Observation(state="start")

    def step(self, action):
        with ACTIONS.open("a") as file:
            file.write(".")
        self.level += {"up": 1, "down": -1}.get(action, 0)
        content = io.BytesIO()
        Image.new("RGB", (32, 32), (40 * self.level % 256, 40 * self.wanted, 0)).save(content, "png")
        done = self.level == self.wanted
        return StepResult(
            observation=Observation(text=action[:4], media=(content.getvalue(),), state=f"level {self.level}"),
            reward=float(done) - 0.002 * len(action),
            terminated=done,
            valid=action in ("up", "down"),
        )

    def expert(self):
        return "up" if self.level < self.wanted else "down"

    def close(self):
        pass


def make():
    return Lamp()
'''
STEP = {"kind": "environment", "fn": "./lamp.py:make", "turns": 3, "max_media": 3, "max_tokens": 400}
PROBE = {"kind": "probe", "corruption": "grey", "every": 2}
SETTINGS = {
    "rewards.terms": [{"fn": "mmrl_rewards.environment:total", "args": {"scale": 4.0}}],
    "evaluation": {"max_new_tokens": 6, "rollout_steps": [{"kind": "generate"}, STEP]},
    "stages.cold.target_field": "expert",
    "stages.cold.rollout_steps": [STEP],
    "stages.rl.rollout_steps": [{"kind": "generate"}, STEP, PROBE],
    "stages.rl.sampling": {"max_new_tokens": 6},
    "stages.rl.advantage": {"credit": "gigpo"},
}
OVERRIDES = tuple(f"{key}={json.dumps(value)}" for key, value in SETTINGS.items())
MAX_DELAY_S = 0.02  # about as long as a turn of all episodes takes


def kill_in_episodes(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 right after a random action of a run."""
    yield kill_after_actions(harness, "one rank", *OVERRIDES, "stages.rl.async_rollouts=true")


def kill_ranks_in_episodes(harness: FaultHarness) -> Iterator[FaultRow]:
    """Kill -9 right after a random action of a run: to one of two ranks, to the other, or to all, by turns."""
    yield kill_after_actions(harness, "two ranks", *OVERRIDES, *TWO_PROCESSES)


def kill_after_actions(harness: FaultHarness, where: str, *overrides: str) -> FaultRow:
    """Kill runs after random numbers of actions, and resume each; with a launcher, kill some or all of its ranks."""
    (harness.folder / "lamp.py").write_text(LAMP)
    actions = harness.folder / "actions"
    actions.write_bytes(b"")
    harness.undisturbed_run(*overrides)
    total = actions.stat().st_size
    tries, moments, lost = max(1, 2 * harness.num_kills // 5), set(), []
    for number in range(tries):
        actions.write_bytes(b"")
        moment = harness.rng.randrange(1, total)
        process = harness.start(*overrides)
        while process.is_alive() and actions.stat().st_size < moment:
            time.sleep(0.001)
        time.sleep(harness.rng.uniform(0.0, MAX_DELAY_S))
        moments.add(actions.stat().st_size)
        ranks = child_processes(process.pid) if where == "two ranks" else [process.pid]
        workers = [worker for rank in ranks for worker in child_processes(rank)]
        all_at_once = where == "one rank" or number % 3 == 2
        for pid in [process.pid, *ranks] if all_at_once else [ranks[number % 3]]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if wait_for_exit(process) == 0:
            lost.append(f"it ended before action {moment} of {total}")
        lost += kill_leftovers([*ranks, *workers], within_s=MAX_EXIT_S) + harness.finish_and_compare(*overrides)
    tried = f"{tries} times, after {len(moments)} different numbers of {total} actions"
    outcome = "no process was left; resumed; all bytes equal"
    return FaultRow(f"kill -9 in the midst of episodes ({where})", tried, outcome, lost)
