"""VLMEvalKit's tables, COCO's annotations and ReasonSeg's outlines, in the layouts that they publish."""

import base64
import csv
import json

import pytest
from factories import write_file
from reader_files import INSTANCES, OUTLINES, PNG, check_rejected, stored_image

from mmrl.types import AnswerType, Target, UserError
from mmrl_datasets.readers import coco, reason_seg, vlmevalkit

# VLMEvalKit


def write_tsv(context, rows):
    """Write a table as pandas does: cells with tabs, quotes or line ends are quoted."""
    with (context.base_dir / "bench.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


BENCH = {"index": "0", "image": base64.b64encode(PNG).decode(), "question": 'Which "one"?\nLook.', "hint": "",
         "A": "cat", "B": "dog", "C": "", "D": "", "answer": "B", "category": "animals"}  # fmt: skip


def test_a_benchmark_of_vlmevalkit(context):
    many = [base64.b64encode(PNG + bytes([number])).decode() for number in range(2)]
    changes = [
        ({}, None),
        ({"image": "0", "hint": "They bark.", "answer": "dog"}, None),
        ({"image": str(many), "question": "<image> or <image>?", "answer": "A"}, None),
        ({"A": "B", "B": "A"}, None),
        ({"image": "7"}, "no earlier row"),
        ({"image": "%" * 70}, "is not base64"),
        ({"answer": "C"}, "from A to B"),
        ({"B": "", "C": "cow"}, "option B is empty"),
        ({"image": ""}, "both image and image_path are"),
    ]
    write_tsv(context, [BENCH | {"index": str(index)} | change for index, (change, _) in enumerate(changes)])
    one, same, two, letters, *bad = vlmevalkit.rows(context, path="bench.tsv")
    assert one.id == "bench/test/0"
    assert one.parts == (stored_image(context, PNG), 'Which "one"?\nLook.\nA. cat\nB. dog')
    assert one.target == Target(answer_type=AnswerType.CHOICE, value="B")
    assert one.meta == {"category": "animals"}
    assert (same.images, same.target) == (one.images, one.target)
    assert same.parts[1].startswith("They bark.\nWhich")
    assert two.images == (stored_image(context, PNG + b"\0"), stored_image(context, PNG + b"\1"))
    assert letters.target.value == "B"
    check_rejected(bad, [reason for _, reason in changes if reason])
    assert f"{context.base_dir / 'bench.tsv'}:10: " in bad[0].reason, "the line it ends on"


def test_a_benchmark_of_vlmevalkit_with_paths_and_open_answers(context):
    ref = write_file(context.base_dir / "images/a.png", b"a picture")
    row = {"index": "0", "image_path": "a.png", "question": "Count.", "answer": "3"}
    second, outside = {"index": "1", "image_path": "['a.png', 'a.png']"}, {"index": "2", "image_path": "../../b.tsv"}
    write_tsv(context, [row, row | second, row | outside])
    one, two, bad = vlmevalkit.rows(context, path="bench.tsv", answer_type="number", media_root="images")
    assert (one.parts, one.target.value, two.images) == ((ref, "Count."), 3, (ref, ref))
    check_rejected([bad], ["lies outside data.media_roots"])
    write_tsv(context, [{"index": "0", "question": "Count.", "answer": "3"}])
    with pytest.raises(UserError, match="there is no column 'image'"):
        list(vlmevalkit.rows(context, path="bench.tsv", answer_type="number"))


# COCO


def read_coco(context, categories=(), **changes):
    write_file(context.base_dir / "1.jpg", PNG)
    (context.base_dir / "coco.json").write_text(json.dumps(INSTANCES | changes))
    return list(coco.rows(context, path="coco.json", categories=categories))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "must be an object with the lists images, categories, annotations"),
        ({"images": [{"id": 1}]}, r"images\[0\] must have id, file_name; is \{'id': 1\}"),
        ({"images": [{"id": [1], "file_name": "1.jpg"}]}, r"images\[0\] must have id, file_name"),
        ({"annotations": [{"image_id": 1}]}, r"annotations\[0\] must have image_id, category_id, bbox"),
        (
            {"annotations": [{"image_id": 5, "category_id": 2, "bbox": []}]},
            "has image 5 and category 2, one of which is missing",
        ),
        ({"annotations": []}, r"coco\.json: holds no row"),
    ],
)
def test_a_file_that_does_not_hold_coco_annotations_is_refused(context, changes, message):
    with pytest.raises(UserError, match=message):
        read_coco(context, **changes)


@pytest.mark.parametrize(
    ("bbox", "reason"),
    [
        ([1, 2, 3], "bbox must be four numbers xywh"),
        ([1, 2, 0, 4], "inverted or empty"),
        ([float("nan"), 2, 3, 4], "not a box"),
    ],
)
def test_an_annotation_with_a_bad_box_rejects_its_question(context, bbox, reason):
    rows = read_coco(context, annotations=[{"image_id": 1, "category_id": 2, "bbox": bbox}])
    check_rejected(rows, [reason])
    assert "image 1, category cat" in rows[0].reason


def test_an_unknown_coco_category_is_refused(context):
    with pytest.raises(UserError, match=r"has no 'cats' \(did you mean 'cat'\?\)"):
        read_coco(context, categories=("cats",))
    with pytest.raises(UserError, match="no such file"):
        list(coco.rows(context, path="none.json"))


# ReasonSeg


def read_outlines(context, content=b"", media_root=None, **changes):
    folder = context.base_dir / "seg"
    write_file((context.base_dir / media_root if media_root else folder) / "1.jpg", PNG)
    write_file(folder / "1.json", content or json.dumps(OUTLINES | changes).encode())
    return list(reason_seg.rows(context, path="seg", media_root=media_root))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"content": b'{"text": ["a caf\xe9"'}, "is not JSON in UTF-8"),
        ({"content": b'{"text": ["a seat\x81"]}'}, "is not JSON in UTF-8"),
        ({"text": "a seat"}, "text and shapes must be lists"),
        ({"shapes": [{"label": "ignore", "points": [[1, 2], [3, 4]]}]}, "no shape is labelled target"),
        ({"shapes": [{"label": "target", "points": [[1]]}]}, "a corner must be [x, y], is [1]"),
        ({"shapes": [{"label": "target"}]}, "a shape must have label and points"),
        ({"shapes": [{"label": "target", "points": [[3, 4], [1, float("nan")]]}]}, "a corner must be [x, y], is [1"),
        ({"shapes": [{"label": "target", "points": [[1, 2], [1, 4]]}]}, "empty or inverted"),
    ],
)
def test_bad_outlines_are_rejected(context, changes, reason):
    check_rejected(read_outlines(context, **changes), [reason])


def test_outlines_in_the_encoding_of_windows_are_read(context):
    """Some files of ReasonSeg are in cp1252, on which LISA's get_mask_from_json falls back."""
    content = json.dumps(OUTLINES | {"text": ["the café’s seat"]}, ensure_ascii=False).encode("cp1252")
    (sample,) = read_outlines(context, content)
    assert sample.parts[-1] == "the café’s seat"


def test_images_of_outlines_may_lie_in_a_folder_of_their_own(context):
    (sample,) = read_outlines(context, media_root="pictures")
    assert sample.images[0].path == str(context.base_dir / "pictures" / "1.jpg")


def test_a_missing_folder_of_outlines_is_refused(context):
    with pytest.raises(UserError, match="no such folder"):
        list(reason_seg.rows(context, path="none"))
