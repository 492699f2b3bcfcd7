"""`mmrl eval MODEL`: training's own numbers again, killed and resumed, without a socket, and refusals that say why."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from harness import Command, mmrl
from PIL import Image

FILES = ("predictions.jsonl", "verdicts.jsonl", "report.json", "report.md")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten questions on ten pictures, as canonical JSONL."""
    folder = tmp_path_factory.mktemp("questions")
    rows = []
    for number in range(10):
        Image.new("RGB", (32, 32), (25 * number, 0, 0)).save(folder / f"{number}.png")
        row = {"id": f"q{number}", "images": f"{number}.png", "question": "How many red shapes?", "answer": number % 3}
        rows.append({**row, "answer_type": "count", "meta": {"parity": number % 2}})
    (folder / "ten.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "ten.jsonl"


def report(out: Path) -> dict[str, Any]:
    """report.json."""
    return json.loads((out / "report.json").read_text())


def test_a_run_on_its_held_out_data_has_exactly_the_reward_that_training_told(
    whole: Path, tmp_path: Path, here: Command
) -> None:
    told = {task["task"]: task["after"] for task in json.loads((whole / "summary.json").read_text())["tasks"]}
    done = here("eval", whole, "--bench", "run:test", "--out", tmp_path / "run")
    assert done.code == 0, done.errors
    exported = here("eval", whole / "model", "--bench", "run:test", "--out", tmp_path / "export")
    assert exported.code == 0, exported.errors
    assert report(tmp_path / "run")["rewards"] == told
    assert report(tmp_path / "export")["rewards"] == told
    assert (tmp_path / "run" / "verdicts.jsonl").read_bytes() == (tmp_path / "export" / "verdicts.jsonl").read_bytes()


def test_killed_and_resumed_every_file_is_as_if_nothing_had_happened(
    whole: Path, questions: Path, tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--bench", "counting", "--data", questions, "evaluation.batch_size=3", "samples=2")
    asked = (*asked, "evaluation.temperature=1")
    killed = mmrl("eval", whole, *asked, "--out", tmp_path / "a", strike=("mmrl.exam.sitting:append", 3, "SIGKILL"))
    assert killed.code == -signal.SIGKILL
    assert not (tmp_path / "a" / "report.json").exists()
    with (tmp_path / "a" / "predictions.jsonl").open("a") as torn:
        torn.write('{"pid": "q6", "sam')
    assert here("eval", whole, *asked, "--out", tmp_path / "a").code == 0

    def no_network(*_: object) -> None:
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert here("eval", whole, *asked, "--out", tmp_path / "b").code == 0
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    found = report(tmp_path / "a")
    assert (found["items"], found["responses"]) == (10, 20)
    assert set(found["samples"]) == {"1", "2"}
    assert set(found["subsets"]["parity"]) == {"0", "1"}
    assert found["made_with"]["pixels"] == [1024, 1024]


def test_another_evaluation_in_the_same_folder_is_refused_and_marking_again_needs_no_model(
    whole: Path, questions: Path, tmp_path: Path, here: Command
) -> None:
    asked = ("eval", whole, "--bench", "counting", "--data", questions, "--out", tmp_path / "out")
    too_early = here(*asked, "--rescore")
    assert too_early.code == 2
    assert "not finished" in too_early.errors
    assert here(*asked).code == 0
    other = here(*asked, "model.max_pixels=2048")
    assert other.code == 2
    assert "model.max_pixels: 1024 -> 2048" in other.errors
    before = (tmp_path / "out" / "verdicts.jsonl").read_bytes()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[0]["strict"] = not rows[0]["strict"]
    (tmp_path / "out" / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = here(*asked)
    assert changed.code == 2
    assert "1 verdicts of an earlier version differ, that of q0" in changed.errors
    again = here(*asked, "--rescore")
    assert again.code == 0
    assert "Loading" not in again.output
    assert f"q0: strict {rows[0]['strict']} -> {not rows[0]['strict']}" in again.output
    assert (tmp_path / "out" / "verdicts.jsonl").read_bytes() == before


def test_missing_pictures_are_named_and_may_count_as_wrong(
    whole: Path, questions: Path, tmp_path: Path, here: Command
) -> None:
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    for row in rows[2:5]:
        row["images"] = "gone.png"
    (questions.parent / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("eval", whole, "--bench", "counting", "--data", questions.parent / "gaps.jsonl", "--out", tmp_path / "out")
    refused = here(*asked)
    assert refused.code == 2
    assert "3 of 10 questions cannot be asked" in refused.errors
    assert all(f"q{number}: " in refused.errors for number in (2, 3, 4))
    allowed = here(*asked, "--allow-missing")
    assert allowed.code == 0, allowed.errors
    found = report(tmp_path / "out")
    assert (found["items"], found["responses"], found["missing"]) == (10, 7, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "--bench", "canonical"), "nowhere is neither a folder of transformers"),
        (("nowhere", "--bench", "mathvist"), "there is no benchmark 'mathvist'"),
        (("{run}", "--bench", "canonical"), "--data: where are the files of canonical? Nothing is fetched"),
        (("{run}", "--bench", "run:exam"), "a run has run:validation, run:test, run:train"),
        (("{run}", "--bench", "canonical", "samples=4"), "samples 4 of a greedy law are all the same"),
        (("{run}", "--bench", "canonical", "model.max_pixel=4"), "did you mean `max_pixels`?"),
        (("{run}", "--bench", "canonical", "--data", "no.jsonl"), "no such file"),
        (("{run}/model", "--bench", "canonical", "--checkpoint", "best"), "is no run directory of mmrl"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    arguments: tuple[str, ...], said: str, whole: Path, tmp_path: Path, here: Command
) -> None:
    done = here("eval", *(word.format(run=whole) for word in arguments), "--out", tmp_path / "out")
    assert done.code == 2
    assert said in done.errors


def test_one_process_alone_takes_a_benchmark(
    whole: Path, tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    done = here("eval", whole, "--bench", "run:test", "--out", tmp_path / "out")
    assert done.code == 2
    assert "mmrl eval is done by one process, and a launcher has started 2; start it alone" in done.errors
    assert not (tmp_path / "out").exists()
