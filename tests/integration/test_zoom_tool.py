"""A policy that calls a tool: it imitates demonstrations that zoom, and zooms by itself in RL."""

import json
import signal
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from harness import check_metrics_alike, metrics, reproducible_files, run_mmrl, succeed, write
from interrupts import train_until_signal
from zoom_runs import check_all_occurred, later_config, learned_steps, partial_config, zoom_config

from mmrl.checkpoint.snapshot import load_state
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.training.async_rollouts import AsyncRollouts

pytestmark = pytest.mark.slow


def saved_rollouts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (run_dir / "rollouts").glob("rl-*.jsonl") for line in file.open()]


def test_the_policy_calls_the_tool_by_itself(zoomed):
    cold = learned_steps(zoomed, "cold")
    assert len(cold) == 90
    assert {record["tools/media_shown"] for record in cold} == {12.0}  # in every demonstration
    assert cold[-1]["learner/loss"] < cold[0]["learner/loss"] / 10
    steps = learned_steps(zoomed)
    assert len(steps) == 4
    assert min(record["tools/media_shown"] for record in steps) >= 4
    assert {record["tools/errors"] + record["tools/timeouts"] for record in steps} == {0.0}
    check_all_occurred(steps, "learner/grad_norm/vision")
    tests = [record for record in metrics(zoomed) if "test/corner" in record]
    assert tests[0]["test/tools/media_shown"] > 0


def test_saved_responses_say_what_was_shown(zoomed):
    showing = [row for row in saved_rollouts(zoomed) if any(map(itemgetter("shows"), row["segments"]))]
    assert showing
    for row in showing:
        assert [segment["author"] for segment in row["segments"]] == ["policy", *["environment"] * 3, "policy"]
        shown = row["segments"][2]["shows"]
        left, top, right, bottom = shown["crop"]
        assert 0 <= left < right <= 128 and 0 <= top < bottom <= 128
        assert row["media"][0]["path"] == shown["path"]
        assert shown["original"] == [right - left, bottom - top] and shown["offset"] == [left, top]
        texts = [row["response"][slice(*segment["chars"])] for segment in row["segments"]]
        assert "".join(texts) == row["response"] and texts[2] == ""


def test_a_run_stopped_while_tool_processes_run_resumes_byte_equal(in_process, tmp_path, zoomed):
    config = write(zoom_config(tmp_path / "run"), tmp_path / "tiny.yaml")
    stopped = run_mmrl("train", config, fault=("mmrl.rollout.engines.hf:HfEngine.generate", 6, "SIGINT"))
    assert "Saved." in stopped.output, stopped.errors
    assert in_process("train", config).code == 0
    assert reproducible_files(tmp_path / "run") == reproducible_files(zoomed)


def test_two_processes_zoom_as_one_does(in_process, tmp_path, zoomed):
    """Supervised and asynchronous steps resume with what they had generated and shown before the stop."""
    once, twice = (
        write(later_config(tmp_path / name, zoomed / "model"), tmp_path / f"{name}.yaml") for name in ("once", "twice")
    )
    train_until_signal(in_process, once, AsyncRollouts, "start", 2, signal.SIGINT)
    next_batch = load_state(tmp_path / "once" / "checkpoints" / "01-000002").next_batch
    assert any(rollout.observations for group in next_batch.groups for rollout in group)
    assert in_process("train", once).code == 0
    succeed(run_mmrl("train", twice, "--nproc", 2))
    assert {record["tools/media_shown"] for record in learned_steps(tmp_path / "once", "cold")} == {5.0}
    steps = learned_steps(tmp_path / "once")
    assert [record["rollout/staleness_max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    assert min(record["tools/media_shown"] for record in steps) > 0
    check_metrics_alike(metrics(tmp_path / "twice"), metrics(tmp_path / "once"))


def test_responses_in_parts_zoom_look_again_and_are_replayed(in_process, tmp_path, zoomed):
    """And a stopped run ends with the same bytes."""
    whole, cut = (
        write(partial_config(tmp_path / name, zoomed / "model"), tmp_path / f"{name}.yaml") for name in ("whole", "cut")
    )
    assert in_process("train", whole).code == 0
    train_until_signal(in_process, cut, EngineSampler, "sync", 3, signal.SIGINT)
    assert in_process("train", cut).code == 0
    assert reproducible_files(tmp_path / "cut") == reproducible_files(tmp_path / "whole")
    steps = learned_steps(tmp_path / "whole")
    records = [record for record in metrics(tmp_path / "whole") if record["stage"] == "rl" and record["step"]]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    # A step whose finished groups agree has nothing to learn from.
    assert all(record in steps or record["advantage/max"] == 0.0 for record in records)
    assert len(steps) >= 4
    names = ("rollout/unfinished_groups", "rollout/resumed_rollouts", "tools/media_shown", "rethink/attempted")
    check_all_occurred(steps, *names, "replay/frac")
    assert max(record["rollout/staleness_max"] for record in steps) >= 1.0
    authors = [{segment["author"] for segment in row["segments"]} for row in saved_rollouts(tmp_path / "whole")]
    assert any({"environment", "forced"} <= found for found in authors)  # zoomed first, then made to rethink
