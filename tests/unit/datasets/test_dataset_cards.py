"""Cards of datasets: the YAML of each reads a tiny file with the columns that the card lists."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from factories import make_context
from pyarrow import parquet
from ruamel.yaml import YAML

from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Region, Sample, Target, VideoRef
from mmrl.utils.plugin_args import read_plugin_options, validate_args
from mmrl.utils.plugins import load_function

CARDS = Path(__file__).parents[3] / "datasets/cards"
READERS = ("table", "chat", "coco", "reason_seg")
LAYOUTS = ("table.md", "chat.md", "vlmevalkit.md")  # cards of readers, tested with them
PNG = b"\x89PNG\r\n\x1a\n"
EMBEDDED = {"bytes": PNG, "path": None}
PX, FRACTIONS = CoordinateSystem.PX_ORIGINAL, CoordinateSystem.NORM_1
IMAGE, VIDEO = object(), object()  # any image and any video of an expected sample


def yaml_blocks(card):
    """Each YAML block of a card with the columns named before it."""
    blocks = re.findall(r"\*\*Columns\*\*: (.*?)\n\n```yaml\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL)
    return [(re.findall(r"`(\w+)`", columns), YAML(typ="safe").load(block)) for columns, block in blocks]


def make_row(columns, **known):
    """A row with these columns, null where nothing is known of them."""
    assert known.keys() <= set(columns)
    return {column: known.get(column) for column in columns}


MMMU_IMAGES = {f"image_{number}": EMBEDDED if number < 3 else None for number in range(1, 8)}
EGO = {
    "sample_id": 115, "video_source": "EpicKitchens", "question": "What next?", "answer": "open door",
    "video_basename": "v.mp4", "current_observation_basename": "i.png",
    "task_progress_metadata": [{"narration_text": "take cup", "start_frame": 3, "stop_frame": 9}],
}  # fmt: skip
TALK = [{"from": "human", "value": "<image>\nWhere is the cup?"}, {"from": "gpt", "value": [1, 2, 30, 40]}]
CHOICES = {"choice_a": "take cup", "choice_b": "open door", "choice_c": "sit", "choice_d": "go"}


def box(*corners, frame=PX):
    return Target(answer_type=AnswerType.BOX, value=corners, coordinate_system=frame)


def target(kind, value):
    return Target(answer_type=AnswerType(kind), value=value)


# Card, number of its YAML block, what its rows know, and the parts and target of each sample that comes of it.
CASES = [
    ("virl39k", 0, [
        {"qid": "Geo-1", "question": "<image>How large?", "answer": r"\boxed{17^\circ}", "image": ["images/1.jpg"]},
        {"qid": "Txt-2", "question": "1+1?", "answer": r"\boxed{2}", "image": []},
    ], [((IMAGE, "How large?"), target("latex", r"17^\circ")), (("1+1?",), target("latex", "2"))]),
    ("refcoco", 0, [{"ref_id": 7, "image_path": "coco/train2014/1.jpg", "bbox": [1.5, 2.0, 30.0, 40.0],
                     "captions": ["the left cup", "cup"], "sentences": [{"sent": "the left cup"}]}],
     [((IMAGE, "Where is the left cup?"), box(1.5, 2, 30, 40))]),
    ("refcoco", 1, [{"question_id": "9", "image": EMBEDDED, "bbox": [1.5, 2.0, 30.0, 40.0], "answer": ["cup", "mug"]}],
     [((IMAGE, "Where is cup?"), box(1.5, 2, 31.5, 42))]),
    ("refcoco", 2, [{"image": "train2014/1.jpg", "problem": "the left cup", "solution": [1, 2, 30, 40]}],
     [((IMAGE, "Where is the left cup?"), box(1, 2, 30, 40))]),
    ("refcoco", 3, [{"id": 1, "image": "train2014/1.jpg", "conversations": TALK}],
     [((IMAGE, "\nWhere is the cup?"), box(1, 2, 30, 40))]),
    ("geometry3k", 0, [{"images": [EMBEDDED], "problem": "<image>Find x.", "answer": r"8 \sqrt { 3 }"}],
     [((IMAGE, "Find x."), target("latex", r"8 \sqrt { 3 }"))]),
    ("clevr", 0, [{"image": EMBEDDED, "problem": "How many items?", "solution": "<answer> 3 </answer>"}],
     [((IMAGE, "How many items?"), target("number", 3))]),
    ("clevr", 1, [{"images": [EMBEDDED], "problem": "<image>How many?", "answer": "10"}],
     [((IMAGE, "How many?"), target("number", 10))]),
    ("superclevr", 0, [{"image_path": "./images/superCLEVR_1.png", "question": "How many cars?", "ground_truth": 4}],
     [((IMAGE, "How many cars?"), target("number", 4))]),
    ("mathvista", 0, [
        {"pid": "1", "decoded_image": EMBEDDED, "question": "Which?", "choices": ["1.2 m", "1.5 m"], "answer": "1.5 m",
         "question_type": "multi_choice", "answer_type": "text"},
        {"pid": "2", "decoded_image": EMBEDDED, "question": "How old?", "unit": "years", "answer": "14",
         "question_type": "free_form", "answer_type": "integer"},
        {"pid": "3", "decoded_image": EMBEDDED, "question": "How far?", "answer": "1.20", "precision": 2.0,
         "question_type": "free_form", "answer_type": "float"},
        {"pid": "4", "decoded_image": EMBEDDED, "question": "Both?", "answer": "[1, 2]",
         "question_type": "free_form", "answer_type": "list"},
    ], [
        ((IMAGE, "Which?\nA. 1.2 m\nB. 1.5 m"), target("choice", "B")),
        ((IMAGE, "How old? (Unit: years)"), target("number", 14)),
        ((IMAGE, "How far?"), target("number", 1.2)),
        ((IMAGE, "Both?"), target("text", "[1, 2]")),
    ]),
    ("mathverse", 0, [
        {"sample_index": "1", "image": EMBEDDED, "query_wo": "Find x.\nChoices:\nA:1\nB:2", "question": "",
         "answer": "B", "question_type": "multi-choice"},
        {"sample_index": "2", "image": EMBEDDED, "query_wo": "Find x.", "answer": "2°", "question_type": "free-form"},
    ], [((IMAGE, "Find x.\nChoices:\nA:1\nB:2"), target("choice", "B")), ((IMAGE, "Find x."), target("text", "2°"))]),
    ("mathvision", 0, [
        {"id": "4", "question": "Which kite?\n<image1>", "options": ["A", "B", "C"], "decoded_image": EMBEDDED,
         "image": "images/4.jpg", "answer": "C"},
        {"id": "5", "question": "How many?\n<image1>", "options": [], "decoded_image": EMBEDDED, "answer": "12"},
    ], [
        (("Which kite?\n", IMAGE, "\nA. A\nB. B\nC. C"), target("choice", "C")),
        (("How many?\n", IMAGE), target("text", "12")),
    ]),
    ("mmmu", 0, [
        {"id": "validation_Accounting_1", "question": "<image 1> fits?", "options": "['it\\'s <image 2>', '$6']",
         "answer": "B", "question_type": "multiple-choice", **MMMU_IMAGES},
        {"id": "validation_Accounting_2", "question": "<image 1> or <image 2>?", "options": "[]", "answer": "8",
         "question_type": "open", **MMMU_IMAGES},
    ], [
        ((IMAGE, " fits?\nA. it's ", IMAGE, "\nB. $6"), target("choice", "B")),
        ((IMAGE, " or ", IMAGE, "?"), target("text", "8")),
    ]),
    ("mmmu_pro", 0, [{"id": "1", "question": "<image 1> and <image 2>?", "options": str([*"123456789", "ten"]),
                      "answer": "J", **MMMU_IMAGES}],
     [((IMAGE, " and ", IMAGE, "?" + "".join(f"\n{a}. {n}" for n, a in enumerate("ABCDEFGHI", 1)) + "\nJ. ten"),
       target("choice", "J"))]),
    ("mmmu_pro", 1, [{"id": "1", "image": EMBEDDED, "options": "['1', '2']", "answer": "B"}],
     [((IMAGE, "Answer the question in the picture."), target("choice", "B"))]),
    ("emma", 0, [
        {"pid": "math_1", "question": "<image_1> or?", "options": ["a", "b"], "answer": "A", "image_1": EMBEDDED,
         "context": "A puzzle."},
        {"pid": "math_2", "question": "How many in <image_1>?", "options": [], "answer": "7", "image_1": EMBEDDED},
    ], [
        (("A puzzle.\n", IMAGE, " or?\nA. a\nB. b"), target("choice", "A")),
        (("How many in ", IMAGE, "?"), target("text", "7")),
    ]),
    ("screenspot", 0, [{"image": EMBEDDED, "instruction": "close this window", "bbox": [0.1, 0.2, 0.3, 0.4]}],
     [((IMAGE, "close this window"), box(0.1, 0.2, 0.3, 0.4, frame=FRACTIONS))]),
    ("screenspot", 1, [{"img_filename": "web_1.png", "instruction": "search", "bbox": [10, 20, 30, 40]}],
     [((IMAGE, "search"), box(10, 20, 40, 60))]),
    ("screenspot", 2, [{"id": "excel_0", "img_filename": "excel/1.png", "instruction": "save", "bbox": [1, 2, 9, 8]}],
     [((IMAGE, "save"), box(1, 2, 9, 8))]),
    ("ui_r1", 0, [{"img_filename": "image1.png", "instruction": "search bar", "bbox": [825, 72, 1673, 149]}],
     [((IMAGE, "search bar"), box(825, 72, 1673, 149))]),
    ("seed_bench_r1", 0, [
        {**EGO, **CHOICES, "golden_choice_idx": "B"},
        {**EGO, **CHOICES, "golden_choice_idx": "B", "sample_id": 116, "task_progress_metadata": []},
    ], [
        ((VIDEO, IMAGE, "What next?\nA. take cup\nB. open door\nC. sit\nD. go"), target("choice", "B")),
        ((IMAGE, "What next?\nA. take cup\nB. open door\nC. sit\nD. go"), target("choice", "B")),
    ]),
    ("seed_bench_r1", 1, [{**EGO, "negative_answers": ["take cup", "sit", "go", "run"]}],
     [((VIDEO, IMAGE, "What next?\nA. go\nB. open door\nC. sit\nD. take cup"), target("choice", "B"))]),
    ("textvqa", 0, [{"question_id": 34602, "question": "what brand?", "answers": ["nokia", "nokia", "Nokia"],
                     "image": EMBEDDED}], [((IMAGE, "what brand?"), target("text", "nokia"))]),
    ("ocrbench", 0, [{"question": "what is written?", "answer": ["CENTRE", "CENTER"], "image": EMBEDDED}],
     [((IMAGE, "what is written?"), target("text", "CENTRE"))]),
    ("coco", 0, [{
        "images": [{"id": 9, "file_name": "000000000009.jpg"}],
        "categories": [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"image_id": 9, "category_id": 17, "bbox": [1, 2, 3, 4.5], "iscrowd": 0},
            {"image_id": 9, "category_id": 18, "bbox": [5, 5, 5, 5], "iscrowd": 0},
            {"image_id": 9, "category_id": 17, "bbox": [9, 9, 1, 1], "iscrowd": 0},
            {"image_id": 9, "category_id": 17, "bbox": [0, 0, 50, 50], "iscrowd": 1},
            {"image_id": 9, "category_id": 1, "bbox": [0, 0, 50, 50], "iscrowd": 1},
        ]}],
     [((IMAGE, "Find every cat."), Target(answer_type=AnswerType.BOXES, coordinate_system=PX, value=(
         Region((1, 2, 4, 6.5), "cat"), Region((9, 9, 10, 10), "cat")))),
      ((IMAGE, "Find every dog."), Target(answer_type=AnswerType.BOXES, coordinate_system=PX, value=(
         Region((5, 5, 10, 10), "dog"),)))]),
    ("reason_seg", 0, [{"text": ["something to sit on", "the seat"], "is_sentence": True, "shapes": [
        {"label": "target", "points": [[10, 20], [30.5, 25], [20, 40]]},
        {"label": "target", "points": [[5, 30], [6, 31], [5, 32]]},
        {"label": "ignore", "points": [[0, 0], [1, 1], [0, 1]]},
    ]}], [((IMAGE, "Find what this means: something to sit on"), box(5, 20, 30.5, 40)),
          ((IMAGE, "Find what this means: the seat"), box(5, 20, 30.5, 40))]),
    ("mvbench", 0, [{"video": "ZS9XR.mp4", "question": "What happened?", "candidates": ["sat", "ran"], "answer": "ran",
                     "start": 11.1, "end": 19.6}],
     [((VIDEO, "What happened?\nA. sat\nB. ran"), target("choice", "B"))]),
    ("video_mme", 0, [{"question_id": "001-1", "videoID": "fFjv93ACGo8", "question": "When?", "answer": "B",
                       "options": ["A. At dawn.", "B. At noon."]}],
     [((VIDEO, "When?\nA. At dawn.\nB. At noon."), target("choice", "B"))]),
    ("visual_rft", 0, [{"image": EMBEDDED, "problem": "Which flower?", "solution": "<answer>sweet pea</answer>"}],
     [((IMAGE, "Which flower?"), target("text", "sweet pea"))]),
    ("mm_eureka", 0, [{"id": "0", "answer": r"\frac{1}{2}", "image_urls": ["file://{base}/1.png"], "conversations": [
        {"role": "system", "content": "Think."}, {"role": "user", "content": "<image>\nHow much?"}]}],
     [((IMAGE, "\nHow much?"), target("latex", r"\frac{1}{2}"))]),
    ("mm_eureka", 1, [{"id": "1", "image": EMBEDDED, "question": "<image>Which?\nA. 1\nB. 2", "answer": "B"}],
     [((IMAGE, "Which?\nA. 1\nB. 2"), target("choice", "B"))]),
    ("visual_jigsaw", 0, [{"images": ["1.png", "2.png"], "question": "Order?", "order": [2, 1]}],
     [((IMAGE, IMAGE, "Order?"), target("permutation", (2, 1)))]),
    ("llava_video", 0, [{"id": "1", "video": "a/1.mp4", "conversations": [
        {"from": "human", "value": "<image>\nWhat is done?"}, {"from": "gpt", "value": "A swim."}, TALK[0]]}],
     [((VIDEO, "\nWhat is done?"), target("text", "A swim."))]),
]  # fmt: skip

IDS = [f"{card}-{number}" for card, number, *_ in CASES]


@pytest.mark.parametrize(("card", "number", "known", "expected"), CASES, ids=IDS)
def test_yaml_of_a_card_reads_the_columns_that_it_lists(tmp_path, card, number, known, expected):
    columns, block = yaml_blocks(CARDS / f"{card}.md")[number]
    rows = [make_row(columns, **each) for each in known]
    place = make_context(tmp_path, schemes=("file",))
    text = json.dumps(rows, default=lambda content: {"hex": content.hex()}).replace("{base}", str(tmp_path))
    write(tmp_path, block, json.loads(text, object_hook=decode_bytes))
    fn = load_function(block["fn"], tmp_path, role="function")
    samples = list(fn(place, **validate_args(card, read_plugin_options(fn, skip=1), block["args"])))
    assert [(tuple(map(hide_media, sample.parts)), sample.target) for sample in samples] == [
        (parts, replace(expected_target, value=as_type_of(expected_target.value, sample.target.value)))
        for (parts, expected_target), sample in zip(expected, samples, strict=True)
    ]


def test_every_yaml_of_every_card_has_a_case():
    written = {
        f"{card.stem}-{number}"
        for card in CARDS.glob("*.md")
        if card.name not in LAYOUTS
        for number, (_, block) in enumerate(yaml_blocks(card))
        if block["fn"].split(":")[0].removeprefix("mmrl_datasets.readers.") in READERS
    }
    assert written == set(IDS)


def test_every_yaml_of_a_card_has_columns_before_it():
    for card in CARDS.glob("*.md"):
        text = card.read_text(encoding="utf-8")
        if card.name not in LAYOUTS and re.search(rf"fn: mmrl_datasets\.readers\.({'|'.join(READERS)}):", text):
            assert text.count("```yaml") == len(yaml_blocks(card)), card.name


@pytest.mark.parametrize("card", LAYOUTS)
def test_examples_of_a_reader_have_its_options(tmp_path, card):
    blocks = re.findall(r"```yaml\n(.*?)```", (CARDS / card).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in map(YAML(typ="safe").load, blocks):
        fn = load_function(block["fn"], tmp_path, role="function")
        validate_args(card, read_plugin_options(fn, skip=1), block["args"])


def hide_media(part):
    match part:
        case ImageRef():
            return IMAGE
        case VideoRef():
            return VIDEO
    return part


def as_type_of(expected, value):
    """Return `expected` as a list or tuple, as `value` is: cards do not say which."""
    return type(value)(expected) if isinstance(expected, tuple) else expected


def decode_bytes(mapping):
    return bytes.fromhex(mapping["hex"]) if mapping.keys() == {"hex"} else mapping


def write(base, block, rows):
    """The rows at the path that the YAML names, and a file at each path that they name."""
    args = block["args"]
    path = base / args["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    match block["fn"].split(".")[2].split(":")[0], path.suffix:
        case "reason_seg", _:
            path.mkdir()
            (path / "1.json").write_text(json.dumps(rows[0]))
            (path / "1.jpg").write_bytes(PNG)
        case "coco", _:
            path.write_text(json.dumps(rows[0]))
        case _, ".jsonl":
            path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        case _, ".json":
            path.write_text(json.dumps(rows))
        case _, ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case _:
            path.mkdir()
            split = args.get("split", "train")
            parquet.write_table(pyarrow.Table.from_pylist(rows), path / f"{split}-00000-of-00001.parquet")
    named = re.findall(r"[\w./-]+\.(?:png|jpg|mp4)", json.dumps(rows, default=str))
    for name in (*named, "fFjv93ACGo8.mp4"):
        for folder in ("", "videos/EpicKitchens", "images/EpicKitchens"):
            beside = path if path.is_dir() else path.parent
            root = base / args["media_root"] if "media_root" in args else base if str(base) in name else beside
            file = root / folder / name.rpartition(f"{base}/")[2]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(PNG)


def test_sample_keeps_the_columns_that_its_card_names(tmp_path):
    _, block = yaml_blocks(CARDS / "coco.md")[0]
    write(tmp_path, block, next(known for card, _, known, _ in CASES if card == "coco"))
    place = make_context(tmp_path)
    cat, dog = load_function(block["fn"], tmp_path, role="function")(place, **block["args"])
    assert isinstance(cat, Sample)
    assert (cat.id, cat.meta) == (
        "instances_val2017/val/9-17", {"category": "cat", "image_id": 9, "crowds": [[0, 0, 50, 50]]}
    )  # fmt: skip
    assert dog.meta["crowds"] == []
