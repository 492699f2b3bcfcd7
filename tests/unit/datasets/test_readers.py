"""Readers on tiny files in each published schema; bad rows are rejected, bad files and settings refused."""

import base64
import csv
import hashlib
import json
import re
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from factories import image_ref, make_context, make_response, write_file
from pyarrow import parquet
from ruamel.yaml import YAML

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.types import (
    AnswerType,
    CoordinateSystem,
    ImageRef,
    RejectedRow,
    ResizeMap,
    Sample,
    Size,
    Target,
    UserError,
)
from mmrl_datasets.formats import tables
from mmrl_datasets.readers import chat, row_to_sample, table, vlmevalkit
from mmrl_rewards import box

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))  # readers never decode


@pytest.fixture
def place(tmp_path):
    (tmp_path / "home").mkdir()
    return make_context(tmp_path / "home")


def stored(place, content, ending=".png"):
    """Check that an embedded image was stored, and return the reference to it."""
    digest = hashlib.sha256(content).hexdigest()
    path = place.work_dir / "media" / digest[:2] / f"{digest}{ending}"
    assert path.read_bytes() == content
    return ImageRef(path=str(path), sha256=digest)


def picture(place, name, content=b"a picture"):
    """Write an image file and return the reference to it."""
    return write_file(place.base_dir / name, content)


def reasons(results):
    return [result.reason for result in results if isinstance(result, RejectedRow)]


# JSON Lines

COLUMNS = {"id": "key", "images": "pics", "question": "q", "answer": "a"}
GOOD = {"key": "k1", "pics": "a.png", "q": "How many?", "a": 3}


@pytest.fixture
def read(place):
    (place.base_dir / "pics").mkdir()
    for name in ("a", "b"):
        (place.base_dir / "pics" / f"{name}.png").write_bytes(name.encode())
    (place.base_dir.parent / "secret.png").write_bytes(b"outside")
    (place.base_dir / "pics" / "link.png").symlink_to(place.base_dir.parent / "secret.png")
    (place.base_dir / "pics" / "loop.png").symlink_to("loop.png")

    def read(*lines, **options):
        text = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (place.base_dir / "rows.jsonl").write_bytes(b"\n".join(text) + b"\n")
        settings = {"path": "rows.jsonl", "columns": COLUMNS, "answer_type": "number", "media_root": "pics"}
        return list(table.rows(place, **(settings | options)))

    return read


def ref(place, name):
    return image_ref(place.base_dir / "pics" / f"{name}.png")


def test_a_row_becomes_a_sample(read, place):
    (sample,) = read(GOOD | {"source": "web"}, task="bottles")
    assert sample == Sample(
        id="bottles/train/k1",
        task="bottles",
        parts=(ref(place, "a"), "How many?"),
        target=Target(answer_type=AnswerType.NUMBER, value=3),
        meta={"source": "web"},
    )


def test_markers_place_the_pictures(read, place):
    (sample,) = read(GOOD | {"pics": ["b.png", "a.png"], "q": "<image> left of <image>?"})
    assert sample.parts == (ref(place, "b"), " left of ", ref(place, "a"), "?")


def test_labels_thoughts_and_rows_without_pictures_or_ids(read):
    columns = {"question": "q", "answer": "a", "label": "l", "thinking": "t"}
    one, other = read(
        {"q": "1+1?", "a": 2, "l": 3, "t": "Hm."}, {"q": "2+2?", "a": 4, "l": None, "t": None}, columns=columns
    )
    assert (one.id, one.parts, one.thinking) == ("rows/train/line-1", ("1+1?",), "Hm.")
    assert one.label == Target(answer_type=AnswerType.NUMBER, value=3)
    assert (other.label, other.thinking) == (None, None)


@pytest.mark.parametrize(
    ("kind", "answer", "value"),
    [("text", "a cat", "a cat"), ("choice", "b", "B"), ("number", -2.5, -2.5), ("box", [0, 1.5, 9, 8], [0, 1.5, 9, 8])],
)
def test_answers_of_each_kind(read, kind, answer, value):
    frame = "px_original" if kind == "box" else None
    (sample,) = read(GOOD | {"a": answer}, answer_type=kind, coordinates=frame)
    assert sample.target == Target(
        answer_type=AnswerType(kind), value=value, coordinate_system=CoordinateSystem(frame) if frame else None
    )


def test_the_limit_counts_rows(read):
    assert len(read(GOOD, GOOD | {"key": "k2"}, GOOD | {"key": "k3"}, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"key": "k1", ', "not a line of JSON"),
        (b"\xff\xfe", "not a line of JSON"),
        ('{"key": "k1", "q": "Où?"}'.encode("latin-1"), "not a line of JSON ('utf-8' codec"),
        ({"key": "k1", "q": "How many?", "a": 3}, "there is no column 'pics'"),
        (b'{"key": "k1", "pics": null, "q": "\\ud800?", "a": 3}', "question holds half of a surrogate pair"),
        (b'{"m": ' + b"[" * 900 + b"]" * 900 + b', "key": 1, "pics": null, "q": "?", "a": 3}', "nested too deeply"),
        (b"[" * 100_000, "not a line of JSON"),
        (b"[1, 2]", "must be an object"),
        (GOOD | {"a": "three"}, "answer must be a finite number, is 'three'"),
        (GOOD | {"a": "1,000"}, "answer must be a finite number, is '1,000'"),
        (GOOD | {"a": "nan"}, "answer must be a finite number, is 'nan'"),
        (GOOD | {"a": True}, "answer must be a finite number, is True"),
        (GOOD | {"a": float("nan")}, "answer must be a finite number, is nan"),
        (GOOD | {"a": 10**400}, "answer must be a finite number"),
        (GOOD | {"a": None}, "answer must be a finite number, is None"),
        (GOOD | {"q": 5}, "question must be text"),
        (GOOD | {"q": "  "}, "question must be text that is not empty"),
        (GOOD | {"key": 1.5}, "id must be text or a whole number"),
        (GOOD | {"pics": "c.png"}, "image 'c.png' cannot be read: there is no such file"),
        (GOOD | {"pics": "."}, "image '.' cannot be read"),
        (GOOD | {"pics": "a\0.png"}, "leads nowhere"),
        (GOOD | {"pics": "loop.png"}, "leads nowhere"),
        (GOOD | {"pics": "https://example.org/a.png"}, "https URLs are refused unless data.allowed_url_schemes has"),
        (GOOD | {"pics": "file:///etc/hostname"}, "file URLs are refused unless data.allowed_url_schemes has file"),
        (GOOD | {"pics": "s3://bucket/a.png"}, "s3 URLs are refused always"),
        (GOOD | {"pics": "data:image/png;base64,iVBO"}, "data URLs are refused unless data.allowed_url_schemes has"),
        (GOOD | {"pics": "../../secret.png"}, "lies outside data.media_roots"),
        (GOOD | {"pics": "link.png"}, "lies outside data.media_roots"),
        (GOOD | {"pics": "/etc/hostname"}, "lies outside data.media_roots"),
        (GOOD | {"pics": [3]}, "image must be text"),
        (GOOD | {"q": "<image> or <image>?"}, "says <image> 2 times, and there are 1 images"),
        (GOOD | {"q": "<image 2>?"}, "names the images [2], and there are 1"),
        (GOOD | {"q": "<image 1> or <image>?"}, "number all, or none"),
    ],
)
def test_a_bad_row_is_rejected_with_its_line_and_reason(read, place, line, reason):
    good, bad = read(GOOD | {"key": "fine"}, line)
    assert isinstance(good, Sample)
    assert isinstance(bad, RejectedRow)
    assert bad.reason.startswith(f"{place.base_dir / 'rows.jsonl'}:2: ")
    assert reason in bad.reason


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ([1, 2, 3], "must be four finite numbers"),
        ([1, 2, float("nan"), 4], "must be four finite numbers"),
        ([1, 2, float("inf"), 4], "must be four finite numbers"),
        ("1,2,3,4", "must be four finite numbers"),
        ("[1,2,3,NaN]", "must be four finite numbers"),
        ([5, 2, 3, 4], "empty or inverted"),
        ([1, 2, 1, 4], "empty or inverted"),
        ([-1, 2, 3, 4], "lies outside the image"),
        ([1, 2, 1001, 4], "lies outside the image"),
    ],
)
def test_a_bad_box_is_rejected(read, box, reason):
    (bad,) = read(GOOD | {"a": box}, answer_type="box", coordinates="norm_1000")
    assert reason in bad.reason


def test_blank_lines_hold_no_row(read):
    assert [sample.id for sample in read(b"", GOOD, b"  ", GOOD | {"key": "k2"})] == ["rows/train/k1", "rows/train/k2"]


def test_an_id_that_occurs_twice_is_rejected(read):
    _, bad = read(GOOD, GOOD)
    assert "the id 'rows/train/k1' is that of line-1 too" in bad.reason


def test_a_missing_column_is_named_with_what_there_is(read):
    with pytest.raises(UserError, match=r"rows\.jsonl:1: there is no column 'pics' \(did you mean 'pic'\?\)"):
        read({"key": 1, "pic": "a.png", "q": "?", "a": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "none.jsonl"}, "no such file that can be read"),
        ({"path": "pics/a.png"}, r"the format is unknown; the name must end in one of \.jsonl"),
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"prompt": "Where?"}, r"prompt takes the place of columns\.question"),
        ({"answer_type": "boxs"}, r"answer_type='boxs' is unknown \(did you mean 'boxes'\?\)"),
        ({"answer_type": "box"}, "set `coordinates` for action, box"),
        ({"coordinates": "norm_1"}, "set `coordinates` for action, box, boxes, point, points, and for json with"),
        ({"prompt": "{{ q", "columns": {"answer": "a"}}, r"prompt: '\{\{ q' is not a template"),
        ({"columns": COLUMNS | {"question": "{% q"}}, r"columns\.question: .* is not a template"),
        ({"answer_type": "box", "coordinates": "norm"}, "coordinates='norm' is unknown"),
        ({"columns": {"question": "q"}}, "which column is the answer"),
        ({"columns": COLUMNS | {"image": "pics"}}, r"unknown role 'image' \(did you mean 'images'\?\)"),
    ],
)
def test_impossible_settings_are_refused(read, options, message):
    with pytest.raises(UserError, match=message):
        read(GOOD, **options)


def test_numerals_and_boxes_in_text_count(read):
    (number,) = read(GOOD | {"a": " 007.50 "})
    (box,) = read(GOOD | {"a": "[1, 2, 30, 40]"}, answer_type="box", coordinates="px_original")
    assert (number.target.value, box.target.value) == (7.5, [1, 2, 30, 40])


def test_corner_and_size_become_corners(read):
    options = {"answer_type": "box", "coordinates": "norm_1", "box_format": "xywh"}
    box, beyond, flat = read(
        GOOD | {"a": [0.25, 0.5, 0.5, 0.25]},
        GOOD | {"key": 2, "a": [0.5, 0.5, 0.75, 0.25]},
        GOOD | {"key": 3, "a": [0.5, 0.5, 0.25, 0]},
        **options,
    )
    assert box.target.value == [0.25, 0.5, 0.75, 0.75]
    assert "lies outside the image" in beyond.reason
    assert "empty or inverted" in flat.reason


BARE = {"id": "key", "images": "pics", "answer": "a"}


def test_a_prompt_puts_in_columns(read):
    prompt = "<image>{Find} {{ q }} of {{ m.size }} x{{ n }}{% if n > 1 %}, all{% endif %}."
    (sample,) = read(GOOD | {"q": "{{ key }}", "m": {"size": "L"}, "n": 2}, columns=BARE, prompt=prompt)
    assert sample.parts[1] == "{Find} {{ key }} of L x2, all."
    assert sample.meta == {"q": "{{ key }}", "m": {"size": "L"}, "n": 2}
    row = GOOD | {"m": {"size": 1}, "n": 1}
    null, flat, lacking, good = read(
        row | {"q": None}, row | {"m": 1}, {k: v for k, v in row.items() if k != "n"}, row, columns=BARE, prompt=prompt
    )
    assert "only text and numbers can be put into a template, not None" in null.reason
    assert "template '<image>{Find} " in null.reason
    assert "has no attribute 'size'" in flat.reason
    assert "there is no column 'n'" in lacking.reason
    assert isinstance(good, Sample)


def test_a_prompt_names_a_column_that_no_row_has(read):
    with pytest.raises(UserError, match=r"there is no column 'qq' \(did you mean 'q'\?\); there are key, pics, q, a"):
        read(GOOD, columns=BARE, prompt="{{ qq }}")


@pytest.mark.parametrize(
    "prompt", ["{{ q.__class__.__mro__ }}", "{{ q.format.__globals__ }}", "{{ q ** q }}", "{{ q[9] }}", "{{ m }}"]
)
def test_a_prompt_runs_in_a_sandbox(read, prompt):
    (bad,) = read(GOOD | {"m": [1]}, columns=BARE, prompt=prompt)
    assert f"template {prompt!r}: " in bad.reason


@pytest.mark.parametrize(
    ("prompt", "without", "with_hint"),
    [
        ("{{ q }}{{ hint | default('') }}", "Find", "FindX"),
        ("{{ q }}{% if hint is defined %} by {{ hint }}{% endif %}", "Find", "Find by X"),
        ("{{ hint if hint is defined else q }}", "Find", "X"),
    ],
)
@pytest.mark.parametrize("lacking", [{}, {"hint": None}])
def test_a_template_may_ask_whether_a_column_is_there(read, prompt, without, with_hint, lacking):
    rows = [{"q": "Find", "a": "1"} | lacking, {"q": "Find", "a": "1", "hint": "X"}]
    for content in (rows, rows[:1]):  # no row need have it
        samples = read(*content, prompt=prompt, columns={"answer": "a"}, answer_type="number")
        assert [sample.parts for sample in samples] == [(without,), (with_hint,)][: len(content)]


def test_a_template_that_also_uses_a_column_plainly_needs_it(read):
    rows = [{"a": "1", "hint": "X"}, {"a": "1"}]
    prompt = "{{ hint | default('') }}{{ hint }}"
    good, bad = read(*rows, prompt=prompt, columns={"answer": "a"}, answer_type="number")
    assert good.parts == ("XX",)
    assert "there is no column 'hint'" in bad.reason
    with pytest.raises(UserError, match="there is no column 'hint'"):
        read(rows[1], prompt=prompt, columns={"answer": "a"}, answer_type="number")


def test_a_template_may_index_and_call_methods_of_text(read):
    row = {"options": ["cat", "dog"], "text": " Which? ", "a": "1"}
    prompt = "{{ text.strip() }} {{ options[0] }} or {{ options[-1] }}"
    (sample,) = read(row, prompt=prompt, columns={"answer": "a"}, answer_type="number")
    assert sample.parts == ("Which? cat or dog",)


def test_a_role_may_be_a_template(read, place):
    columns = {"question": "q", "answer": "{{ a | striptags }}", "images": "{{ stem }}.png", "id": "{{ stem }}-{{ n }}"}
    (sample,) = read({"q": "?", "a": "<answer> 3 </answer>", "stem": "b", "n": 5}, columns=columns)
    assert (sample.id, sample.images, sample.target.value) == ("rows/train/b-5", (ref(place, "b"),), 3)


def test_each_row_may_have_a_kind_of_its_own(read):
    kind = "{{ 'number' if type == 'count' else 'box' if type == 'find' else type }}"
    number, box, letter, bad = read(
        GOOD | {"type": "count"},
        GOOD | {"key": 2, "type": "find", "a": [1, 2, 3, 4]},
        GOOD | {"key": 3, "type": "choice", "a": "c"},
        GOOD | {"key": 4, "type": "chioce", "a": "c"},
        answer_type=kind,
        coordinates="px_original",
    )
    assert number.target == Target(answer_type=AnswerType.NUMBER, value=3)
    assert (box.target.answer_type, box.target.coordinate_system) == (AnswerType.BOX, CoordinateSystem.PX_ORIGINAL)
    assert letter.target == Target(answer_type=AnswerType.CHOICE, value="C")
    assert "answer_type='chioce' is unknown (did you mean 'choice'?)" in bad.reason


def test_the_cards_example_of_coordinates_in_json_is_what_the_reward_reads(place):
    card = (Path(__file__).parents[3] / "datasets" / "cards" / "table.md").read_text()
    (example,) = (yaml for yaml in re.findall(r"```yaml\n(.*?)```", card, re.DOTALL) if "answer_type: json" in yaml)
    media = [picture(place, name, name.encode()) for name in ("l.png", "r.png")]
    row = {"left": "l.png", "right": "r.png", "thing": "the cup", "which": 2, "x": 100, "y": 20, "w": 40, "h": 30}
    (place.base_dir / "pairs.jsonl").write_text(json.dumps(row))
    (sample,) = table.rows(place, **YAML(typ="safe").load(example)["args"])
    assert sample.parts[:2] == tuple(media)
    assert sample.target == Target(
        answer_type=AnswerType.JSON,
        value={"image": 2, "bbox_2d": [100, 20, 140, 50]},
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
        media_index=1,
    )
    given = '<answer>{"image": 2, "bbox_2d": [500, 200, 700, 500]}</answer>'
    resize_maps = (ResizeMap(Size(640, 480), Size(56, 56)), ResizeMap(Size(200, 100), Size(56, 28)))
    answer = ResponseFormat().parse(given, AnswerType.JSON)
    response = make_response(given, answer, resize_maps=resize_maps, coordinate_system=CoordinateSystem.NORM_1000)
    assert box.referring(response, sample).value == 1.0


def test_coordinates_belong_to_a_medium(read):
    columns = COLUMNS | {"media_index": "m"}
    options = {"columns": columns, "answer_type": "box", "coordinates": "px_original"}
    row = GOOD | {"pics": ["a.png", "b.png"], "a": [1, 2, 3, 4]}
    second, written, *bad = read(
        row | {"m": 1},
        row | {"key": 2, "m": "0"},
        row | {"key": 3, "m": 2},
        row | {"key": 4, "m": True},
        row | {"key": 5, "m": 0, "pics": None},
        **options,
    )
    assert (second.target.media_index, written.target.media_index) == (1, 0)
    assert ["one of 2 images and videos, from 0; is 2" in bad[0].reason, "is True" in bad[1].reason] == [True, True]
    assert "a box needs an image or video to lie in" in bad[2].reason


def test_numbered_places_name_their_picture(read, place):
    columns = {"question": "q", "answer": "a", "images": ["one", "two", "three"], "choices": "c"}
    row = {"q": "<image 2> shows?", "a": "B", "one": "a.png", "two": "b.png", "three": None}
    (sample,) = read(row | {"c": "['<image_1>', \"isn't <image2>\"]"}, columns=columns, answer_type="choice")
    a, b = ref(place, "a"), ref(place, "b")
    assert sample.parts == (b, " shows?\nA. ", a, "\nB. isn't ", b)


@pytest.mark.parametrize(("answer", "letter"), [("b", "B"), ("B", "B"), ("a dog", "B"), ("C", None), ("dog", None)])
def test_choices_are_listed_and_letters_or_quoted(read, answer, letter):
    columns = COLUMNS | {"choices": "c"}
    (result,) = read(GOOD | {"a": answer, "c": ["a cat", "a dog"]}, columns=columns, answer_type="choice")
    if letter is None:
        assert "answer must be one letter from A to B, or one option" in result.reason
    else:
        assert result.parts[1] == "How many?\nA. a cat\nB. a dog"
        assert result.target == Target(answer_type=AnswerType.CHOICE, value=letter)


def test_an_answer_that_is_one_letter_and_another_option_is_rejected(read):
    columns = COLUMNS | {"choices": "c"}
    (bad,) = read(GOOD | {"a": "A", "c": ["B", "A"]}, columns=columns, answer_type="choice")
    assert "one letter from A to B, or one option, is 'A'; it means several: set choice_answer" in bad.reason
    for choice_answer, letter in (("letter", "A"), ("text", "B")):
        (sample,) = read(
            GOOD | {"a": "A", "c": ["B", "A"]}, columns=columns, answer_type="choice", choice_answer=choice_answer
        )
        assert sample.target.value == letter
    (same,) = read(GOOD | {"a": "B", "c": ["1", "1"]}, columns=columns, answer_type="choice", choice_answer="letter")
    assert same.target.value == "B"
    (bad,) = read(GOOD | {"a": "1", "c": ["1", "2"]}, columns=columns, answer_type="choice", choice_answer="letter")
    assert "answer must be one letter from A to B" in bad.reason


def test_a_column_that_some_rows_lack_spoils_only_those(read):
    bad, good = read({"key": 1, "q": "?", "a": 1}, GOOD)
    assert isinstance(good, Sample)
    assert "there is no column 'pics'" in bad.reason


def test_a_wrong_mapping_is_told_long_before_a_large_file_ends(place, monkeypatch):
    monkeypatch.setattr(row_to_sample._MissingColumnCheck, "MAX_ROWS", 3)
    (place.base_dir / "a.jsonl").write_text('{"q": "?", "a": 1}\n' * 9)
    results = table.rows(place, path="a.jsonl", columns={"question": "qq", "answer": "a"}, answer_type="number")
    assert isinstance(next(results), RejectedRow)
    with pytest.raises(UserError, match=r"a\.jsonl:1: there is no column 'qq' \(did you mean 'q'\?\)"):
        next(results), next(results)


def test_a_bom_is_no_content_and_utf16_is_refused(place):
    options = {"columns": {"question": "q", "answer": "a"}, "answer_type": "number"}
    (place.base_dir / "a.jsonl").write_bytes('{"q": "Où?", "a": 1}\n'.encode("utf-8-sig"))
    (sample,) = table.rows(place, path="a.jsonl", **options)
    assert sample.parts == ("Où?",)
    (place.base_dir / "b.jsonl").write_text('{"q": "?", "a": 1}\n', encoding="utf-16")
    with pytest.raises(UserError, match="is UTF-16; save it as UTF-8"):
        list(table.rows(place, path="b.jsonl", **options))


def test_a_line_without_end_is_rejected_in_bounded_memory(place, monkeypatch):
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 1000)
    (place.base_dir / "a.jsonl").write_bytes(b'{"q": "' + b"x" * 9_000_000 + b'"}\n{"q": "?", "a": 1}\n')
    tracemalloc.start()
    bad, good = table.rows(place, path="a.jsonl", columns={"question": "q", "answer": "a"}, answer_type="number")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "a.jsonl:1: longer than" in bad.reason
    assert good.id == "a/train/line-2"
    assert peak < 1_000_000


# JSON


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"version": 1, "data": rows}])
def test_a_list_or_what_is_under_data(place, wrap):
    (place.base_dir / "a.json").write_text(json.dumps(wrap([{"q": "1+1?", "a": 2}, [3]])), encoding="utf-8-sig")
    good, bad = table.rows(place, path="a.json", columns={"question": "q", "answer": "a"}, answer_type="number")
    assert (good.id, good.parts) == ("a/train/row-1", ("1+1?",))
    assert "a.json: row 2: must be an object of columns, is [3]" in bad.reason


@pytest.mark.parametrize("content", [b"[1,", b"\xff", b'{"rows": []}', b"3", b"[" * 99_999])
def test_what_is_no_list_is_refused(place, content):
    (place.base_dir / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: (is not JSON|must be a list of rows)"):
        list(table.rows(place, path="a.json", columns={"question": "q", "answer": "a"}, answer_type="number"))


def test_a_list_too_large_for_memory_is_refused(place, monkeypatch):
    monkeypatch.setattr("mmrl_datasets.formats.tables.MAX_JSON_BYTES", 5)
    (place.base_dir / "a.json").write_text("[{}, {}]")
    with pytest.raises(UserError, match="write it as JSON Lines"):
        list(table.rows(place, path="a.json", columns={"question": "q", "answer": "a"}, answer_type="number"))


def test_rec_rows_of_vlm_r1(place):
    ref = picture(place, "coco/train2014/1.jpg")
    row = {"image": "train2014/1.jpg", "problem": "the left cup", "solution": [10, 20, 30, 40],
           "normalized_solution": [0.1, 0.2, 0.3, 0.4], "height": 100, "width": 100}  # fmt: skip
    nan = row | {"solution": [10, float("nan"), 30, 40]}
    (place.base_dir / "rec.json").write_text(json.dumps([row, nan, row | {"solution": [30, 20, 10, 40]}]))
    settings = {"path": "rec.json", "media_root": "coco", "answer_type": "box", "prompt": "Where is {{ problem }}?"}
    good, *bad = table.rows(
        place, **settings, columns={"images": "image", "answer": "solution"}, coordinates="px_original"
    )
    assert good.parts == (ref, "Where is the left cup?")
    assert good.target == Target(
        answer_type=AnswerType.BOX, value=[10, 20, 30, 40], coordinate_system=CoordinateSystem.PX_ORIGINAL
    )
    assert ["four finite numbers" in bad[0].reason, "inverted" in bad[1].reason] == [True, True]
    first, *_ = table.rows(
        place, **settings, columns={"images": "image", "answer": "normalized_solution"}, coordinates="norm_1"
    )
    assert first.target == Target(
        answer_type=AnswerType.BOX, value=[0.1, 0.2, 0.3, 0.4], coordinate_system=CoordinateSystem.NORM_1
    )


# Parquet and Hugging Face

EASY = {"question": "problem", "answer": "answer", "images": "images"}


def easy_rows():
    """Columns of EasyR1's sets: a list of embedded pictures, and answers in text."""
    return [
        {"images": [{"bytes": PNG, "path": None}], "problem": "<image>How long is AB?", "answer": "3.5"},
        {"images": [{"bytes": PNG, "path": "x.png"}], "problem": "<image>And BC?", "answer": r"\sqrt{2}"},
        {"images": [{"bytes": b"", "path": None}], "problem": "<image>And AC?", "answer": "4"},
        {"images": [], "problem": "1+1?", "answer": "2"},
    ]


def check_easy(place, results):
    one, word, empty, plain = results
    assert one.parts == (stored(place, PNG), "How long is AB?")
    assert one.target == Target(answer_type=AnswerType.NUMBER, value=3.5)
    assert "answer must be a finite number" in word.reason
    assert (
        "embedded image has 0 bytes, must have 1 to 50,000,000; see data.media_limits.max_image_bytes" in empty.reason
    )
    assert plain.parts == ("1+1?",)
    assert len([file for file in (place.work_dir / "media").rglob("*") if file.is_file()]) == 1, "stored once"


def test_parquet_with_embedded_pictures(place):
    parquet.write_table(pyarrow.Table.from_pylist(easy_rows()), place.base_dir / "geo.parquet")
    results = list(table.rows(place, path="geo.parquet", columns=EASY, answer_type="number"))
    check_easy(place, results)
    assert results[0].id == "geo/train/row-1"
    assert f"{place.base_dir / 'geo.parquet'}: row 2: " in results[1].reason


def test_pictures_as_bytes_and_columns_that_json_cannot_say(place):
    rows = [{"q": "?", "a": "A", "picture": b"\xff\xd8\xffjpeg", "thumb": b"123", "n": float("nan")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), place.base_dir / "a.parquet")
    columns = {"question": "q", "answer": "a", "images": "picture"}
    (sample,) = table.rows(place, path="a.parquet", columns=columns, answer_type="choice")
    assert sample.images == (stored(place, b"\xff\xd8\xffjpeg", ".jpg"),)
    assert sample.meta["thumb"] == "3 bytes"


def test_a_damaged_stored_picture_is_written_again(place):
    parquet.write_table(pyarrow.Table.from_pylist(easy_rows()[:1]), place.base_dir / "a.parquet")
    (sample,) = table.rows(place, path="a.parquet", columns=EASY, answer_type="number")
    (place.work_dir / "media").joinpath(sample.images[0].path).write_bytes(b"damaged")
    assert list(table.rows(place, path="a.parquet", columns=EASY, answer_type="number")) == [sample]
    stored(place, PNG)


def test_parquet_is_read_in_bounded_memory(place):
    rows = [{"question": "?", "answer": number, "pad": bytes([number % 256]) * 50_000} for number in range(500)]
    content = pyarrow.Table.from_pylist(rows)
    pages = {"write_batch_size": 16, "use_dictionary": False, "compression": "none"}
    parquet.write_table(content, place.base_dir / "a.parquet", **pages)
    del content
    idle = pyarrow.total_allocated_bytes()
    columns = {"question": "question", "answer": "answer"}
    peak = max(
        pyarrow.total_allocated_bytes() - idle
        for _ in table.rows(place, path="a.parquet", columns=columns, answer_type="number")
    )
    assert peak < 12_000_000, "of 25 MB in one row group"


@pytest.mark.parametrize("spoil", [lambda content: b"no parquet", lambda content: content[:-20], lambda content: b""])
def test_damaged_parquet_is_refused(place, spoil):
    parquet.write_table(pyarrow.Table.from_pylist(easy_rows()), place.base_dir / "a.parquet")
    (place.base_dir / "a.parquet").write_bytes(spoil((place.base_dir / "a.parquet").read_bytes()))
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet beyond row 0"):
        list(table.rows(place, path="a.parquet", columns=EASY, answer_type="number"))


def test_a_folder_of_parquet_gives_one_split(place):
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]):
        (place.base_dir / "set/data").mkdir(parents=True, exist_ok=True)
        rows = [{"problem": name, "answer": str(number), "images": None}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), place.base_dir / "set/data" / f"{name}.parquet")
    train = list(table.rows(place, path="set", columns=EASY, answer_type="number"))
    assert [(sample.id, sample.target.value) for sample in train] == [("set/train/row-1", 0), ("set/train/row-2", 1)]
    (test,) = table.rows(place, path="set", split="test", columns=EASY, answer_type="number")
    assert test.parts == ("test-00000-of-00001",)
    with pytest.raises(UserError, match=r"has no split 'tran' \(did you mean 'train'\?\); there are test, train"):
        table.rows(place, path="set", split="tran", columns=EASY, answer_type="number")
    (place.base_dir / "empty").mkdir()
    with pytest.raises(UserError, match="holds neither Parquet files nor a dataset saved to disk"):
        table.rows(place, path="empty", columns=EASY, answer_type="number")


def test_datasets_saved_to_disk(place):
    features = Features({"images": [Image()], "problem": Value("string"), "answer": Value("string")})
    saved = Dataset.from_list(easy_rows(), features=features)
    saved.save_to_disk(place.base_dir / "one")
    DatasetDict({"validation": saved}).save_to_disk(place.base_dir / "several")
    check_easy(place, list(table.rows(place, path="one", columns=EASY, answer_type="number")))
    check_easy(place, list(table.rows(place, path="several", split="validation", columns=EASY, answer_type="number")))
    with pytest.raises(UserError, match="has no split 'train'; there are validation"):
        table.rows(place, path="several", columns=EASY, answer_type="number")
    (place.base_dir / "one" / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded as a saved dataset"):
        table.rows(place, path="one", columns=EASY, answer_type="number")


def test_the_hub_is_asked_only_by_name_and_its_absence_is_told(place, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf://nobody/nothing: split 'train' cannot be loaded from the hub"):
        list(table.rows(place, path="hf://nobody/nothing", columns=EASY, answer_type="number"))
    with pytest.raises(UserError, match="write hf://owner/name"):
        list(table.rows(place, path="hf://nothing", columns=EASY, answer_type="number"))


# Tab separated


def write_tsv(place, rows, name="bench.tsv"):
    """As pandas writes it: cells with tabs, quotes or line ends are quoted."""
    with (place.base_dir / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


BENCH = {"index": "0", "image": base64.b64encode(PNG).decode(), "question": 'Which "one"?\nLook.', "hint": "",
         "A": "cat", "B": "dog", "C": "", "D": "", "answer": "B", "category": "animals"}  # fmt: skip


def test_a_benchmark_of_vlmevalkit(place):
    many = [base64.b64encode(PNG + bytes([number])).decode() for number in range(2)]
    write_tsv(place, [
        BENCH,
        BENCH | {"index": "1", "image": "0", "hint": "They bark.", "answer": "dog"},
        BENCH | {"index": "2", "image": str(many), "question": "<image> or <image>?", "answer": "A"},
        BENCH | {"index": "3", "image": "7"},
        BENCH | {"index": "4", "image": "%" * 70},
        BENCH | {"index": "5", "answer": "C"},
        BENCH | {"index": "6", "B": "", "C": "cow"},
        BENCH | {"index": "7", "image": ""},
        BENCH | {"index": "8", "A": "B", "B": "A"},
    ])  # fmt: skip
    one, same, two, *bad, letters = vlmevalkit.rows(place, path="bench.tsv")
    assert letters.target.value == "B"
    assert one.id == "bench/test/0"
    assert one.parts == (stored(place, PNG), 'Which "one"?\nLook.\nA. cat\nB. dog')
    assert one.target == Target(answer_type=AnswerType.CHOICE, value="B")
    assert one.meta == {"category": "animals"}
    assert (same.images, same.target) == (one.images, one.target)
    assert same.parts[1].startswith("They bark.\nWhich")
    assert two.images == (stored(place, PNG + b"\0"), stored(place, PNG + b"\1"))
    wanted = ["no earlier row", "is not base64", "from A to B", "option B is empty", "both image and image_path are"]
    assert len(bad) == len(wanted)
    assert all(part in result.reason for part, result in zip(wanted, bad, strict=True))
    assert f"{place.base_dir / 'bench.tsv'}:8: " in bad[0].reason, "the line it ends on"


def test_a_benchmark_with_paths_and_open_answers(place):
    ref = picture(place, "images/a.png")
    write_tsv(place, [
        {"index": "0", "image_path": "a.png", "question": "Count.", "answer": "3"},
        {"index": "1", "image_path": "['a.png', 'a.png']", "question": "Count.", "answer": "3"},
        {"index": "2", "image_path": "../../bench.tsv", "question": "Count.", "answer": "3"},
    ])  # fmt: skip
    one, two, bad = vlmevalkit.rows(place, path="bench.tsv", answer_type="number", media_root="images")
    assert (one.parts, one.target.value, two.images) == ((ref, "Count."), 3, (ref, ref))
    assert "lies outside data.media_roots" in bad.reason
    write_tsv(place, [{"index": "0", "question": "Count.", "answer": "3"}])
    with pytest.raises(UserError, match="there is no column 'image'"):
        list(vlmevalkit.rows(place, path="bench.tsv", answer_type="number"))


def test_bad_records_of_a_text_table(place):
    lines = [b"q\ta", b"1+1?\t2", b"only one", b"", b"O\xf9?\t2", b'"x"y\t2', b"2+2?\t4", b'"never closed\t2', b"3\t3"]
    (place.base_dir / "a.tsv").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    results = list(table.rows(place, path="a.tsv", columns={"question": "q", "answer": "a"}, answer_type="number"))
    assert [result.target.value for result in results if isinstance(result, Sample)] == [2, 4]
    wanted = ["a.tsv:3: has 1 cells", "a.tsv:5: is not UTF-8", "a.tsv:6: not a record", "a.tsv:9: not a record"]
    assert all(part in reason for part, reason in zip(wanted, reasons(results), strict=True))


def test_a_quote_that_never_ends_stops_at_the_limit(place, monkeypatch):
    monkeypatch.setattr("mmrl_datasets.formats.tables.MAX_CELL_CHARS", 200_000)
    (place.base_dir / "a.csv").write_text('q,a\n"1+1?\n' + "2,2\n" * 100_000)
    results = list(
        table.rows(place, path="a.csv", columns={"question": "q", "answer": "a"}, answer_type="number", limit=2)
    )
    assert "larger than field limit" in reasons(results)[0]


@pytest.mark.parametrize("header", ["", "\n", "q\tq\n"])
def test_a_text_table_needs_a_header(place, header):
    (place.base_dir / "a.tsv").write_text(header)
    with pytest.raises(UserError, match="the first line must name the columns"):
        list(table.rows(place, path="a.tsv", columns={"question": "q", "answer": "a"}, answer_type="number"))


# Conversations


@pytest.fixture
def talk(place):
    picture(place, "a.png", b"a")
    picture(place, "b.png", b"b")

    def talk(*rows, columns, **options):
        (place.base_dir / "talk.json").write_text(json.dumps(rows))
        return list(chat.rows(place, **({"path": "talk.json", "columns": columns, "answer_type": "text"} | options)))

    return talk


LLAVA = {"turns": "conversations", "images": "image", "id": "id"}
ASKED = {"from": "human", "value": "<image>\nWhat is it?"}
TOLD = {"from": "gpt", "value": "A cat."}


def test_conversations_of_llava(talk, place):
    row = {"id": "c1", "image": "a.png", "conversations": [ASKED, TOLD], "source": "coco"}
    plain = {"id": "c2", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}
    one, other = talk(row, plain, columns=LLAVA)
    assert one == Sample(
        id="talk/train/c1",
        task="talk",
        parts=(picture(place, "a.png", b"a"), "\nWhat is it?"),
        target=Target(answer_type=AnswerType.TEXT, value="A cat."),
        meta={"source": "coco"},
    )
    assert (other.parts, other.target.value) == (("1+1?",), "2")


def test_messages_of_openai(talk, place):
    content = [
        {"type": "text", "text": "Is "},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "text", "text": " like "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "?"},
    ]
    reply = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}, reply]
    (sample,) = talk({"messages": messages}, columns={"turns": "messages"})
    assert sample.parts == ("Is ", picture(place, "a.png", b"a"), " like ", picture(place, "b.png", b"b"), "?")
    assert (sample.target.value, sample.meta) == ("Yes.", {"system": "Be brief."})


def test_rows_of_verl(talk, place):
    row = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": None, "path": "a.png"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    columns = {"turns": "prompt", "images": "images", "answer": "reward_model.ground_truth"}
    (sample,) = talk(row, columns=columns, answer_type="number")
    assert sample.parts == (picture(place, "a.png", b"a"), "Find x.")
    assert (sample.target.value, sample.meta) == (3, {"data_source": "geo3k"})


LONG = [ASKED, TOLD, {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}]


def test_a_conversation_is_cut_only_on_demand(talk):
    row = {"id": 1, "image": "a.png", "conversations": LONG}
    (bad,) = talk(row, columns=LLAVA)
    assert "continues after the answer: 4 turns; `exchange: first` cuts it" in bad.reason
    (good,) = talk(row, columns=LLAVA, exchange="first")
    assert good.target.value == "A cat."


# Replies of published cold starts: LLaMA-Factory's ShareGPT rows (data/README.md), R1-V's and Vision-R1's tags,
# Qwen3's empty thought, and LLaVA-CoT-100k (its card: id, image, conversations).
COT = "<SUMMARY>S</SUMMARY>\n\n<CAPTION>C</CAPTION>\n\n<REASONING>R</REASONING>\n\n<CONCLUSION>7</CONCLUSION>"
COT_TAGS = ("SUMMARY", "CAPTION", "REASONING", "CONCLUSION")


@pytest.mark.parametrize(
    ("reply", "options", "thinking", "response"),
    [
        ("<think>\nT\n</think>\n<answer> 7 </answer>", {}, "\nT\n", None),
        ("<think>\nT\n</think>\n\n7", {}, "\nT\n", None),
        ("<think>\n\n</think>\n\n7", {}, None, None),
        ("<answer>7</answer>", {}, None, None),
        (r"<think>T \boxed{8}</think>So $\boxed{7}$.", {}, r"T \boxed{8}", "all"),
        (r"3 + 4 is \boxed{7}", {}, None, "all"),
        ("<reason>T</reason><answer>7</answer>", {"reply_tags": ("reason", "answer")}, "T", None),
        (COT, {"reply_tags": COT_TAGS}, COT.partition("<CONCLUSION>")[0], None),
        ("Seven, so 8 - 1.", {"columns": LLAVA | {"answer": "gold"}}, None, "all"),
    ],
)
def test_a_reply_holds_thinking_and_answer(talk, reply, options, thinking, response):
    row = {"id": 1, "image": "a.png", "conversations": [ASKED, {"from": "gpt", "value": reply}], "gold": 7}
    (sample,) = talk(row, **{"columns": LLAVA, "answer_type": "number"} | options)
    assert (sample.target.value, sample.thinking, sample.response) == (7, thinking, response and reply)


def test_a_reply_in_sections_becomes_a_demonstration_in_the_same_sections(talk):
    row = {"id": 1, "image": "a.png", "conversations": [ASKED, {"from": "gpt", "value": COT}]}
    (sample,) = talk(row, columns=LLAVA, reply_tags=COT_TAGS)
    sections = (ResponseSection("SUMMARY"), ResponseSection("CAPTION"))
    response_format = ResponseFormat(
        thinking="required", think_tag="REASONING", answer_tag="CONCLUSION", sections=sections
    )
    assert response_format.render(sample.target, sample.thinking) == COT


def test_thinking_in_a_field_of_its_own(talk):
    reply = {"role": "assistant", "content": "Yes.", "reasoning_content": "T"}
    (sample,) = talk({"messages": [{"role": "user", "content": "Is it?"}, reply]}, columns={"turns": "messages"})
    assert (sample.target.value, sample.thinking) == ("Yes.", "T")


@pytest.mark.parametrize(
    ("reply", "options", "reason"),
    [
        ("<think>T", {}, "no answer tag, <think> never closed: '<think>T'; correct the reply, or name a column"),
        ("T</think>7", {}, "stray </think>"),
        ("<think>T</think>", {}, "empty answer"),
        ("<think>T</think>So <answer>7</answer>", {}, "text outside the tags"),
        ("<answer>7</answer> or <answer>8</answer>", {}, "two answers"),
        (r"\boxed{7} or \boxed{8}", {}, "two answers"),
        (COT, {}, "begins with <SUMMARY>: set `reply_tags: [SUMMARY, CAPTION, REASONING, CONCLUSION]`"),
        ("7", {"reply_tags": COT_TAGS}, "no CONCLUSION tag"),
        (COT.replace("CAPTION", "REASONING"), {"reply_tags": COT_TAGS}, "no <CAPTION>"),
    ],
)
def test_a_reply_that_is_not_in_the_tags_is_rejected(talk, reply, options, reason):
    row = {"id": 1, "image": "a.png", "conversations": [ASKED, {"from": "gpt", "value": reply}]}
    (bad,) = talk(row, columns=LLAVA, **options)
    assert reason in bad.reason


@pytest.mark.parametrize("reply", [COT, "<think>T</think>7", "<table><tr></tr></table>"])
def test_a_whole_turn_may_be_the_answer(talk, reply):
    row = {"id": 1, "image": "a.png", "conversations": [ASKED, {"from": "gpt", "value": reply}]}
    (sample,) = talk(row, columns=LLAVA, **({} if "table" in reply else {"reply_tags": ()}))
    assert (sample.target.value, sample.thinking) == (reply, None)


@pytest.mark.parametrize(("tags", "message"), [(("answer",), "name the tag of the thinking"), (("a(", "b"), "'a\\('")])
def test_impossible_tags_are_refused(talk, tags, message):
    row = {"id": 1, "image": "a.png", "conversations": [ASKED, TOLD]}
    with pytest.raises(UserError, match=message):
        talk(row, columns=LLAVA, reply_tags=tags)


def said(*content):
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "It."}]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ("hello", "must be a list of turns"),
        ([], "holds no question"),
        ([ASKED], "nobody answers"),
        ([TOLD, ASKED], "the assistant speaks where the user should"),
        ([{"from": "robot", "value": "?"}], "unknown speaker 'robot'"),
        ([{"from": "human", "text": "?"}], "a turn must have from and value"),
        ([3], "a turn must have from and value"),
        ([{"from": "human", "value": "<image><image>?"}, TOLD], "<image> 2 times, and there are 1 images"),
        ([ASKED, {"from": "gpt", "value": " "}], "answer must be text"),
        (said({"type": "audio", "audio": "a.wav"}), "a part must be of type text, image_url, image, video_url or"),
        (said({"type": "image"}), "must say something besides images"),
        (said({"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}), "says <image> 2 times, and there"),
        (said({"type": "image", "image": "c.png"}, {"type": "text", "text": "?"}), "image 'c.png' cannot be read"),
    ],
)
def test_bad_conversations(talk, turns, reason):
    good, bad = talk({"id": 1, "image": "a.png", "conversations": [ASKED, TOLD]},
                     {"id": 2, "image": "a.png", "conversations": turns}, columns=LLAVA)  # fmt: skip
    assert isinstance(good, Sample)
    assert "talk.json: row 2: " in bad.reason
    assert reason in bad.reason


def test_a_column_of_pictures_that_no_row_has_is_a_wrong_setting(talk):
    row = {"id": 1, "image": "a.png", "conversations": [{"from": "human", "value": "What?"}, TOLD]}
    with pytest.raises(UserError, match="no row has the column 'pics'"):
        talk(row, columns=LLAVA | {"images": "pics"})
