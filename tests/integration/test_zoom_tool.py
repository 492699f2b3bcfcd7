"""A policy that calls a tool: it imitates demonstrations that zoom, and zooms by itself in reinforcement."""

from __future__ import annotations

import json
import signal

import pytest
from harness import TINY, alike, contents, experiment, metrics, mmrl, rl_stage, sft_stage, write
from test_async_rollouts_run import strike

from mmrl.checkpoint.snapshot import load_state
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.training.async_rollouts import AsyncRollouts

ROOM = {"max_total_tokens": 512, "max_result_chars": 400}
GLASS = {"kind": "tools", "max_media": 1, "max_turns": 1, **ROOM, "tools": [{"fn": "mmrl.rollout.tools.builtin:zoom"}]}
ROLLOUT_STEPS = [{"kind": "generate"}, GLASS]


def corners(split, size, **options):
    args = {"split": split, "size": size, "image_px": 128, "digit_px": 12, "resized_px": 32, **options}
    return {"fn": "mmrl_datasets.generators.tiny_digits:corner_digits", "args": args}


def zooming(run_dir):
    model = {
        **experiment(run_dir)["model"],
        "from_scratch": {**TINY, "language": {**TINY["language"], "vocab_size": 400}},
    }
    cold = sft_stage(steps=90, batch_size=12, micro_batch_sequences=12, target_field="response", rollout_steps=[GLASS])
    rl = rl_stage(steps=4, ppo_epochs=1, rollout_steps=ROLLOUT_STEPS, sampling={"max_new_tokens": 40})
    return experiment(
        run_dir,
        model=model,
        data={"train": [corners("train", 96)], "test": [corners("test", 6)]},
        rewards={"terms": [{"fn": "mmrl_rewards.number:exact", "name": "digit"}]},
        evaluation={"max_new_tokens": 40, "batch_size": 8, "rollout_steps": ROLLOUT_STEPS},
        checkpoints={"every": 100, "keep_last": 2},
        stages=[cold, rl],
    )


@pytest.fixture(scope="module")
def zoomed(tmp_path_factory):
    """The directory of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("zoom")
    done = mmrl("train", write(zooming(folder / "run"), folder / "tiny.yaml"))
    assert done.code == 0, done.errors
    return folder / "run"


def test_the_policy_calls_the_tool_by_itself(zoomed):
    told = metrics(zoomed)
    cold = [record for record in told if record["stage"] == "cold" and "learner/loss" in record]
    assert len(cold) == 90
    assert {record["tools/media_shown"] for record in cold} == {12.0}  # every demonstration was shown what it looks at
    assert cold[-1]["learner/loss"] < cold[0]["learner/loss"] / 10
    steps = [record for record in told if record["stage"] == "rl" and "learner/loss" in record]
    assert len(steps) == 4
    for record in steps:
        assert record["tools/media_shown"] >= 4
        assert record["tools/errors"] == record["tools/timeouts"] == 0
    assert any(record["learner/grad_norm/vision"] > 0.0 for record in steps)
    tested = [record for record in told if "test/corner" in record]
    assert tested[0]["test/tools/media_shown"] > 0


def test_what_was_shown_stands_in_its_responses(zoomed):
    kept = [json.loads(line) for file in (zoomed / "rollouts").glob("rl-*") for line in file.read_text().splitlines()]
    looked = [record for record in kept if any("shows" in segment for segment in record["segments"])]
    assert looked
    for record in looked:
        call, lead, view, _, answer = record["segments"]
        authors = [segment["author"] for segment in (call, lead, view, answer)]
        assert authors == ["policy", "environment", "environment", "policy"]
        left, top, right, bottom = view["crop"]
        assert 0 <= left < right <= 128 and 0 <= top < bottom <= 128
        assert f"{zoomed}/{record['media'][0]}" == view["shows"]


@pytest.mark.slow
def test_such_a_run_goes_on_as_if_it_had_never_stopped(here, tmp_path, zoomed):
    """Stopped by Ctrl-C in a step of reinforcement, while the tool's processes run."""
    config = write(zooming(tmp_path / "run"), tmp_path / "tiny.yaml")
    stopped = mmrl("train", config, strike=("mmrl.rollout.engines.hf:HfEngine.generate", 6, "SIGINT"))
    assert "Saved." in stopped.output, stopped.errors
    assert here("train", config).code == 0
    assert contents(tmp_path / "run") == contents(zoomed)


def going_on(run_dir, base):
    """What a policy that zooms already is taught and teaches itself, in steps that overlap."""
    config = zooming(run_dir)
    config["model"] |= {"from_scratch": None, "path": str(base)}
    cold, rl = config["stages"]
    cold |= {"steps": 3, "batch_size": 5, "optimizer": {"lr": 3e-4}}
    rl |= {"async_rollouts": True, "optimizer": {"lr": 1e-3}, "loss": {"entropy": {"coef": 0.02}}}
    return config


@pytest.mark.slow
def test_two_processes_zoom_as_one_does(here, tmp_path, monkeypatch, zoomed):
    """Imitation and asynchronous steps resume with what they had generated and shown before the stop."""
    once, twice = (write(going_on(tmp_path / n, zoomed / "model"), tmp_path / f"{n}.yaml") for n in ("once", "twice"))
    with monkeypatch.context() as patched:
        strike(patched, AsyncRollouts, "start", 2, signal.SIGINT)
        assert here("train", once).code == 128 + signal.SIGINT
    ahead = load_state(tmp_path / "once" / "checkpoints" / "01-000002").prefetched
    assert any(rollout.observations for group in ahead.groups for rollout in group)
    assert here("train", once).code == 0
    done = mmrl("train", twice, "--nproc", 2)
    assert done.code == 0, done.errors
    told = metrics(tmp_path / "once")
    assert {
        record["tools/media_shown"] for record in told if record["stage"] == "cold" and "learner/loss" in record
    } == {5.0}
    steps = [record for record in told if record["stage"] == "rl" and "learner/loss" in record]
    assert [record["rollout/staleness_max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    assert min(record["tools/media_shown"] for record in steps) > 0
    alike(metrics(tmp_path / "twice"), told)


def in_parts(run_dir, base):
    """Responses that are drawn in chunks, zoom, are made to look again, and are learned from once more."""
    config = going_on(run_dir, base)
    look = {"kind": "rethink", "correct": ["digit"], "max_new_tokens": 12, "triggers": [{"text": " Wait."}]}
    cold, rl = config["stages"]
    cold |= {"steps": 1}
    rl |= {
        "async_rollouts": False,
        "steps": 5,
        "rollout_steps": [
            {"kind": "generate", "partial_rollout_tokens": 4, "oversampling": 1.5, "max_tokens_per_step": 120},
            GLASS,
            {**look, "fraction": 0.5},
            {"kind": "probe", "corruption": "grey", "every": 2},
        ],
        "replay": {"capacity": 64, "drop_zero_advantage": False, "fill": "fraction", "target_fraction": 0.3},
    }
    return config


def test_responses_in_parts_zoom_look_again_and_are_replayed(here, tmp_path, monkeypatch, zoomed):
    """And continue, after a stop, as if they had never been stopped."""
    whole, cut = (write(in_parts(tmp_path / n, zoomed / "model"), tmp_path / f"{n}.yaml") for n in ("whole", "cut"))
    assert here("train", whole).code == 0
    with monkeypatch.context() as patched:
        strike(patched, EngineSampler, "sync", 3, signal.SIGINT)
        assert here("train", cut).code == 128 + signal.SIGINT
    assert here("train", cut).code == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    steps = [record for record in metrics(tmp_path / "whole") if record["stage"] == "rl" and "learner/loss" in record]
    assert len(steps) == 5
    for name in (
        "rollout/unfinished_groups",
        "rollout/resumed_rollouts",
        "tools/media_shown",
        "rethink/attempted",
        "replay/frac",
    ):
        assert sum(record.get(name, 0.0) for record in steps) > 0, name
    assert max(record["rollout/staleness_max"] for record in steps) >= 1.0
    kept = [json.loads(line) for file in (tmp_path / "whole" / "rollouts").glob("rl-*") for line in file.open()]
    authors = {tuple(segment["author"] for segment in record["segments"]) for record in kept}
    assert any({"environment", "forced"} <= {*of} for of in authors)  # zoomed first, then made to look again
