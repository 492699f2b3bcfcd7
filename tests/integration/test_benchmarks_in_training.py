"""Benchmarks during training: the verdicts of `mmrl eval`, killed and resumed, by two processes, refused at start."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import experiment, metrics, questions, refuse, rl_stage, run_mmrl, sft_stage, succeed, write
from json_lines import read_json_lines

from mmrl.benchmarks.predictions import append_predictions

pytestmark = pytest.mark.slow

FILES = ("predictions.jsonl", "verdicts.jsonl", "report.json", "report.md", "settings.json")
TAKEN = ["00-000000", "00-000007", "00-000014", "01-000007", "01-000008"]
RETHINK = [{"kind": "generate"}, {"kind": "rethink", "correct": ["count"], "max_new_tokens": 4}]


def config(folder: Path, *, best: str = "benchmark/ten/accuracy", **benchmark: object) -> dict[str, Any]:
    """Imitation and reinforcement with a benchmark every seventh step, and forced rethinking in it."""
    ten = {"name": "ten", "benchmark": "counting", "data": ["asked/ten.jsonl"], "every": 7, "subsets": ["parity"]}
    evaluation = {"max_new_tokens": 6, "batch_size": 4, "rollout_steps": RETHINK, "benchmarks": [{**ten, **benchmark}]}
    saving = {"every": 7, "keep_last": 9, "best": {"metric": best}}
    stages = [sft_stage(steps=14), rl_stage()]
    return experiment(folder / "run", evaluation=evaluation, checkpoints=saving, stages=stages)


@pytest.fixture(scope="module")
def taken(tmp_path_factory) -> Path:
    """A run with its benchmarks, in the folder of its config and its questions."""
    folder = tmp_path_factory.mktemp("taken")
    questions(folder / "asked")
    done = succeed(run_mmrl("train", write(config(folder), folder / "c.yaml")))
    assert "ten after 7 steps of cold: strict" in done.output
    return folder


@pytest.fixture
def again(taken, tmp_path) -> Path:
    """The config of the same run, to be run elsewhere."""
    shutil.copytree(taken / "asked", tmp_path / "asked")
    return write(config(tmp_path), tmp_path / "c.yaml")


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with a benchmark's metrics."""
    return [record for record in metrics(folder / "run") if "benchmark/ten/accuracy" in record]


def same(one: Path, other: Path) -> None:
    """Check that the benchmarks of two runs have the same bytes."""
    for place in TAKEN:
        for name in FILES:
            left, right = (folder / "run" / "benchmarks" / "ten" / place / name for folder in (one, other))
            assert left.read_bytes() == right.read_bytes(), (place, name)
    assert records(one) == records(other)


def test_benchmark_runs_every_seventh_step_and_at_the_end_of_each_stage(taken):
    assert sorted(path.name for path in (taken / "run" / "benchmarks" / "ten").iterdir()) == TAKEN
    stages = {"cold": 0, "rl": 1}
    told = {f"{stages[record['stage']]:02d}-{record['step']:06d}": record for record in records(taken)}
    assert list(told) == TAKEN
    for place, record in told.items():
        report = json.loads((taken / "run" / "benchmarks" / "ten" / place / "report.json").read_text())
        assert record["benchmark/ten/accuracy"] == report["strict"]["value"]
        assert record["benchmark/ten/official_score"] == report["score"]
        assert record["benchmark/ten/truncated_frac"] == report["truncated_rate"]
        assert record["benchmark/ten/parity/1"] == report["subsets"]["parity"]["1"]["strict"]
    accuracies = {record["benchmark/ten/accuracy"] for record in told.values()}
    assert len(accuracies) > 1  # something is measured


def test_best_checkpoint_is_chosen_by_a_benchmark(taken):
    for name, scored in (("00-000007", "00-000007"), ("01-000000", "00-000014"), ("02-000000", "01-000008")):
        report = json.loads((taken / "run" / "benchmarks" / "ten" / scored / "report.json").read_text())
        score = json.loads((taken / "run" / "checkpoints" / name / "ranking_metric.json").read_text())
        assert score == report["strict"]["value"], name


def test_mmrl_eval_gives_the_same_bytes_for_a_checkpoint_and_for_an_export_elsewhere(taken, tmp_path, in_process):
    model = shutil.copytree(taken / "run" / "model", tmp_path / "elsewhere")
    saved = taken / "run" / "checkpoints" / "00-000007"
    for given, place in ((saved, "00-000007"), (taken / "run", "01-000008"), (model, "01-000008")):
        out = tmp_path / f"{given.name}-out"
        succeed(
            in_process("eval", given, "--benchmark", "counting", "--data", taken / "asked" / "ten.jsonl", "--out", out)
        )
        for name in ("predictions.jsonl", "verdicts.jsonl"):
            in_training = taken / "run" / "benchmarks" / "ten" / place / name
            assert (out / name).read_bytes() == in_training.read_bytes(), given


def test_run_killed_during_a_benchmark_resumes_it(taken, again, in_process):
    done = run_mmrl("train", again, fault=("mmrl.evaluation.session:append_predictions", 3 * 3 + 2, "SIGKILL"))
    assert done.code == -signal.SIGKILL
    folder = again.parent / "run" / "benchmarks" / "ten" / "01-000007"
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 4
    assert not (folder / "report.json").exists()
    succeed(in_process("train", again))
    same(taken, again.parent)


def test_finished_benchmark_is_not_repeated_unless_the_weights_differ(taken, again, in_process, monkeypatch):
    # Just after it was evaluated.
    done = run_mmrl("train", again, fault=("mmrl.training.run_checkpoints:RunCheckpoints.save", 4, "SIGKILL"))
    assert done.code == -signal.SIGKILL
    settings = again.parent / "run" / "benchmarks" / "ten" / "01-000008" / "settings.json"
    settings.parent.mkdir()
    settings.write_text('{"settings": {"model": "another path"}, "missing": {}}')
    batches = []

    def counted(path, predictions):
        batches.append(path.parent.name)
        append_predictions(path, predictions)

    monkeypatch.setattr("mmrl.evaluation.session.append_predictions", counted)
    succeed(in_process("train", again))
    assert batches == ["01-000008"] * 3
    same(taken, again.parent)


def test_several_responses_have_the_numbers_and_bytes_of_mmrl_eval(tmp_path, in_process):
    path = questions(tmp_path / "asked")
    ten = {"name": "ten", "benchmark": "counting", "data": ["asked/ten.jsonl"]}
    ten |= {"responses_per_question": 4, "temperature": 1.0}
    evaluation = {"max_new_tokens": 6, "batch_size": 4, "benchmarks": [ten]}
    config = experiment(tmp_path / "run", evaluation=evaluation, stages=[sft_stage(steps=7)])
    succeed(in_process("train", write(config, tmp_path / "c.yaml")))
    last = tmp_path / "run" / "benchmarks" / "ten" / "00-000007"
    done = in_process(
        *("eval", tmp_path / "run", "--benchmark", "counting", "--data", path, "--out", tmp_path / "out"),
        *("evaluation.temperature=1", "responses_per_question=4"),
    )
    assert done.code == 0, done.errors
    for name in ("predictions.jsonl", "verdicts.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (last / name).read_bytes()
    told = [record for record in metrics(tmp_path / "run") if "benchmark/ten/accuracy" in record][-1]
    report = json.loads((last / "report.json").read_text())
    assert report["responses"] == 40
    assert list(report["samples"]) == ["1", "2", "4"]
    for k, row in report["samples"].items():
        assert (told[f"benchmark/ten/pass@{k}"], told[f"benchmark/ten/maj@{k}"]) == (row["pass"], row["maj"])
    assert told["benchmark/ten/accuracy"] == report["samples"]["1"]["pass"]


def test_two_processes_share_the_questions(taken, again):
    succeed(run_mmrl("train", again, "--nproc", 2))
    here, there = (
        read_json_lines(folder / "run" / "benchmarks/ten/00-000000/predictions.jsonl")
        for folder in (taken, again.parent)
    )
    assert here == there  # untrained, so no rounding tells them apart
    assert [record["step"] for record in records(again.parent)] == [0, 7, 14, 7, 8]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"benchmark": "countin"}, "evaluation.benchmarks.ten: there is no benchmark 'countin'; there are"),
        ({"data": ["asked/odd.jsonl"]}, "asked/odd.jsonl:1: the columns are id, q; the nearest known layout is"),
        ({"data": ["asked/gaps.jsonl"]}, "evaluation.benchmarks.ten: 1 of 10 questions cannot be asked"),
        ({"data": ["asked/gaps.jsonl"]}, "count them as incorrect with evaluation.benchmarks.ten.allow_missing=true"),
        ({"subsets": ["color"]}, "evaluation.benchmarks.ten.subsets: no question has 'color'; they have parity"),
    ],
)
def test_unusable_benchmark_is_refused_before_anything_is_trained(changed, said, tmp_path, in_process):
    path = questions(tmp_path / "asked")
    (path.parent / "gaps.jsonl").write_text(path.read_text().replace('"3.png"', '"gone.png"'))
    (path.parent / "odd.jsonl").write_text('{"id": "1", "q": "How many?"}\n')
    refuse(in_process("train", write(config(tmp_path, **changed), tmp_path / "c.yaml")), said)
    assert not (tmp_path / "run").exists()
