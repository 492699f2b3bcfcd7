"""Rows in the columns that authors and VLMEvalKit publish, with invented content and tiny media."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_rows import PICTURE, place, shown, write
from factories import png_bytes
from PIL import Image

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import ItemResponse
from mmrl.benchmarks.readers.published import get_layouts, read_published_layouts
from mmrl.benchmarks.readers.questions import BenchmarkQuestions, read_questions
from mmrl.benchmarks.registry import BENCHMARKS, get_benchmark
from mmrl.types import CoordinateSystem, Size, UserError
from mmrl_datasets.media_files import RenderedVideo, save_mp4

BOX = [4.0, 6.0, 8.0, 16.0]


PLAIN = base64.b64encode(png_bytes()).decode()
SEVEN = {f"image_{number}": None for number in range(2, 8)} | {"image_1": PICTURE}
SEED = {
    **{"sample_id": "s1", "video_source": "Ego4D", "video_id": "v", "task_goal": "tea", "question": "What next?"},
    **{f"choice_{letter}": f"do {letter}" for letter in "abcd"},
    **{"golden_choice_idx": "D", "answer": "do d", "video_basename": "f.mp4", "current_observation_basename": "p.png"},
}
PROGRESS = [{"narration_text": "boil", "start_frame": 1, "stop_frame": 9}]
REF = {
    **{"sent_ids": [1, 2], "file_name": "f", "ann_id": 7, "ref_id": 9, "image_id": 3, "split": "val", "category_id": 1},
    **{"sentences": [], "raw_anns": "{}", "raw_image_info": "{}", "raw_sentences": "[]", "image_path": "p.png"},
    **{"bbox": BOX, "captions": ["left cup", "blue cup"], "global_image_id": "coco.3", "anns_id": "coco.7"},
}
MME = {
    **{"video_id": "001", "duration": "short", "domain": "Life", "sub_category": "Food", "url": "https://x"},
    **{"videoID": "f", "question_id": "001-1", "task_type": "Counting", "question": "What is it?"},
    **{"options": ["A. tea.", "B. milk.", "C. ink.", "D. oil."], "answer": "C"},
}
MEGA = {
    **{"id": "7", "task_name": "sudoku", "task_description": "Fill it in.", "global_media": "[]", "example_text": ""},
    **{"example_media": "[]", "query_text": "Go.", "query_media": "['./p.png', './f.mp4']", "eval_context": "{}"},
    **{"answer": "{'rows': '12', 'sum': '3'}", "application": "Planning", "taxonomy_tree_path": "Planning;Puzzles"},
    "metric_info": "{'field_score_function': {'rows': 'exact_str_match', 'sum': 'positive_int_match'}, 'aggregation': "
    "{'function': 'mean', 'field_weights': {'rows': 1, 'sum': 3}}, 'response_parse_function': 'json'}",
}
KIT = {"index": 1, "image": PLAIN, "question": "Which?"}
CLICK = {"bbox": "[4, 6, 8, 16]", "question": "close it", "image": PLAIN}

# name: benchmark, file, row, question as asked (* a picture, ~ a video), what is due, an answer that is right
ROWS: dict[str, tuple[str, str, dict[str, Any], str, object, str]] = {
    "MMMU-Pro of Hugging Face, standard": (
        *("mmmu_pro", "rows.parquet"),
        {
            **{
                **SEVEN,
                "id": "validation_Art_1",
                "question": "<image 1> shows?",
                "explanation": "",
                "img_type": "['x']",
            },
            **{"options": "['bust', 'vase', 'bowl', 'cup', 'jug', 'urn', 'pan', 'pot', 'mug', 'tub']", "answer": "J"},
            **{"topic_difficulty": "Easy", "subject": "Art"},
        },
        "* shows?\nA. bust\nB. vase\nC. bowl\nD. cup\nE. jug\nF. urn\nG. pan\nH. pot\nI. mug\nJ. tub",
        *("tub", "Answer: J"),
    ),
    "EMMA of Hugging Face, open": (
        *("emma", "rows.parquet"),
        {
            **{**SEVEN, "pid": "math_1", "question": "Add <image_1>.", "options": [], "answer": "0.5", "solution": ""},
            **{
                "subject": "Math",
                "task": "sum",
                "category": "2D",
                "source": "new",
                "type": "Open-ended",
                "context": None,
            },
        },
        *("Add *.", "0.5", r"\boxed{\frac{1}{2}}"),
    ),
    "MEGA-Bench of Hugging Face": (
        *("megabench", "rows.parquet", MEGA, "*~Fill it in.\nGo.", {"rows": "12", "sum": "3"}),
        '{"rows": "12", "sum": "3"}',
    ),
    "RefCOCO of jxu124": (
        *("refcoco", "rows.jsonl", REF, "*Where is left cup?", (4, 6, 8, 16), "<answer>{[4, 6, 8, 16]}</answer>"),
    ),
    "ScreenSpot of Hugging Face": (
        *("screenspot", "rows.parquet"),
        {
            **{"file_name": "f.png", "image": PICTURE, "instruction": "close", "bbox": [0.1, 0.2, 0.2, 0.5333]},
            **{"data_type": "icon", "data_source": "ios"},
        },
        *("*close", (0.1, 0.2, 0.2, 0.5333), "pyautogui.click(x=5, y=7)"),
    ),
    "ScreenSpot-v2": (
        *("screenspot", "screenspot_web_v2.json"),
        {"img_filename": "p.png", "bbox": [4, 6, 8, 16], "instruction": "close", "data_type": "a", "data_source": "b"},
        *("*close", (4, 6, 12, 22), "click(x=11, y=21)"),
    ),
    "ScreenSpot-Pro": (
        *("screenspot", "pro.json"),
        {
            **{"img_filename": "p.png", "bbox": [4, 6, 8, 16], "instruction": "close", "instruction_cn": "关"},
            **{"id": "i1", "application": "word", "platform": "mac", "img_size": [40, 30], "ui_type": "icon"},
            "group": "Office",
        },
        *("*close", (4, 6, 8, 16), "click(x=7, y=15)"),
    ),
    "ScreenSpot-Pro with its pictures": (
        *("screenspot", "rows.parquet"),
        {
            **{"image": PICTURE, "img_filename": "word/1.png", "bbox": [4, 6, 8, 16], "instruction": "close"},
            **{"application": "word", "platform": "mac", "img_size": [40, 30], "ui_type": "icon", "group": "Office"},
        },
        *("*close", (4, 6, 8, 16), "click(x=7, y=15)"),
    ),
    "DocVQA of Hugging Face": (
        *("docvqa", "rows.parquet"),
        {
            **{"questionId": "4", "question": "Who?", "question_types": ["form"], "image": PICTURE, "docId": 3},
            **{
                "ucsf_document_id": "x",
                "ucsf_document_page_no": "1",
                "answers": ["Ada", "ada l."],
                "data_split": "val",
            },
        },
        *("*Who?", ["Ada", "ada l."], "Ada"),
    ),
    "SuperCLEVR of R1-V": (
        *("counting", "superclevr.jsonl"),
        {"image_path": "./p.png", "question": "How many?", "ground_truth": 3},
        *("*How many?", 3, "<think>..</think><answer>3</answer>"),
    ),
    "CLEVR of EasyR1": (
        *("counting", "rows.parquet", {"images": [PICTURE], "problem": "<image>How many?", "answer": "3"}),
        *("*How many?", "3", "<answer>3</answer>"),
    ),
    "MVBench of Hugging Face": (
        *("mvbench", "action_sequence.json"),
        {
            "video": "c.mp4",
            "question": "What first?",
            "candidates": ["sat", "ran"],
            "answer": "ran",
            "start": 0.0,
            "end": 0.5,
        },
        *("~What first?\nA. sat\nB. ran", "ran", "(B) ran"),
    ),
    "Video-MME of Hugging Face": (
        *("video_mme", "rows.parquet", MME, "~What is it?\nA. tea.\nB. milk.\nC. ink.\nD. oil.", "ink.", "C"),
    ),
    "SEED-Bench-R1, with what was done": (
        *("seed_bench_r1", "validation_L1.jsonl", SEED | {"task_progress_metadata": PROGRESS}),
        *("~*What next?\nA. do a\nB. do b\nC. do c\nD. do d", "do d", "<answer>D. do d</answer>"),
    ),
    "VLMEvalKit's MathVista": (
        *("mathvista", "kit.tsv"),
        {
            **{**KIT, "question": "Hint: ..\nQuestion: Which?\nChoices:\n(A) 3\n(B) 5", "answer": "5"},
            **{"answer_option": "B", "choices": "['3', '5']", "question_type": "multi_choice", "answer_type": "text"},
        },
        *("*Hint: ..\nQuestion: Which?\nChoices:\n(A) 3\n(B) 5", "5", "The answer is (B)."),
    ),
    "VLMEvalKit's MathVerse": (
        *("mathverse", "kit.tsv"),
        {
            **{**KIT, "question": "Find x.\\nChoices:\\nA:1\\nB:2".replace("\\n", " | "), "answer": "7"},
            **{"question_type": "free-form", "metadata": "{'subject': 'Plane'}", "problem_version": "Text Lite"},
        },
        *("*Find x. | Choices: | A:1 | B:2", "7", "The answer is 7."),
    ),
    "MATH-V of Hugging Face, parts of a sheet": (
        *("mathvision", "rows.parquet"),
        {
            **{"id": "33", "question": "From <image1> to <image2>?\n<image7>", "options": ["A", "B"], "answer": "B"},
            **{"image": "images/33.jpg", "decoded_image": PICTURE, "solution": None, "level": 2, "subject": "graphs"},
        },
        *("*From <image1> to <image2>?\n<image7>\nA. A\nB. B", "B", r"\boxed{B}"),
    ),
    "MATH-V of its authors": (
        *("mathvision", "test.jsonl"),
        {
            **{"id": "4", "question": "How many?\n<image1>", "options": [], "answer": "6", "solution": None},
            **{"level": 1, "subject": "counting", "image": "p.png"},
        },
        *("How many?\n*", "6", r"\boxed{6}"),
    ),
    "MMMU, a picture for the explanation alone": (
        *("mmmu", "rows.parquet"),
        {
            **{**SEVEN, "image_2": PICTURE, "id": "validation_Art_2", "question": "What is <image 1>?"},
            **{"options": "['a bust', 'a vase']", "answer": "B", "question_type": "multiple-choice"},
            **{"explanation": "See <image 2>.", "topic_difficulty": "Easy", "subfield": "Design", "img_type": "['x']"},
        },
        *("What is *?\nA. a bust\nB. a vase", "a vase", "Answer: B"),
    ),
    "VLMEvalKit's MMMU, open": (
        *("mmmu", "kit.tsv"),
        {**KIT, "question": "How far is <image 1>?", "A": "360", "B": "Other Answers", "answer": "A", "split": "dev"},
        *("How far is *?", "360", "The answer is 360."),
    ),
    "VLMEvalKit's MathVision, parts of a sheet": (
        *("mathvision", "kit.tsv"),
        {**KIT, "question": "From <image1> to <image2>?", "choices": "['A', 'B']", "answer": "B", "category": "logic"},
        *("*From <image1> to <image2>?\nA. A\nB. B", "B", r"\boxed{B}"),
    ),
    "VLMEvalKit's MathVision, options with texts": (
        *("mathvision", "kit.tsv"),
        {**KIT, "question": "How many?", "choices": "['2', 'C', '4', '5', '6']", "answer": "C", "category": "counting"},
        *("*How many?\nA. 2\nB. C\nC. 4\nD. 5\nE. 6", "4", r"\boxed{C}"),
    ),
    "VLMEvalKit's MathVerse, vision only": (
        *("mathverse", "kit.tsv"),
        {
            **{**KIT, "question": "", "query_wo": "Answer the question in the image.", "answer": "C"},
            **{"question_type": "multi-choice", "metadata": "{'subject': 'Plane'}", "problem_version": "Vision Only"},
        },
        *("*Answer the question in the image.", "C", "Answer: C"),
    ),
    "VLMEvalKit's EMMA": (
        *("emma", "kit.tsv"),
        {**KIT, "question": "And <image_1>?", "context": "Look.", "A": "x", "B": "y", "answer": "B", "type": "MCQ"},
        *("Look.\nAnd *?\nA. x\nB. y", "y", r"\boxed{B}"),
    ),
    "VLMEvalKit's OCRBench": (
        *("ocrbench", "kit.tsv", {**KIT, "answer": "['CENTRE', 'CENTER']", "category": "Digit String Recognition"}),
        *("*Which?", ["CENTRE", "CENTER"], "center"),
    ),
    "VLMEvalKit's TextVQA": (
        *("textvqa", "kit.tsv", {**KIT, "answer": str(["nokia"] * 10)}, "*Which?", ["nokia"] * 10, "Nokia"),
    ),
    "VLMEvalKit's CountBenchQA": (
        *("counting", "kit.tsv", {**KIT, "answer": 4}, "*Which?", "4", "<answer>4</answer>"),
    ),
    "VLMEvalKit's ScreenSpot": (
        *("screenspot", "kit.tsv", {"index": 1, **CLICK, "data_type": "icon", "data_source": "shop"}),
        *("*close it", (4, 6, 12, 22), "click(x=11, y=21)"),
    ),
    "VLMEvalKit's ScreenSpot-Pro": (
        *("screenspot", "kit.tsv", {**CLICK, "ui_type": "icon", "application": "word", "category": "Office"}),
        *("*close it", (4, 6, 8, 16), "click(x=7, y=15)"),
    ),
    "VLMEvalKit's MVBench": (
        *("mvbench", "kit.tsv"),
        {
            **{"task_type": "Action Antonym", "prefix": "star/Charades_v1_480", "data_type": "video", "bound": "True"},
            **{"start": 0.0, "end": 0.5, "video": "c.mp4", "question": "What?", "answer": "ran"},
            **{"candidates": "['sat', 'ran']", "index": 0},
        },
        *("~What?\nA. sat\nB. ran", "ran", "(B)"),
    ),
    "VLMEvalKit's Video-MME": (
        *("video_mme", "kit.tsv"),
        {
            **{"index": 0, "video": "f", "video_path": "./f.mp4", "duration": "short", "domain": "Life"},
            **{"candidates": str(MME["options"]), "sub_category": "Food", "task_type": "Counting"},
            **{"subtitle_path": "./f.srt", "question": "What is it?", "answer": "C"},
        },
        *("~What is it?\nA. tea.\nB. milk.\nC. ink.\nD. oil.", "ink.", "C"),
    ),
}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a video of one second."""
    folder = tmp_path_factory.mktemp("film")
    frames = [Image.new("RGB", (32, 32), (9 * number, 0, 0)) for number in range(4)]
    return Path(save_mp4(RenderedVideo(frames=frames, fps=4), folder, "f").path).read_bytes()


@pytest.fixture
def read(tmp_path: Path, film: bytes) -> Any:
    """Read rows as files of a benchmark, with images and videos in every folder that a layout expects."""
    for folder in ("", "images/Ego4D", "videos/Ego4D", "star/Charades_v1_480"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "p.png").write_bytes(png_bytes())
        for name in ("f.mp4", "c.mp4"):
            (tmp_path / folder / name).write_bytes(film)

    def run(
        bench: str, files: Mapping[str, list[Mapping[str, Any]]], frame: CoordinateSystem | None = None
    ) -> BenchmarkQuestions:
        for name, rows in files.items():
            write(tmp_path / name, rows)
        return read_questions(
            get_benchmark(bench), [*files], place(tmp_path), split="test", media_root=None, coordinate_system=frame
        )

    return run


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_is_asked_and_scored(name: str, read: Any) -> None:
    bench, file, row, asked, due, answer = ROWS[name]
    question = read(bench, {file: [row]}).entries[0]
    assert shown(question) == asked
    assert (question.item.answer_text if question.item.options else question.item.answer) == due
    item = replace(question.item, image_size=Size(40, 30))  # as the picture tells
    verdict = grade_response(get_benchmark(bench), item, ItemResponse(id=item.id, text=answer))
    assert verdict.score == 1.0, verdict


def test_an_option_that_is_a_letter_is_not_taken_for_one(read: Any) -> None:
    # test_Biology_146 of MMMU/MMMU_Pro: five labels of a picture, in an order of their own.
    row = dict(ROWS["MMMU-Pro of Hugging Face, standard"][2])
    row |= {"id": "test_Biology_146", "options": "['B', 'D', 'E', 'A', 'C']", "answer": "C"}
    (question,) = read("mmmu_pro", {"rows.parquet": [row]}).entries
    assert (question.item.answer, question.item.answer_text) == ("C", "E")
    assert question.sample.target.value == "C"
    for letter in "ABCDE":
        verdict = grade_response(
            get_benchmark("mmmu_pro"), question.item, ItemResponse(id="1", text=f"Answer: {letter}")
        )
        assert verdict.strict is verdict.official is (letter == "C")
    # phy_123 of luckychao/EMMA: options are small letters, and so is the answer, which names the place all the same.
    emma = ROWS["EMMA of Hugging Face, open"][2] | {
        "type": "Multiple Choice",
        "options": ["e", "d", "b"],
        "answer": "b",
    }
    assert read("emma", {"rows.parquet": [emma]}).entries[0].item.answer == "B"
    # The same table in VLMEvalKit's columns, and MVBench, which gives the text.
    kit = KIT | dict(zip("ABCDE", "BDEAC", strict=True)) | {"answer": "C"}
    assert read("mmmu_pro", {"kit.tsv": [kit]}).entries[0].item.answer == "C"
    moves = ROWS["MVBench of Hugging Face"][2] | {"candidates": ["B", "C", "A"], "answer": "C"}
    assert read("mvbench", {ROWS["MVBench of Hugging Face"][1]: [moves]}).entries[0].item.answer == "B"


def test_equal_options_are_told_apart_by_letter_only(read: Any) -> None:
    row = {"id": "1", "images": "p.png", "question": "?", "options": ["50", "20", "50"], "answer_type": "choice"}
    by_letter, by_text = read(
        "canonical", {"c.jsonl": [row | {"answer": "C"}, row | {"id": "2", "answer": "50"}]}
    ).entries
    benchmark = get_benchmark("canonical")
    for text, by_place in (("(A)", False), ("(C)", True), ("B", False), ("The answer is 50.", True)):
        for question, right in ((by_letter, by_place), (by_text, text != "B")):
            response = ItemResponse(id="1", text=text)
            assert grade_response(benchmark, question.item, response).strict is right, (text, question.item.answer)


def test_spans_of_videos_and_subsets_are_read(read: Any) -> None:
    bench, file, row, *_ = ROWS["MVBench of Hugging Face"]
    (question,) = read(bench, {file: [row]}).entries
    video = question.sample.parts[0]
    assert (video.start, video.end) == (0.0, 0.5)
    mega = read("megabench", {"m.parquet": [MEGA]}).entries[0].item
    assert mega.subsets == {"task": ("sudoku",), "application": ("Planning",)}
    assert mega.meta["aggregation"]["field_weights"] == {"rows": 1, "sum": 3}


def test_every_phrase_of_a_picture_is_a_question(read: Any) -> None:
    first, second = read("refcoco", {"r.jsonl": [REF]}).entries
    assert [first.item.id, second.item.id] == ["9-1", "9-2"]
    assert [shown(first), shown(second)] == ["*Where is left cup?", "*Where is blue cup?"]
    assert first.item.cluster == second.item.cluster
    assert first.item.coordinate_system is CoordinateSystem.PX_ORIGINAL
    with pytest.raises(UserError, match="captions must be a list of texts that is not empty"):
        read("refcoco", {"r.jsonl": [REF | {"captions": []}]})


def test_several_files_are_groups_and_may_repeat_places(read: Any) -> None:
    bench, _, row, *_ = ROWS["MVBench of Hugging Face"]
    here = {"action_sequence.json": [row], "object_interaction.json": [row, row | {"answer": "sat"}]}
    asked = read(bench, here).entries
    assert len({question.item.id for question in asked}) == 3
    assert [question.item.subsets["file"] for question in asked] == [
        *(("action_sequence",), ("object_interaction",), ("object_interaction",))
    ]


def test_questions_without_a_rule_are_left_out_and_counted(read: Any) -> None:
    judged = MEGA | {"id": "8", "metric_info": "{'field_score_function': {'rows': 'gpt_4o_as_judge'}}"}
    whole = MEGA | {"id": "9", "metric_info": MEGA["metric_info"][:-1] + ", 'global_aux_metrics': {'all': 'x'}}"}
    questions = read("megabench", {"m.parquet": [MEGA, judged, whole]})
    assert (len(questions.entries), questions.num_unscorable) == (1, 2)
    with pytest.raises(UserError, match="metric_info must be a list|metric_info must be a mapping"):
        read("megabench", {"m.parquet": [MEGA | {"metric_info": "rows"}]})


def test_a_plan_whose_problem_cannot_be_read_is_left_out(read: Any) -> None:
    metric = "{'field_score_function': {'rows': 'symbolic_planning_test'}}"
    plan = MEGA | {"metric_info": metric, "eval_context": "{'domain_pddl': '(define', 'task_pddl': ''}"}
    assert read("megabench", {"m.parquet": [MEGA, plan | {"id": "8"}]}).num_unscorable == 1


@pytest.mark.parametrize("name", ["MVBench of Hugging Face", "VLMEvalKit's MVBench"])
def test_folders_of_frames_are_videos_of_three_frames_a_second(name: str, read: Any, tmp_path: Path) -> None:
    bench, _, row, *_ = ROWS[name]
    row, home = {**row, "video": "castle", "prefix": "tvqa/frames_fps3_hq"}, tmp_path / "tvqa/frames_fps3_hq/castle"
    asked = {f"episodic_reasoning.{'tsv' if 'prefix' in ROWS[name][2] else 'json'}": [row]}
    assert "tvqa/frames_fps3_hq/castle" in read(bench, asked).entries[0].problem
    home.mkdir(parents=True)
    for number in (1, 2, 10):
        (home / f"{number}.jpg").write_bytes(png_bytes(color=(number, 0, 0)))
    (video,) = read(bench, asked).entries[0].sample.media
    assert (video.path, video.fps, video.start, video.end) == (str(home), 3.0, 0.0, 0.5)
    (home / "2.jpg").write_bytes(png_bytes(color=(3, 0, 0)))
    assert read(bench, asked).entries[0].sample.media[0].sha256 != video.sha256
    (home / "notes.txt").touch()
    assert "holds notes.txt, which is not an image" in read(bench, asked).entries[0].problem


def test_a_canonical_row_says_the_rate_of_its_frames(read: Any, tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "1.png").write_bytes(png_bytes())
    row = {"id": "1", "videos": "frames", "prompt": "What?", "answer": "it", "answer_type": "text"}
    (question,) = read("canonical", {"c.jsonl": [row | {"fps": 2}]}).entries
    assert question.sample.parts[0].fps == 2.0
    (question,) = read("canonical", {"c.jsonl": [row]}).entries
    assert "is a folder; make its frames a video file, or name `fps`" in question.problem
    with pytest.raises(UserError, match="fps must be more than 0, is 0"):
        read("canonical", {"c.jsonl": [row | {"fps": 0}]})


REFCOCO = {"index": 1, "image": PLAIN, "question": "Where is <ref>it</ref>?", "category": "RefCOCO val"}
FRAMES = [
    (CoordinateSystem.NORM_1, "[0.1, 0.2, 0.2, 0.5]", [4, 6, 8, 15]),
    (CoordinateSystem.NORM_1000, "[100, 200, 200, 500]", [4, 6, 8, 15]),
    (CoordinateSystem.PX_ORIGINAL, "[4, 6, 8, 15]", [4, 6, 8, 15]),
]


@pytest.mark.parametrize(("frame", "written", "pixels"), FRAMES)
def test_boxes_of_vlmevalkit_are_in_the_named_coordinate_system(
    frame: CoordinateSystem, written: str, pixels: list[int], read: Any
) -> None:
    table = {"refcoco.tsv": [REFCOCO | {"answer": written}]}
    (question,) = read("refcoco", table, frame=frame).entries
    assert (shown(question), question.item.coordinate_system) == ("*Where is <ref>it</ref>?", frame)
    item = replace(question.item, image_size=Size(40, 30))
    text = f"<answer>{{'bbox': {pixels}}}</answer>"
    verdict = grade_response(BENCHMARKS["refcoco"], item, ItemResponse(id=item.id, text=text))
    assert (verdict.strict, verdict.official) == (True, True)
    with pytest.raises(UserError, match=r"does not say what boxes such as .+ name it with --coordinates"):
        read("refcoco", table)


def test_a_box_outside_its_coordinate_system_is_refused(read: Any) -> None:
    for frame, written, said in (
        (CoordinateSystem.NORM_1, "[4, 6, 8, 15]", "lies outside of norm_1, which ends at 1"),
        (CoordinateSystem.NORM_1000, "[4, 6, 1100, 15]", "lies outside of norm_1000, which ends at 1000"),
        (
            CoordinateSystem.PX_ORIGINAL,
            "[0.1, 0.2, 0.2, 0.5]",
            "smaller than one unit of px_original; is it in norm_1?",
        ),
    ):
        with pytest.raises(UserError, match=said):
            read("refcoco", {"refcoco.tsv": [REFCOCO | {"answer": written}]}, frame=frame)
    pixels = {"image": PICTURE, "instruction": "close", "bbox": [4.0, 6.0, 8.0, 16.0]}
    with pytest.raises(UserError, match="lies outside of norm_1, which ends at 1"):
        read("screenspot", {"s.parquet": [pixels | {"data_type": "icon", "data_source": "ios"}]})
    with pytest.raises(UserError, match="jxu124's says itself what boxes are measured in; leave out --coordinates"):
        read("refcoco", {"r.jsonl": [REF]}, frame=CoordinateSystem.NORM_1)


def test_corners_in_columns_of_their_own_are_pixels(read: Any) -> None:
    corners = {"bbox_x1": 4, "bbox_y1": 6.5, "bbox_x2": 8, "bbox_y2": 15, "width": 40, "height": 30}
    (question,) = read("refcoco", {"refcoco.tsv": [REFCOCO | {"answer": "[]"} | corners]}).entries
    assert (question.item.answer, question.item.coordinate_system) == ((4, 6.5, 8, 15), CoordinateSystem.PX_ORIGINAL)


@pytest.mark.parametrize("bench", sorted({*BENCHMARKS} - {"coco"}))
def test_unknown_columns_name_the_nearest_layout_of_every_benchmark(bench: str, read: Any) -> None:
    with pytest.raises(UserError, match=r"nearest known layout is .+, which needs '.+' too"):
        read(bench, {"odd.jsonl": [{"picture": "p.png", "what": "?", "right": 1}]})


def test_every_benchmark_reads_canonical_rows_last(read: Any) -> None:
    assert {*read_published_layouts()} | {"coco", "megabench"} == {*BENCHMARKS}
    for bench in read_published_layouts():
        assert get_layouts(bench)[-1].name == "canonical JSONL"
        row = {"id": "1", "images": "p.png", "prompt": "A or B?", "options": ["x", "y"], "answer": "B"}
        (question,) = read(bench, {"c.jsonl": [row | {"answer_type": "choice"}]}).entries
        assert question.item.answer == "B"
