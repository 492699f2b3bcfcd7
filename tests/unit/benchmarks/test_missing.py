"""Missing images, malformed rows and missing responses: named, refused, or counted as incorrect everywhere."""

from dataclasses import replace
from itertools import chain

import pytest
from benchmark_rows import read, write_rows
from factories import make_context, png_bytes

from mmrl.benchmarks.grading import score_responses
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.readers.questions import read_questions
from mmrl.benchmarks.registry import BENCHMARKS, get_benchmark
from mmrl.benchmarks.report import build_report, report_markdown
from mmrl.evaluation.session import EvalBatches, check_missing
from mmrl.types import Region, UserError

MISSING = (7, 70, 700)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A thousand questions; three of them name an image that does not exist."""
    folder = tmp_path_factory.mktemp("thousand")
    (folder / "0.png").write_bytes(png_bytes())
    row = {"question": "How many?", "answer": 3, "answer_type": "count"}
    images = ["gone.png" if number in MISSING else "0.png" for number in range(1000)]
    return read(folder, "counting", *({**row, "id": f"q{n}", "images": image} for n, image in enumerate(images)))


def check(missing, questions, *, allowed, warn=pytest.fail):
    check_missing(missing, questions, allowed=allowed, remedy="--allow-missing", warn=warn)


def report_on(benchmark, items, responses):
    return build_report(score_responses(get_benchmark(benchmark), {item.id: item for item in items}, responses, {}))


def test_missing_images_are_named_and_refused(thousand):
    assert [*thousand.problems] == [f"q{number}" for number in MISSING]
    with pytest.raises(UserError, match="3 of 1000 questions cannot be asked") as refused:
        check(thousand.problems, thousand, allowed=False)
    for line in (*(f"q{number}: image 'gone.png'" for number in MISSING), "--allow-missing"):
        assert line in str(refused.value)


def test_allowed_missing_images_count_as_incorrect(thousand):
    warnings = []
    check(thousand.problems, thousand, allowed=True, warn=warnings.append)
    assert "3 of 1000 questions cannot be asked and count as incorrect" in warnings[0]
    batches = EvalBatches(thousand, thousand.problems, batch_size=8, responses_per_question=1)
    assert batches.rows_per_batch == [8] * 124 + [5]
    asked = chain.from_iterable(batches.batches)
    report = report_on(
        "counting", thousand.items.values(), [ItemResponse(id=id, text="<answer>3</answer>") for id, _ in asked]
    )
    assert (report["items"], report["responses"], report["missing"]) == (1000, 997, 3)
    assert report["strict"]["value"] == report["official"]["value"] == 0.997
    assert report["rules"]["missing"] == {"n": 3, "strict": 0.0}


def test_all_images_missing_is_refused_even_if_missing_ones_are_allowed(thousand):
    two = replace(thousand, entries=thousand.entries[:2])
    with pytest.raises(UserError, match="2 of 2"):
        check({"q0": "gone", "q1": "gone"}, two, allowed=True)


def test_malformed_rows_are_named_and_refuse_no_others(tmp_path):
    """validation_Accounting_29 of MMMU/MMMU_Pro (standard, 10 options) has a list within its list of options."""
    (tmp_path / "1.png").write_bytes(png_bytes())
    row = {f"image_{number}": None for number in range(2, 8)} | {"image_1": "1.png", "question": "<image 1> shows?"}
    row |= {"explanation": "", "img_type": "['Tables']", "topic_difficulty": "Easy", "subject": "Accounting"}
    row |= {"id": "validation_Accounting_1", "options": "['$6', '$7', '$8']", "answer": "B"}
    nested = row | {"id": "validation_Accounting_29", "options": "[['A', 'B', 'Not enough']]", "answer": "A"}
    beyond = row | {"id": "validation_Accounting_30", "answer": "D"}
    write_rows(tmp_path / "rows.jsonl", [row, nested, beyond, {"id": "x"}])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{\n")
    questions = read_questions(get_benchmark("mmmu_pro"), ["rows.jsonl"], make_context(tmp_path))
    assert [*questions.problems] == ["validation_Accounting_29", "validation_Accounting_30", "x", "line-5"]
    assert "rows.jsonl:2: choices must be a list of two or more" in questions.problems["validation_Accounting_29"]
    assert "'D' is not the letter of one of 3 options" in questions.problems["validation_Accounting_30"]
    with pytest.raises(UserError, match="(?s)4 of 5 questions cannot be asked.*validation_Accounting_29: .*--allow-mi"):
        check(questions.problems, questions, allowed=False)
    malformed = [questions.items[id] for id in questions.problems]
    for name in BENCHMARKS:
        assert report_on(name, malformed, [])["official"]["value"] == 0.0
    response = ItemResponse(id="validation_Accounting_1", text="Answer: B")
    report = report_on("mmmu_pro", questions.items.values(), [response])
    assert report["strict"]["value"] == report["official"]["value"] == 0.2


def test_item_without_a_response_lowers_pass_and_majority():
    items = [Item(id=id, answer_type="integer", answer="3") for id in ("a", "b")]
    responses = [ItemResponse(id="a", text=text, response_index=n) for n, text in enumerate(("3", "3", "4"))]
    report = report_on("canonical", items, responses)
    assert report["samples"] == {
        "1": {"pass": 0.3333, "maj": 0.3333},
        "2": {"pass": 0.5, "maj": 0.5},
        "3": {"pass": 0.5, "maj": 0.5},
    }
    # As pass@1: three responses to an item count no more than one.
    assert report["strict"]["value"] == report["score"] == 0.3333
    assert "| 3 | 50.0 | 50.0 |" in report_markdown(report)


@pytest.mark.parametrize(
    ("item", "texts"),
    [
        (Item(id="a", answer_type="integer", answer="3"), ("4", r"\boxed{3.0}", "The answer is 3 cm.")),
        (Item(id="a", answer_type="text", answer="Ada L."), ("Bob", "ADA  L", "Ada L.")),
    ],
)
def test_equal_answers_in_different_notations_vote_together(item, texts):
    responses = [ItemResponse(id="a", text=text, response_index=n) for n, text in enumerate(texts)]
    assert report_on("canonical", [item], responses)["samples"]["3"] == {"pass": 1.0, "maj": 1.0}


def test_item_without_a_response_lowers_overall_metrics():
    box = [Region((0.0, 0.0, 9.0, 9.0), "cat")]
    images = [Item(id=id, answer_type="boxes", answer=box) for id in ("a", "b")]
    found = ItemResponse(id="a", text='[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}]')
    assert report_on("coco", images, [found])["overall"]["AP"] == round(51 / 101, 4)  # recall reaches one half
    meta = {"metric": "exact_str_match"}
    tasks = [Item(id=id, answer_type="text", answer="x", meta={**meta, "task": id}) for id in ("a", "b")]
    report = report_on("megabench", tasks, [ItemResponse(id="a", text="x")])
    assert report["overall"] == {"macro mean over tasks": 0.5}


def test_partial_credit_is_reported_beside_the_accuracy():
    items = [Item(id=id, answer_type="text", answer="centre") for id in ("a", "b")]
    report = report_on("docvqa", items, [ItemResponse(id="a", text="centr"), ItemResponse(id="b", text="centre")])
    assert report["official"]["value"] == 0.5
    assert report["score"] == pytest.approx((5 / 6 + 1) / 2, abs=1e-4)
    assert "| official, with partial credit | 91.7 |" in report_markdown(report)
