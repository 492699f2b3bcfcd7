"""Runs that draw the next step's rollouts while they learn this one: from YAML to the same bytes after a stop."""

from __future__ import annotations

import os
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from harness import Command, contents, experiment, metrics, mmrl, rl_stage, scheduled, sft_stage, write
from rounding import LOGPROBS
from test_launch import alike

from mmrl.checkpoint.snapshot import load_state
from mmrl.cli import main
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.training.async_rollouts import AsyncRollouts, PendingRound

LOOK = {"kind": "rethink", "correct": ["count"], "max_new_tokens": 6, "triggers": [{"text": " Wait."}]}
COLD = sft_stage(validation={"every": 4, "stop_at_mean_reward": 0.8})
STEPS = 6


def overlapping(run_dir: Path, loss: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A cold start, then steps that overlap; the bonus on entropy moves the weights, whatever is rewarded."""
    loss = {"kl": {"coef": 0.05}, "entropy": {"coef": 0.02}, **(loss or {})}
    rl = rl_stage(steps=STEPS, async_rollouts=True, loss=loss, optimizer=scheduled(3e-3, STEPS))
    stages = [COLD, {**rl, **options}]
    return experiment(run_dir, stages=stages, checkpoints={"every": 2, "keep_last": 20})


def with_everything(run_dir: Path) -> dict[str, Any]:
    """All that reads or changes what a step is made of."""
    config = overlapping(
        run_dir,
        rollout_steps=[
            {"kind": "generate"},
            {**LOOK, "fraction": 0.5},
            {"kind": "probe", "corruption": "grey", "every": 2},
        ],
        dynamic_sampling={"ranges": [{"term": "format", "low": 0.0, "high": 1.0}], "max_rounds": 2},
        optimizer=scheduled(1e-3, STEPS),
        replay={"capacity": 32},
        track_rewards=["count"],
        data_order={"kind": "priority"},
        validation={"every": 3},
    )
    # By default the copy that samples is not checked.
    return {**config, "rollout": {"logprob_check": {"every": 2, "max_new_tokens": 2}}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("overlap")
    assert main(["train", str(write(with_everything(folder / "run"), folder / "tiny.yaml"))]) == 0
    return folder / "run"


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in metrics(run_dir) if record["stage"] == "rl" and "learner/loss" in record]


def test_what_is_learned_is_one_version_old_from_the_second_step_on(whole: Path) -> None:
    steps = steps_of(whole)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    gaps = [record["rollout/staleness_max"] for record in steps if "rollout/staleness_max" in record]
    assert gaps[0] == 0.0 and 1.0 in gaps and max(gaps) <= 2.0  # 2: carried by the filter for a step
    assert any("validation/mean" in record for record in metrics(whole))
    told = ["rollout/stale_logprob_diff_mean" in record for record in steps if record["learner/loss"]]
    assert not told[0] and all(told[1:])
    checks = [record["logprob_check/diff_mean"] for record in metrics(whole) if "logprob_check/diff_mean" in record]
    assert len(checks) >= STEPS // 2 and max(checks) < LOGPROBS
    assert any(name.startswith("probe/blind_gap/grey/") for record in steps for name in record)
    assert sum(record["rethink/attempted"] for record in steps) > 0


def test_no_step_is_drawn_for_nobody(whole: Path) -> None:
    """A step of the tables that rollouts are kept in has as many as were learned; what lies ahead is in checkpoints."""
    assert load_state(whole / "checkpoints" / "01-000006").prefetched is None
    ahead = load_state(whole / "checkpoints" / "01-000004").prefetched
    assert ahead is not None and len(ahead.groups) == 4


def strike(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int, *signals: signal.Signals) -> None:
    """Send this process signals at the Nth call of a method."""
    method, calls = getattr(owner, name), count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            for which in signals:
                os.kill(os.getpid(), which)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, struck)


MOMENTS = {
    "the fifth step is about to be drawn": ("start", 4, (signal.SIGTERM,), 128 + signal.SIGTERM, "01-000004"),
    "the sixth is drawn, and it is urgent": ("wait", 5, (signal.SIGINT,) * 2, 128 + signal.SIGINT, "01-000004"),
}


@pytest.mark.parametrize(("name", "nth", "signals", "code", "saved"), MOMENTS.values(), ids=MOMENTS)
def test_a_run_stopped_while_steps_overlap_ends_like_the_whole_one(
    tmp_path: Path,
    whole: Path,
    here: Command,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nth: int,
    signals: tuple[signal.Signals, ...],
    code: int,
    saved: str,
) -> None:
    config = write(with_everything(tmp_path / "run"), tmp_path / "tiny.yaml")
    strike(monkeypatch, AsyncRollouts if name == "start" else PendingRound, name, nth, *signals)
    assert here("train", config).code == code
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == saved
    done = here("train", config)
    assert done.code == 0, done.errors
    assert f"{saved}: stage rl, step 4" in done.output
    assert contents(tmp_path / "run") == contents(whole)


@pytest.mark.slow
def test_two_processes_overlap_as_one_does(tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what one has drawn ahead is dealt out when two continue."""
    replay = {"capacity": 32, "drop_zero_advantage": False, "fill": "fraction", "target_fraction": 0.3}
    replay["old_logprobs"] = "recomputed"
    loss = {"old_logprobs": "recomputed", "rollout_correction": {"method": "tis"}}
    more = {
        "num_mini_batches": 2,
        "loss": loss,
        "replay": replay,
        "sampling": {"max_new_tokens": 6, "temperature": 0.6},
    }
    once, twice = (overlapping(tmp_path / name, **more) for name in ("once", "twice"))
    assert here("train", write(once, tmp_path / "once.yaml")).code == 0
    steps = steps_of(tmp_path / "once")
    assert [record["rollout/staleness_max"] for record in steps] == [0.0] + [1.0] * (STEPS - 1)
    assert [record["rollout/staleness_mean"] for record in steps] == [0.0] + [1.0] * (STEPS - 1)
    assert ["rollout/logprob_diff_mean" in record for record in steps] == [True] + [False] * (STEPS - 1)
    assert ["rollout/stale_logprob_diff_mean" in record for record in steps] == [False] + [True] * (STEPS - 1)
    assert min(record["replay/frac"] for record in steps[1:]) > 0.2
    config = write(twice, tmp_path / "twice.yaml")
    with monkeypatch.context() as patched:
        strike(patched, AsyncRollouts, "start", 3, signal.SIGINT)
        assert here("train", config).code == 128 + signal.SIGINT
    done = mmrl("train", config, "--nproc", 2)
    assert done.code == 0, done.errors
    alike(metrics(tmp_path / "twice"), metrics(tmp_path / "once"))


@pytest.mark.slow
def test_groups_that_wait_wait_on_all_ranks(tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes continue with what one left waiting, and then step by step as one does, whoever opens pictures."""
    chunked = [{"kind": "generate", "partial_rollout_tokens": 2, "oversampling": 1.5, "max_tokens_per_step": 60}]
    loss = {"entropy": {"coef": 0.02}, "old_logprobs": "recomputed", "rollout_correction": {"method": "tis"}}
    means = {"sampling": {"max_new_tokens": 16, "temperature": 1.2}, "loss": loss, "num_mini_batches": 2}
    means["optimizer"] = scheduled(3e-3, STEPS)
    stages = [COLD, rl_stage(steps=STEPS, rollout_steps=chunked, group_size=2, **means)]
    once, twice = (experiment(tmp_path / name, stages=stages) for name in ("once", "twice"))
    twice["data"]["media_workers"] = 1
    assert here("train", write(once, tmp_path / "once.yaml")).code == 0
    told = steps_of(tmp_path / "once")
    assert told[0]["rollout/unfinished_groups"] > 0
    gaps = [record["rollout/staleness_max"] for record in told]
    assert gaps[0] == 0.0 and max(gaps) >= 1.0
    config = write(twice, tmp_path / "twice.yaml")
    with monkeypatch.context() as patched:
        strike(patched, EngineSampler, "sync", 1, signal.SIGINT)
        assert here("train", config).code == 128 + signal.SIGINT
    done = mmrl("train", config, "--nproc", 2)
    assert done.code == 0, done.errors
    alike(metrics(tmp_path / "twice"), metrics(tmp_path / "once"))


@pytest.mark.slow
def test_a_lengthened_run_says_whether_it_ends_like_a_longer_one(tmp_path: Path, here: Command) -> None:
    """The last step of the shorter run generates nothing in advance; from an earlier checkpoint both are the same."""
    longer = ["stages.rl.steps=7"]
    run_dir = tmp_path / "run"
    config = write(with_everything(run_dir), tmp_path / "tiny.yaml")
    assert here("train", config).code == 0
    shutil.copytree(run_dir, tmp_path / "short")
    done = here("train", config, *longer)
    assert done.code == 0, done.errors
    assert "Stage rl will not end like one that had 7 steps from the start: step 6 was its last one" in done.output
    shutil.rmtree(run_dir)
    shutil.copytree(tmp_path / "short", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "01-000006")
    done = here("train", config, *longer)
    assert done.code == 0, done.errors
    assert "01-000004: stage rl, step 4" in done.output
    assert "The stage will end like one that had so many steps from the start." in done.output
    assert here("train", config, *longer, "--run-dir", tmp_path / "fresh").code == 0
    assert contents(run_dir) == contents(tmp_path / "fresh")
