"""Callbacks from a user's file: called after each step, able to log metrics and end a stage, refused when unusable."""

import re
import shutil
from pathlib import Path

import pytest
from harness import (
    experiment,
    metrics,
    refuse,
    reproducible_files,
    rl_stage,
    run_mmrl,
    sft_stage,
    stop_in_rl,
    succeed,
    write,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "callback.py"


def config_of(folder: Path, fn: str, **args: object) -> Path:
    stages = [sft_stage(steps=2), rl_stage(steps=6, optimizer={"lr": 1e-9})]
    config = experiment(folder / "run", stages=stages, callbacks=[{"fn": fn, "args": args}])
    return write(config, folder / "tiny.yaml")


def test_example_callback_ends_a_stage_that_makes_no_progress(tmp_path, in_process):
    shutil.copy(EXAMPLE, tmp_path)
    done = succeed(in_process("train", config_of(tmp_path, "./callback.py:stop_without_progress", patience=1)))
    steps = [record for record in metrics(tmp_path / "run") if "reward/mean" in record]
    best = [record["my/best_of_group"] for record in steps]
    assert len(best) < 6
    assert best[-1] <= max(best[:-1])
    assert all(record["reward/mean"] <= record["my/best_of_group"] <= record["reward/max"] for record in steps)
    assert "my/best_of_group (best): Mean over groups of the largest total reward." in done.output
    assert f"  best {best[0]:.3f}" in done.output
    assert f"step {len(best)}: nothing better than {max(best):.3f} since step" in done.output
    assert f"Stage rl ended after {len(best)} steps, its goal reached." in done.output


@pytest.mark.slow
def test_resumed_run_with_the_example_callback_ends_the_stage_at_the_same_step(tmp_path, in_process):
    configs = []
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
        shutil.copy(EXAMPLE, tmp_path / name)
        configs.append(config_of(tmp_path / name, "./callback.py:stop_without_progress", patience=2))
    done = succeed(in_process("train", configs[0]))
    high_step, last_step = map(int, re.search(r"since step (\d+)(?s:.*)ended after (\d+) steps", done.output).groups())
    assert last_step < 6
    stop_in_rl(configs[1], high_step + 1)
    succeed(in_process("train", configs[1]))
    assert reproducible_files(tmp_path / "twice" / "run") == reproducible_files(tmp_path / "once" / "run")


MEASURING = """
from mmrl.log.metric_registry import Metric

class Measuring:
    metrics = (Metric("my/peak", "Largest after the third step.", label="peak", form=".2f"),)

    def __init__(self, rank):
        self.rank = rank

    def on_step_end(self, state, result):
        return {"my/peak": 1 - abs(state.step - 3) / 10, "my/rank": self.rank, "my/nothing": float("nan")}

def make(run):
    return Measuring(run.ranks.rank)

class Reading:
    def on_step_end(self, state, result):
        return {"my/twice": 2 * result.metrics["my/peak"]}

def read(run):
    return Reading()
"""


def measuring(folder: Path, name: str) -> Path:
    """A config whose callbacks measure each step, and whose best checkpoint is the one with the largest my/peak."""
    (folder / "mine.py").write_text(MEASURING)
    sections = {
        "stages": [rl_stage(steps=5)],
        "checkpoints": {"every": 1, "keep_last": 1, "best": {"metric": "my/peak"}},
        "callbacks": [{"fn": "./mine.py:make"}, {"fn": "./mine.py:read"}],
    }
    return write(experiment(folder / name, **sections), folder / f"{name}.yaml")


@pytest.mark.slow
def test_metrics_of_callbacks_are_logged_with_the_step_and_resumed_exactly(tmp_path, in_process):
    once, twice = measuring(tmp_path, "once"), measuring(tmp_path, "twice")
    done = succeed(in_process("train", once))
    steps = [record for record in metrics(tmp_path / "once") if "learner/lr" in record]
    assert [record["my/peak"] for record in steps] == [0.8, 0.9, 1.0, 0.9, 0.8]
    assert [record["my/twice"] for record in steps] == [1.6, 1.8, 2.0, 1.8, 1.6]
    assert all(record["my/nothing"] is None and record["my/rank"] == 0.0 for record in steps)
    assert re.search(r"lr 3\.0e-03  clip_frac \S+  entropy \S+  peak 0\.80", done.output)
    assert "rank 0" not in done.output
    stop_in_rl(twice, 4)
    assert in_process("train", twice).code == 0
    assert reproducible_files(tmp_path / "twice") == reproducible_files(tmp_path / "once")
    for name in ("once", "twice"):
        assert {path.name for path in (tmp_path / name / "checkpoints").iterdir()} == {"00-000003", "01-000000"}


@pytest.mark.slow
def test_metrics_of_the_first_rank_are_logged(tmp_path):
    succeed(run_mmrl("train", measuring(tmp_path, "run"), "--nproc", 2))
    assert [record["my/rank"] for record in metrics(tmp_path / "run") if "my/rank" in record] == [0.0] * 5


def source(metrics: str = "()", line: str = "pass") -> str:
    """The file of a callback that declares these metrics and runs this line after each step."""
    return f"""
from mmrl.log.metric_registry import Metric
class Mine:
    metrics = {metrics}
    def on_step_end(self, state, result):
        {line}
def make(run):
    return Mine()
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return 3", "returned 3; return a mapping of metrics by name, or None"),
        ("return {'my/x': 'many'}", "returned 'many' as metric 'my/x'; return a number for each name"),
        ("return {7: 1.0}", "returned 1.0 as metric 7; return a number for each name"),
        ("return {'reward/mean': 1.0}", "the metric 'reward/mean' is taken, as mmrl writes 'reward/mean'"),
        ("return {'step': 1.0}", "the metric 'step' is taken, as mmrl writes 'step'"),
        ("return {'my/before': 1.0}", "the metric 'my/before' is taken, as another callback has it"),
        ("raise KeyError('x')", "raised KeyError: 'x'"),
    ],
)
def test_a_step_whose_callback_fails_is_in_the_files(tmp_path, in_process, line, message):
    for name, body in (("before", "return {'my/before': 2}"), ("mine", line)):
        (tmp_path / f"{name}.py").write_text(source(line=body))
    callbacks = [{"fn": "./before.py:make"}, {"fn": "./mine.py:make"}]
    config = experiment(tmp_path / "run", stages=[rl_stage(steps=2)], callbacks=callbacks)
    refuse(in_process("train", write(config, tmp_path / "tiny.yaml")), "callback './mine.py:make'", "mine.py:", message)
    *_, last = metrics(tmp_path / "run")
    assert last["step"] == 1 and "learner/lr" in last and last["my/before"] == 2.0
    assert (tmp_path / "run" / "rollouts" / "rl-000001.jsonl").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make(run):\n    return 3\n", "returned 3, which has no method 'on_step_end'"),
        (source("('my/x',)"), "`metrics` are ('my/x',), not a tuple of mmrl.Metric"),
        (source("Metric('my/x', 'X.')"), "not a tuple of mmrl.Metric"),
        (source("(Metric('my/x', 'X.', form='3g3'),)"), "mine.py:4: ValueError: Invalid format specifier"),
        (source("(Metric('reward/term/x', 'X.'),)"), "term/x' is taken, as mmrl writes 'reward/term/<term>'"),
        (source("(Metric('my/x', 'X.'),) * 2"), "'my/x' is taken, as another callback has it"),
    ],
)
def test_unusable_callback_is_refused_before_the_run_begins(tmp_path, in_process, text, message):
    (tmp_path / "mine.py").write_text(text)
    done = in_process("train", config_of(tmp_path, "./mine.py:make"))
    assert done.code != 0
    assert message in done.errors
    assert not (tmp_path / "run").exists()
