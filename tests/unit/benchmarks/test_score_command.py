"""Items, responses, verdicts and reports as files: what is refused, and that the same input gives the same bytes."""

import gzip
import json
import random
import re

import pytest

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import ItemResponse, parse_canonical_item
from mmrl.benchmarks.official_metrics.mathvista import parse_mathvista_item as mathvista_item
from mmrl.benchmarks.registry import BENCHMARKS
from mmrl.benchmarks.verdict import parse_verdict, read_rows, read_verdicts
from mmrl.cli import main
from mmrl.utils.stats import wilson_interval

FRUIT = ["apple", "pear", "plum"]
ITEMS = [
    {"pid": "1", "question": "Which?", "choices": FRUIT, "answer": "pear", "answer_type": "text", "precision": None},
    {"pid": "2", "question": "How many?", "choices": None, "answer": "3", "answer_type": "integer", "precision": None},
    {"pid": "3", "question": "How far?", "choices": None, "answer": "1.2", "answer_type": "float", "precision": 1.0},
]
for row in ITEMS:
    row |= {"metadata": {"task": "one" if row["pid"] == "1" else "other", "skills": ["a", "b"]}, "image": "1.jpg"}
RESPONSES = [
    {"pid": "1", "response": "The answer is (B)."},
    {"pid": "2", "response": "There are four."},
    {"pid": "3", "response": "The answer is 1.21."},
]


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.fixture
def score(tmp_path, capsys):
    """Runs `mmrl eval score` on rows; returns exit code, folder and what was printed."""

    def run(items=ITEMS, responses=RESPONSES, out="out", *more, bench="mathvista", suffix=".jsonl"):
        files = write(tmp_path / f"items{suffix}", items), write(tmp_path / f"responses{suffix}", responses)
        arguments = ["eval", "score", "--benchmark", bench, "--items", files[0], "--responses", files[1]]
        code = main([*map(str, arguments), "--out", str(tmp_path / out), *more])
        return code, tmp_path / out, capsys.readouterr()

    return run


def test_score_writes_verdicts_and_reports(score):
    code, out, said = score()
    assert code == 0, said.err
    rows = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]
    assert [(row["pid"], row["strict"], row["official"], row["outcome"]) for row in rows] == [
        ("1", True, True, "correct"),
        ("2", False, False, "incorrect"),
        ("3", True, True, "correct"),
    ]
    assert rows[0] | {"rule": "announced_letter", "value": "B", "text": "B", "start": 15, "end": 16} == rows[0]
    report = json.loads((out / "report.json").read_text())
    assert (report["items"], report["missing"], report["strict"]["value"]) == (3, 0, 0.6667)
    assert report["subsets"]["task"]["other"] | {"n": 2, "strict": 0.5} == report["subsets"]["task"]["other"]
    assert report["subsets"]["skills"]["b"]["n"] == 3
    assert report["outcomes"]["correct"] == 2
    assert "| one | 1 | 100.0 | 100.0 |" in (out / "report.md").read_text()
    assert "| strict | 66.7 |" in said.out


def test_a_malformed_item_ends_the_command_or_counts_as_incorrect(score):
    items = [*ITEMS[:2], {**ITEMS[2], "choices": 3}, {"question": "what?"}]
    code, out, said = score(items=items)
    assert code == 2 and not out.exists()
    assert "items.jsonl:3: " in said.err and "items.jsonl:4: has no column 'pid'" in said.err
    assert "2 of 4 items are malformed: repair them, or count them as incorrect with --allow-missing" in said.err
    code, out, said = score(items, RESPONSES, "out", "--allow-missing")
    assert code == 0, said.err
    assert "counts as incorrect: " in said.err and "items.jsonl:3: " in said.err
    rows = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]
    assert [(row["pid"], row["strict"]) for row in rows] == [("1", True), ("2", False), ("3", False), ("line 4", False)]
    report = json.loads((out / "report.json").read_text())
    assert (report["items"], report["missing"], report["strict"]["value"]) == (4, 2, 0.25)
    code, _, said = score([{"pid": "1"}], RESPONSES[:1], "none", "--allow-missing")
    assert code == 2 and "1 of 1 items are malformed: repair them" in said.err


def test_the_order_of_responses_changes_no_byte(score):
    _, first, _ = score(out="first")
    shuffled = RESPONSES[:]
    random.Random(1).shuffle(shuffled)
    _, second, _ = score(responses=shuffled, out="second")
    assert (first / "verdicts.jsonl").read_bytes() == (second / "verdicts.jsonl").read_bytes()
    assert (first / "report.md").read_bytes() == (second / "report.md").read_bytes()


def test_score_reads_compressed_files(score):
    code, out, said = score(suffix=".jsonl.gz")
    assert code == 0, said.err
    assert len(read_verdicts(out)) == 3


def test_a_byte_order_mark_is_skipped(tmp_path):
    write(tmp_path / "responses.jsonl", RESPONSES)
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "responses.jsonl").read_bytes())
    assert [row for _, row in read_rows(path)] == RESPONSES


def test_items_without_a_response_are_named_and_wrong(score):
    code, out, said = score(responses=RESPONSES[:1])
    assert code == 0
    assert "2 items have no response and count as incorrect: 2, 3" in said.err
    assert [verdict.rule for verdict in read_verdicts(out)] == ["announced_letter", "missing", "missing"]
    assert json.loads((out / "report.json").read_text())["strict"]["value"] == 0.3333


def test_empty_and_null_responses_are_no_answers(score):
    _, out, _ = score(responses=[{"pid": "1", "response": ""}, {"pid": "2", "response": None}, RESPONSES[2]])
    assert [str(verdict.outcome) for verdict in read_verdicts(out)] == ["no_answer", "no_answer", "correct"]


def test_extra_columns_of_responses_are_ignored(score):
    code, _, _ = score(responses=[row | {"extraction": "B", "true_false": True} for row in RESPONSES])
    assert code == 0


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([ITEMS[0], ITEMS[0]], "items.jsonl:2: the id '1' appears twice"),
        ([{"pid": "1"}], "items.jsonl:1: has no column 'answer', 'answer_type', 'choices', 'precision'"),
        ([ITEMS[0] | {"answer": "fig"}], "the answer 'fig' is none of the options 'apple', 'pear', 'plum'"),
        ([ITEMS[2] | {"precision": 1.5}], "precision is 1.5, not a whole number of decimals"),
        ([ITEMS[2] | {"precision": "1"}], "precision is '1'"),
        ([ITEMS[0] | {"choices": "apple"}], "options are 'apple', not a list of texts"),
        ([ITEMS[0] | {"choices": None}], "answer_type 'text' and 0 choices do not go together"),
        ([ITEMS[1] | {"answer": 3}], "the answer is 3, not text"),
        ([ITEMS[1] | {"answer": ""}], "the answer '' has no number"),
        ([ITEMS[1] | {"metadata": "x"}], "metadata is 'x', not an object"),
        ([ITEMS[1] | {"pid": None}], "the id is None"),
        ([], "holds no items"),
    ],
)
def test_bad_items_are_refused(score, items, complaint):
    code, out, said = score(items=items)
    assert code == 2
    assert complaint in said.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("responses", "complaint"),
    [
        ([{"pid": "1"}], "responses.jsonl:1: has no column 'response'"),
        ([{"id": "1", "response": "x"}], "has no column 'pid'"),
        ([{"pid": "9", "response": "x"}], "the id '9' is that of no item"),
        ([RESPONSES[0], RESPONSES[0]], "responses.jsonl:2: a second response to '1'"),
        ([{"pid": "1", "response": 3}], "the response is 3, not text"),
        ([{"pid": "1", "response": "x", "sample": -1}], "sample is -1"),
        ([{"pid": "1", "response": "x", "tokens": "9"}], "tokens is '9'"),
        ([{"pid": "1", "response": "x", "frame": "pixels"}], "frame is 'pixels', not one of px_original"),
    ],
)
def test_bad_responses_are_refused(score, responses, complaint):
    code, _, said = score(responses=responses)
    assert code == 2
    assert complaint in said.err


@pytest.mark.parametrize(("text", "complaint"), [("{", "not JSON"), ("[1]", "one JSON object per line")])
def test_files_that_are_not_jsonl_are_refused(tmp_path, capsys, text, complaint):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    arguments = ["--items", path, "--responses", path, "--out", tmp_path / "out"]
    assert main(["eval", "score", "--benchmark", "mathvista", *map(str, arguments)]) == 2
    assert f"items.jsonl:1: {complaint}" in capsys.readouterr().err
    arguments[1] = tmp_path / "no"
    assert main(["eval", "score", "--benchmark", "mathvista", *map(str, arguments)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"id": "1"}, "has no column 'answer', 'answer_type'"),
        ({"id": "1", "answer": "x", "answer_type": "word"}, "answer_type is 'word', not one of choice"),
        ({"id": "1", "answer": [0, 0, 1, 1], "answer_type": "box"}, "a box needs the column 'frame'"),
        ({"id": "1", "answer": [0, 0, 1, 1], "answer_type": "box", "frame": "pixels"}, "frame is 'pixels'"),
        ({"id": "1", "answer": "x", "answer_type": "text", "image_size": [0, 1]}, "the size is"),
        ({"id": "1", "answer": "E", "answer_type": "choice", "options": FRUIT}, "the answer 'E' is none of the"),
        ({"id": "1", "answer": "x", "answer_type": "text", "meta": 3}, "meta is 3"),
        ({"id": "1", "answer": "many", "answer_type": "count"}, "the answer 'many' has no number"),
        ({"id": "1", "answer": [9, 0, 1, 1], "answer_type": "box", "frame": "norm_1"}, "inverted or empty box"),
        ({"id": "1", "answer": "a", "answer_type": "choice", "options": ["a"] * 27}, "27 options"),
        ({"id": "1", "answer": "a", "answer_type": "choice"}, "the answer 'a' is none of the options (none)"),
        ({"id": "1", "answer": None, "answer_type": "text"}, "the answer is None: nothing could be right"),
        ({"id": "1", "answer": [], "answer_type": "text"}, "the answer is []: nothing could be right"),
        ({"id": "1", "answer": [1, "a"], "answer_type": "list"}, "the answer [1, 'a'] is not a list of numbers"),
        ({"id": "1", "answer": "none", "answer_type": "list"}, "the answer 'none' is not a list of numbers"),
        ({"id": "1", "answer": "a", "answer_type": "text", "question": ["q"]}, "question is ['q'], not text"),
        ({"id": "1", "answer": "1", "answer_type": "integer", "unit": 5}, "unit is 5, not text"),
    ],
)
def test_bad_canonical_rows_are_refused(row, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse_canonical_item(row)


def test_several_responses_give_pass_at_k_and_majority(score):
    answers = ["(B)", "(A)", "(B)", "(C)"]
    responses = [{"pid": "1", "response": text, "sample": n, "tokens": n} for n, text in enumerate(answers)]
    _, out, _ = score(items=ITEMS[:1], responses=responses)
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == {
        "1": {"pass": 0.5, "maj": 0.5},
        "2": {"pass": 0.8333, "maj": 1.0},
        "4": {"pass": 1.0, "maj": 1.0},
    }
    assert report["mean_tokens"] == 1.5
    (row,) = report["subsets"]["task"].values()
    one = wilson_interval(0.5, 1)
    assert (row["n"], row["strict"]) == (1, 0.5)  # four responses to one question are one question
    assert (row["low"], row["high"]) == pytest.approx((one.low, one.high), abs=1e-4)


def test_the_report_counts_truncation_and_rules(score):
    cut = {"response": "Let me think", "finish": "length", "tokens": 5}
    _, out, _ = score(responses=[RESPONSES[0] | {"tokens": 2}, RESPONSES[1] | cut, RESPONSES[2]])
    page = (out / "report.md").read_text()
    assert "| truncated | 1 | 33.3 |" in page
    assert "33.3 % of responses reached the limit of tokens. They are 3.5 tokens long on average." in page
    report = json.loads((out / "report.json").read_text())
    assert (report["truncated_rate"], report["outcomes"]["truncated"]) == (0.3333, 1)
    for rule, row in report["rules"].items():
        assert f"| {rule} | {row['n']} | {100 * row['strict']:.1f} |" in page


def test_one_correct_response_still_has_a_wide_interval(score):
    _, out, _ = score(items=ITEMS[:1], responses=[{"pid": "1", "response": "(B)"}])
    told = json.loads((out / "report.json").read_text())["strict"]
    assert (told["value"], told["high"]) == (1.0, 1.0)
    assert told["low"] == pytest.approx(1 / (1 + 1.959964**2), abs=1e-4)  # Wilson's, of one of one


def test_help_names_every_benchmark(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "run", "--help"])
    said = {*re.findall(r"\w+", capsys.readouterr().out)}
    assert {*BENCHMARKS} <= said


def test_verdicts_on_other_responses_are_not_overwritten(score):
    _, out, _ = score()
    before = (out / "verdicts.jsonl").read_bytes()
    assert score()[0] == 0  # the same again
    changed = [RESPONSES[0] | {"response": "(A)"}, *RESPONSES[1:]]
    code, _, said = score(responses=changed)
    assert code == 2
    assert "reports on other files" in said.err
    assert (out / "verdicts.jsonl").read_bytes() == before
    code, _, said = score(ITEMS, changed, "out", "--rescore")
    assert code == 0
    assert "1: strict True -> False, official True -> False (first_letter)" in said.out


def test_verdicts_read_back_equal(score):
    _, out, _ = score()
    items = {row["pid"]: mathvista_item(row) for row in ITEMS}
    judged = [
        grade_response(BENCHMARKS["mathvista"], items[row["pid"]], ItemResponse(id=row["pid"], text=row["response"]))
        for row in RESPONSES
    ]
    assert read_verdicts(out) == judged
    with pytest.raises(ValueError, match="no column 'sample'"):
        parse_verdict({"pid": "1"})


def test_compare_prints_differences_by_subset(score, tmp_path, capsys):
    _, a, _ = score(out="a")
    _, b, _ = score(
        responses=[RESPONSES[0] | {"response": "(A)"}, RESPONSES[1] | {"response": "3"}, RESPONSES[2]], out="b"
    )
    assert main(["eval", "compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "strict: A 66.7, B 66.7, of 3 questions" in said
    assert "correct in A alone 1, in B alone 1; McNemar's exact p = 1" in said
    assert "correct in A alone: 1\n" in said
    assert "correct in B alone: 2\n" in said
    assert "no significant difference" in said
    _, _, tables = said.partition("strict by skills")
    skills, _, tasks = tables.partition("strict by task")
    cells = {
        line.split("\u2502")[1].strip(): line.split("\u2502")[2:] for line in tasks.splitlines() if "\u2502" in line
    }
    assert [cell.strip() for cell in cells["one"][:4]] == ["1", "100.0", "0.0", "+100.0"]
    assert [cell.strip() for cell in cells["other"][:4]] == ["2", "50.0", "100.0", "-50.0"]
    assert [cell.strip() for cell in cells["other"][5:8]] == ["0", "1", "1"]
    assert "+0.0" in skills


def test_compare_refuses_runs_on_other_questions(score, capsys):
    _, a, _ = score(out="a")
    _, b, _ = score(items=ITEMS[:2], responses=RESPONSES[:2], out="b")
    assert main(["eval", "compare", str(a), str(b)]) == 2
    assert "1 questions are in one run alone (3)" in capsys.readouterr().err
    assert main(["eval", "compare", str(a), str(a.parent / "nowhere")]) == 2


def test_detection_reports_average_precision(score):
    items = [{"id": "1", "answer": [{"bbox_2d": [0, 0, 10, 10], "label": "cat"}], "answer_type": "boxes"}]
    items[0] |= {"frame": "px_original", "image_size": [100, 100]}
    responses = [{"pid": "1", "response": '[{"bbox_2d": [0, 0, 10, 8], "label": "cat"}]'}]
    code, out, said = score(items=items, responses=responses, bench="coco")
    assert code == 0, said.err
    assert json.loads((out / "report.json").read_text())["overall"] == {"AP": 0.7}
    assert "| AP | 70.0 |" in (out / "report.md").read_text()
