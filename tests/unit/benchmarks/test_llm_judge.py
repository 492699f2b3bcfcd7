"""A judge is asked where no rule can read, overrules none, and is asked once."""

import json

import pytest
from serving import judging, reply, served

from mmrl.benchmarks.compare import compare_runs
from mmrl.benchmarks.verdict import read_verdicts
from mmrl.cli import main

ITEMS = [
    {"id": str(n), "question": "How many cats?", "answer": 3, "answer_type": "integer", "meta": {"half": n // 4}}
    for n in range(8)
]
ITEMS.append({"id": "8", "question": "Where?", "answer": [0, 0, 9, 9], "answer_type": "box", "frame": "px_original"})
RESPONSES = [
    "The answer is 3.",
    "The answer is 4.",
    "As many as a triangle has sides.",
    "Lots.",
    "I cannot tell.",
    "",
    "<think>So",
    "As many as a triangle has sides.",
    "Top left.",
]


def triangle(material):
    assert material["question"] == "How many cats?"
    return {"score": int(material["reference"] == "3" and "triangle" in material["response"])}


@pytest.fixture
def score(tmp_path, capsys):
    """Runs `mmrl eval score` with the judge at an address; returns exit code, folder and what was printed."""
    for name, rows in (
        ("items", ITEMS),
        ("responses", [{"pid": str(n), "response": text} for n, text in enumerate(RESPONSES)]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*more, out="out"):
        files = ("--items", tmp_path / "items.jsonl", "--responses", tmp_path / "responses.jsonl")
        arguments = ["eval", "score", "--benchmark", "canonical", *files, "--out", tmp_path / out, *more]
        return main([*map(str, arguments)]), tmp_path / out, capsys.readouterr()

    return run


def at(url):
    return "--judge-url", url, "--judge-model", "m"


def test_the_judge_is_asked_only_where_no_rule_reads(score):
    _, alone, _ = score(out="alone")
    with served(judging(triangle)) as (url, requests):
        code, out, said = score(*at(url))
    assert code == 0, said.err
    assert {json.loads(body["messages"][1]["content"].split("\n")[1])["response"] for body, _ in requests} == {
        RESPONSES[2],
        RESPONSES[3],
    }
    verdicts, before = read_verdicts(out), read_verdicts(alone)
    assert {one.id: one.judge_correct for one in verdicts if one.judge_correct is not None} == {
        "2": True,
        "3": False,
        "7": True,
    }
    assert [(one.strict, one.official, one.outcome) for one in verdicts] == [
        (one.strict, one.official, one.outcome) for one in before
    ]
    report = json.loads((out / "report.json").read_text())
    assert report["strict"]["value"] == round(1 / 9, 4)
    judge = report["judge"]
    assert (judge["model"], judge["asked"], judge["correct"], judge["failed"]) == ("m", 3, 2, 0)
    assert judge["accuracy"]["value"] == round(3 / 9, 4)
    assert "| strict, with judge | 33.3 |" in said.out
    assert "judge" not in json.loads((alone / "report.json").read_text())
    assert compare_runs(verdicts, before, "correct_with_judge").a_only_ids == ("2", "7")


def test_scoring_again_asks_no_judge_and_writes_the_same_bytes(score):
    with served(judging(triangle)) as (url, _):
        _, out, _ = score(*at(url))
    names = ("verdicts.jsonl", "report.json", "report.md")
    before = [(out / name).read_bytes() for name in names]
    code, _, said = score(*at(url), "--rescore")  # the server is gone
    assert code == 0, said.err
    assert [(out / name).read_bytes() for name in names] == before


def test_questions_without_a_verdict_are_counted_and_asked_again(score):
    def refusing(handler, body):
        if "triangle" in body["messages"][1]["content"]:
            judging(triangle)(handler, body)
        else:
            reply(handler, b"too hard", 422)

    with served(refusing) as (url, _):
        code, out, said = score(*at(url))
        assert code == 0
        assert "the judge has no verdict on 1 responses: status 422" in said.err
        assert json.loads((out / "report.json").read_text())["judge"]["failed"] == 1
        assert {one.id for one in read_verdicts(out) if one.judge_correct} == {"2", "7"}


def test_a_judge_that_answers_nothing_ends_the_command(score):
    with served(lambda handler, _: reply(handler, b"no such model", 404)) as (url, _):
        code, out, said = score(*at(url))
    assert code == 2
    assert "the judge has no verdict on 3 responses" in said.err
    assert "status 404" in said.err
    assert not (out / "report.json").exists()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (("--judge-url", "http://127.0.0.1:9/v1"), "--judge-url URL and --judge-model NAME belong together"),
        (("--judge-url", "ftp://x", "--judge-model", "m"), "--judge-url ftp://x: String should match"),
    ],
)
def test_a_judge_without_address_or_name_is_refused(score, more, complaint):
    code, _, said = score(*more)
    assert code == 2
    assert complaint in said.err
