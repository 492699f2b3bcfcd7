"""Rows of a table become samples: roles, placeholders, choices, coordinates and templates."""

import json
import re
from pathlib import Path

import pytest
from factories import image_ref, make_response, make_sample, write_file
from reader_files import check_rejected, json_lines
from ruamel.yaml import YAML

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, CoordinateSystem, RejectedRow, ResizeMap, Sample, Size, Target, UserError
from mmrl_datasets.readers import row_to_sample, table
from mmrl_rewards import box

COLUMNS = {"id": "key", "images": "pics", "question": "q", "answer": "a"}
ROW = {"key": "k1", "pics": "a.png", "q": "How many?", "a": 3}
NO_QUESTION = {"id": "key", "images": "pics", "answer": "a"}  # columns beside a prompt


@pytest.fixture
def read(context, read_table):
    pics = context.base_dir / "pics"
    for name in "ab":
        write_file(pics / f"{name}.png", name.encode())
    (pics / "loop.png").symlink_to("loop.png")

    def read(*rows, **options):
        return read_table("rows.jsonl", json_lines(rows), **{"columns": COLUMNS, "media_root": "pics"} | options)

    return read


def image(context, name):
    return image_ref(context.base_dir / "pics" / f"{name}.png")


def make_rows(**cells):
    """Return a row for each value of the cells, with keys of their own."""
    (name, values), *fixed = cells.items()
    return [ROW | dict(fixed) | {"key": number, name: value} for number, value in enumerate(values)]


def test_a_row_becomes_a_sample(read, context):
    (sample,) = read(ROW | {"source": "web"}, task="bottles")
    parts = (image(context, "a"), "How many?")
    assert sample == make_sample(3, id="bottles/train/k1", task="bottles", parts=parts, meta={"source": "web"})


def test_labels_thinking_and_rows_without_images_or_ids(read):
    columns = {"question": "q", "answer": "a", "label": "l", "thinking": "t"}
    row = {"q": "1+1?", "a": 2, "l": 3, "t": "Hm."}
    one, other = read(row, {"q": "2+2?", "a": 4, "l": None, "t": None}, columns=columns)
    assert (one.id, one.parts, one.thinking) == ("rows/train/line-1", ("1+1?",), "Hm.")
    assert one.label == Target(answer_type=AnswerType.NUMBER, value=3)
    assert (other.label, other.thinking) == (None, None)


def test_blank_lines_are_skipped_and_the_limit_counts_rows(read):
    rows = [b"", ROW, b"  ", ROW | {"key": "k2"}, ROW | {"key": "k3"}]
    assert [sample.id for sample in read(*rows, limit=2)] == ["rows/train/k1", "rows/train/k2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"key": "k1", ', "not a line of JSON"),
        (b"[" * 100_000, "not a line of JSON"),
        (b"[1, 2]", "must be an object"),
        (b'{"key": "k1", "pics": null, "a": 3}', "there is no column 'q'"),
        (b'{"key": "k1", "pics": null, "q": "\\ud800?", "a": 3}', "question holds half of a surrogate pair"),
        (b'{"m": ' + b"[" * 900 + b"]" * 900 + b', "key": 1, "pics": null, "q": "?", "a": 3}', "nested too deeply"),
        ({"a": "three"}, "answer must be a finite number, is 'three'"),
        ({"a": "1,000"}, "answer must be a finite number, is '1,000'"),
        ({"a": "nan"}, "answer must be a finite number, is 'nan'"),
        ({"a": True}, "answer must be a finite number, is True"),
        ({"a": float("nan")}, "answer must be a finite number, is nan"),
        ({"a": 10**400}, "answer must be a finite number"),
        ({"a": None}, "answer must be a finite number, is None"),
        ({"q": 5}, "question must be text"),
        ({"q": "  "}, "question must be text that is not empty"),
        ({"key": 1.5}, "id must be text or a whole number"),
        ({"key": "fine"}, "the id 'rows/train/fine' is also the id of line-1"),
        ({"pics": "a\0.png"}, "leads nowhere"),
        ({"pics": "loop.png"}, "leads nowhere"),
        ({"pics": "s3://bucket/a.png"}, "s3 URLs are refused always"),
        ({"q": "<image> or <image>?"}, "says <image> 2 times, and there are 1 images"),
        ({"q": "<image 2>?"}, "names the images [2], and there are 1"),
        ({"q": "<image 1> or <image><image>?"}, "says <image> 2 times, and there are 1 images"),
    ],
)
def test_a_bad_row_is_rejected_with_its_line_and_reason(read, context, line, reason):
    good, bad = read(ROW | {"key": "fine"}, line if isinstance(line, bytes) else ROW | line)
    assert isinstance(good, Sample)
    check_rejected([bad], [reason])
    assert bad.reason.startswith(f"{context.base_dir / 'rows.jsonl'}:2: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "none.jsonl"}, "no such file, or it cannot be read"),
        ({"prompt": "Where?"}, r"prompt takes the place of columns\.question"),
        ({"answer_type": "boxs"}, r"answer_type='boxs' is unknown \(did you mean 'boxes'\?\)"),
        ({"answer_type": "box"}, "set `coordinates` for action, box"),
        ({"coordinates": "norm_1"}, "set `coordinates` for action, box, boxes, point, points, and for json with"),
        ({"prompt": "{{ q", "columns": {"answer": "a"}}, r"prompt: '\{\{ q' is not a template"),
        ({"columns": COLUMNS | {"question": "{% q"}}, r"columns\.question: .* is not a template"),
        ({"answer_type": "box", "coordinates": "norm"}, "coordinates='norm' is unknown"),
        ({"columns": {"question": "q"}}, "which column is the answer"),
        ({"columns": COLUMNS | {"image": "pics"}}, r"unknown role 'image' \(did you mean 'images'\?\)"),
        ({"columns": COLUMNS | {"images": "pic"}}, r"rows\.jsonl: .* column 'pic' \(did you mean 'pics'\?\)"),
        ({"columns": NO_QUESTION, "prompt": "{{ qq }}"}, r"no column 'qq' \(did you mean 'q'\?\); there are key, pics"),
    ],
)
def test_impossible_settings_are_refused(read, options, message):
    with pytest.raises(UserError, match=message):
        read(ROW, **options)


def test_a_column_that_some_rows_lack_rejects_only_those(read):
    bad, good = read({"key": 1, "pics": None, "a": 1}, ROW)
    assert isinstance(good, Sample)
    check_rejected([bad], ["there is no column 'q'"])


@pytest.mark.parametrize("limit", [None, 2])
def test_a_row_without_the_column_of_images_is_text_unless_no_row_has_it(read, limit):
    """As VLM-R1 reads its rows: src/open-r1-multimodal/src/open_r1/grpo_jsonl.py, `if 'image' in item`."""
    text = {"key": 1, "q": "?", "a": 1}
    bare, pictured = read(text, ROW, limit=limit)
    assert not bare.images and pictured.images
    with pytest.raises(UserError, match="in every row: there is no column 'pics'; there are key, q, a"):
        read(text, text | {"key": 2}, limit=limit)


def test_an_image_that_the_question_has_a_place_for_is_not_optional(read):
    bad, good = read({"key": 1, "q": "<image>?", "a": 1}, ROW)
    assert isinstance(good, Sample)
    check_rejected([bad], ["the question says <image> 1 times, and there are 0 images"])


def test_a_wrong_column_is_refused_long_before_a_large_file_ends(context, monkeypatch):
    monkeypatch.setattr(row_to_sample._MissingColumnCheck, "MAX_ROWS", 3)
    (context.base_dir / "a.jsonl").write_text('{"q": "?", "a": 1}\n' * 9)
    results = table.rows(context, path="a.jsonl", columns={"question": "qq", "answer": "a"}, answer_type="number")
    assert isinstance(next(results), RejectedRow)
    with pytest.raises(UserError, match=r"a\.jsonl:1: there is no column 'qq' \(did you mean 'q'\?\)"):
        next(results), next(results)


def test_rec_rows_of_vlm_r1(context):
    ref = write_file(context.base_dir / "coco/train2014/1.jpg", b"a picture")
    row = {"image": "train2014/1.jpg", "problem": "the left cup", "solution": [10, 20, 30, 40],
           "normalized_solution": [0.1, 0.2, 0.3, 0.4], "height": 100, "width": 100}  # fmt: skip
    nan = row | {"solution": [10, float("nan"), 30, 40]}
    (context.base_dir / "rec.json").write_text(json.dumps([row, nan, row | {"solution": [30, 20, 10, 40]}]))
    settings = {"path": "rec.json", "media_root": "coco", "answer_type": "box", "prompt": "Where is {{ problem }}?"}
    columns = {"images": "image", "answer": "solution"}
    good, *bad = table.rows(context, **settings, columns=columns, coordinates="px_original")
    assert good.parts == (ref, "Where is the left cup?")
    assert (good.target.value, good.target.coordinate_system) == ([10, 20, 30, 40], CoordinateSystem.PX_ORIGINAL)
    check_rejected(bad, ["four finite numbers", "inverted"])
    columns = {"images": "image", "answer": "normalized_solution"}
    first, *_ = table.rows(context, **settings, columns=columns, coordinates="norm_1")
    assert (first.target.value, first.target.coordinate_system) == ([0.1, 0.2, 0.3, 0.4], CoordinateSystem.NORM_1)


def test_a_key_within_a_column_leaves_the_other_keys_in_meta(read):
    columns = {"question": "q", "answer": "target.value", "videos": "info.video.path", "id": "info.id"}
    info = {"video": {"path": None, "fps": 12.0}, "id": 4}
    row = {"q": "When?", "target": {"value": 3}, "info": info, "info.id": 7, "empty": {}}
    (sample,) = read(row, columns=columns)
    assert (sample.id, sample.target.value) == ("rows/train/7", 3)
    assert sample.meta == {"info": {"video": {"fps": 12.0}, "id": 4}, "empty": {}}


# Templates


def test_a_prompt_inserts_columns(read):
    prompt = "<image>{Find} {{ q }} of {{ m.size }} x{{ n }}{% if n > 1 %}, all{% endif %}."
    (sample,) = read(ROW | {"q": "{{ key }}", "m": {"size": "L"}, "n": 2}, columns=NO_QUESTION, prompt=prompt)
    assert sample.parts[1] == "{Find} {{ key }} of L x2, all."
    assert sample.meta == {"q": "{{ key }}", "m": {"size": "L"}, "n": 2}
    row = ROW | {"m": {"size": 1}, "n": 1}
    lacking = {name: cell for name, cell in row.items() if name != "n"}
    *bad, good = read(row | {"q": None}, row | {"m": 1}, lacking, row, columns=NO_QUESTION, prompt=prompt)
    check_rejected(bad, ["not None", "has no attribute 'size'", "there is no column 'n'"])
    assert isinstance(good, Sample)


@pytest.mark.parametrize(
    "prompt", ["{{ q.__class__.__mro__ }}", "{{ q.format.__globals__ }}", "{{ q ** q }}", "{{ q[9] }}", "{{ m }}"]
)
def test_a_template_runs_in_a_sandbox(read, prompt):
    check_rejected(read(ROW | {"m": [1]}, columns=NO_QUESTION, prompt=prompt), [f"template {prompt!r}: "])


@pytest.mark.parametrize(
    ("prompt", "without", "with_hint"),
    [
        ("{{ q }}{{ hint | default('') }}", "Find", "FindX"),
        ("{{ q }}{% if hint is defined %} by {{ hint }}{% endif %}", "Find", "Find by X"),
        ("{{ hint if hint is defined else q }}", "Find", "X"),
    ],
)
@pytest.mark.parametrize("lacking", [{}, {"hint": None}])
def test_a_template_may_test_whether_a_column_exists(read, prompt, without, with_hint, lacking):
    rows = [{"q": "Find", "a": "1"} | lacking, {"q": "Find", "a": "1", "hint": "X"}]
    for content in (rows, rows[:1]):  # no row need have it
        samples = read(*content, prompt=prompt, columns={"answer": "a"})
        assert [sample.parts for sample in samples] == [(without,), (with_hint,)][: len(content)]


def test_a_template_that_also_uses_a_column_untested_requires_it(read):
    rows = [{"a": "1", "hint": "X"}, {"a": "1"}]
    options = {"prompt": "{{ hint | default('') }}{{ hint }}", "columns": {"answer": "a"}}
    good, bad = read(*rows, **options)
    assert good.parts == ("XX",)
    check_rejected([bad], ["there is no column 'hint'"])
    with pytest.raises(UserError, match="there is no column 'hint'"):
        read(rows[1], **options)


def test_a_template_may_index_and_call_methods_of_text(read):
    row = {"options": ["cat", "dog"], "text": " Which? ", "a": "1"}
    prompt = "{{ text.strip() }} {{ options[0] }} or {{ options[-1] }}"
    (sample,) = read(row, prompt=prompt, columns={"answer": "a"})
    assert sample.parts == ("Which? cat or dog",)


def test_a_role_may_be_a_template(read, context):
    columns = {"question": "q", "answer": "{{ a | striptags }}", "images": "{{ stem }}.png", "id": "{{ stem }}-{{ n }}"}
    (sample,) = read({"q": "?", "a": "<answer> 3 </answer>", "stem": "b", "n": 5}, columns=columns)
    assert (sample.id, sample.images, sample.target.value) == ("rows/train/b-5", (image(context, "b"),), 3)


def test_a_template_may_name_the_answer_type_of_each_row(read):
    rows = make_rows(type=("count", "find", "choice", "chioce"))
    rows[1]["a"], rows[2]["a"] = [1, 2, 3, 4], "c"
    answer_type = "{{ 'number' if type == 'count' else 'box' if type == 'find' else type }}"
    number, found, letter, bad = read(*rows, answer_type=answer_type, coordinates="px_original")
    assert number.target == Target(answer_type=AnswerType.NUMBER, value=3)
    assert (found.target.answer_type, found.target.coordinate_system) == (AnswerType.BOX, CoordinateSystem.PX_ORIGINAL)
    assert letter.target == Target(answer_type=AnswerType.CHOICE, value="C")
    check_rejected([bad], ["answer_type='chioce' is unknown (did you mean 'choice'?)"])


def test_the_cards_example_of_coordinates_in_json_is_what_the_reward_reads(context):
    card = (Path(__file__).parents[3] / "datasets" / "cards" / "table.md").read_text()
    (example,) = (yaml for yaml in re.findall(r"```yaml\n(.*?)```", card, re.DOTALL) if "answer_type: json" in yaml)
    media = [write_file(context.base_dir / name, name.encode()) for name in ("l.png", "r.png")]
    row = {"left": "l.png", "right": "r.png", "thing": "the cup", "which": 2, "x": 100, "y": 20, "w": 40, "h": 30}
    (context.base_dir / "pairs.jsonl").write_text(json.dumps(row))
    (sample,) = table.rows(context, **YAML(typ="safe").load(example)["args"])
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


# Images and choices


def test_placeholders_place_the_images(read, context):
    (sample,) = read(ROW | {"pics": ["b.png", "a.png"], "q": "<image> left of <image>?"})
    assert sample.parts == (image(context, "b"), " left of ", image(context, "a"), "?")


def test_numbered_placeholders_name_their_image(read, context):
    columns = {"question": "q", "answer": "a", "images": ["one", "two", "three"], "choices": "c"}
    row = {"q": "<image 2> shows?", "a": "B", "one": "a.png", "two": "b.png", "three": None}
    (sample,) = read(row | {"c": "['<image_1>', \"isn't <image2>\"]"}, columns=columns, answer_type="choice")
    a, b = image(context, "a"), image(context, "b")
    assert sample.parts == (b, " shows?\nA. ", a, "\nB. isn't ", b)


def test_a_number_beside_a_place_without_one_is_text(read, context):
    """As some rows of ViRL39K have it: `<image>` is the place, and the question refers to it as `<image 1>`."""
    (sample,) = read(ROW | {"q": "<image>In <image 1>, how many?", "pics": "a.png"})
    assert sample.parts == (image(context, "a"), "In <image 1>, how many?")


def test_coordinates_lie_in_the_image_of_media_index(read):
    options = {"columns": COLUMNS | {"media_index": "m"}, "answer_type": "box", "coordinates": "px_original"}
    rows = make_rows(m=(1, "0", 2, True, 0), pics=["a.png", "b.png"], a=[1, 2, 3, 4])
    rows[-1]["pics"] = None
    second, written, *bad = read(*rows, **options)
    assert (second.target.media_index, written.target.media_index) == (1, 0)
    reasons = ["one of 2 images and videos, from 0; is 2", "is True", "a box needs an image or video to lie in"]
    check_rejected(bad, reasons)


@pytest.mark.parametrize(
    ("answer", "choices", "choice_answer", "letter"),
    [
        ("b", ["a cat", "a dog"], None, "B"),
        ("B", ["a cat", "a dog"], None, "B"),
        ("a dog", ["a cat", "a dog"], None, "B"),
        ("A", ["B", "A"], "letter", "A"),
        ("A", ["B", "A"], "text", "B"),
        ("B", ["1", "1"], "letter", "B"),
    ],
)
def test_an_answer_names_a_choice_by_letter_or_text(read, answer, choices, choice_answer, letter):
    row = ROW | {"a": answer, "c": choices}
    options = {"columns": COLUMNS | {"choices": "c"}, "answer_type": "choice", "choice_answer": choice_answer}
    (sample,) = read(row, **options)
    assert sample.parts[1] == f"How many?\nA. {choices[0]}\nB. {choices[1]}"
    assert sample.target == Target(answer_type=AnswerType.CHOICE, value=letter)


@pytest.mark.parametrize(
    ("answer", "choices", "choice_answer", "reason"),
    [
        ("C", ["a cat", "a dog"], None, "answer must be one letter from A to B, or one option"),
        ("dog", ["a cat", "a dog"], None, "answer must be one letter from A to B, or one option"),
        ("A", ["B", "A"], None, "or one option, is 'A'; it means several: set choice_answer"),
        ("1", ["1", "2"], "letter", "answer must be one letter from A to B"),
    ],
)
def test_an_answer_that_names_no_choice_or_several_is_rejected(read, answer, choices, choice_answer, reason):
    row = ROW | {"a": answer, "c": choices}
    options = {"columns": COLUMNS | {"choices": "c"}, "answer_type": "choice", "choice_answer": choice_answer}
    check_rejected(read(row, **options), [reason])


def test_a_video_may_be_a_folder_of_frames_where_the_rate_is_named(read, context):
    frames = context.base_dir / "pics" / "v_1"
    for name in ("c01_0002.jpeg", "c01_0001.jpeg"):
        write_file(frames / name, name.encode())
    columns = {"videos": "v", "question": "q", "answer": "a"}
    (sample,) = read({"v": "v_1", "q": "How many?", "a": 3}, columns=columns, fps=0.5)
    video = sample.parts[0]
    assert (Path(video.path).name, video.fps) == ("v_1", 0.5)
    check_rejected(read({"v": "v_1", "q": "How many?", "a": 3}, columns=columns), ["is a folder"])
