"""`mmrl eval MODEL`: the numbers of training, killed and resumed, without a socket, and refusals with the reason."""

import json
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import metrics, refuse, run_mmrl, succeed
from json_lines import read_json_lines
from serving import judging, served

FILES = ("predictions.jsonl", "verdicts.jsonl", "report.json", "report.md")


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Ten questions on ten pictures, as canonical JSONL."""
    return harness.questions(tmp_path_factory.mktemp("questions"))


def report(out: Path) -> dict[str, Any]:
    """report.json."""
    return json.loads((out / "report.json").read_text())


def test_held_out_data_has_exactly_the_reward_that_training_reported(whole, tmp_path, in_process):
    """The run, its last checkpoint, its model, and an export in another folder."""
    told = {task["task"]: task["after"] for task in json.loads((whole / "summary.json").read_text())["tasks"]}
    assert [told["count"]] == [record["test/count"] for record in metrics(whole) if "test/count" in record][1:]
    saved = max((whole / "checkpoints").iterdir())
    assert in_process("export", whole, "--out", tmp_path / "away" / "mine").code == 0
    for number, model in enumerate((whole, saved, whole / "model", tmp_path / "away" / "mine")):
        out = tmp_path / str(number)
        succeed(in_process("eval", model, "--benchmark", "run:test", "--out", out))
        assert report(out)["rewards"] == told
        assert (out / "verdicts.jsonl").read_bytes() == (tmp_path / "0" / "verdicts.jsonl").read_bytes()


def test_model_without_settings_is_evaluated_with_the_defaults(whole, questions, tmp_path, in_process):
    mine = shutil.copytree(whole / "model", tmp_path / "mine")
    asked = ("--benchmark", "counting", "--data", questions, "model.device=cpu", "evaluation.max_new_tokens=6")
    known = in_process("eval", mine, *asked, "--out", tmp_path / "known")
    assert known.code == 0, known.errors
    assert "defaults" not in known.output
    assert report(tmp_path / "known")["generation"]["pixels"] == [1024, 1024]
    (mine / "mmrl.yaml").unlink()
    foreign = in_process("eval", mine, *asked, "--out", tmp_path / "foreign")
    assert foreign.code == 0, foreign.errors
    assert "mine has no mmrl.yaml: prompt, pixels and limits are the defaults, unless set here" in foreign.output
    prompts = [report(tmp_path / name)["generation"]["prompts"] for name in ("known", "foreign")]
    assert prompts[0] != prompts[1]  # by default the form of the answer is stated
    gone = in_process("eval", mine, "--benchmark", "run:test", "--out", tmp_path / "test")
    refuse(gone, "mine has no mmrl.yaml, so it has no data of its own")


def test_judge_is_asked_where_no_rule_finds_an_answer(whole, questions, tmp_path, in_process):
    rows = read_json_lines(questions)
    for row in rows:
        row |= {"answer_type": "choice", "options": ["apple", "pear"], "answer": "pear"}
    asked = questions.parent / "fruit.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("eval", whole, "--benchmark", "canonical", "--data", asked, "--out", tmp_path / "out")
    assert in_process(*command).code == 0
    before = (tmp_path / "out" / "predictions.jsonl").read_bytes()
    unread = report(tmp_path / "out")["outcomes"]["no_answer"]
    assert unread
    with served(judging(lambda _: {"score": 1})) as (url, requests):
        done = in_process(*command, f"judge.url={url}", "judge.model=m")
    assert done.code == 0, done.errors
    assert "Loading" not in done.output  # what was answered stays
    assert (tmp_path / "out" / "predictions.jsonl").read_bytes() == before
    found = report(tmp_path / "out")
    assert found["judge"]["asked"] == found["judge"]["correct"] == unread >= len(requests)
    assert found["strict"]["value"] + unread / 10 == pytest.approx(found["judge"]["accuracy"]["value"])
    judge = (f"judge.url={url}", "judge.model=m")
    refused = in_process("eval", whole, "--benchmark", "run:test", *judge, "--out", tmp_path / "b")
    refuse(refused, "the run's rewards judge its data; leave out judge")


def test_killed_and_resumed_evaluation_has_the_same_bytes(whole, questions, tmp_path, in_process, monkeypatch):
    asked = ("--benchmark", "counting", "--data", questions, "evaluation.batch_size=3", "responses_per_question=2")
    asked = (*asked, "evaluation.temperature=1")
    fault = ("mmrl.evaluation.session:append_predictions", 3, "SIGKILL")
    killed = run_mmrl("eval", whole, *asked, "--out", tmp_path / "a", fault=fault)
    assert killed.code == -signal.SIGKILL
    assert not (tmp_path / "a" / "report.json").exists()
    with (tmp_path / "a" / "predictions.jsonl").open("a") as torn:
        torn.write('{"pid": "q6", "sam')
    assert in_process("eval", whole, *asked, "--out", tmp_path / "a").code == 0

    def no_network(*_):
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert in_process("eval", whole, *asked, "--out", tmp_path / "b").code == 0
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    found = report(tmp_path / "a")
    assert (found["items"], found["responses"]) == (10, 20)
    assert set(found["samples"]) == {"1", "2"}
    assert set(found["subsets"]["parity"]) == {"0", "1"}
    assert found["generation"]["pixels"] == [1024, 1024]


def test_other_settings_are_refused_and_rescoring_needs_no_model(whole, questions, tmp_path, in_process):
    asked = ("eval", whole, "--benchmark", "counting", "--data", questions, "--out", tmp_path / "out")
    refuse(in_process(*asked, "--rescore"), "not finished")
    assert in_process(*asked).code == 0
    refuse(in_process(*asked, "model.max_pixels=2048"), "model.max_pixels: 1024 -> 2048")
    before = (tmp_path / "out" / "verdicts.jsonl").read_bytes()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[0]["strict"] = not rows[0]["strict"]
    edited = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "out" / "verdicts.jsonl").write_text(edited)
    finished = in_process(*asked)
    assert finished.code == 0
    assert "This evaluation is finished" in finished.output
    assert (tmp_path / "out" / "verdicts.jsonl").read_text() == edited  # nothing was graded again
    (tmp_path / "out" / "report.json").write_text("{")
    refuse(in_process(*asked), "report.json: cannot be read (", "--rescore (Python: rescore=True) writes it again")
    changed = in_process(*asked, "judge.url=http://127.0.0.1:9/v1", "judge.model=m")
    refuse(changed, "1 verdicts of earlier rules differ, that of q0")
    again = in_process(*asked, "--rescore")
    assert again.code == 0
    assert "Loading" not in again.output
    assert f"q0: strict {rows[0]['strict']} -> {not rows[0]['strict']}" in again.output
    assert (tmp_path / "out" / "verdicts.jsonl").read_bytes() == before


def test_missing_images_are_named_and_may_count_as_incorrect(whole, questions, tmp_path, in_process):
    rows = read_json_lines(questions)
    for row in rows[2:5]:
        row["images"] = "gone.png"
    (questions.parent / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--benchmark", "counting", "--data", questions.parent / "gaps.jsonl")
    asked = ("eval", whole, *data, "--out", tmp_path / "out")
    refused = refuse(in_process(*asked), "3 of 10 questions cannot be asked")
    assert all(f"q{number}: " in refused.errors for number in (2, 3, 4))
    allowed = in_process(*asked, "--allow-missing")
    assert allowed.code == 0, allowed.errors
    found = report(tmp_path / "out")
    assert (found["items"], found["responses"], found["missing"]) == (10, 7, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{run}", "--benchmark", "canonical"), "data: name the files of canonical"),
        (("{run}", "--benchmark", "run:exam"), "a run has run:validation, run:test, run:train"),
        (("{run}", "--benchmark", "canonical", "responses_per_question=4"), "the same at temperature 0"),
        (("{run}", "--benchmark", "canonical", "--data", __file__, "--split", "easy"), "only a folder of questions"),
    ],
)
def test_unusable_argument_is_refused_with_the_reason(arguments, said, whole, tmp_path, in_process):
    refuse(in_process("eval", *(word.format(run=whole) for word in arguments), "--out", tmp_path / "out"), said)


def test_evaluation_by_two_processes_is_refused(whole, tmp_path, in_process, monkeypatch):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    done = in_process("eval", whole, "--benchmark", "run:test", "--out", tmp_path / "out")
    refuse(done, "mmrl eval works in one process, but a launcher has started 2")
    assert not (tmp_path / "out").exists()
