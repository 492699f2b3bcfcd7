"""`mmrl eval` draws responses greedily, several at a temperature, continued, with or without thinking, and blind."""

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import pytest
from benchmark_rows import write_rows
from harness import refuse, succeed
from json_lines import read_json_lines
from PIL import Image

RETHINK = "[{kind: generate}, {kind: rethink, correct: [correct], max_new_tokens: 6}]"


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    return harness.questions(tmp_path_factory.mktemp("questions"))


class Results:
    """The folder of an evaluation."""

    def __init__(self, out: Path) -> None:
        self.report: dict[str, Any] = json.loads((out / "report.json").read_text())
        self.generation: dict[str, Any] = self.report["generation"]
        self.page = (out / "report.md").read_text()
        self.predictions = read_json_lines(out / "predictions.jsonl")
        self.verdicts = read_json_lines(out / "verdicts.jsonl")


@pytest.fixture
def evaluate(whole, questions, tmp_path, in_process) -> Any:
    """Runs the benchmark with settings, every time in a new folder."""

    def run(*settings):
        out = tmp_path / str(len([*tmp_path.iterdir()]))
        succeed(
            in_process("eval", whole / "model", "--benchmark", "counting", "--data", questions, "--out", out, *settings)
        )
        return Results(out)

    return run


def test_greedy_responses_are_the_same_every_time_and_have_no_pass_at_k(evaluate):
    first, second = evaluate(), evaluate()
    assert first.predictions == second.predictions
    assert (first.generation["temperature"], first.generation["responses_per_question"]) == (0.0, 1)
    assert first.report["samples"] == {}
    assert "pass@k" not in first.page


def test_several_responses_give_pass_at_k_as_counted_by_hand(evaluate):
    results = evaluate("evaluation.temperature=1.5", "responses_per_question=4", "top_k=64")
    generation = results.generation
    assert [generation[name] for name in ("temperature", "responses_per_question", "top_k")] == [1.5, 4, 64]
    assert len({row["response"] for row in results.predictions}) > 6
    by_item: dict[str, list[bool]] = {}
    for row in results.verdicts:
        by_item.setdefault(row["pid"], []).append(row["strict"])
    for k in (1, 2, 4):
        passed = [fmean(map(any, combinations(correct, k))) for correct in by_item.values()]
        assert results.report["samples"][str(k)]["pass"] == pytest.approx(fmean(passed), abs=1e-4)
    assert "| k | pass@k | maj@k |" in results.page


def test_temperature_and_seed_decide_the_responses(evaluate):
    two = "responses_per_question=2"
    hot, again, cool = (evaluate(f"evaluation.temperature={value}", two) for value in (1.5, 1.5, 0.5))
    assert hot.predictions == again.predictions != cool.predictions
    assert evaluate("evaluation.temperature=1.5", two, "run.seed=7").predictions != hot.predictions


def test_continuation_follows_a_trigger(evaluate):
    results = evaluate(f"evaluation.rollout_steps={RETHINK}")
    continued = [row for row in results.predictions if row["first_response_chars"] is not None]
    assert continued
    assert all(row["response"][row["first_response_chars"] :].startswith("\n\nWait") for row in continued)
    assert [step["kind"] for step in results.generation["rollout_steps"]] == ["generate", "rethink"]
    assert "rethink" in results.page


def test_thinking_is_asked_for_or_not(evaluate):
    prompts = []
    for thinking in ("required", "none"):
        settings = ("response_format.add_instruction=true", f"response_format.thinking={thinking}")
        generation = evaluate(*settings).generation
        assert generation["response_format"]["thinking"] == thinking
        prompts.append(generation["prompts"])
    assert prompts[0] != prompts[1]


def test_corrupted_images_change_the_prompts(evaluate):
    prompts = {evaluate().generation["prompts"]}
    for corruption in ("noise", "grey", "left_out"):
        results = evaluate(f"corruption={corruption}")
        assert results.generation["corruption"] == corruption
        assert f"| corruption | {corruption} |" in results.page
        assert results.report["items"] == 10
        prompts.add(results.generation["prompts"])
    assert len(prompts) == 4


def test_image_that_holds_the_answer_cannot_be_left_out(whole, tmp_path, in_process):
    Image.new("RGB", (32, 32)).save(tmp_path / "p.png")
    row = {"id": "1", "images": "p.png", "question": "Where?", "answer": [1, 1, 9, 9], "answer_type": "box"}
    write_rows(tmp_path / "box.jsonl", [row | {"frame": "px_original"}])
    data = ("--benchmark", "refcoco", "--data", tmp_path / "box.jsonl")
    done = in_process("eval", whole / "model", *data, "--out", tmp_path / "out", "corruption=left_out")
    refuse(done, "corruption=left_out", "corruption=grey")
