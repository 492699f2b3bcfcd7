"""`mmrl data make`: samples read back equal, and a failed command leaves no partial folder."""

import hashlib
import json
from pathlib import Path

import pytest
from factories import make_context
from ruamel.yaml import YAML

from mmrl.cli import main
from mmrl.types import (
    AnswerType,
    CoordinateSystem,
    DatasetContext,
    ImageRef,
    MediaPolicy,
    RejectedRow,
    Sample,
    Target,
    UserError,
)
from mmrl_datasets.export import atomic_output_dir, write_table
from mmrl_datasets.generators import charts, jigsaw, multiple_choice, printed_text, scenes, shape_videos
from mmrl_datasets.readers import table

GENERATORS = [
    *(scenes.counting, scenes.grounding, scenes.digits, printed_text.text, multiple_choice.shapes, charts.charts),
    *(jigsaw.order, jigsaw.relation, shape_videos.direction, shape_videos.appearance_count, shape_videos.visible_span),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts(sample):
    """Everything of a sample except the paths of its files."""
    parts = [part if isinstance(part, str) else (type(part), part.sha256) for part in sample.parts]
    return sample.id, sample.task, parts, sample.target, sample.label, sample.thinking, sample.meta


def read(snippet, base):
    """Read the samples of a printed config snippet."""
    ((part, (origin,)),) = YAML(typ="safe").load(snippet)["data"].items()
    assert origin["fn"] == "mmrl_datasets.readers.table:rows"
    return part, list(table.rows(make_context(base), **origin["args"]))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("generate", GENERATORS)
def test_made_datasets_read_back_equal(generate, form, here, capsys):
    name = f"{generate.__module__}:{generate.__name__}"
    assert main(["data", "make", name, "split=test", "size=5", "--out", "made/set", "--format", form]) == 0
    part, again = read(capsys.readouterr().out, here)
    made = generate(DatasetContext(work_dir=here / "other", base_dir=here, seed=0), split="test", size=5)
    assert part == "test"
    assert [facts(sample) for sample in again] == [facts(sample) for sample in made]
    assert sorted(entry.name for entry in (here / "made" / "set").iterdir()) == ["media", f"samples.{form}"]
    assert all(Path(ref.path).is_relative_to(here / "made" / "set" / "media") for s in again for ref in s.media)


def test_options_are_typed_as_in_a_config(here, capsys):
    words = ["data", "make", "mmrl_datasets.generators.scenes:counting", "--out", "a", "size=3", "split=train"]
    assert main([*words, "colours=[red, blue]", "background=0.0", "seed=7"]) == 0
    _, again = read(capsys.readouterr().out, here)
    made = scenes.counting(
        DatasetContext(work_dir=here, base_dir=here, seed=0),
        split="train",
        size=3,
        colours=["red", "blue"],
        background=0.0,
        seed=7,
    )
    assert [facts(sample) for sample in again] == [facts(sample) for sample in made]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["size=3", "colour=red"], "did you mean 'colours'?"),
        (["size=three"], "option 'size' = 'three'"),
        (["size=null"], "size=null never ends"),
        (["size=0"], "size=0 must be at least 1"),
        (["size=3", "image_px"], "'image_px' is not an option; write key=value"),
        (["size=[1"], "not valid YAML"),
    ],
)
def test_wrong_options_are_refused_and_leave_nothing(words, message, here, capsys):
    assert main(["data", "make", "mmrl_datasets.generators.scenes:counting", "split=train", *words, "--out", "a"]) == 2
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(here, capsys):
    (here / "a").mkdir()
    command = ["data", "make", "mmrl_datasets.generators.scenes:counting", "split=train", "size=2", "--out"]
    assert main([*command, "a"]) == 0, "an empty folder is as good as none"
    before = {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()}
    assert main([*command, "a"]) == 2
    assert "a is not an empty folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()} == before
    (here / "file").write_text("mine")
    assert main([*command, "file"]) == 2
    assert main([*command, "file/inside"]) == 2
    assert "file/inside: cannot be written" in capsys.readouterr().err
    assert (here / "file").read_text() == "mine"


SLOW = """\
from mmrl_datasets.generators import scenes

def rows(place, *, split: str, fail: str):
    yield from scenes.counting(place, split=split, size=3)
    raise {"interrupt": KeyboardInterrupt, "bug": FileNotFoundError}[fail]
"""


def test_an_interrupted_make_leaves_no_folder(here, capsys):
    (here / "slow.py").write_text(SLOW)
    command = ["data", "make", "./slow.py:rows", "split=train", "--out", "a/b"]
    assert main([*command, "fail=interrupt"]) == 130
    assert main([*command, "fail=bug"]) == 2
    assert "data source './slow.py:rows' raised FileNotFoundError (" in capsys.readouterr().err
    assert list((here / "a").iterdir()) == []


def test_names_that_are_no_dataset_are_refused(here, capsys):
    assert main(["data", "make", "mmrl_datasets.generators.scenes:Dice", "--out", "a"]) == 2
    assert main(["data", "make", "mmrl_datasets.generators.scenes:UNCLEAR_LABEL", "--out", "a"]) == 2
    assert "'mmrl_datasets.generators.scenes:UNCLEAR_LABEL' is not a function" in capsys.readouterr().err
    assert main(["data", "make", "mmrl_datasets.generators.scenes:counts", "--out", "a"]) == 2
    assert list(here.iterdir()) == []


# Any samples


def picture(folder, content=b"a picture"):
    folder.mkdir(exist_ok=True)
    path = folder / "1.png"
    path.write_bytes(content)
    return ImageRef(path=str(path), sha256=hashlib.sha256(content).hexdigest())


def sample(**changes):
    given = {
        "id": "meter/train/1",
        "task": "meter",
        "parts": ("How much?",),
        "target": Target(answer_type=AnswerType.NUMBER, value=3),
    }
    return Sample(**(given | changes))


def write(samples, out):
    with atomic_output_dir(out) as folder:
        return write_table(samples, folder, "jsonl")


def test_media_from_elsewhere_are_copied_once(tmp_path):
    ref = picture(tmp_path / "camera")
    pair = [sample(id=f"meter/train/{i}", parts=("Before ", ref, " and ", ref, "?")) for i in (1, 2)]
    options = write(pair, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "media").iterdir()] == [f"{ref.sha256}.png"]
    first, _ = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert first == {
        "id": "1",
        "images": [f"media/{ref.sha256}.png"] * 2,
        "question": "Before <image> and <image>?",
        "answer": 3,
    }
    assert options["columns"] == {"id": "id", "images": "images", "question": "question", "answer": "answer"}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "there is not one sample"),
        ([RejectedRow("meter/train/9", "row 9: no reading")], "meter/train/9 cannot be written: row 9: no reading"),
        ([sample(), sample(id="clock/train/1", task="clock")], "differ in task, answer type or coordinates"),
        (
            [sample(), sample(id="meter/train/2", target=Target(answer_type=AnswerType.TEXT, value="3"))],
            "differ in task",
        ),
        ([sample(), sample(id="meter/test/2")], "'meter/test/2' is not called <task>/<split>/<name>"),
        ([sample(), sample()], "cannot be read back: .*the id 'meter/train/1'"),
        ([sample(meta={"question": "mine"})], "reads back as another"),
        ([sample(parts=("What does <image> mean?",))], "cannot be read back"),
        ([sample(target=Target(answer_type=AnswerType.NUMBER, value=float("inf")))], "cannot be read back"),
        ([sample(parts=(ImageRef(path="/nowhere/1.png", sha256="0"), "?"))], "/nowhere/1.png cannot be copied"),
    ],
)
def test_samples_that_a_table_cannot_hold_are_refused(others, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write(others, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_medium_that_has_changed_is_noticed(tmp_path):
    ref = picture(tmp_path / "camera")
    picture(tmp_path / "camera", b"another picture")
    with pytest.raises(UserError, match="reads back as another"):
        write([sample(parts=(ref, "How much?"))], tmp_path / "out")


def test_labels_thinking_and_boxes_are_written(tmp_path):
    ref = picture(tmp_path / "camera")
    box = Target(answer_type=AnswerType.BOX, value=[1, 2, 3, 4.5], coordinate_system=CoordinateSystem.PX_ORIGINAL)
    given = [
        sample(id="meter/train/1", parts=(ref, "Where?"), target=box, label=box, thinking="Left.", meta={"by": "Ann"}),
        sample(id="meter/train/2", parts=(ref, "Where?"), target=box),
    ]
    options = write(given, tmp_path / "out")
    place = DatasetContext(
        work_dir=tmp_path, base_dir=tmp_path / "out", seed=0, media_policy=MediaPolicy(roots=(tmp_path,))
    )
    assert [facts(row) for row in table.rows(place, **options)] == [facts(one) for one in given]


def test_a_value_that_parquet_cannot_hold_is_named(tmp_path):
    mixed = [sample(id=f"meter/train/{i}", meta={"by": by}) for i, by in enumerate(["Ann", [1]])]
    with (
        pytest.raises(UserError, match="Parquet cannot hold the rows.*JSON Lines"),
        atomic_output_dir(tmp_path / "a") as out,
    ):
        write_table(mixed, out, "parquet")
    assert list(tmp_path.iterdir()) == []
