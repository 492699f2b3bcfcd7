"""Stages that make data: rejection sampling in one YAML, a stage killed half-way, what another run reads of it."""

import signal
import time
from pathlib import Path
from typing import Any

import harness
import pytest
from factories import make_context
from json_lines import read_json_lines

from mmrl.checkpoint.atomic_folder import commit_partial
from mmrl.training.sample_stage import run_sample_stage
from mmrl_datasets.readers import table

COLUMNS = ("id", "task", "images", "question", "answer", "label", "thinking", "response", "media_index")
READ = {
    "columns": {name: name for name in COLUMNS},
    "answer_type": "{{ answer_type }}",
    "coordinates": "{{ coordinates or '' }}",
}


def recipe(run_dir: Path) -> dict[str, Any]:
    """Draw, look again at half of it, keep what is right, imitate it, then reinforce on what is not too easy."""
    look = {"kind": "rethink", "correct": ["count"], "fraction": 0.5, "cut_answer_fraction": 1.0, "max_new_tokens": 6}
    draw = {"name": "draw", "kind": "sample", "group_size": 4, "prompts_per_step": 5, "sampling": {"max_new_tokens": 6}}
    draw["rollout_steps"] = [{"kind": "generate"}, {**look, "triggers": [{"text": " Wait."}]}]
    reject = {
        "name": "right",
        "kind": "select",
        "results_of": "draw",
        "correct": ["count"],
        "output": "responses",
        "max_responses": 2,
    }
    route = {"name": "hard", "kind": "select", "results_of": "draw", "correct": ["count"], "range": [0.0, 0.9]}
    learn = harness.sft_stage(name="imitate", samples_of="right", target_field="response", steps=3, validation=None)
    rl = harness.rl_stage(
        samples_of="hard", steps=2, data_order={"kind": "sorted", "column": "pass_rate", "descending": True}
    )
    return harness.experiment(
        run_dir,
        data={
            "train": [harness.counting("train", 12, label_miss_prob=0.2)],
            "validation": [harness.counting("validation", 8)],
            "test": [harness.counting("test", 6)],
        },
        checkpoints={"every": 10, "keep_last": 1, "best": {"metric": "validation/mean"}},
        stages=[harness.sft_stage(steps=40, validation={"every": 10}), draw, reject, route, learn, rl],
    )


@pytest.fixture(scope="module")
def sample_table(tmp_path_factory) -> Path:
    """The run directory of the recipe, undisturbed."""
    return harness.undisturbed(tmp_path_factory, "sample_table", recipe)


def rows(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return read_json_lines(run_dir / "outputs" / f"{name}.jsonl")


def test_all_sampled_rollouts_are_written(sample_table):
    drawn = rows(sample_table, "draw")
    assert len(drawn) == 12 * 4
    assert [row["rollout"] for row in drawn[:4]] == [0, 1, 2, 3]
    assert len({row["id"] for row in drawn}) == 48
    assert {row["terms"]["count"] for row in drawn} == {0.0, 1.0}  # the cold start left something to choose
    seconds = [row for row in drawn if row["rethink"]]
    assert 0 < len(seconds) < 48 and all(" Wait." in row["response"] for row in seconds)
    sampled = next(record for record in harness.metrics(sample_table) if record["stage"] == "draw")
    assert sampled["rethink/frac"] == len(seconds) / 48
    assert sampled["reward/term/count"] == pytest.approx(sum(row["terms"]["count"] for row in drawn) / 48)


def test_select_stages_keep_the_right_rollouts(sample_table):
    right = {row["id"] for row in rows(sample_table, "draw") if row["terms"]["count"] == 1.0}
    kept = rows(sample_table, "right")
    assert {row["id"] for row in kept} <= right
    rates = {}
    for row in rows(sample_table, "draw"):
        rates.setdefault(row["sample"], []).append(row["terms"]["count"])
    assert len(kept) == sum(min(2, int(sum(values))) for values in rates.values())
    hard = rows(sample_table, "hard")
    assert [row["id"] for row in hard] == [name for name, values in rates.items() if sum(values) / 4 <= 0.9]
    assert all(row["pass_rate"] == sum(rates[row["id"]]) / 4 for row in hard)


def test_later_stages_train_on_the_selected_samples(sample_table):
    learned = [
        record for record in harness.metrics(sample_table) if record["stage"] == "imitate" and "learner/loss" in record
    ]
    assert len(learned) == 3 and all(record["learner/grad_norm"] > 0 for record in learned)
    first = read_json_lines(sample_table / "rollouts" / "rl-000001.jsonl")
    hard = sorted(rows(sample_table, "hard"), key=lambda row: -row["pass_rate"])
    assert list(dict.fromkeys(row["sample"] for row in first)) == [row["id"] for row in hard[:4]]


def test_the_model_card_names_the_stages_that_train(sample_table):
    card = (sample_table / "model" / "README.md").read_text()
    assert ": imitation (cold), then imitation (imitate), then grpo (rl). Checkpoint 06-000000." in card


def test_another_run_reads_the_tables(sample_table):
    context = make_context(sample_table)
    for name in ("draw", "right", "hard"):
        samples = list(table.rows(context, path=f"outputs/{name}.jsonl", **READ))
        written = rows(sample_table, name)
        assert [sample.id for sample in samples] == [row["id"] for row in written]
        assert [sample.response for sample in samples] == [row["response"] for row in written]
        assert all(sample.task == "count" and Path(sample.images[0].path).is_file() for sample in samples)
        assert [sample.target.value for sample in samples] == [row["answer"] for row in written]


@pytest.mark.slow
def test_a_killed_sample_stage_resumes_where_it_stopped(sample_table, tmp_path, in_process):
    config = harness.write(recipe(tmp_path / "run"), tmp_path / "recipe.yaml")
    done = harness.run_mmrl("train", config, fault=("mmrl.training.sample_stage:_append_rows", 3, "SIGKILL"))
    assert done.code == -signal.SIGKILL
    drawn = tmp_path / "run" / "outputs" / "draw.jsonl"
    assert drawn.read_bytes() == b"".join((sample_table / "outputs" / "draw.jsonl").read_bytes().splitlines(True)[:40])
    drawn.write_bytes(drawn.read_bytes()[:-7])  # as if it had been killed while it wrote
    assert in_process("train", config).code == 0
    assert harness.reproducible_files(tmp_path / "run") == harness.reproducible_files(sample_table)
    for name in ("draw", "right", "hard"):
        file = f"outputs/{name}.jsonl"
        assert (tmp_path / "run" / file).read_bytes() == (sample_table / file).read_bytes()


@pytest.mark.slow
def test_a_first_sample_stage_begins_once_the_first_checkpoint_is_on_the_disk(tmp_path, in_process, monkeypatch):
    """Without the checkpoint, a run that was stopped in this stage would delete the table when it is started again."""
    seen = []

    def commit_late(folder):
        time.sleep(0.5)
        commit_partial(folder)

    def look_and_run(stage, run, *rest):
        seen.append([path.name for path in run.run_dir.checkpoints.iterdir()])
        run_sample_stage(stage, run, *rest)

    monkeypatch.setattr("mmrl.checkpoint.manager.commit_partial", commit_late)
    monkeypatch.setattr("mmrl.training.run.run_sample_stage", look_and_run)
    draw = {"name": "draw", "kind": "sample", "group_size": 1, "prompts_per_step": 2}
    learn = harness.sft_stage(steps=1, validation=None)
    sources = {"train": [harness.counting("train", 2)], "validation": [], "test": []}
    config = harness.experiment(tmp_path / "run", data=sources, checkpoints={"async_save": True}, stages=[draw, learn])
    harness.succeed(in_process("train", harness.write(config, tmp_path / "first.yaml")))
    assert seen == [["00-000000"]]


@pytest.mark.slow
def test_two_processes_sample_and_select_as_one_does(sample_table, tmp_path):
    """Tables, validation, and the best checkpoint of its choice."""
    harness.succeed(
        harness.run_mmrl("train", harness.write(recipe(tmp_path / "run"), tmp_path / "recipe.yaml"), "--nproc", 2)
    )
    harness.check_metrics_alike(harness.metrics(tmp_path / "run"), harness.metrics(sample_table))
    assert sum("validation/mean" in record for record in harness.metrics(sample_table)) == 4
    for name in ("draw", "right", "hard"):
        assert rows(tmp_path / "run", name) == rows(sample_table, name)
    kept = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (tmp_path / "run", sample_table)]
    assert kept[0] == kept[1] and len(kept[0]) == 2
