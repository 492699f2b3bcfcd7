"""Metrics, settings and benchmarks of a page."""

import json

import pytest
from benchmark_rows import read
from view_runs import make_run, write_benchmark, write_lines, write_picture

from mmrl.view.benchmarks import build_benchmark, describe_benchmark, list_benchmarks
from mmrl.view.media import MAX_SIDE, PictureStore
from mmrl.view.metrics import build_metrics
from mmrl.view.records import RunFiles, find_run
from mmrl.view.run_documents import RunDocuments
from mmrl.view.settings import MASK, list_settings, mask_setting


def test_lines_of_one_step_are_merged_and_the_last_timing_counts():
    lines = [{"stage": "rl", "step": 1, "reward/mean": 0.5}, {"stage": "rl", "step": 1, "validation/a": 0.25}]
    timings = [{"stage": "rl", "step": 1, "time/learn_s": 9.0}, {"stage": "rl", "step": 1, "time/learn_s": 2.0}]
    document = build_metrics(lines, timings, {"rl": 4})
    assert document["columns"] == {"reward/mean": [0.5], "time/learn_s": [2.0], "validation/a": [0.25]}
    assert "reward" in document["meanings"]["reward/mean"]


def test_steps_are_counted_on_over_the_stages_of_the_config():
    lines = [{"stage": "cold", "step": 1}, {"stage": "rl", "step": 1}, {"stage": None, "step": 0, "test/a": 1.0}]
    document = build_metrics(lines, [], {"cold": 10, "rl": 5})
    assert document["global"] == [1, 11, 11]
    assert document["columns"]["test/a"] == [None, None, 1.0]
    assert build_metrics(lines, [], {})["global"] == [1, 2, 2]


def test_values_that_are_no_numbers_are_left_out():
    lines = [{"stage": "rl", "step": 1, "a": None, "b": "x", "c": 1 / 3}, {"stage": 3, "step": 1}, {"step": None}]
    assert build_metrics(lines, [], {})["columns"] == {"a": [None], "c": [0.333333]}


@pytest.mark.parametrize(
    ("path", "text", "shown"),
    [
        ("judge.api_key", "abc", MASK),
        ("logging.trackers.0.token", "abc", MASK),
        ("args.passwords.1", "abc", MASK),
        ("args.WANDB-API-KEY", "abc", MASK),
        ("judge.url", "https://me:pw@host/v1", f"https://{MASK}@host/v1"),
        ("judge.url", "https://host/v1?api_key=abc&x=1", f"https://host/v1?api_key={MASK}&x=1"),
        ("args.note", "use hf_abcdefghijklmnop1234 here", f"use {MASK} here"),
        ("args.header", "Bearer abc.def", MASK),
        ("model.path", "models/key-frames", "models/key-frames"),
        ("stages.0.monkey", "banana", "banana"),
        ("judge.api_key", "", ""),
    ],
)
def test_secrets_in_settings_are_masked(path, text, shown):
    assert mask_setting(path, text) == shown


def test_numbers_under_a_key_like_tokens_are_shown():
    assert list_settings({"rollout": {"max_new_tokens": 512, "token": None}}) == [
        ["rollout.max_new_tokens", "512"],
        ["rollout.token", "null"],
    ]


def test_a_benchmark_of_a_run_has_the_span_that_was_read_and_the_rule(tmp_path):
    run = make_run(tmp_path / "small")
    folder, files = find_run(run, "r0", "small"), RunFiles(run)
    (benchmark,) = list_benchmarks(folder, files, ["cold", "rl"])
    entry = describe_benchmark(benchmark, files)
    assert entry | {"name": "mathvista", "label": "rl 2", "items": 2, "accuracy": 0.5} == entry
    document = build_benchmark(benchmark, files, None, lambda record: {})
    (response,) = document["items"][0]["responses"]
    # In units of JavaScript, where the face is two.
    units = response["response"].encode("utf-16-le")
    assert units[2 * response["start"] : 2 * response["end"]].decode("utf-16-le") == "B"
    assert (response["rule"], response["strict"]) == ("parentheses", True)
    assert document["items"][0]["subsets"] == {"skill": ["math"]}
    assert document["items"][1]["responses"][0] | {"response": "", "outcome": "no_answer"} is not None
    assert ["AP", 0.3] in document["metrics"]


def test_a_folder_of_an_evaluation_is_its_own_benchmark_also_before_its_report(tmp_path):
    write_benchmark(tmp_path / "eval", report=False)
    folder, files = find_run(tmp_path / "eval", "r0", "eval"), RunFiles(tmp_path / "eval")
    assert folder.kind == "eval"
    (benchmark,) = list_benchmarks(folder, files, [])
    entry = describe_benchmark(benchmark, files)
    assert (entry["name"], entry["items"], entry["accuracy"]) == ("eval", 1, None)
    assert len(build_benchmark(benchmark, files, None, lambda record: {})["items"]) == 2


QUESTION = {"id": "1", "question": "Which colour?", "answer": "red", "answer_type": "text", "images": ["a.png"]}


def make_evaluation(folder, **report):
    """Write an evaluation of one canonical question with a picture, and return its document and notices."""
    write_picture(folder / "data/a.png")
    questions = read(folder / "data", "canonical", QUESTION)
    generation = {"data": [str(folder / "data/rows.jsonl")], "data_sha256": questions.digest(), "corruption": None}
    content = {"benchmark": "canonical", "items": 1, "generation": generation, **report}
    row = {"pid": "1", "sample": 0, "response": "red", "sizes": [[200, 100, 112, 56]]}
    write_lines(folder / "eval/predictions.jsonl", [row])
    (folder / "eval/report.json").write_text(json.dumps(content))
    return folder / "eval"


def build_evaluation(path):
    run = RunDocuments(find_run(path, "r0", "eval"), PictureStore(with_media=True, max_side=MAX_SIDE), ())
    ((_, _), (_, document)) = run.build_all()
    return document, run.build_entry()["notices"]


def test_questions_are_read_again_with_their_pictures_at_the_size_that_the_model_saw(tmp_path):
    document, notices = build_evaluation(make_evaluation(tmp_path))
    (item,) = document["items"]
    assert (item["question"], item["target"]) == ("<image>Which colour?", "red")
    assert item["media"][0] | {"width": 112, "height": 56, "original": [200, 100], "problem": None} == item["media"][0]
    assert notices == []


def test_questions_that_have_changed_are_not_shown(tmp_path):
    path = make_evaluation(tmp_path)
    (tmp_path / "data/rows.jsonl").write_text(json.dumps({**QUESTION, "question": "Which size?"}))
    document, notices = build_evaluation(path)
    assert document["items"][0]["question"] == ""
    assert any("its questions are not shown: their files have changed since" in notice for notice in notices)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"benchmark": "./mine.py:make_benchmark"}, "not a benchmark of mmrl"),
        ({"benchmark": "run:test"}, "not a benchmark of mmrl"),
        ({"generation": None}, "does not name their files"),
        ({"generation": {"data": ["absent.jsonl"]}}, "absent.jsonl"),
        ({"generation": {"data": 3, "data_sha256": []}}, "not shown"),
    ],
)
def test_questions_that_cannot_be_read_are_a_notice_and_no_code_is_run(tmp_path, monkeypatch, report, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    document, notices = build_evaluation(make_evaluation(tmp_path, **report))
    assert document["items"][0]["responses"][0]["response"] == "red"
    assert any("its questions are not shown" in notice and reason in notice for notice in notices)
