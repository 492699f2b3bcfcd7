"""Tables in every format and encoding: bad rows are rejected, bad files refused, and memory stays bounded."""

import json
import random
import tracemalloc

import pyarrow
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from pyarrow import parquet
from reader_files import INSTANCES, OUTLINES, PNG, check_rejected, stored_image

from mmrl.types import AnswerType, RejectedRow, Sample, Target, UserError
from mmrl_datasets.formats import tables
from mmrl_datasets.readers import chat, coco, reason_seg, table, vlmevalkit

# Text

ROWS = {"a.jsonl": '{"q": "Où?", "a": 1}\n', "a.json": '[{"q": "Où?", "a": 1}]', "a.tsv": "q\ta\nOù?\t1\n"}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_is_read_with_and_without_byte_order_mark(read_table, name, encoding):
    (sample,) = read_table(name, ROWS[name].encode(encoding))
    assert (sample.parts, sample.target.value) == (("Où?",), 1)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_refused_or_rejected(read_table, name, encoding):
    try:
        results = read_table(name, ROWS[name].encode(encoding))
    except UserError as error:
        assert name in str(error)
        str(error).encode()  # can be printed
    else:
        assert results
        assert all(isinstance(result, RejectedRow) for result in results)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no row"),
        ("a.jsonl", b"\n \n", "holds no row"),
        ("a.jsonl", '{"q": "?", "a": 1}\n'.encode("utf-16"), "is UTF-16"),
        ("a.json", b"[]", "holds no row"),
        ("a.json", b"[1,", "is not JSON"),
        ("a.json", b"\xff", "is not JSON"),
        ("a.json", b"[" * 99_999, "is not JSON"),
        ("a.json", b'{"rows": []}', "holds no row"),
        ("a.json", b'{"images": [], "categories": []}', "must be a list of rows, hold one .under `data` if several"),
        ("a.json", b'{"data": {}, "rows": []}', "must be a list of rows"),
        ("a.json", b"3", "must be a list of rows"),
        ("a.tsv", b"q\ta\n", "holds no row"),
        ("a.tsv", b"", "the first line must name the columns"),
        ("a.tsv", b"\n", "the first line must name the columns"),
        ("a.tsv", b"q\tq\n", "the first line must name the columns"),
        ("a.tsv", "où\tq\ta\n1\t2\t3\n".encode("latin-1"), "the header is not UTF-8"),
        ("a.png", PNG, r"the format is unknown; the name must end in one of \.jsonl"),
        ("a.parquet", b"no parquet", "cannot be read as Parquet beyond row 0"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused(read_table, name, content, message):
    with pytest.raises(UserError, match=rf"{name}: {message}"):
        read_table(name, content)


def test_a_row_in_another_encoding_is_rejected_alone(read_table):
    bad, good = read_table("a.tsv", b"q\ta\n" + "Où?\t1\n".encode("latin-1") + "Où?\t1\n".encode())
    check_rejected([bad], ["a.tsv:2: is not UTF-8"])
    line = '{"q": "Où?", "a": 1}\n'
    one, bad, three = read_table("a.jsonl", line.encode() + line.encode("latin-1") + line.encode())
    check_rejected([bad], ["a.jsonl:2: not a line of JSON ('utf-8' codec"])
    assert good.parts == one.parts == three.parts == ("Où?",)


def test_records_of_a_text_table_that_cannot_be_read_are_rejected(read_table):
    lines = [b"q\ta", b"1+1?\t2", b"only one", b"", b"O\xf9?\t2", b'"x"y\t2', b"2+2?\t4", b'"never closed\t2', b"3\t3"]
    first, *bad, last, open_quote = read_table("a.tsv", b"\xef\xbb\xbf" + b"\n".join(lines))
    assert (first.target.value, last.target.value) == (2, 4)
    check_rejected(bad, ["a.tsv:3: has 1 cells", "a.tsv:5: is not UTF-8", "a.tsv:6: not a record"])
    check_rejected([open_quote], ["a.tsv:9: not a record"])


def test_a_quote_that_never_ends_stops_at_the_longest_cell(read_table, monkeypatch):
    monkeypatch.setattr(tables, "MAX_CELL_CHARS", 200_000)
    bad, *_ = read_table("a.csv", b'q,a\n"1+1?\n' + b"2,2\n" * 100_000, limit=2)
    check_rejected([bad], ["larger than field limit"])


def test_a_line_that_is_too_long_is_rejected_in_bounded_memory(context, read_table, monkeypatch):
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 1000)
    (context.base_dir / "a.jsonl").write_bytes(b'{"q": "' + b"x" * 9_000_000 + b'"}\n{"q": "?", "a": 1}\n')
    tracemalloc.start()
    columns = {"question": "q", "answer": "a"}
    bad, good = table.rows(context, path="a.jsonl", columns=columns, answer_type="number")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check_rejected([bad], ["a.jsonl:1: longer than"])
    assert good.id == "a/train/line-2"
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: rows,
        lambda rows: {"version": 1, "data": rows},
        lambda rows: {"tags": [1], "data": rows},
        lambda rows: {"images": rows, "dataset": "coco"},
        lambda rows: {"images": [], "annotations": rows},
    ],
)
def test_json_is_a_list_or_holds_one_under_data_or_no_other(read_table, wrap):
    content = json.dumps(wrap([{"q": "1+1?", "a": 2}, [3]])).encode("utf-8-sig")
    good, bad = read_table("a.json", content)
    assert (good.id, good.parts) == ("a/train/row-1", ("1+1?",))
    check_rejected([bad], ["a.json: row 2: must be an object of columns, is [3]"])


def test_json_may_be_rows_by_name(read_table):
    """An object of objects is a table, whose names are the column `key`, as in HC-STVG's annotations."""
    content = json.dumps({"a.mp4": {"q": "1+1?", "a": 2}, "b.mp4": {"q": "2+1?", "a": 3, "key": "own"}}).encode()
    first, second = read_table("a.json", content, columns={"question": "q", "answer": "a", "id": "key"})
    assert first.id.endswith("/a.mp4") and first.target.value == 2
    assert second.id.endswith("/own") and second.target.value == 3


CAPTIONS = {  # Charades-STA and ActivityNet Captions, as VideoChat-R1 publishes them
    "AO8RW": {"duration": 9.0, "timestamps": [[0.0, 6.9], [1.0, 2.0]], "sentences": ["a book", "a shelf"]},
    "Y6R7T": {"duration": 9.0, "timestamps": [[0.0, 6.9]], "sentences": ["a book", "a shelf"]},
    "Z1R7T": {"duration": 9.0, "timestamps": [[3.0, 4.0]], "sentences": ["a cup"]},
}


def test_rows_by_their_keys_with_lists_that_are_unfolded(read_table):
    options = {
        "columns": {"answer": "timestamps"},
        "prompt": "{{ key }}: {{ sentences }} of {{ duration }} s?",
        "unfold": ["timestamps", "sentences"],
        "answer_type": "span",
    }
    *good, last = read_table("a.json", json.dumps(CAPTIONS).encode(), **options)
    good, bad = [good[0], good[1], last], good[2]
    asked = [sample.parts[0] for sample in good]
    assert asked == ["AO8RW: a book of 9.0 s?", "AO8RW: a shelf of 9.0 s?", "Z1R7T: a cup of 9.0 s?"]
    assert [sample.target.value for sample in good] == [(0.0, 6.9), (1.0, 2.0), (3.0, 4.0)]
    assert [sample.id for sample in good] == ["a/train/row-1-1", "a/train/row-1-2", "a/train/row-3-1"]
    check_rejected([bad], ["a.json: row 2: the columns timestamps, sentences must be lists of one length"])


def test_json_too_large_for_memory_is_refused(read_table, monkeypatch):
    monkeypatch.setattr(tables, "MAX_JSON_BYTES", 5)
    with pytest.raises(UserError, match="write it as JSON Lines"):
        read_table("a.json", b"[{}, {}]")


# Parquet and Hugging Face. The columns are those of EasyR1's sets: a list of embedded images, and answers in text.

EASY = {"columns": {"question": "problem", "answer": "answer", "images": "images"}, "answer_type": "number"}
EASY_ROWS = [
    {"images": [{"bytes": PNG, "path": None}], "problem": "<image>How long is AB?", "answer": "3.5"},
    {"images": [{"bytes": PNG, "path": "x.png"}], "problem": "<image>And BC?", "answer": r"\sqrt{2}"},
    {"images": [{"bytes": b"", "path": None}], "problem": "<image>And AC?", "answer": "4"},
    {"images": [], "problem": "1+1?", "answer": "2"},
]


def write_parquet(context, name, rows):
    path = context.base_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def check_easy_samples(context, results):
    one, *bad, plain = results
    assert one.parts == (stored_image(context, PNG), "How long is AB?")
    assert one.target == Target(answer_type=AnswerType.NUMBER, value=3.5)
    empty = "embedded image has 0 bytes, must have 1 to 50,000,000; see data.media_limits.max_image_bytes"
    check_rejected(bad, ["answer must be a finite number", empty])
    assert plain.parts == ("1+1?",)
    assert len([file for file in (context.work_dir / "media").rglob("*") if file.is_file()]) == 1


def test_parquet_with_embedded_images(context):
    path = write_parquet(context, "geo.parquet", EASY_ROWS)
    results = list(table.rows(context, path="geo.parquet", **EASY))
    check_easy_samples(context, results)
    assert results[0].id == "geo/train/row-1"
    assert f"{path}: row 2: " in results[1].reason


def test_images_as_bytes_and_cells_that_json_cannot_hold(context):
    rows = [{"q": "?", "a": "A", "picture": b"\xff\xd8\xffjpeg", "thumb": b"123", "n": float("nan")}]
    write_parquet(context, "a.parquet", rows)
    columns = {"question": "q", "answer": "a", "images": "picture"}
    (sample,) = table.rows(context, path="a.parquet", columns=columns, answer_type="choice")
    assert sample.images == (stored_image(context, b"\xff\xd8\xffjpeg", ".jpg"),)
    assert sample.meta["thumb"] == "3 bytes"


def test_a_damaged_stored_image_is_written_again(context):
    write_parquet(context, "a.parquet", EASY_ROWS[:1])
    (sample,) = table.rows(context, path="a.parquet", **EASY)
    (context.work_dir / "media").joinpath(sample.images[0].path).write_bytes(b"damaged")
    assert list(table.rows(context, path="a.parquet", **EASY)) == [sample]
    stored_image(context, PNG)


def test_parquet_is_read_in_bounded_memory(context):
    rows = [{"question": "?", "answer": number, "pad": bytes([number % 256]) * 50_000} for number in range(500)]
    content = pyarrow.Table.from_pylist(rows)
    pages = {"write_batch_size": 16, "use_dictionary": False, "compression": "none"}
    parquet.write_table(content, context.base_dir / "a.parquet", **pages)
    del content
    idle = pyarrow.total_allocated_bytes()
    columns = {"question": "question", "answer": "answer"}
    samples = table.rows(context, path="a.parquet", columns=columns, answer_type="number")
    peak = max(pyarrow.total_allocated_bytes() - idle for _ in samples)
    assert peak < 12_000_000, "of 25 MB in one row group"


def test_a_folder_of_parquet_gives_one_split(context):
    test_name = "test-00000-of-00001-c6fe4964edb19d81"  # as older versions of Hugging Face name it
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", test_name]):
        rows = [{"problem": name, "answer": str(number), "images": None}]
        write_parquet(context, f"set/data/{name}.parquet", rows)
    train = list(table.rows(context, path="set", **EASY))
    assert [(sample.id, sample.target.value) for sample in train] == [("set/train/row-1", 0), ("set/train/row-2", 1)]
    (test,) = table.rows(context, path="set", split="test", **EASY)
    assert test.parts == (test_name,)
    with pytest.raises(UserError, match=r"has no split 'tran' \(did you mean 'train'\?\); there are test, train"):
        table.rows(context, path="set", split="tran", **EASY)
    (context.base_dir / "empty").mkdir()
    with pytest.raises(UserError, match="neither Parquet files nor a dataset saved to disk"):
        table.rows(context, path="empty", **EASY)


def test_missing_shards_of_the_split_are_refused(context):
    for name in ("a/train-00000-of-00004", "a/train-00002-of-00004", "b/train-00000-of-00001", "a/test-00001-of-00002"):
        write_parquet(context, f"set/{name}.parquet", EASY_ROWS)
    missing = r"set/a: 2 of 4 shards of split 'train' are missing, the first of them train-00001-of-00004\.parquet;"
    with pytest.raises(UserError, match=missing):
        list(table.rows(context, path="set", **EASY))
    # One shard may be named by itself.
    check_easy_samples(context, list(table.rows(context, path="set/a/train-00002-of-00004.parquet", **EASY)))


def test_shards_may_be_counted_from_1(context):
    for name in ("train-00001-of-00002", "train-00002-of-00002"):
        write_parquet(context, f"set/{name}.parquet", EASY_ROWS)
    assert len(list(table.rows(context, path="set", **EASY))) == 2 * len(EASY_ROWS)


def test_datasets_saved_to_disk(context):
    features = Features({"images": [Image()], "problem": Value("string"), "answer": Value("string")})
    saved = Dataset.from_list(EASY_ROWS, features=features)
    saved.save_to_disk(context.base_dir / "one")
    DatasetDict({"validation": saved}).save_to_disk(context.base_dir / "several")
    check_easy_samples(context, list(table.rows(context, path="one", **EASY)))
    check_easy_samples(context, list(table.rows(context, path="several", split="validation", **EASY)))
    with pytest.raises(UserError, match="has no split 'train'; there are validation"):
        table.rows(context, path="several", **EASY)
    (context.base_dir / "one" / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded as a saved dataset"):
        table.rows(context, path="one", **EASY)


def test_the_hub_is_used_only_by_name_and_its_absence_is_reported(context, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf://nobody/nothing: split 'train' cannot be loaded from the hub"):
        list(table.rows(context, path="hf://nobody/nothing", **EASY))
    with pytest.raises(UserError, match="write hf://owner/name"):
        list(table.rows(context, path="hf://nothing", **EASY))


# Damage: whatever happens to a good file ends in samples, rejected rows or a refusal.


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, True, [], ["a"], {}, {"a": 1}, "", " ", "\ud800", float("nan"), 10**400]
)
@pytest.mark.parametrize(
    "role", ["question", "answer", "images", "videos", "choices", "label", "thinking", "media_index", "id"]
)
def test_a_value_of_any_type_in_any_role_makes_a_sample_or_a_rejected_row(read_table, role, value):
    columns = {"question": "q", "answer": "a", role: "x"}
    content = json.dumps({"q": "?", "a": "A", "x": value}).encode()
    results = read_table("a.jsonl", content, columns=columns, answer_type="choice")
    assert [type(result) for result in results] in ([Sample], [RejectedRow])


TURNS = [{"from": "human", "value": "<image>How many?"}, {"from": "gpt", "value": "3"}]
TABLE_COLUMNS = {"question": "{{ q }} {{ c[0] }}", "answer": "c", "images": "i"}
CHAT_COLUMNS = {"turns": "talk", "images": "image", "id": "id"}
READERS = {
    "t.jsonl": (
        json.dumps({"q": "Is {{ it }}?", "a": "3", "i": "1.jpg", "c": [1, 2, 30, 40]}) + "\n",
        table.rows,
        {"path": "t.jsonl", "columns": TABLE_COLUMNS, "answer_type": "box", "coordinates": "px_original"},
    ),
    "c.json": (
        json.dumps([{"id": 1, "image": "1.jpg", "talk": TURNS}]),
        chat.rows,
        {"path": "c.json", "columns": CHAT_COLUMNS, "answer_type": "number"},
    ),
    "b.tsv": (
        'index\timage_path\tquestion\tA\tB\tanswer\n1\t1.jpg\t"What, so?"\tcat\tdog\tB\n',
        vlmevalkit.rows,
        {"path": "b.tsv"},
    ),
    "coco.json": (json.dumps(INSTANCES), coco.rows, {"path": "coco.json"}),
    "seg/1.json": (json.dumps(OUTLINES), reason_seg.rows, {"path": "seg", "media_root": "."}),
}


def damage(content, rng):
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


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_ends_in_samples_rejected_rows_or_a_refusal(context, name):
    content, read, options = READERS[name]
    file = context.base_dir / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    (context.base_dir / "1.jpg").write_bytes(PNG)
    assert all(isinstance(result, Sample) for result in read(context, **options))
    rng, ends = random.Random(f"mutate {name}"), set()
    for _ in range(300):
        file.write_bytes(damage(content.encode(), rng))
        try:
            ends |= {type(result) for result in read(context, **options)}
        except UserError as error:
            assert str(error)
            ends.add(UserError)
    assert {UserError, RejectedRow} & ends
