"""Configs of a policy that acts in an environment: it imitates the environment's expert, then acts by itself."""

from pathlib import Path
from typing import Any

from harness import TINY, counting, experiment, rl_stage, scheduled, sft_stage

LAMP = '''
"""A lamp is switched to the wanted level, by "up" and "down"; the picture shows how bright it is."""

import io
import os

from PIL import Image

from mmrl import Observation, StepResult


class Lamp:
    def reset(self, sample, seed):
        self.level, self.wanted = 3, seed % 6
        return Observation(state="start")

    def step(self, action):
        self.level += {"up": 1, "down": -1}.get(action, 0)
        content = io.BytesIO()
        Image.new("RGB", (32, 32), (40 * self.level % 256, 40 * self.wanted, 0)).save(content, "png")
        done = self.level == self.wanted
        return StepResult(
            observation=Observation(text=action[:4], media=(content.getvalue(),), state=f"level {self.level}"),
            reward=float(done) - 0.01 * len(action),
            terminated=done,
            valid=action in ("up", "down"),
            info={"level": self.level},
        )

    def expert(self):
        return "up" if self.level < self.wanted else "down"

    def close(self):
        pass


def make():
    return Lamp()
'''
STEP = {"kind": "environment", "fn": "./lamp.py:make", "turns": 3, "max_media": 3, "max_tokens": 200}


def environment_config(run_dir: Path, **options: Any) -> dict[str, Any]:
    """A cold start on an expert's episodes, then RL on the policy's own; it writes the environment's file."""
    (run_dir.parent / "lamp.py").write_text(LAMP)
    cold = sft_stage(steps=4, prompts_per_step=6, target_field="expert", rollout_steps=[STEP])
    steps = options.pop("rollout_steps", [{"kind": "generate"}, STEP, {"kind": "probe", "corruption": "grey"}])
    rl = {"steps": 6, "ppo_epochs": 1, "rollout_steps": steps, "sampling": {"max_new_tokens": 6}}
    rl |= {"advantage": {"credit": "gigpo"}, "loss": {"entropy": {"coef": 0.02}}, "optimizer": scheduled(3e-3, 6)}
    rl |= options
    config = experiment(
        run_dir,
        data={"train": [counting("train", 12)], "validation": [counting("validation", 4)], "test": []},
        rewards={"terms": [{"fn": "mmrl_rewards.environment:total", "args": {"scale": 4.0}}]},
        evaluation={"max_new_tokens": 6, "batch_size": 8, "rollout_steps": [{"kind": "generate"}, STEP]},
        checkpoints={"every": 2, "keep_last": 20},
        stages=[cold, rl_stage(**rl)],
    )
    config["model"]["from_scratch"] = {**TINY, "language": {**TINY["language"], "vocab_size": 400}}
    return config
