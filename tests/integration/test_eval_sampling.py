"""`mmrl eval` draws responses greedily, several at a temperature, continued, with or without thinking, and blind."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from harness import Command
from PIL import Image

RETHINK = "[{kind: generate}, {kind: rethink, correct: [correct], max_new_tokens: 6}]"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six questions on six pictures, as canonical JSONL."""
    folder = tmp_path_factory.mktemp("questions")
    rows = []
    for number in range(6):
        Image.new("RGB", (32, 32), (40 * number, 0, 0)).save(folder / f"{number}.png")
        row = {"id": f"q{number}", "images": f"{number}.png", "question": "How many red shapes?", "answer": number % 3}
        rows.append({**row, "answer_type": "count"})
    (folder / "six.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "six.jsonl"


class Taken:
    """The folder of an evaluation."""

    def __init__(self, out: Path) -> None:
        self.report: dict[str, Any] = json.loads((out / "report.json").read_text())
        self.told: dict[str, Any] = self.report["generation"]
        self.page = (out / "report.md").read_text()
        self.predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
        self.verdicts = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]


@pytest.fixture
def take(whole: Path, questions: Path, tmp_path: Path, here: Command) -> Any:
    """Takes the benchmark with settings; every time in a new folder."""

    def run(*settings: str) -> Taken:
        out = tmp_path / str(len([*tmp_path.iterdir()]))
        done = here("eval", whole / "model", "--benchmark", "counting", "--data", questions, "--out", out, *settings)
        assert done.code == 0, done.errors
        return Taken(out)

    return run


def test_greedy_is_the_same_every_time_and_has_no_pass_at_k(take: Any) -> None:
    first, second = take(), take()
    assert first.predictions == second.predictions
    assert (first.told["temperature"], first.told["responses_per_question"], first.report["samples"]) == (0.0, 1, {})
    assert "pass@k" not in first.page


def test_several_responses_give_pass_and_majority_as_counted_by_hand(take: Any) -> None:
    taken = take("evaluation.temperature=1.5", "responses_per_question=4", "top_k=64")
    assert (taken.told["temperature"], taken.told["responses_per_question"], taken.told["top_k"]) == (1.5, 4, 64)
    assert len({row["response"] for row in taken.predictions}) > 6
    by_item: dict[str, list[dict[str, Any]]] = {}
    for row in taken.verdicts:
        by_item.setdefault(row["pid"], []).append(row)
    for k in (1, 2, 4):
        drawn = fmean(
            fmean(any(row["strict"] for row in draw) for draw in combinations(rows, k)) for rows in by_item.values()
        )
        assert taken.report["samples"][str(k)]["pass"] == pytest.approx(drawn, abs=1e-4)
    voted = fmean(_majority(rows) for rows in by_item.values())
    assert taken.report["samples"]["4"]["maj"] == pytest.approx(voted, abs=1e-4)
    assert "| k | pass@k | maj@k |" in taken.page


def _majority(rows: list[dict[str, Any]]) -> bool:
    """Whether the value read most often, of several the first, is right."""
    votes = Counter(row["value"] for row in rows if row["value"] is not None)
    return bool(votes) and next(row["strict"] for row in rows if row["value"] == votes.most_common(1)[0][0])


def test_a_temperature_changes_what_is_drawn_and_a_seed_repeats_it(take: Any) -> None:
    hot, again, cool = (take(f"evaluation.temperature={t}", "responses_per_question=2") for t in (1.5, 1.5, 0.5))
    assert hot.predictions == again.predictions
    assert hot.predictions != cool.predictions
    other = take("evaluation.temperature=1.5", "responses_per_question=2", "run.seed=7")
    assert other.predictions != hot.predictions


def test_a_continuation_follows_a_trigger(take: Any) -> None:
    taken = take(f"evaluation.rollout_steps={RETHINK}")
    looked = [row for row in taken.predictions if row["first_response_chars"] is not None]
    assert looked
    assert all(row["response"][row["first_response_chars"] :].startswith("\n\nWait") for row in looked)
    assert [step["kind"] for step in taken.told["rollout_steps"]] == ["generate", "rethink"]
    assert "rethink" in taken.page


def test_thinking_is_asked_for_or_not(take: Any) -> None:
    thinking, plain = (
        take("response_format.add_instruction=true", f"response_format.thinking={how}") for how in ("required", "none")
    )
    assert thinking.told["prompts"] != plain.told["prompts"]
    assert [taken.told["response_format"]["thinking"] for taken in (thinking, plain)] == ["required", "none"]


def test_blind_answers_are_to_other_pictures(take: Any) -> None:
    taken = {how: take(f"corruption={how}") for how in ("noise", "grey", "left_out")}
    seen = take()
    assert len({one.told["prompts"] for one in (seen, *taken.values())}) == 4
    assert all(one.told["corruption"] == how and f"| corruption | {how} |" in one.page for how, one in taken.items())
    assert all(one.report["items"] == 6 for one in taken.values())


def test_no_place_can_be_shown_in_a_picture_that_is_left_out(whole: Path, tmp_path: Path, here: Command) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "p.png")
    row = {"id": "1", "images": "p.png", "question": "Where?", "answer": [1, 1, 9, 9], "answer_type": "box"}
    (tmp_path / "box.jsonl").write_text(json.dumps(row | {"frame": "px_original"}))
    asked = (
        "--benchmark",
        "refcoco",
        "--data",
        tmp_path / "box.jsonl",
        "--out",
        tmp_path / "out",
        "corruption=left_out",
    )
    done = here("eval", whole / "model", *asked)
    assert done.code == 2
    assert "corruption=left_out" in done.errors
    assert "take corruption=grey" in done.errors
