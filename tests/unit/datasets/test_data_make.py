"""`mmrl data make`: samples read back equal, and a failed command leaves no partial folder."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_context, make_sample, write_file
from json_lines import read_json_lines
from ruamel.yaml import YAML

from mmrl.cli import main
from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, ImageRef, RejectedRow, UserError
from mmrl_datasets.export import atomic_output_dir, write_table
from mmrl_datasets.generators import charts, jigsaw, multiple_choice, printed_text, scenes, shape_videos
from mmrl_datasets.readers import table

GENERATORS = [
    *(scenes.counting, scenes.grounding, scenes.digits, printed_text.text, multiple_choice.shapes, charts.charts),
    *(jigsaw.order, jigsaw.relation, shape_videos.direction, shape_videos.appearance_count, shape_videos.visible_span),
]
COUNTING = "mmrl_datasets.generators.scenes:counting"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts(sample):
    """Everything of a sample except the paths of its files."""
    parts = [part if isinstance(part, str) else (type(part), part.sha256) for part in sample.parts]
    return sample.id, sample.task, parts, sample.target, sample.label, sample.thinking, sample.meta


def read(snippet, base):
    """Return the split that a printed config snippet names, and its samples."""
    ((split, (source,)),) = YAML(typ="safe").load(snippet)["data"].items()
    assert source["fn"] == "mmrl_datasets.readers.table:rows"
    return split, list(table.rows(make_context(base), **source["args"]))


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
@pytest.mark.parametrize("generate", GENERATORS)
def test_made_datasets_read_back_equal(generate, file_format, here, capsys):
    name = f"{generate.__module__}:{generate.__name__}"
    assert main(["data", "make", name, "split=test", "size=5", "--out", "made/set", "--format", file_format]) == 0
    split, again = read(capsys.readouterr().out, here)
    made = generate(DatasetContext(work_dir=here / "other", base_dir=here, seed=0), split="test", size=5)
    assert split == "test"
    assert list(map(facts, again)) == list(map(facts, made))
    assert sorted(entry.name for entry in (here / "made" / "set").iterdir()) == ["media", f"samples.{file_format}"]
    assert all(Path(ref.path).is_relative_to(here / "made" / "set" / "media") for s in again for ref in s.media)


def test_options_are_typed_as_in_a_config(here, capsys):
    words = ["size=3", "split=train", "colours=[red, blue]", "background=0.0", "seed=7"]
    assert main(["data", "make", COUNTING, "--out", "a", *words]) == 0
    _, again = read(capsys.readouterr().out, here)
    context = DatasetContext(work_dir=here, base_dir=here, seed=0)
    made = scenes.counting(context, split="train", size=3, colours=["red", "blue"], background=0.0, seed=7)
    assert list(map(facts, again)) == list(map(facts, made))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([COUNTING, "size=3", "colour=red"], "did you mean 'colours'?"),
        ([COUNTING, "size=three"], "option 'size' = 'three'"),
        ([COUNTING, "size=null"], "size=null never ends"),
        ([COUNTING, "size=0"], "option 'size' = 0"),
        ([COUNTING, "size=3", "image_px"], "'image_px' is not an option; write key=value"),
        ([COUNTING, "size=[1"], "not valid YAML"),
        (["mmrl_datasets.generators.scenes:UNCLEAR_LABEL"], "scenes:UNCLEAR_LABEL' is not a function"),
        (["mmrl_datasets.generators.scenes:countin"], "did you mean 'counting'"),
    ],
)
def test_a_wrong_function_or_option_is_refused_and_leaves_nothing(words, message, here, capsys):
    assert main(["data", "make", *words, "split=train", "--out", "a"]) == 2
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_only_an_empty_folder_is_written_into(here, capsys):
    (here / "a").mkdir()
    command = ["data", "make", COUNTING, "split=train", "size=2", "--out"]
    assert main([*command, "a"]) == 0
    before = {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()}
    assert main([*command, "a"]) == 2
    assert "a is not an empty folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()} == before
    (here / "file").write_text("mine")
    assert main([*command, "file"]) == 2
    assert main([*command, "file/inside"]) == 2
    assert "file/inside cannot be written" in capsys.readouterr().err
    assert (here / "file").read_text() == "mine"


SLOW = """\
from mmrl_datasets.generators import scenes

def rows(context, *, split: str, fail: str):
    yield from scenes.counting(context, split=split, size=3)
    raise {"interrupt": KeyboardInterrupt, "bug": FileNotFoundError}[fail]
"""


def test_an_interrupted_make_leaves_no_folder(here, capsys):
    (here / "slow.py").write_text(SLOW)
    command = ["data", "make", "./slow.py:rows", "split=train", "--out", "a/b"]
    assert main([*command, "fail=interrupt"]) == 130
    assert main([*command, "fail=bug"]) == 2
    assert "data source './slow.py:rows' raised FileNotFoundError (" in capsys.readouterr().err
    assert list((here / "a").iterdir()) == []


# Any samples


def make_row(name="1", split="train", **fields):
    return make_sample(**{"id": f"meter/{split}/{name}", "task": "meter", "parts": ("How much?",)} | fields)


def write(samples, out, file_format="jsonl"):
    with atomic_output_dir(out) as folder:
        return write_table(samples, folder, file_format)


def test_media_from_elsewhere_are_copied_once(tmp_path):
    ref = write_file(tmp_path / "camera" / "1.png", b"a picture")
    pair = [make_row(name, parts=("Before ", ref, " and ", ref, "?")) for name in "12"]
    options = write(pair, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "media").iterdir()] == [f"{ref.sha256}.png"]
    first, _ = read_json_lines(tmp_path / "out" / "samples.jsonl")
    images = [f"media/{ref.sha256}.png"] * 2
    assert first == {"id": "1", "images": images, "question": "Before <image> and <image>?", "answer": 3}
    assert options["columns"] == {"id": "id", "images": "images", "question": "question", "answer": "answer"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no samples to write"),
        ([RejectedRow("meter/train/9", "row 9: no reading")], "meter/train/9 cannot be written: row 9: no reading"),
        ([make_row(), make_row(id="clock/train/1", task="clock")], "differ in task, answer type or coordinates"),
        ([make_row(), make_row("2", value="3", answer_type=AnswerType.TEXT)], "differ in task"),
        ([make_row(), make_row("2", "test")], "'meter/test/2' is not called <task>/<split>/<name>"),
        ([make_row(), make_row()], "cannot be read back: .*the id 'meter/train/1'"),
        ([make_row(meta={"question": "mine"})], "reads back as another"),
        ([make_row(parts=("What does <image> mean?",))], "cannot be read back"),
        ([make_row(value=float("inf"))], "cannot be read back"),
        ([make_row(parts=(ImageRef(path="/nowhere/1.png", sha256="0"), "?"))], "/nowhere/1.png cannot be copied"),
    ],
)
def test_samples_that_a_table_cannot_hold_are_refused(rows, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write(rows, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_medium_that_has_changed_is_noticed(tmp_path):
    ref = write_file(tmp_path / "camera" / "1.png", b"a picture")
    write_file(tmp_path / "camera" / "1.png", b"another picture")
    with pytest.raises(UserError, match="reads back as another"):
        write([make_row(parts=(ref, "How much?"))], tmp_path / "out")


def test_labels_thinking_and_boxes_are_written(tmp_path):
    ref = write_file(tmp_path / "camera" / "1.png", b"a picture")
    box = {"value": [1, 2, 3, 4.5], "answer_type": AnswerType.BOX, "coordinate_system": CoordinateSystem.PX_ORIGINAL}
    plain = make_row("2", parts=(ref, "Where?"), **box)
    full = replace(plain, id="meter/train/1", label=plain.target, thinking="Left.", meta={"by": "Ann"})
    options = write([full, plain], tmp_path / "out")
    assert list(map(facts, table.rows(make_context(tmp_path / "out"), **options))) == list(map(facts, [full, plain]))


def test_a_value_that_parquet_cannot_hold_is_named(tmp_path):
    mixed = [make_row("1", meta={"by": "Ann"}), make_row("2", meta={"by": [1]})]
    with pytest.raises(UserError, match="Parquet cannot hold the rows.*JSON Lines"):
        write(mixed, tmp_path / "a", "parquet")
    assert list(tmp_path.iterdir()) == []
