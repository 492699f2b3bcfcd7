"""Files of benchmarks become questions and items: published tables, canonical JSONL, COCO, and refused rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_rows import PNG, PNG_BASE64, as_text, load_published_rows, read, write_rows
from factories import make_context, make_sample, png_bytes
from PIL import Image

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.readers.published import get_layouts, read_published_layouts
from mmrl.benchmarks.readers.questions import PROMPT_ANSWER_TYPES, questions_from_samples, read_questions
from mmrl.benchmarks.registry import BENCHMARKS, get_benchmark
from mmrl.benchmarks.verdict import Verdict
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Size, UserError, VideoRef
from mmrl_datasets.media_files import RenderedVideo, save_mp4

ROWS = load_published_rows()
MEGA = ROWS["MEGA-Bench of Hugging Face"]["row"]
MVBENCH = ROWS["MVBench of Hugging Face"]["row"]
REF = ROWS["RefCOCO of jxu124"]["row"]
TEXT = {"id": "1", "question": "?", "answer": "z", "answer_type": "text", "images": "p.png"}
KIT = {"index": 1, "image": PNG_BASE64, "question": "Which?"}


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> bytes:
    """The bytes of a video of one second."""
    folder = tmp_path_factory.mktemp("film")
    frames = [Image.new("RGB", (32, 32), (9 * number, 0, 0)) for number in range(4)]
    return Path(save_mp4(RenderedVideo(frames=frames, fps=4), folder, "f").path).read_bytes()


@pytest.fixture
def folder(tmp_path, film) -> Path:
    """A folder with images and videos in every subfolder that a layout expects."""
    for name in ("", "images/Ego4D", "videos/Ego4D", "star/Charades_v1_480"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "p.png").write_bytes(png_bytes())
        for video in ("f.mp4", "c.mp4"):
            (tmp_path / name / video).write_bytes(film)
    return tmp_path


def grade(benchmark: str, item: Item, text: str) -> Verdict:
    return grade_response(get_benchmark(benchmark), item, ItemResponse(id=item.id, text=text))


@pytest.mark.parametrize("name", ROWS)
def test_published_row_is_asked_and_its_answer_has_full_marks(name, folder):
    entry = ROWS[name]
    question = read(folder, entry["benchmark"], entry["row"], name=entry["file"]).entries[0]
    item = question.item
    assert as_text(question) == entry["asked"]
    correct = item.answer_text if item.options else item.answer
    assert (list(correct) if isinstance(correct, tuple) else correct) == entry["correct"]
    assert question.sample.target.answer_type is PROMPT_ANSWER_TYPES[item.answer_type]
    verdict = grade(entry["benchmark"], replace(item, image_size=Size(40, 30)), entry["response"])
    assert verdict.score == 1.0, verdict


@pytest.mark.parametrize(
    ("benchmark", "file", "row", "letter", "text"),
    [
        # test_Biology_146 of MMMU/MMMU_Pro: five labels of an image, in an order of their own.
        (
            *("mmmu_pro", "rows.parquet"),
            ROWS["MMMU-Pro of Hugging Face, standard"]["row"] | {"options": "['B', 'D', 'E', 'A', 'C']", "answer": "C"},
            *("C", "E"),
        ),
        # phy_123 of luckychao/EMMA: options are small letters, and so is the answer, which is still a place.
        (
            *("emma", "rows.parquet"),
            ROWS["EMMA of Hugging Face, open"]["row"] | {"options": ["e", "d", "b"], "answer": "b"},
            *("B", "d"),
        ),
        ("mmmu_pro", "kit.tsv", KIT | dict(zip("ABCDE", "BDEAC", strict=True)) | {"answer": "C"}, "C", "E"),
        # MVBench gives the text.
        ("mvbench", "rows.json", MVBENCH | {"candidates": ["B", "C", "A"], "answer": "C"}, "B", "C"),
    ],
)
def test_option_whose_text_is_a_letter_is_not_confused_with_its_place(benchmark, file, row, letter, text, folder):
    (question,) = read(folder, benchmark, row, name=file).entries
    assert (question.item.answer, question.item.answer_text) == (letter, text)
    assert question.sample.target.value == letter
    if benchmark == "mmmu_pro":
        for said in "ABCDE":
            verdict = grade(benchmark, question.item, f"Answer: {said}")
            assert verdict.strict is verdict.official is (said == letter)


@pytest.mark.parametrize(
    ("columns", "precision"),
    [
        ({"answer": "1.2"}, 1),
        ({"answer": "1.20"}, 2),
        ({"answer": "12"}, None),
        ({"answer": "1.2", "precision": "2.0"}, 2),
        ({"answer": "12", "answer_type": "integer"}, None),
    ],
)
def test_float_of_vlmevalkit_is_compared_to_its_precision(columns, precision, folder):
    row = ROWS["VLMEvalKit's MathVista, float"]["row"] | {"unit": "cm"} | columns
    item = read(folder, "mathvista", row, name="kit.tsv").entries[0].item
    assert (item.precision, item.unit) == (precision, "cm")


def test_precision_of_vlmevalkit_must_be_whole(folder):
    row = ROWS["VLMEvalKit's MathVista, float"]["row"]
    rows = (row | {"precision": "1"}, row | {"index": 3, "precision": "x"})
    good, bad = read(folder, "mathvista", *rows, name="kit.tsv").entries
    assert not good.problem
    assert "precision is 'x'" in bad.problem


def test_equal_options_differ_by_letter_only(folder):
    row = {**TEXT, "options": ["50", "20", "50"], "answer_type": "choice"}
    by_letter, by_text = read(folder, "canonical", row | {"answer": "C"}, row | {"id": "2", "answer": "50"}).entries
    for text, by_place in (("(A)", False), ("(C)", True), ("B", False), ("The answer is 50.", True)):
        assert grade("canonical", by_letter.item, text).strict is by_place
        assert grade("canonical", by_text.item, text).strict is (text != "B")


def test_layout_gives_clips_subsets_clusters_and_coordinate_systems(folder):
    (question,) = read(folder, "mvbench", MVBENCH, name="action_sequence.json").entries
    video = question.sample.media[0]
    assert (video.start, video.end) == (0.0, 0.5)
    mega = read(folder, "megabench", MEGA, name="m.parquet").entries[0].item
    assert mega.subsets == {"task": ("sudoku",), "application": ("Planning",)}
    assert mega.meta["aggregation"]["field_weights"] == {"rows": 1, "sum": 3}
    entry = ROWS["ScreenSpot of Hugging Face"]
    item = read(folder, "screenspot", entry["row"], name="rows.parquet").entries[0].item
    assert (item.coordinate_system, item.answer_type) == (CoordinateSystem.NORM_1, "point")
    (pixels,) = read(folder, "screenspot", ROWS["ScreenSpot-v2"]["row"], name="v2.json").entries
    assert pixels.item.coordinate_system is CoordinateSystem.PX_ORIGINAL
    assert (pixels.sample.target.answer_type, pixels.sample.target.value) == (AnswerType.POINT, (8.0, 14.0))


def test_digest_depends_on_what_is_shown_of_a_file_and_not_on_its_path():
    def digest(media):
        return questions_from_samples([make_sample(3, parts=(media, "?"))]).digest()

    image, video = ImageRef(path="a.png", sha256="12"), VideoRef(path="a.mp4", sha256="12")
    assert digest(image) == digest(replace(image, path="b/c.png"))
    assert digest(video) == digest(replace(video, path="b/c.mp4"))
    shown = [image, replace(image, sha256="34"), replace(image, timestamp=1.0), replace(image, crop=(0, 0, 1, 1))]
    shown += [replace(video, start=1.0), replace(video, end=1.0), replace(video, start=0.0), replace(video, fps=1.0)]
    assert len({*map(digest, shown)}) == len(shown)


def test_every_caption_of_an_image_is_a_question(folder):
    first, second = read(folder, "refcoco", REF).entries
    assert [first.item.id, second.item.id] == ["9-1", "9-2"]
    assert [as_text(first), as_text(second)] == ["*Where is left cup?", "*Where is blue cup?"]
    assert first.item.cluster == second.item.cluster
    assert first.item.coordinate_system is CoordinateSystem.PX_ORIGINAL


def test_vlmevalkit_image_may_be_the_index_of_an_earlier_row(tmp_path):
    rows = [
        {**KIT, "A": "red", "B": "blue", "answer": "B", "category": "hue"},
        {**KIT, "index": 2, "image": 1, "A": "left", "B": "right", "answer": "A", "category": "place"},
    ]
    first, second = read(tmp_path, "mmmu_pro", *rows, name="kit.tsv").entries
    assert as_text(first) == "*Which?\nA. red\nB. blue"
    assert (first.item.answer_text, second.item.answer_text) == ("blue", "left")
    assert first.item.cluster == second.item.cluster
    assert second.item.subsets == {"category": ("place",)}


def test_canonical_row_may_have_prompt_and_subsets(folder):
    row = {"id": 1, "images": ["p.png"], "prompt": "Say A or B.", "options": ["x", "y"], "answer": "y"}
    (question,) = read(folder, "canonical", {**row, "answer_type": "choice", "meta": {"level": 2}}).entries
    assert as_text(question) == "*Say A or B."
    assert question.item.subsets == {"level": ("2",)}


def test_coco_asks_for_each_category_of_each_image(folder):
    tables = {
        "images": [{"id": 1, "file_name": "p.png"}],
        "categories": [{"id": 2, "name": "cat"}],
        "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": 0}],
    }
    (folder / "instances.json").write_text(json.dumps(tables))
    (question,) = read_questions(get_benchmark("coco"), ["instances.json"], make_context(folder)).entries
    assert question.item.answer_type == "boxes"
    assert [(region.coordinates, region.label) for region in question.item.answer] == [((1, 2, 4, 6), "cat")]


def test_several_files_are_subsets_and_may_repeat_row_numbers(folder):
    files = {"action_sequence.json": [MVBENCH], "object_interaction.json": [MVBENCH, MVBENCH | {"answer": "sat"}]}
    for name, rows in files.items():
        write_rows(folder / name, rows)
    questions = read_questions(get_benchmark("mvbench"), [*files], make_context(folder)).entries
    assert len({question.item.id for question in questions}) == 3
    assert [question.item.subsets["file"][0] for question in questions] == [
        *("action_sequence", "object_interaction", "object_interaction")
    ]


def test_rows_that_no_rule_scores_are_left_out_and_counted(folder):
    judged = MEGA | {"id": "8", "metric_info": "{'field_score_function': {'rows': 'gpt_4o_as_judge'}}"}
    whole = MEGA | {"id": "9", "metric_info": MEGA["metric_info"][:-1] + ", 'global_aux_metrics': {'all': 'x'}}"}
    plan = MEGA | {
        "id": "10",
        "metric_info": "{'field_score_function': {'rows': 'symbolic_planning_test'}}",
        "eval_context": "{'domain_pddl': '(define', 'task_pddl': ''}",  # cannot be read
    }
    questions = read(folder, "megabench", MEGA, judged, whole, plan, name="m.parquet")
    assert (len(questions.entries), questions.num_unscorable) == (1, 3)


@pytest.mark.parametrize("name", ["MVBench of Hugging Face", "VLMEvalKit's MVBench"])
def test_folder_of_frames_is_a_video_of_three_frames_a_second(name, folder):
    row = ROWS[name]["row"] | {"video": "castle", "prefix": "tvqa/frames_fps3_hq"}
    file = "episodic_reasoning" + Path(ROWS[name]["file"]).suffix
    frames = folder / "tvqa/frames_fps3_hq/castle"

    def read_row():
        return read(folder, "mvbench", row, name=file).entries[0]

    assert "tvqa/frames_fps3_hq/castle" in read_row().problem
    frames.mkdir(parents=True)
    for number in (1, 2, 10):
        (frames / f"{number}.jpg").write_bytes(png_bytes(color=(number, 0, 0)))
    (video,) = read_row().sample.media
    assert (video.path, video.fps, video.start, video.end) == (str(frames), 3.0, 0.0, 0.5)
    (frames / "2.jpg").write_bytes(png_bytes(color=(3, 0, 0)))
    assert read_row().sample.media[0].sha256 != video.sha256
    (frames / "notes.txt").touch()
    assert "notes.txt" in read_row().problem


def test_canonical_row_states_the_rate_of_its_frames(tmp_path):
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "1.png").write_bytes(png_bytes())
    row = {"id": "1", "videos": "frames", "prompt": "What?", "answer": "it", "answer_type": "text"}
    with_rate, without_rate = read(tmp_path, "canonical", row | {"fps": 2}, row | {"id": "2"}).entries
    assert with_rate.sample.media[0].fps == 2.0
    assert "`fps`" in without_rate.problem


# VLMEvalKit's RefCOCO, whose table does not state the coordinate system.
REFCOCO = {"index": 1, "image": PNG_BASE64, "question": "Where is <ref>it</ref>?", "category": "RefCOCO val"}


@pytest.mark.parametrize(
    ("coordinate_system", "box"),
    [("norm_1", "[0.1, 0.2, 0.2, 0.5]"), ("norm_1000", "[100, 200, 200, 500]"), ("px_original", "[4, 6, 8, 15]")],
)
def test_box_is_in_the_coordinate_system_that_the_user_names(coordinate_system, box, tmp_path):
    system = CoordinateSystem(coordinate_system)
    row = REFCOCO | {"answer": box}
    (question,) = read(tmp_path, "refcoco", row, name="refcoco.tsv", coordinate_system=system).entries
    assert (as_text(question), question.item.coordinate_system) == ("*Where is <ref>it</ref>?", system)
    item = replace(question.item, image_size=Size(40, 30))
    verdict = grade("refcoco", item, "<answer>{'bbox': [4, 6, 8, 15]}</answer>")
    assert (verdict.strict, verdict.official) == (True, True)


def test_corners_in_columns_are_pixels(tmp_path):
    corners = {"bbox_x1": 4, "bbox_y1": 6.5, "bbox_x2": 8, "bbox_y2": 15, "width": 40, "height": 30}
    (question,) = read(tmp_path, "refcoco", REFCOCO | {"answer": "[]"} | corners, name="refcoco.tsv").entries
    assert (question.item.answer, question.item.coordinate_system) == ((4, 6.5, 8, 15), CoordinateSystem.PX_ORIGINAL)


NORM_1, NORM_1000, PIXELS = CoordinateSystem.NORM_1, CoordinateSystem.NORM_1000, CoordinateSystem.PX_ORIGINAL
SCREEN = {"image": PNG, "instruction": "close", "bbox": [4.0, 6.0, 8.0, 16.0], "data_type": "a", "data_source": "b"}
MATHVISTA = {name: value for name, value in ROWS["MathVista, choice"]["row"].items() if name != "decoded_image"}


@pytest.mark.parametrize(
    ("benchmark", "file", "rows", "coordinate_system", "message"),
    [
        ("refcoco", "r.tsv", [REFCOCO | {"answer": "[4, 6, 8, 15]"}], None, "--coordinates"),
        ("refcoco", "r.tsv", [REFCOCO | {"answer": "[4, 6, 8, 15]"}], NORM_1, "outside of norm_1, which ends at 1"),
        ("refcoco", "r.tsv", [REFCOCO | {"answer": "[4, 6, 1100, 15]"}], NORM_1000, "outside of norm_1000"),
        ("refcoco", "r.tsv", [REFCOCO | {"answer": "[0.1, 0.2, 0.2, 0.5]"}], PIXELS, "is it in norm_1?"),
        ("refcoco", "r.jsonl", [REF], NORM_1, "jxu124's .* leave out norm_1"),
        ("refcoco", "r.jsonl", [REF | {"captions": []}], None, "captions must be"),
        ("screenspot", "s.parquet", [SCREEN], None, "outside of norm_1"),
        ("megabench", "m.parquet", [MEGA | {"metric_info": "rows"}], None, "metric_info must be"),
        ("megabench", "m.parquet", [MEGA | {"task_description": 3}], None, "question must be text that is not empty"),
        ("screenspot", "s.jsonl", [TEXT], None, "the answer_type 'text' is not scored by screenspot, which takes"),
        ("mathvista", "m.jsonl", [MATHVISTA], None, "MathVista of Hugging Face, which needs 'decoded_image'"),
        ("canonical", "c.jsonl", [TEXT, TEXT], None, "1 of 2 rows .*appears twice: 1"),
        ("canonical", "c.jsonl", [TEXT | {"answer_type": "choice", "options": ["a", "b"]}], None, "of the options"),
        (
            *("canonical", "c.jsonl", [{"image" if key == "images" else key: TEXT[key] for key in TEXT}], None),
            "c.jsonl:1: the column 'image' is unknown; did you mean 'images'?",
        ),
        ("canonical", "c.jsonl", [TEXT | {"question": ""}], None, "neither a question nor a prompt"),
        (
            *("canonical", "c.jsonl", [TEXT | {"id": id, "answer_type": "mood"} for id in "12"], None),
            "none of 2 rows is a question of canonical:\n  1: .*c.jsonl:1: answer_type is 'mood'",
        ),
        ("canonical", "c.jsonl", [TEXT | {"videos": "f.mp4", "fps": 0}], None, "fps must be more than 0"),
    ],
)
def test_unusable_file_is_refused_with_the_reason(benchmark, file, rows, coordinate_system, message, folder):
    with pytest.raises(UserError, match=f"(?s){message}"):
        read(folder, benchmark, *rows, name=file, coordinate_system=coordinate_system)


@pytest.mark.parametrize("benchmark", sorted({*BENCHMARKS} - {"coco"}))
def test_unknown_columns_name_the_nearest_layout_of_every_benchmark(benchmark, tmp_path):
    with pytest.raises(UserError, match=r"nearest known layout is .+, which needs '.+' too"):
        read(tmp_path, benchmark, {"picture": "p.png", "what": "?", "right": 1})


def test_every_benchmark_reads_canonical_rows_last(folder):
    assert {*read_published_layouts()} | {"coco", "megabench"} == {*BENCHMARKS}
    row = {"id": "1", "images": "p.png", "prompt": "A or B?", "options": ["x", "y"], "frame": "px_original"}
    answers = {"choice": "B", "count": 3, "box": (1, 2, 3, 4), "point": (1, 2, 3, 4)}
    for benchmark in read_published_layouts():
        assert get_layouts(benchmark)[-1].name == "canonical JSONL"
        answer_type = next(name for name in answers if name in get_benchmark(benchmark).answer_types)
        asked = row | {"answer_type": answer_type, "answer": answers[answer_type]}
        (question,) = read(folder, benchmark, asked).entries
        assert question.item.answer == answers[answer_type]


def test_lines_that_are_not_json_are_not_called_no_rows(folder):
    (folder / "rows.jsonl").write_text("{\n[1]\n")
    with pytest.raises(UserError, match=r"none of 2 rows is a question of canonical:\n.*rows.jsonl:1: not a line"):
        read_questions(get_benchmark("canonical"), ["rows.jsonl"], make_context(folder))


def test_a_split_of_files_is_refused(folder):
    (folder / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="^split 'testA': only a folder of questions has splits; leave it out"):
        read_questions(get_benchmark("canonical"), ["rows.jsonl"], make_context(folder), split="testA")


def test_missing_image_keeps_the_item_and_names_the_problem(folder):
    questions = read(folder, "canonical", TEXT | {"images": "gone.png"})
    assert not questions.samples
    assert "gone.png" in questions.problems["1"]
    (question,) = read(folder, "mvbench", MVBENCH | {"video": "v" * 300}, name="action_sequence.json").entries
    assert "File name too long" in question.problem


def test_digest_depends_on_content_and_not_on_the_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.png").write_bytes(png_bytes())
    digests = [read(tmp_path / name, "canonical", TEXT).digest() for name in ("a", "b")]
    other = read(tmp_path / "b", "canonical", TEXT | {"answer": "y"}).digest()
    assert digests[0] == digests[1] != other
