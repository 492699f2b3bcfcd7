"""A judge is asked where no rule finds an answer, overrules no rule, and is asked once."""

import json

import pytest
from benchmark_rows import write_rows
from serving import judging, reply, served

from mmrl.benchmarks.compare import compare_runs
from mmrl.benchmarks.verdict import read_verdicts
from mmrl.cli import main

CATS = {"question": "How many cats?", "answer": 3, "answer_type": "integer"}
ITEMS = [{**CATS, "id": str(n), "meta": {"half": n // 4}} for n in range(8)]
ITEMS.append({"id": "8", "question": "Where?", "answer": [0, 0, 9, 9], "answer_type": "box", "frame": "px_original"})
TRIANGLE = "As many as a triangle has sides."
RESPONSES = ["The answer is 3.", "The answer is 4.", TRIANGLE, "Lots.", "I cannot tell.", "", "<think>So", TRIANGLE]
RESPONSES.append("Top left.")


def judge_triangle(material):
    assert material["question"] == "How many cats?"
    return {"score": int(material["reference"] == "3" and "triangle" in material["response"])}


@pytest.fixture
def score(tmp_path, capsys):
    """Runs `mmrl eval score`, with a judge at `url` if given; returns exit code, folder and what was printed."""
    write_rows(tmp_path / "items.jsonl", ITEMS)
    write_rows(tmp_path / "responses.jsonl", [{"pid": str(n), "response": text} for n, text in enumerate(RESPONSES)])

    def run(*options, url=None, out="out"):
        files = [f"--{name}={tmp_path / name}.jsonl" for name in ("items", "responses")]
        judge = [f"--judge-url={url}", "--judge-model=m"] if url else []
        code = main(["eval", "score", "--benchmark=canonical", *files, f"--out={tmp_path / out}", *judge, *options])
        return code, tmp_path / out, capsys.readouterr()

    return run


def test_judge_is_asked_only_where_no_rule_finds_an_answer(score):
    _, without, _ = score(out="without")
    with served(judging(judge_triangle)) as (url, requests):
        code, out, printed = score(url=url)
    assert code == 0, printed.err
    asked = {json.loads(body["messages"][1]["content"].split("\n")[1])["response"] for body, _ in requests}
    assert asked == {TRIANGLE, "Lots."}
    verdicts, before = read_verdicts(out), read_verdicts(without)
    judged = {verdict.id: verdict.judge_correct for verdict in verdicts if verdict.judge_correct is not None}
    assert judged == {"2": True, "3": False, "7": True}
    by_rule = [[(one.strict, one.official, one.outcome) for one in run] for run in (verdicts, before)]
    assert by_rule[0] == by_rule[1]
    report = json.loads((out / "report.json").read_text())
    assert report["strict"]["value"] == round(1 / 9, 4)
    judge = report["judge"]
    assert (judge["model"], judge["asked"], judge["correct"], judge["failed"]) == ("m", 3, 2, 0)
    assert judge["accuracy"]["value"] == round(3 / 9, 4)
    assert "| strict, with judge | 33.3 |" in printed.out
    assert "judge" not in json.loads((without / "report.json").read_text())
    assert compare_runs(verdicts, before, "correct_with_judge").a_only_ids == ("2", "7")


def test_compare_wants_a_judge_on_both_sides(score, tmp_path, capsys):
    _, without, _ = score(out="without")
    with served(judging(judge_triangle)) as (url, _):
        _, judged, _ = score(url=url)
        # Rules read every response, so the judge has nothing to say.
        rows = [{"pid": str(n), "response": "[0, 0, 9, 9]" if n == 8 else "3"} for n in range(9)]
        write_rows(tmp_path / "responses.jsonl", rows)
        _, perfect, _ = score(url=url, out="perfect")
    assert main(["eval", "compare", str(judged), str(perfect)]) == 0
    assert "with_judge: A 33.3, B 100.0" in capsys.readouterr().out
    assert main(["eval", "compare", str(judged), str(judged)]) == 0
    assert "with_judge: A 33.3, B 33.3" in capsys.readouterr().out
    for folders, side in (((judged, without), "A"), ((without, judged), "B")):
        assert main(["eval", "compare", *map(str, folders)]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "with_judge" in line]
        assert len(lines) == 1
        assert f"left out, because only {side} asked a judge" in lines[0]


def test_scoring_again_asks_no_judge_and_writes_the_same_bytes(score):
    with served(judging(judge_triangle)) as (url, _):
        _, out, _ = score(url=url)
    names = ("verdicts.jsonl", "report.json", "report.md")
    before = [(out / name).read_bytes() for name in names]
    code, _, printed = score("--rescore", url=url)  # the server is gone
    assert code == 0, printed.err
    assert [(out / name).read_bytes() for name in names] == before


def test_questions_without_a_verdict_are_counted(score):
    def answer(handler, body):
        if "triangle" in body["messages"][1]["content"]:
            judging(judge_triangle)(handler, body)
        else:
            reply(handler, b"too hard", 422)

    with served(answer) as (url, _):
        code, out, printed = score(url=url)
    assert code == 0
    assert "no verdict on 1 responses: status 422" in printed.err
    assert json.loads((out / "report.json").read_text())["judge"]["failed"] == 1
    assert {verdict.id for verdict in read_verdicts(out) if verdict.judge_correct} == {"2", "7"}


def test_judge_that_answers_nothing_ends_the_command(score):
    with served(lambda handler, _: reply(handler, b"no such model", 404)) as (url, _):
        code, out, printed = score(url=url)
    assert code == 2
    assert "no verdict on 3 responses" in printed.err and "status 404" in printed.err
    assert not (out / "report.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--judge-url=http://127.0.0.1:9/v1",), "--judge-url URL and --judge-model NAME belong together"),
        (("--judge-url=ftp://x", "--judge-model=m"), "--judge-url ftp://x: String should match"),
    ],
)
def test_judge_without_address_or_name_is_refused(score, options, message):
    code, _, printed = score(*options)
    assert code == 2
    assert message in printed.err
