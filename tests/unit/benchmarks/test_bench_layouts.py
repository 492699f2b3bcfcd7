"""Benchmarks in every layout they are published in: tiny files with invented content become questions and items."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmark_rows import PICTURE, place, shown, write
from factories import png_bytes

from mmrl.benchmarks.predictions import Prediction, append_predictions, read_complete_batches
from mmrl.benchmarks.readers.questions import PROMPT_ANSWER_TYPES, BenchmarkQuestions, read_questions
from mmrl.benchmarks.registry import get_benchmark
from mmrl.types import AnswerType, CoordinateSystem, FinishReason, ResizeMap, Size, UserError

EMPTY = {f"image_{number}": None for number in range(1, 8)}
WHERE = {"image": PICTURE, "iscrowd": 0, "segmentation": []}
SEED = {
    "task_progress_metadata": [],
    "video_source": "a",
    "video_basename": "b.mp4",
    "current_observation_basename": "p.png",
}
PUBLISHED: dict[str, tuple[str, dict[str, Any], str, object]] = {
    # name: benchmark, row, question as asked, what is due
    "MathVista, choice": (
        "mathvista",
        {
            **{"pid": "1", "question": "Which?", "decoded_image": PICTURE, "choices": ["3", "5"], "unit": None},
            **{"precision": None, "answer": "5", "question_type": "multi_choice", "answer_type": "text"},
            "metadata": {"task": "geometry", "skills": ["arithmetic"]},
        },
        "Which?\nA. 3\nB. 5",
        "5",
    ),
    "MathVista, float": (
        "mathvista",
        {
            **{"pid": "1", "question": "How far?", "decoded_image": PICTURE, "choices": None, "unit": "cm"},
            **{"precision": 1.0, "answer": "2.5", "question_type": "free_form", "answer_type": "float"},
            "metadata": {"task": "geometry", "skills": []},
        },
        "How far? (Unit: cm)",
        "2.5",
    ),
    "MathVerse": (
        "mathverse",
        {
            **{"sample_index": "7", "query_wo": "Find x.\nChoices:\nA:10\nB:20\nC:30\nD:40", "image": PICTURE},
            **{"answer": "B", "question_type": "multi-choice", "problem_version": "Text Lite"},
        },
        "Find x.\nChoices:\nA:10\nB:20\nC:30\nD:40",
        "20",
    ),
    "MathVision": (
        "mathvision",
        {
            **{"id": "3", "question": "See <image1>. How many?", "options": [], "decoded_image": PICTURE},
            **{"answer": "12", "level": 2, "subject": "counting"},
        },
        "See *. How many?",
        "12",
    ),
    "MMMU": (
        "mmmu",
        {
            **{**EMPTY, "id": "validation_Art_1", "question": "<image 1> shows?", "options": "['a bust', 'a vase']"},
            **{"image_1": PICTURE, "answer": "B", "question_type": "multiple-choice", "subfield": "Art"},
        },
        "* shows?\nA. a bust\nB. a vase",
        "a vase",
    ),
    "MMMU, open": (
        "mmmu",
        {
            **{**EMPTY, "id": "validation_Art_2", "question": "<image 1> weighs?", "options": "[]"},
            **{"image_1": PICTURE, "answer": "['2 kg', 'two kg']", "question_type": "open"},
        },
        "* weighs?",
        ["2 kg", "two kg"],
    ),
    "MMMU-Pro, vision": (
        "mmmu_pro",
        {"id": "t1", "image": PICTURE, "options": "['one', 'two', 'three']", "answer": "C", "subject": "Art"},
        "*Answer the question in the picture.",
        "three",
    ),
    "EMMA": (
        "emma",
        {
            **{**EMPTY, "pid": "m1", "question": "Next after <image_1>?", "options": ["x", "y"], "image_1": PICTURE},
            **{"answer": "A", "context": "Look.", "subject": "Math", "task": "pattern"},
        },
        "Look.\nNext after *?\nA. x\nB. y",
        "x",
    ),
    "RefCOCO": (
        "refcoco",
        {**WHERE, "question_id": "5", "question": "?", "answer": ["left cup"], "bbox": [2.0, 3.0, 10.0, 20.0]},
        "*Where is left cup?",
        (2.0, 3.0, 12.0, 23.0),
    ),
    "RefCOCO of VLM-R1": (
        "refcoco",
        {
            "image": PICTURE,
            "problem": "Box the cup.",
            "solution": [2.0, 3.0, 12.0, 23.0],
            "normalized_solution": [1] * 4,
        },
        "*Box the cup.",
        (2.0, 3.0, 12.0, 23.0),
    ),
    "ScreenSpot": (
        "screenspot",
        {
            "image": PICTURE,
            "instruction": "close",
            "bbox": [0.1, 0.2, 0.3, 0.4],
            "data_type": "icon",
            "data_source": "ios",
        },
        "*close",
        (0.1, 0.2, 0.3, 0.4),
    ),
    "OCRBench": (
        "ocrbench",
        {
            "image": PICTURE,
            "question": "What is written?",
            "answer": ["STOP"],
            "dataset": "IIIT5K",
            "question_type": "Word",
        },
        "*What is written?",
        ["STOP"],
    ),
    "TextVQA": (
        "textvqa",
        {"question_id": 4, "image": PICTURE, "question": "Which brand?", "answers": ["nokia"] * 10},
        "*Which brand?",
        ["nokia"] * 10,
    ),
    "CountBench": ("counting", {"image": PICTURE, "question": "How many?", "number": 4}, "*How many?", 4),
    "CLEVR": (
        "counting",
        {"image": PICTURE, "problem": "How many items?", "solution": "<answer> 3 </answer>"},
        "*How many items?",
        "3",
    ),
    "SEED-Bench-R1": (
        "seed_bench_r1",
        {
            **{
                **SEED,
                "sample_id": "s1",
                "question": "What next?",
                "golden_choice_idx": "D",
                "task_progress_metadata": "",
            },
            **{f"choice_{letter}": f"do {letter}" for letter in "abcd"},
        },
        "*What next?\nA. do a\nB. do b\nC. do c\nD. do d",
        "do d",
    ),
    "Geometry3K": (
        "geometry3k",
        {"images": [PICTURE], "problem": "<image>Find x.", "answer": "8 \\sqrt { 3 }"},
        "*Find x.",
        "8 \\sqrt { 3 }",
    ),
    "MEGA-Bench": (
        "megabench",
        {
            **{
                "id": "g1",
                "task_name": "sudoku",
                "task_description": "Solve it.",
                "example_text": "",
                "query_text": "Go.",
            },
            **{"query_media": "['p.png']", "answer": "{'answer': '42'}", "eval_context": "{}"},
            "metric_info": "{'field_score_function': {'answer': 'exact_str_match'}}",
        },
        "*Solve it.\nGo.",
        {"answer": "42"},
    ),
}


def read(folder: Path, bench: str, *rows: Mapping[str, Any], name: str = "rows.parquet") -> BenchmarkQuestions:
    """Write rows to a file beside the images `p.png` and `images/a/p.png`, and read them as questions."""
    (folder / "images" / "a").mkdir(parents=True, exist_ok=True)
    for picture in (folder / "p.png", folder / "images" / "a" / "p.png"):
        picture.write_bytes(png_bytes())
    write(folder / name, rows)
    return read_questions(get_benchmark(bench), [name], place(folder), split="test", media_root=None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_becomes_a_question_and_an_item(name: str, tmp_path: Path) -> None:
    bench, row, asked, due = PUBLISHED[name]
    (question,) = read(tmp_path, bench, row).entries
    assert shown(question).removeprefix("*") == asked.removeprefix("*")
    assert shown(question).count("*") == 1
    assert (question.item.answer_text if question.item.options else question.item.answer) == due
    assert question.sample is not None
    assert question.sample.target.answer_type is PROMPT_ANSWER_TYPES[question.item.answer_type]


def test_coordinate_systems_and_corners_follow_the_layout(tmp_path: Path) -> None:
    first = read(tmp_path, *PUBLISHED["ScreenSpot"][:2]).entries[0].item
    row = {"img_filename": "p.png", "instruction": "close", "bbox": [4, 6, 8, 16], "data_type": "a", "data_source": "b"}
    second = read(tmp_path, "screenspot", row, name="v2.jsonl").entries[0]
    pro = read(tmp_path, "screenspot", {**row, "id": "x"}, name="pro.jsonl").entries[0]
    assert (first.coordinate_system, first.answer_type) == (CoordinateSystem.NORM_1, "point")
    assert (second.item.coordinate_system, second.item.answer) == (CoordinateSystem.PX_ORIGINAL, (4, 6, 12, 22))
    assert second.sample is not None
    assert (second.sample.target.answer_type, second.sample.target.value) == (AnswerType.POINT, (8.0, 14.0))
    assert pro.item.answer == (4, 6, 8, 16)


def test_vlmevalkit_images_may_refer_to_an_earlier_row(tmp_path: Path) -> None:
    picture = base64.b64encode(png_bytes()).decode()
    rows = [
        {"index": 1, "image": picture, "question": "Which?", "A": "red", "B": "blue", "answer": "B", "category": "hue"},
        {"index": 2, "image": 1, "question": "And now?", "A": "left", "B": "right", "answer": "A", "category": "place"},
    ]
    first, second = read(tmp_path, "mmmu_pro", *rows, name="kit.tsv").entries
    assert shown(first) == "*Which?\nA. red\nB. blue"
    assert (first.item.answer_text, second.item.answer_text) == ("blue", "left")
    assert first.item.cluster == second.item.cluster
    assert second.item.subsets == {"category": ("place",)}


def test_canonical_rows_name_prompt_answer_type_and_subsets(tmp_path: Path) -> None:
    row = {"id": 1, "images": ["p.png"], "prompt": "Say A or B.", "options": ["x", "y"], "answer": "y"}
    (question,) = read(
        tmp_path, "canonical", {**row, "answer_type": "choice", "meta": {"level": 2}}, name="c.jsonl"
    ).entries
    assert shown(question) == "*Say A or B."
    assert question.item.subsets == {"level": ("2",)}


def test_coco_asks_for_each_category_of_each_picture(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(png_bytes())
    tables = {
        "images": [{"id": 1, "file_name": "p.png"}],
        "categories": [{"id": 2, "name": "cat"}],
        "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": 0}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(tables))
    (question,) = read_questions(
        get_benchmark("coco"), ["instances.json"], place(tmp_path), split="val", media_root=None
    ).entries
    assert question.item.answer_type == "boxes"
    assert [(region.coordinates, region.label) for region in question.item.answer] == [((1, 2, 4, 6), "cat")]


def test_unknown_columns_name_the_nearest_layout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MathVista of Hugging Face, which needs 'decoded_image'"):
        row = dict(PUBLISHED["MathVista, choice"][1])
        row["picture"] = row.pop("decoded_image")
        read(tmp_path, "mathvista", row)


def test_bad_rows_are_named_and_refused(tmp_path: Path) -> None:
    row = {"id": "1", "question": "?", "answer": "z", "answer_type": "text", "images": "p.png"}
    for bad, said in (
        ([row, row], "1 of 2 rows .*appears twice: 1;"),
        ([{**row, "answer": "z", "answer_type": "choice", "options": ["a", "b"]}], "none of the options"),
        ([{**row, "answer_type": "mood"}], "answer_type is 'mood'"),
        ([{**row, "question": "", "images": "p.png"}], "neither a question nor a prompt"),
    ):
        with pytest.raises(UserError, match=f"(?s){said}"):
            read(tmp_path, "canonical", *bad, name="bad.jsonl")
    with pytest.raises(UserError, match="none of 2 rows is a question of canonical:\n  1: .*bad.jsonl:1: answer_type"):
        read(tmp_path, "canonical", *({**row, "id": id, "answer_type": "mood"} for id in "12"), name="bad.jsonl")


def test_a_missing_image_keeps_the_item_and_names_the_problem(tmp_path: Path) -> None:
    row = {"id": "1", "question": "?", "answer": "z", "answer_type": "text", "images": "gone.png"}
    questions = read(tmp_path, "canonical", row, name="c.jsonl")
    assert not questions.samples
    assert "gone.png" in questions.problems["1"]


def test_the_digest_depends_on_content_not_on_the_folder(tmp_path: Path) -> None:
    row = {"id": "1", "question": "?", "answer": "z", "answer_type": "text", "images": "p.png"}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, same = (read(tmp_path / name, "canonical", row, name="c.jsonl").digest() for name in ("a", "b"))
    other = read(tmp_path / "b", "canonical", {**row, "answer": "y"}, name="c.jsonl").digest()
    assert one == same != other


def answered(number: int) -> Prediction:
    """A stored response to the question with this number as id."""
    resize = ResizeMap(Size(40, 30), Size(56, 28))
    facts = {
        "finish_reason": FinishReason.EOS,
        "num_tokens": 3,
        "prompt_digest": "ab",
        "coordinate_system": CoordinateSystem.PX_RESIZED,
        "resize_maps": (resize,),
    }
    return Prediction(
        id=str(number), response_index=0, text=f"<answer>{number}\u2028</answer>", first_response_chars=None, **facts
    )


def test_incomplete_batches_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    path, all_of_them = tmp_path / "predictions.jsonl", [answered(number) for number in range(5)]
    append_predictions(path, all_of_them)
    assert read_complete_batches(path, [2, 2, 1]) == all_of_them
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert read_complete_batches(path, [2, 2, 1]) == all_of_them[:4]
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    path.write_bytes(whole.splitlines(keepends=True)[0])
    assert read_complete_batches(path, [2, 2, 1]) == []
    assert read_complete_batches(tmp_path / "none.jsonl", [2]) == []


def test_a_line_that_is_no_prediction_is_refused(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="predictions.jsonl:1: no prediction"):
        read_complete_batches(tmp_path / "predictions.jsonl", [1])
