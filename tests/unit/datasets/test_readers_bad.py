"""Readers on bad files: other encodings, empty and broken files, wrong types; none may raise anything else."""

import json
import random

import pytest
from factories import make_context

from mmrl.types import RejectedRow, Sample, UserError
from mmrl_datasets.readers import chat, coco, reason_seg, table, vlmevalkit

COLUMNS = {"question": "q", "answer": "a"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "1.jpg").write_bytes(PNG)
    return make_context(tmp_path)


def read(place, name, content, **options):
    (place.base_dir / name).write_bytes(content)
    return list(table.rows(place, **({"path": name, "columns": COLUMNS, "answer_type": "text"} | options)))


# Encodings

ROWS = {"a.jsonl": '{"q": "Où?", "a": "là"}\n', "a.json": '[{"q": "Où?", "a": "là"}]', "a.tsv": "q\ta\nOù?\tlà\n"}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_is_read_with_or_without_a_mark(place, name, encoding):
    (sample,) = read(place, name, ROWS[name].encode(encoding))
    assert (sample.parts, sample.target.value) == (("Où?",), "là")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_refused_or_rejected(place, name, encoding):
    try:
        results = read(place, name, ROWS[name].encode(encoding))
    except UserError as error:
        assert name in str(error)
        str(error).encode()  # can be printed
    else:
        assert results, "not one row, and nobody told"
        assert all(isinstance(result, RejectedRow) for result in results)


def test_a_latin_cell_spoils_its_row_and_a_latin_header_the_file(place):
    lines = [b"q\ta\n", "Où?\tlà\n".encode("latin-1"), "Où?\tlà\n".encode(), b"1+1?\t2\n"]
    bad, good, other = read(place, "a.tsv", b"".join(lines))
    assert "a.tsv:2: is not UTF-8" in bad.reason
    assert (good.parts, other.parts) == (("Où?",), ("1+1?",))
    with pytest.raises(UserError, match=r"a\.tsv: the header is not UTF-8; save the file as UTF-8"):
        read(place, "a.tsv", "où\tq\ta\n1\t2\t3\n".encode("latin-1"))


def test_mixed_lines_of_json(place):
    lines = ['{"q": "Où?", "a": "là"}\n'.encode(code) for code in ("utf-8", "latin-1", "utf-8")]
    one, bad, three = read(place, "a.jsonl", b"".join(lines))
    assert (one.parts, three.parts) == (("Où?",), ("Où?",))
    assert "a.jsonl:2: not a line of JSON ('utf-8' codec" in bad.reason


# Nothing, and too much


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.tsv", b"q\ta\n")]
)
def test_a_file_without_rows_is_refused(place, name, content):
    with pytest.raises(UserError, match=rf"{name}: holds no row"):
        read(place, name, content)


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, True, [], ["a"], {}, {"a": 1}, "", " ", "\ud800", float("nan"), 10**400]
)
@pytest.mark.parametrize(
    "role", ["question", "answer", "images", "videos", "choices", "label", "thinking", "media_index", "id"]
)
def test_a_value_of_any_type_in_any_role_makes_a_sample_or_a_reject(place, role, value):
    columns = {"question": "q", "answer": "a", role: "x"}
    row = {"q": "?", "a": "A", "x": value}
    results = read(place, "a.jsonl", json.dumps(row).encode(), columns=columns, answer_type="choice")
    assert [type(result) for result in results] in ([Sample], [RejectedRow])


# Mutations: whatever is done to a good file ends in samples, rejects or a refusal

TALK = [{"from": "human", "value": "<image>How many?"}, {"from": "gpt", "value": "3"}]
LABELME = {"text": ["a seat"], "is_sentence": True, "shapes": [{"label": "target", "points": [[1, 2], [30, 40]]}]}
INSTANCES = {
    "images": [{"id": 1, "file_name": "1.jpg"}],
    "categories": [{"id": 2, "name": "cat"}],
    "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": 0}],
}
GOOD = {
    "t.jsonl": json.dumps({"q": "Is {{ it }}?", "a": "3", "i": "1.jpg", "c": [1, 2, 30, 40]}) + "\n",
    "c.json": json.dumps([{"id": 1, "image": "1.jpg", "talk": TALK}]),
    "b.tsv": 'index\timage_path\tquestion\tA\tB\tanswer\n1\t1.jpg\t"What, so?"\tcat\tdog\tB\n',
    "coco.json": json.dumps(INSTANCES),
    "seg/1.json": json.dumps(LABELME),
}


def everything(place, name):
    match name:
        case "t.jsonl":
            columns = {"question": "{{ q }} {{ c[0] }}", "answer": "c", "images": "i"}
            return table.rows(place, path=name, columns=columns, answer_type="box", coordinates="px_original")
        case "c.json":
            return chat.rows(
                place, path=name, columns={"turns": "talk", "images": "image", "id": "id"}, answer_type="number"
            )
        case "b.tsv":
            return vlmevalkit.rows(place, path=name)
        case "coco.json":
            return coco.rows(place, path=name)
    (place.base_dir / "seg" / "1.jpg").write_bytes(PNG)
    return reason_seg.rows(place, path="seg")


def mutated(content, rng):
    """Overwrite, delete, insert, double or cut off a few bytes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        piece = rng.choice(
            [b"\0", b"\xff", b'"', b"[", b"}", b",", b"1e999", b"NaN", b"null", b"-1", b"\t", b"<image>", b"{{"]
        )
        content = rng.choice([
            content[:at] + piece + content[at + 1 :],
            content[:at] + content[at + rng.randint(1, 9) :],
            content[:at] + piece + content[at:],
            content[:at] + content[max(0, at - 20) :],
            content[:at],
        ])  # fmt: skip
    return content


@pytest.mark.parametrize("name", GOOD)
def test_mutated_files_end_in_samples_rejects_or_a_refusal(place, name):
    (place.base_dir / "seg").mkdir()
    (place.base_dir / name).write_text(GOOD[name])
    assert all(isinstance(result, Sample) for result in everything(place, name)), "the good file is good"
    rng, ends = random.Random(f"mutate {name}"), set()
    for _ in range(300):
        (place.base_dir / name).write_bytes(mutated(GOOD[name].encode(), rng))
        try:
            ends |= {type(result) for result in everything(place, name)}
        except UserError as error:
            assert str(error)
            ends.add(UserError)
    assert {UserError, RejectedRow} & ends


# Joined layouts


def instances(place, **changed):
    (place.base_dir / "coco.json").write_text(json.dumps(INSTANCES | changed))
    return coco.rows(place, path="coco.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": None}, "must be an object with the lists images, categories, annotations"),
        ({"images": [{"id": 1}]}, r"images\[0\] must have id, file_name; is \{'id': 1\}"),
        ({"annotations": [{"image_id": 1}]}, r"annotations\[0\] must have image_id, category_id, bbox"),
        ({"annotations": [{"image_id": 5, "category_id": 2, "bbox": []}]}, "names image 5 and category 2: one is not"),
        ({"images": [{"id": [1], "file_name": "1.jpg"}]}, r"images\[0\] must have id, file_name"),
        ({"annotations": []}, r"coco\.json: holds no row"),
    ],
)
def test_files_that_are_no_annotations_are_refused(place, changed, message):
    with pytest.raises(UserError, match=message):
        list(instances(place, **changed))


@pytest.mark.parametrize(
    ("bbox", "reason"),
    [
        ([1, 2, 3], "bbox must be four numbers xywh"),
        ([1, 2, 0, 4], "inverted or empty"),
        ([float("nan"), 2, 3, 4], "not a box"),
    ],
)
def test_an_annotation_with_a_bad_box_spoils_its_question(place, bbox, reason):
    (bad,) = instances(place, annotations=[{"image_id": 1, "category_id": 2, "bbox": bbox}])
    assert reason in bad.reason
    assert "image 1, category cat" in bad.reason


def test_only_known_categories_can_be_asked_for(place):
    instances(place)
    with pytest.raises(UserError, match=r"has no 'cats' \(did you mean 'cat'\?\)"):
        list(coco.rows(place, path="coco.json", categories=("cats",)))
    with pytest.raises(UserError, match="no such file"):
        list(coco.rows(place, path="none.json"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"text": "a seat"}, "text and shapes must be lists"),
        ({"shapes": [{"label": "ignore", "points": [[1, 2], [3, 4]]}]}, "no shape is labelled target"),
        ({"shapes": [{"label": "target", "points": [[1]]}]}, r"a corner must be [x, y], is [1]"),
        ({"shapes": [{"label": "target"}]}, "a shape must have label and points"),
        ({"shapes": [{"label": "target", "points": [[3, 4], [1, float("nan")]]}]}, "a corner must be [x, y], is [1"),
        ({"shapes": [{"label": "target", "points": [[1, 2], [1, 4]]}]}, "empty or inverted"),
    ],
)
def test_bad_outlines_are_rejected(place, changed, reason):
    (place.base_dir / "seg").mkdir()
    (place.base_dir / "seg" / "1.jpg").write_bytes(PNG)
    (place.base_dir / "seg" / "1.json").write_text(json.dumps(LABELME | changed))
    (bad,) = reason_seg.rows(place, path="seg")
    assert reason in bad.reason


def test_pictures_of_outlines_may_lie_in_a_folder_of_their_own(place):
    for folder in ("seg", "pictures"):
        (place.base_dir / folder).mkdir()
    (place.base_dir / "pictures" / "1.jpg").write_bytes(PNG)
    (place.base_dir / "seg" / "1.json").write_text(json.dumps(LABELME))
    for sample in reason_seg.rows(place, path="seg", media_root="pictures"):
        assert sample.images[0].path == str(place.base_dir / "pictures" / "1.jpg")


def test_outlines_that_are_not_utf8_are_rejected_and_a_missing_folder_is_refused(place):
    (place.base_dir / "seg").mkdir()
    (place.base_dir / "seg" / "1.json").write_bytes(b'{"text": ["a caf\xe9"]}')
    (bad,) = reason_seg.rows(place, path="seg")
    assert "is not JSON in UTF-8" in bad.reason
    with pytest.raises(UserError, match="no such folder"):
        list(reason_seg.rows(place, path="none"))
