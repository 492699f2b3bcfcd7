"""Callbacks from a user's file: called after each step, able to end a stage, and refused when they are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import Command, experiment, metrics, rl_stage, sft_stage, write

EXAMPLE = Path(__file__).parents[2] / "examples" / "callback.py"


def config_of(folder: Path, fn: str, **args: object) -> Path:
    stages = [sft_stage(steps=2), rl_stage(steps=6, optimizer={"lr": 1e-9})]
    config = experiment(folder / "run", stages=stages, callbacks=[{"fn": fn, "args": args}])
    return write(config, folder / "tiny.yaml")


def test_the_example_ends_a_stage_that_makes_no_progress(tmp_path: Path, here: Command) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    done = here("train", config_of(tmp_path, "./callback.py:stop_without_progress", patience=1))
    assert done.code == 0, done.errors
    steps = [record for record in metrics(tmp_path / "run") if record["stage"] == "rl" and "reward/mean" in record]
    rewards = [record["reward/mean"] for record in steps]
    assert len(rewards) < 6
    assert rewards[-1] <= max(rewards[:-1])
    assert f"step {len(rewards)}: no better mean reward than" in done.output
    assert f"Stage rl ended after {len(rewards)} steps, its goal reached." in done.output


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        (
            "def make(context):\n    return 3\n",
            {},
            "returned 3, which has no method 'on_step_end'",
        ),
        ("def make():\n    pass\n", {}, "mine.py:1: make: a callback is called with (context)"),
        ("def make(context, *, every: int):\n    pass\n", {"evry": 2}, "has no option 'evry'; did you mean 'every'?"),
        ("def make(context:\n", {}, "mine.py:1: syntax error"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_run_begins(
    tmp_path: Path, here: Command, source: str, args: dict[str, object], message: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    done = here("train", config_of(tmp_path, "./mine.py:make", **args))
    assert done.code != 0
    assert message in done.errors
    assert not (tmp_path / "run").exists()
