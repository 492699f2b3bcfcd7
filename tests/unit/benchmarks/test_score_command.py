"""`mmrl eval score` and `compare`: items, responses, verdicts and reports as files, and what is refused."""

import json
import random
import re

import pytest
from benchmark_rows import write_rows
from json_lines import read_json_lines

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import ItemResponse, parse_canonical_item
from mmrl.benchmarks.official_metrics.mathvista import parse_mathvista_item
from mmrl.benchmarks.registry import BENCHMARKS
from mmrl.benchmarks.verdict import SCORER_VERSION, parse_verdict, read_rows, read_verdicts
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
TEXTS = {"1": "The answer is (B).", "2": "There are four.", "3": "The answer is 1.21."}
RESPONSES = [{"pid": pid, "response": text} for pid, text in TEXTS.items()]


class Scored:
    """What one call of the command left."""

    def __init__(self, code, folder, printed):
        self.code, self.folder, self.output, self.errors = code, folder, printed.out, printed.err

    @property
    def report(self):
        return json.loads((self.folder / "report.json").read_text())

    @property
    def page(self):
        return (self.folder / "report.md").read_text()

    @property
    def verdicts(self):
        return read_json_lines(self.folder / "verdicts.jsonl")


@pytest.fixture
def score(tmp_path, capsys):
    """Runs `mmrl eval score` on rows."""

    def run(items=ITEMS, responses=RESPONSES, *options, out="out", benchmark="mathvista", suffix=".jsonl"):
        write_rows(tmp_path / f"items{suffix}", items)
        write_rows(tmp_path / f"responses{suffix}", responses)
        files = [f"--{name}={tmp_path / name}{suffix}" for name in ("items", "responses")]
        code = main(["eval", "score", f"--benchmark={benchmark}", *files, f"--out={tmp_path / out}", *options])
        return Scored(code, tmp_path / out, capsys.readouterr())

    return run


def test_score_writes_verdicts_and_reports(score):
    scored = score()
    assert scored.code == 0, scored.errors
    rows, report = scored.verdicts, scored.report
    found = [(row["pid"], row["strict"], row["official"], row["outcome"]) for row in rows]
    assert found == [("1", True, True, "correct"), ("2", False, False, "incorrect"), ("3", True, True, "correct")]
    assert rows[0] | {"rule": "announced_letter", "value": "B", "text": "B", "start": 15, "end": 16} == rows[0]
    assert (report["items"], report["missing"], report["strict"]["value"]) == (3, 0, 0.6667)
    assert report["subsets"]["task"]["other"] | {"n": 2, "strict": 0.5} == report["subsets"]["task"]["other"]
    assert report["subsets"]["skills"]["b"]["n"] == 3
    assert report["outcomes"]["correct"] == 2
    assert "| one | 1 | 100.0 | 100.0 |" in scored.page
    assert "| strict | 66.7 |" in scored.output


def test_malformed_items_end_the_command_or_count_as_incorrect(score):
    items = [*ITEMS[:2], {**ITEMS[2], "choices": 3}, {"question": "what?"}]
    refused = score(items)
    assert refused.code == 2 and not refused.folder.exists()
    assert "items.jsonl:3: " in refused.errors and "items.jsonl:4: has no column 'pid'" in refused.errors
    assert "2 of 4 items are malformed" in refused.errors and "--allow-missing" in refused.errors
    allowed = score(items, RESPONSES, "--allow-missing")
    assert allowed.code == 0, allowed.errors
    assert "counts as incorrect: " in allowed.errors and "items.jsonl:3: " in allowed.errors
    assert [(row["pid"], row["strict"]) for row in allowed.verdicts] == [
        *(("1", True), ("2", False), ("3", False), ("line 4", False))
    ]
    report = allowed.report
    assert (report["items"], report["missing"], report["strict"]["value"]) == (4, 2, 0.25)
    assert "1 of 1 items are malformed" in score([{"pid": "1"}], RESPONSES[:1], "--allow-missing", out="none").errors


def test_order_and_compression_of_responses_change_no_verdict(score):
    first = score(out="first")
    shuffled = random.Random(1).sample(RESPONSES, len(RESPONSES))
    second = score(responses=shuffled, out="second")
    assert (first.verdicts, first.page) == (second.verdicts, second.page)
    assert score(suffix=".jsonl.gz", out="third").verdicts == first.verdicts


def test_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "marked.jsonl"
    write_rows(path, RESPONSES)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row for _, row in read_rows(path)] == RESPONSES


def test_items_without_a_response_are_named_and_incorrect(score):
    scored = score(responses=[RESPONSES[0] | {"extraction": "B", "true_false": True}])  # other columns are ignored
    assert scored.code == 0
    assert "2 items have no response and count as incorrect: 2, 3" in scored.errors
    assert [row["rule"] for row in scored.verdicts] == ["announced_letter", "missing", "missing"]
    assert scored.report["strict"]["value"] == 0.3333


def test_empty_and_null_responses_have_no_answer(score):
    scored = score(responses=[{"pid": "1", "response": ""}, {"pid": "2", "response": None}, RESPONSES[2]])
    assert [row["outcome"] for row in scored.verdicts] == ["no_answer", "no_answer", "correct"]


ANSWERED = {"pid": "1", "response": "x"}


@pytest.mark.parametrize(
    ("items", "responses", "message"),
    [
        ([ITEMS[0], ITEMS[0]], RESPONSES, "items.jsonl:2: the id '1' appears twice"),
        ([{"pid": "1"}], RESPONSES, "items.jsonl:1: has no column 'answer', 'answer_type', 'choices', 'precision'"),
        ([ITEMS[0] | {"answer": "fig"}], RESPONSES, "'fig' is none of the options 'apple', 'pear', 'plum'"),
        ([ITEMS[2] | {"precision": 1.5}], RESPONSES, "precision is 1.5"),
        ([ITEMS[2] | {"precision": "1"}], RESPONSES, "precision is '1'"),
        ([ITEMS[0] | {"choices": "apple"}], RESPONSES, "choices is 'apple': not a valid list"),
        ([ITEMS[0] | {"choices": None}], RESPONSES, "answer_type 'text' and 0 choices"),
        ([ITEMS[1] | {"answer": 3}], RESPONSES, "answer is 3: not a valid string"),
        ([ITEMS[1] | {"answer": ""}], RESPONSES, "the answer '' has no number"),
        ([ITEMS[1] | {"metadata": "x"}], RESPONSES, "metadata is 'x'"),
        ([ITEMS[1] | {"pid": None}], RESPONSES, "pid is None"),
        ([], RESPONSES, "holds no items"),
        (ITEMS, [{"pid": "1"}], "responses.jsonl:1: has no column 'response'"),
        (ITEMS, [{"id": "1", "response": "x"}], "has no column 'pid'"),
        (ITEMS, [ANSWERED | {"pid": "9"}], "no item has the id '9'"),
        (ITEMS, [], "responses.jsonl: holds no responses"),
        (ITEMS, [ANSWERED, ANSWERED], "responses.jsonl:2: a second response to '1'"),
        (ITEMS, [ANSWERED | {"response": 3}], "response is 3"),
        (ITEMS, [ANSWERED | {"sample": -1}], "sample is -1"),
        (ITEMS, [ANSWERED | {"tokens": "9"}], "tokens is '9'"),
        (ITEMS, [ANSWERED | {"frame": "pixels"}], "frame is 'pixels': not 'px_original'"),
    ],
)
def test_bad_row_is_refused_with_its_value(score, items, responses, message):
    scored = score(items, responses)
    assert scored.code == 2
    assert message in scored.errors
    assert not scored.folder.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", ":1: not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'\n{"pid": "\xe9"}', ":2: not JSON: 'utf-8' codec"),
        (b"[1]", ":1: one JSON object per line is expected, got [1]"),
        (None, "cannot be read: No such file or directory; give"),
    ],
)
def test_file_that_is_not_jsonl_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "items.jsonl"
    if content is not None:
        path.write_bytes(content)
    files = [f"--items={path}", f"--responses={path}", f"--out={tmp_path / 'out'}"]
    assert main(["eval", "score", "--benchmark=mathvista", *files]) == 2
    errors = capsys.readouterr().err
    assert "items.jsonl" in errors and message in errors


CANONICAL = {"id": "1", "answer": "x", "answer_type": "text"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "1"}, "has no column 'answer', 'answer_type'"),
        (CANONICAL | {"answer_type": "word"}, "answer_type is 'word': not 'choice'"),
        (CANONICAL | {"answer_type": "box", "answer": [0, 0, 1, 1]}, "a box needs the column 'frame'"),
        (CANONICAL | {"answer_type": "box", "answer": [0, 0, 1, 1], "frame": "pixels"}, "frame is 'pixels'"),
        (CANONICAL | {"answer_type": "box", "answer": [9, 0, 1, 1], "frame": "norm_1"}, "inverted or empty box"),
        (CANONICAL | {"image_size": [0, 1]}, "image_size is [0, 1]"),
        (CANONICAL | {"image_size": [5]}, "image_size is [5]"),
        (CANONICAL | {"id": True}, "id is True"),
        (CANONICAL | {"id": ""}, "id is ''"),
        (CANONICAL | {"answer_type": "choice", "answer": "E", "options": FRUIT}, "'E' is none of the"),
        (CANONICAL | {"answer_type": "choice", "options": ["a"] * 27}, "at most 26 items after validation, not 27"),
        (CANONICAL | {"answer_type": "choice"}, "'x' is none of the options (none)"),
        (CANONICAL | {"answer_type": "count", "answer": "many"}, "'many' has no number"),
        (CANONICAL | {"answer_type": "list", "answer": [1, "a"]}, "[1, 'a'] is not a list of numbers"),
        (CANONICAL | {"answer_type": "list", "answer": "none"}, "'none' is not a list of numbers"),
        (CANONICAL | {"answer": None}, "the answer is None"),
        (CANONICAL | {"answer": []}, "the answer is []"),
        (CANONICAL | {"meta": 3}, "meta is 3"),
        (CANONICAL | {"question": ["q"]}, "question is ['q']"),
        (CANONICAL | {"unit": 5}, "unit is 5"),
    ],
)
def test_bad_canonical_row_is_refused_with_its_value(row, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_canonical_item(row)


def test_several_responses_give_pass_at_k_and_majority(score):
    answers = ["(B)", "(A)", "(B)", "(C)"]
    responses = [{"pid": "1", "response": text, "sample": n, "tokens": n} for n, text in enumerate(answers)]
    report = score(ITEMS[:1], responses).report
    assert report["samples"] == {
        "1": {"pass": 0.5, "maj": 0.5},
        "2": {"pass": 0.8333, "maj": 1.0},
        "4": {"pass": 1.0, "maj": 1.0},
    }
    assert report["mean_tokens"] == 1.5
    (row,) = report["subsets"]["task"].values()
    interval = wilson_interval(0.5, 1)
    assert (row["n"], row["strict"]) == (1, 0.5)  # four responses to one question are one question
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-4)


def test_report_counts_truncation_and_rules(score):
    cut = {"response": "Let me think", "finish": "length", "tokens": 5}
    scored = score(responses=[RESPONSES[0] | {"tokens": 2}, RESPONSES[1] | cut, RESPONSES[2]])
    report = scored.report
    assert (report["truncated_rate"], report["outcomes"]["truncated"]) == (0.3333, 1)
    lines = ["| truncated | 1 | 33.3 |", "33.3 % of responses", "3.5 tokens"]
    lines += [f"| {rule} | {row['n']} | {100 * row['strict']:.1f} |" for rule, row in report["rules"].items()]
    for line in lines:
        assert line in scored.page


def test_one_correct_response_has_a_wide_interval(score):
    strict = score(ITEMS[:1], RESPONSES[:1]).report["strict"]
    assert (strict["value"], strict["high"]) == (1.0, 1.0)
    assert strict["low"] == pytest.approx(1 / (1 + 1.959964**2), abs=1e-4)  # Wilson's, of one of one


def test_verdicts_on_other_responses_are_replaced_only_on_request(score):
    before = score().verdicts
    assert score().code == 0  # the same again
    changed = [RESPONSES[0] | {"response": "(A)"}, *RESPONSES[1:]]
    refused = score(responses=changed)
    assert refused.code == 2
    assert "reports on other files" in refused.errors
    assert refused.verdicts == before
    replaced = score(ITEMS, changed, "--rescore")
    assert replaced.code == 0
    assert "1: strict True -> False, score 1 -> 0 (first_letter)" in replaced.output


def test_verdicts_read_back_equal(score):
    expected = []
    for item, response in zip(map(parse_mathvista_item, ITEMS), RESPONSES, strict=True):
        answer = ItemResponse(id=item.id, text=response["response"])
        expected.append(grade_response(BENCHMARKS["mathvista"], item, answer))
    assert read_verdicts(score().folder) == expected
    with pytest.raises(ValueError, match="no column 'sample'"):
        parse_verdict({"pid": "1"})


def test_compare_prints_differences_by_subset(score, capsys):
    changed = [RESPONSES[0] | {"response": "(A)"}, RESPONSES[1] | {"response": "3"}, RESPONSES[2]]
    folders = [str(score(responses=responses, out=out).folder) for responses, out in ((RESPONSES, "a"), (changed, "b"))]
    assert main(["eval", "compare", *folders]) == 0
    output = capsys.readouterr().out
    for line in (
        "strict: A 66.7, B 66.7, of 3 questions",
        "correct only in A: 1, only in B: 1; McNemar's exact p = 1",
        "correct only in A: 1\n",
        "correct only in B: 2\n",
        "no significant difference",
    ):
        assert line in output
    _, _, tables = output.partition("strict by skills")
    skills, _, tasks = tables.partition("strict by task")
    rows = [re.split(" {2,}", line.strip()) for line in tasks.splitlines()]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["one"][:4] == ["1", "100.0", "0.0", "+100.0"]
    assert cells["other"][:4] == ["2", "50.0", "100.0", "-50.0"]
    assert cells["other"][5:8] == ["0", "1", "1"]
    assert "+0.0" in skills


def test_compare_refuses_runs_on_other_questions(score, tmp_path, capsys):
    score(out="a")
    score(ITEMS[:2], RESPONSES[:2], out="b")
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "1 questions are in only one run (3)" in capsys.readouterr().err
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "nowhere")]) == 2


def test_compare_refuses_verdicts_of_another_version_of_the_rules(score, tmp_path, capsys):
    folders = [str(score(out=out).folder) for out in ("a", "b")]
    verdicts = tmp_path / "a" / "verdicts.jsonl"
    assert {verdict.scorer for verdict in read_verdicts(verdicts)} == {SCORER_VERSION}
    verdicts.write_text("".join(json.dumps(row | {"scorer": "1"}) + "\n" for row in read_json_lines(verdicts)))
    assert main(["eval", "compare", *folders]) == 2
    message = f"A was scored by version 1 of the rules and B by version {SCORER_VERSION}, so verdicts may"
    assert message in " ".join(capsys.readouterr().err.split())


def test_detection_reports_average_precision(score):
    item = {"id": "1", "answer": [{"bbox_2d": [0, 0, 10, 10], "label": "cat"}], "answer_type": "boxes"}
    item |= {"frame": "px_original", "image_size": [100, 100]}
    response = {"pid": "1", "response": '[{"bbox_2d": [0, 0, 10, 8], "label": "cat"}]'}
    scored = score([item], [response], benchmark="coco")
    assert scored.code == 0, scored.errors
    assert scored.report["overall"] == {"AP": 0.7}
    assert "| AP | 70.0 |" in scored.page
