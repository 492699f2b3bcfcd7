"""Orders that follow training: a stopped run, or one with worker processes, draws the very same samples."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import (
    counting,
    experiment,
    metrics,
    reproducible_files,
    rl_stage,
    run_mmrl,
    sft_stage,
    succeed,
    undisturbed,
    write,
)
from json_lines import read_json_lines

pytestmark = pytest.mark.slow


def one_example(run_dir: Path, workers: int = 0) -> dict[str, Any]:
    """A pilot that goes by its own history; then the sample whose reward varied most, again and again."""
    shape = {"steps": 6, "track_rewards": ["count"], "ppo_epochs": 1, "loss": {}}
    pilot = rl_stage(name="pilot", data_order={"kind": "priority", "min_weight": 0.2}, repeat_samples_to=15, **shape)
    best = {"name": "best", "kind": "select", "results_of": "pilot", "metric": "reward_std", "top_k": 1}
    single = rl_stage(
        name="single", samples_of="best", repeat_samples_to=4, steps=2, ppo_epochs=1, loss={"entropy": {"coef": 1e-3}}
    )
    data = dict(train=[counting("train", 10, label_miss_prob=0.2)], test=[counting("test", 4)], media_workers=workers)
    return experiment(run_dir, data=data, stages=[sft_stage(steps=40), pilot, best, single])


@pytest.fixture(scope="module")
def whole_one(tmp_path_factory) -> Path:
    return undisturbed(tmp_path_factory, "one", one_example)


def drawn(run_dir: Path, stage: str, step: int) -> list[str]:
    """The samples of a step, in order."""
    records = (run_dir / "rollouts" / f"{stage}-{step:06d}.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(record)["sample"] for record in records))


def test_one_example_fills_the_batch_with_rollouts_of_its_own(whole_one):
    history = read_json_lines(whole_one / "outputs" / "pilot.jsonl")
    assert sum(len(row["visits"]) for row in history) == 6 * 4
    (best,) = read_json_lines(whole_one / "outputs" / "best.jsonl")
    assert sorted(drawn(whole_one, "single", 1)) == sorted([best["id"], *(f"{best['id']}#{k}" for k in (2, 3, 4))])
    records = (whole_one / "rollouts" / "single-000001.jsonl").read_text().splitlines()
    assert len(records) == 16
    assert len({json.loads(record)["response"] for record in records}) > 2


def test_a_stopped_run_resumes_with_its_reward_history(whole_one, tmp_path, in_process):
    config = write(one_example(tmp_path / "run"), tmp_path / "one.yaml")
    stopped = run_mmrl("train", config, fault=("mmrl.rollout.engine_sampler:EngineSampler.sync", 4, "SIGINT"))
    assert stopped.code == 128 + signal.SIGINT
    assert in_process("train", config).code == 0
    assert reproducible_files(tmp_path / "run") == reproducible_files(whole_one)
    assert (tmp_path / "run/outputs/pilot.jsonl").read_bytes() == (whole_one / "outputs/pilot.jsonl").read_bytes()


def test_workers_do_not_change_which_samples_are_drawn(whole_one, tmp_path, in_process):
    assert in_process("train", write(one_example(tmp_path / "run", workers=1), tmp_path / "one.yaml")).code == 0
    assert reproducible_files(tmp_path / "run") == reproducible_files(whole_one)


def test_a_curriculum_goes_from_phase_to_phase(tmp_path, in_process):
    """Eight samples are two steps; then no rise is enough, which two steps show."""
    phases = [{"max_samples": 8}, {"plateau": {"window": 1, "min_improvement": 2.0}}, {}]
    order = {"kind": "curriculum", "phases": phases}
    config = experiment(tmp_path / "run", stages=[rl_stage(data_order=order, track_rewards=["count"], steps=5)])
    succeed(in_process("train", write(config, tmp_path / "phases.yaml")))
    assert [
        record["data/curriculum_phase"] for record in metrics(tmp_path / "run") if "data/curriculum_phase" in record
    ] == [0, 0, 1, 1, 2]
    # No `select` stage reads the rewards, so no table is written, which could not hold every kind of medium.
    assert not (tmp_path / "run/outputs/rl.jsonl").exists()


def test_a_stage_trains_on_the_samples_of_its_when(tmp_path, in_process):
    """Imitation of the samples that have labels, then reinforcement on the others, which could not be imitated."""
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps({"q": f"{n} + 1?", "a": n + 1, "part": n % 2}) + "\n" for n in range(12)))
    args = {
        "path": str(table),
        "columns": {"question": "q", "answer": "a", "response": "{{ '<answer>1</answer>' if part else '' }}"},
    }
    stages = [
        sft_stage(target_field="response", when={"part": ["1"]}, steps=2),
        {"name": "draw", "kind": "sample", "when": {"part": ["1"]}, "group_size": 2},
        rl_stage(when={"part": ["0"]}, steps=2, prompts_per_step=4, ppo_epochs=1, loss={}),
    ]
    data = {
        "train": [{"fn": "mmrl_datasets.readers.table:rows", "args": {**args, "answer_type": "number", "task": "add"}}]
    }
    rewards = {"terms": [{"fn": "mmrl_rewards.number:exact"}]}
    config = experiment(tmp_path / "run", stages=stages, data=data, rewards=rewards)
    succeed(in_process("train", write(config, tmp_path / "parts.yaml")))
    odd, even = ({f"add/train/line-{n + 1}" for n in range(first, 12, 2)} for first in (1, 0))
    assert set(drawn(tmp_path / "run", "rl", 2)) < even
    rows = read_json_lines(tmp_path / "run/outputs/draw.jsonl")
    assert {row["id"].partition("#")[0] for row in rows} == odd
    config["stages"][2]["when"] = {"part": ["2"]}
    done = in_process("train", write(config, tmp_path / "none.yaml"), "--run-dir", tmp_path / "none")
    assert "stage 'rl' has nothing to train on: there are 0 samples (see its `when`)" in done.errors


def test_a_stage_for_which_a_selection_keeps_too_few_samples_is_refused_before_the_pilot(tmp_path, in_process):
    config = one_example(tmp_path / "run")
    config["stages"][-1]["repeat_samples_to"] = 3
    done = in_process("train", write(config, tmp_path / "one.yaml"))
    assert done.code == 2
    assert "stage 'single' needs 4 prompts per step and stage 'best' keeps 1 samples, so" in done.errors
    assert "raise repeat_samples_to, or lower prompts_per_step" in done.errors
    assert not (tmp_path / "run/metrics.jsonl").exists()
