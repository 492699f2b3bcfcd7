"""Missing images, malformed rows and missing responses: named, refused, or counted as incorrect everywhere."""

from dataclasses import replace

import pytest
from benchmark_rows import place, write
from PIL import Image

from mmrl.benchmarks.grading import score_responses
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.readers.questions import read_questions
from mmrl.benchmarks.registry import BENCHMARKS, get_benchmark
from mmrl.benchmarks.report import build_report, report_markdown
from mmrl.config.schema import BenchmarkConfig
from mmrl.evaluation.session import check_missing, make_batches
from mmrl.training.benchmarks import _report_metrics
from mmrl.types import Region, UserError

GONE = (7, 70, 700)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A thousand questions about two images; three questions name an image that does not exist."""
    folder = tmp_path_factory.mktemp("thousand")
    for number in range(2):
        Image.new("RGB", (8, 8), (90 * number, 0, 0)).save(folder / f"{number}.png")
    rows = [
        {
            "id": f"q{number}",
            "images": "gone.png" if number in GONE else f"{number % 2}.png",
            "question": "How many?",
            "answer": 3,
            "answer_type": "count",
        }
        for number in range(1000)
    ]
    write(folder / "rows.jsonl", rows)
    return read_questions(get_benchmark("counting"), ["rows.jsonl"], place(folder), split="test", media_root=None)


def test_three_of_a_thousand_pictures_are_named_and_refused(thousand):
    assert [*thousand.problems] == [f"q{number}" for number in GONE]
    with pytest.raises(UserError, match="3 of 1000 questions cannot be asked") as refused:
        check_missing(thousand.problems, thousand, allowed=False, remedy="--allow-missing", warn=pytest.fail)
    for line in (*(f"q{number}: image 'gone.png'" for number in GONE), "--allow-missing"):
        assert line in str(refused.value)


def test_allowed_missing_images_count_as_incorrect(thousand):
    told = []
    check_missing(thousand.problems, thousand, allowed=True, remedy="--allow-missing", warn=told.append)
    assert "3 of 1000 questions cannot be asked and count as incorrect" in told[0]
    asked = make_batches(thousand, thousand.problems, batch_size=8, responses_per_question=1).questions
    responses = [ItemResponse(id=id, text="<answer>3</answer>") for id, _ in asked]
    report = build_report(score_responses(BENCHMARKS["counting"], thousand.items, responses, {}))
    assert (report["items"], report["responses"], report["missing"]) == (1000, 997, 3)
    assert report["strict"]["value"] == report["official"]["value"] == 0.997
    assert report["rules"]["missing"] == {"n": 3, "strict": 0.0}


def test_a_malformed_row_is_named_and_refuses_no_other(tmp_path):
    """validation_Accounting_29 of MMMU/MMMU_Pro (standard, 10 options) has a list within its list of options."""
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    row = {f"image_{number}": None for number in range(2, 8)} | {"image_1": "1.png", "question": "<image 1> shows?"}
    row |= {"explanation": "", "img_type": "['Tables']", "topic_difficulty": "Easy", "subject": "Accounting"}
    row |= {"id": "validation_Accounting_1", "options": "['$6', '$7', '$8']", "answer": "B"}
    nested = row | {
        "id": "validation_Accounting_29",
        "options": "[['A', 'B', 'Not enough information']]",
        "answer": "A",
    }
    beyond = row | {"id": "validation_Accounting_30", "answer": "D"}
    write(tmp_path / "rows.jsonl", [row, nested, beyond, {"id": "x"}])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{\n")
    questions = read_questions(get_benchmark("mmmu_pro"), ["rows.jsonl"], place(tmp_path), split="test")
    assert [*questions.problems] == ["validation_Accounting_29", "validation_Accounting_30", "x", "line-5"]
    assert "rows.jsonl:2: choices must be a list of two or more" in questions.problems["validation_Accounting_29"]
    assert "'D' is not the letter of one of 3 options" in questions.problems["validation_Accounting_30"]
    with pytest.raises(UserError, match="(?s)4 of 5 questions cannot be asked.*validation_Accounting_29: .*--allow-mi"):
        check_missing(questions.problems, questions, allowed=False, remedy="--allow-missing", warn=pytest.fail)
    check_missing(questions.problems, questions, allowed=True, remedy="--allow-missing", warn=lambda _: None)
    response = ItemResponse(id="validation_Accounting_1", text="Answer: B")
    malformed = {id: questions.items[id] for id in questions.problems}
    for name in BENCHMARKS:
        assert build_report(score_responses(get_benchmark(name), malformed, [], {}))["official"]["value"] == 0.0
    report = build_report(score_responses(BENCHMARKS["mmmu_pro"], questions.items, [response], {}))
    assert report["strict"]["value"] == report["official"]["value"] == 0.2


def test_all_images_missing_is_refused_even_where_some_are_allowed(thousand):
    two = replace(thousand, entries=thousand.entries[:2])
    with pytest.raises(UserError, match="2 of 2"):
        check_missing({"q0": "gone", "q1": "gone"}, two, allowed=True, remedy="--allow-missing", warn=pytest.fail)


def test_an_item_without_a_response_lowers_pass_and_majority():
    items = {id: Item(id=id, answer_type="integer", answer="3") for id in ("a", "b")}
    responses = [ItemResponse(id="a", text=text, response_index=n) for n, text in enumerate(("3", "3", "4"))]
    report = build_report(score_responses(BENCHMARKS["canonical"], items, responses, {}))
    assert report["samples"] == {
        "1": {"pass": 0.3333, "maj": 0.3333},
        "2": {"pass": 0.5, "maj": 0.5},
        "3": {"pass": 0.5, "maj": 0.5},
    }
    assert (
        report["strict"]["value"] == report["score"] == 0.3333
    )  # as pass@1: three responses weigh no more than one item
    assert "| 3 | 50.0 | 50.0 |" in report_markdown(report)


def test_equal_answers_written_in_other_ways_vote_together():
    items = {
        "a": Item(id="a", answer_type="integer", answer="3"),
        "b": Item(id="b", answer_type="text", answer="Ada L."),
    }
    told = {"a": ("4", r"\boxed{3.0}", "The answer is 3 cm."), "b": ("Bob", "ADA  L", "Ada L.")}
    responses = [
        ItemResponse(id=id, text=text, response_index=n) for id, texts in told.items() for n, text in enumerate(texts)
    ]
    assert build_report(score_responses(BENCHMARKS["canonical"], items, responses, {}))["samples"]["3"] == {
        "pass": 1.0,
        "maj": 1.0,
    }


def test_a_picture_without_a_response_lowers_average_precision():
    target = [Region((0.0, 0.0, 9.0, 9.0), "cat")]
    items = {id: Item(id=id, answer_type="boxes", answer=target) for id in ("a", "b")}
    answer = ItemResponse(id="a", text='[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}]')
    run = score_responses(BENCHMARKS["coco"], items, [answer], {})
    assert run.overall_scores["AP"] == pytest.approx(51 / 101)  # recall reaches one half


def test_a_task_without_a_response_lowers_the_mean_over_tasks():
    items = {
        id: Item(id=id, answer_type="text", answer="x", meta={"metric": "exact_str_match", "task": id})
        for id in ("a", "b")
    }
    run = score_responses(get_benchmark("megabench"), items, [ItemResponse(id="a", text="x")], {})
    assert run.overall_scores == {"macro mean over tasks": 0.5}


def test_partial_credit_reaches_the_metrics_of_training():
    items = {id: Item(id=id, answer_type="text", answer="centre") for id in ("a", "b")}
    responses = [ItemResponse(id=id, text=text, num_tokens=1) for id, text in (("a", "centr"), ("b", "centre"))]
    report = build_report(score_responses(BENCHMARKS["docvqa"], items, responses, {}))
    values = _report_metrics(BenchmarkConfig(name="docvqa", data=("rows.jsonl",)), report)
    assert values["benchmark/docvqa/official_accuracy"] == 0.5
    assert values["benchmark/docvqa/official_score"] == pytest.approx((5 / 6 + 1) / 2, abs=1e-4)
    assert "| official, with partial credit | 91.7 |" in report_markdown(report)
